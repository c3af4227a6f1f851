"""Stores over TLS, with a certificate that nobody signed whom the system trusts."""

import shutil
import ssl
import subprocess

import pytest

import dcp_rs
from dcp_rs.errors import StorageError
from support import assert_state_equal, blank
from support.object_server import object_server

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    """A folder with ``ca.pem``, and ``cert.pem`` and ``key.pem`` of 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    authority = ["-keyout", folder / "ca-key.pem", "-out", folder / "ca.pem"]
    openssl(
        "req", "-x509", *new, *authority, "-subj", "/CN=tests", "-addext", "keyUsage=keyCertSign"
    )
    server = [
        "-CA",
        folder / "ca.pem",
        "-CAkey",
        folder / "ca-key.pem",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    server += [
        "-addext",
        "basicConstraints=critical,CA:FALSE",
        "-addext",
        "extendedKeyUsage=serverAuth",
    ]
    files = ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    openssl("req", "-x509", *new, *files, "-subj", "/CN=127.0.0.1", *server)
    return folder


@pytest.fixture
def server(signed):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(signed / "cert.pem", signed / "key.pem")
    with object_server(context) as store:
        yield store


@pytest.fixture
def options(server):
    return server.options(aws_allow_http=False)


def test_untrusted_server_gets_no_request(saved, server, options, monkeypatch, signed):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    url = server.url("runs/ckpt")
    with pytest.raises(StorageError, match=r"certificate.*UnknownIssuer") as caught:
        dcp_rs.open(url, storage_options=options)
    assert caught.value.path == f"{url}/index.dcprs"
    assert caught.value.path in str(caught.value)
    assert caught.value.attempts == 1
    assert server.requests == []


def test_the_certificate_of_the_one_who_signed(saved, server, options, monkeypatch, signed):
    monkeypatch.setenv("SSL_CERT_FILE", str(signed / "ca.pem"))
    state, _ = saved
    into = blank(state)
    dcp_rs.load(into, server.url("runs/ckpt"), storage_options=options)
    assert_state_equal(into, state)


def test_another_name_than_that_of_the_certificate(saved, server, monkeypatch, signed):
    monkeypatch.setenv("SSL_CERT_FILE", str(signed / "ca.pem"))
    elsewhere = server.options(
        aws_allow_http=False, aws_endpoint=server.endpoint.replace("127.0.0.1", "localhost")
    )
    with pytest.raises(StorageError, match=r"certificate.*not valid for"):
        dcp_rs.open(server.url("runs/ckpt"), storage_options=elsewhere)


def test_no_certificate_is_looked_at_where_that_is_asked_for(saved, server, options):
    with dcp_rs.open(
        server.url("runs/ckpt"), storage_options={**options, "allow_invalid_certificates": True}
    ) as ckpt:
        assert ckpt["step"] == 17


def test_a_bundle_in_place_of_the_authorities_of_the_system(
    saved, server, options, monkeypatch, signed
):
    """`AWS_CA_BUNDLE` was not read."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    bundle = str(signed / "ca.pem")
    for given in ({"aws_ca_bundle": bundle}, {}):
        with dcp_rs.open(server.url("runs/ckpt"), storage_options={**options, **given}) as ckpt:
            assert ckpt["step"] == 17
        monkeypatch.setenv("AWS_CA_BUNDLE", bundle)
