"""No secret of a store is shown: in repr, messages, logs, pickles, tracebacks."""

import logging
import pickle
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest

import dcp_rs
import programs
from dcp_rs import RsReader
from dcp_rs._url import StorageOptions
from dcp_rs.errors import DcpRsError, UnsupportedError
from support import blank
from support.object_server import Fault

SECRETS = ("test-secret-key-0123456789", "session-token-9876543210")


def has_secret(text) -> bool:
    return any(secret in str(text) for secret in SECRETS)


@pytest.fixture
def options(server):
    return server.options(aws_session_token=SECRETS[1])


def test_repr_and_pickle(server, options):
    reader = RsReader(server.url("x"), storage_options=options)
    shown = [repr(reader._source.storage_options), str(vars(reader))]
    assert "aws_endpoint=" in shown[0]
    assert "aws_secret_access_key=***" in shown[0]
    assert not any(map(has_secret, shown))
    for held in (reader, reader._source.storage_options):
        data = pickle.dumps(held)
        assert not any(secret.encode() in data for secret in SECRETS)
    copy = pickle.loads(pickle.dumps(reader))
    assert copy._source.storage_options["aws_endpoint"] == server.endpoint
    assert "aws_secret_access_key" not in copy._source.storage_options


def test_repr_of_many_options(options):
    """A long list of options was abbreviated to the first two, with their values."""
    many = options | {f"option_{number}": number for number in range(9)}
    for first in ("aws_secret_access_key", "aws_session_token"):
        given = {first: many[first], **many}
        assert not has_secret(repr(RsReader("s3://bucket/x", storage_options=given)))


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=403, code="SignatureDoesNotMatch"),
        Fault(status=400, code="x"),
        Fault(status=503),
        Fault(reset=True),
    ],
    ids=["denied", "bad", "busy", "reset"],
)
def test_errors_and_logs(saved, server, options, fault, caplog):
    """The server sends the secret back in the body of its errors."""
    state, _ = saved
    fault.times = None
    server.faults.append(fault)
    caplog.set_level(logging.DEBUG)
    with pytest.raises(DcpRsError) as caught:
        dcp_rs.load(
            blank(state), server.url("runs/ckpt"), storage_options={**options, "max_retries": 1}
        )
    told = "".join(traceback.format_exception(caught.value))
    assert not has_secret(told)
    assert not has_secret(pickle.dumps(caught.value))
    assert not has_secret(caplog.text)
    dumped = pickle.loads(pickle.dumps(caught.value))
    assert (dumped.path, dumped.operation, dumped.attempts) == (
        caught.value.path,
        "read",
        caught.value.attempts,
    )


def test_urls_with_credentials_are_refused_without_telling_them():
    for url in (
        f"https://me:{SECRETS[0]}@host/x",
        f"https://host/x?X-Amz-Signature={SECRETS[0]}",
        f"s3://key:{SECRETS[0]}@bucket/x",
        f"s3://key:{SECRETS[0]}/more@bucket/x",
        f"s3:/key:{SECRETS[0]}@bucket/x",
        Path(f"s3://key:{SECRETS[0]}@bucket/x"),
        Path(f"https://host/x?X-Amz-Signature={SECRETS[0]}"),
        f"ftp://me:{SECRETS[0]}@host/x",
        f"ftp://host/x?sig={SECRETS[0]}",
        f"file://me:{SECRETS[0]}@host/x",
    ):
        with pytest.raises(UnsupportedError, match="pass credentials in") as caught:
            dcp_rs.open(url)
        assert not has_secret("".join(traceback.format_exception_only(caught.value)))


def test_an_endpoint_with_a_password_is_a_secret():
    options = StorageOptions(
        {
            "aws_endpoint": f"http://me:{SECRETS[0]}@host",
            "aws_region": "r",
            "aws_session_token": None,
        }
    )
    assert dict(options) == {"aws_endpoint": f"http://me:{SECRETS[0]}@host", "aws_region": "r"}
    assert not has_secret(repr(options))
    assert "aws_region='r'" in repr(options)
    assert dict(pickle.loads(pickle.dumps(options))) == {"aws_region": "r"}


def test_no_variable_of_a_traceback_shows_them(saved, server, options):
    server.faults.append(Fault(status=403, times=None))
    with pytest.raises(DcpRsError) as caught:
        dcp_rs.open(server.url("runs/ckpt"), storage_options=options)
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(caught.value.__traceback__)][1:]
    assert any("storage_options" in variables for variables in frames)
    # What the caller gave is the caller's own; the first frame that takes it in has it by that
    # name.
    assert not any(has_secret({**variables, "storage_options": None}) for variables in frames[1:])


def test_value_of_an_unknown_option_is_hidden():
    line = [sys.executable, "-m", "dcp_rs", "ls", "s3://b/x", "--storage-option", SECRETS[0]]
    done = programs.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "KEY=VALUE" in done.stderr
    assert not has_secret(done.stdout + done.stderr)


def test_options_of_another_kind_are_refused():
    with pytest.raises(TypeError, match="storage_options is a list"):
        RsReader("s3://b/x", storage_options=[1])


def test_a_store_of_obstore_is_taken(saved, server, options):
    from obstore.store import S3Store

    config = {
        key: value
        for key, value in options.items()
        if key.startswith("aws_") and key != "aws_allow_http"
    }
    store = S3Store(server.bucket, config=config, client_options={"allow_http": True})
    with dcp_rs.open(server.url("runs/ckpt"), storage_options=store) as ckpt:
        assert ckpt["step"] == 17


def test_shared_options_stay_secret():
    config = {"aws_access_key_id": "a", "aws_secret_access_key": SECRETS[0]}
    store = SimpleNamespace(
        config=config, client_options={"allow_http": True}, credential_provider=None
    )
    options = StorageOptions.of(store)
    assert dict(options) == {"allow_http": "true", **config}
    assert not has_secret(repr(options))


@pytest.mark.slow
def test_the_command_line(saved, server, options):
    arguments = []
    for key, value in options.items():
        arguments += [
            "--storage-option",
            f"{key}={str(value).lower() if isinstance(value, bool) else value}",
        ]
    url = server.url("runs/ckpt")

    def run(*command):
        line = [sys.executable, "-m", "dcp_rs", *command, *arguments]
        return programs.run(line, capture_output=True, text=True, check=False)

    for command, expected in [
        (("ls", url), "model.big"),
        (("inspect", url), url),
        (("stats", url, "model.small"), "model.small"),
        (("verify", url), "all is well"),
        (("diff", url, str(saved[1])), ""),
    ]:
        done = run(*command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        assert expected in done.stdout
        assert not has_secret(done.stdout + done.stderr)
    server.access_key = "another"
    done = run("ls", url, "--debug")
    assert done.returncode != 0
    assert "403" in done.stderr
    assert not has_secret(done.stdout + done.stderr)
