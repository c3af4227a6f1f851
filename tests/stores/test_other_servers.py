"""What other servers of S3 say of what is asked, beside the server of these tests: moto's, and s3s-fs where it is installed. Moto is slow: little is loaded."""

import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import dcp_rs
import programs
from dcp_rs import _core
from dcp_rs.errors import CheckpointNotFoundError, StorageNotFoundError, StoragePreconditionError
from support import assert_state_equal, blank

boto3 = pytest.importorskip(
    "boto3", reason="boto3 is not installed: the group `stores` of pyproject.toml"
)

BUCKET = "bucket"


class Bucket:
    """A bucket on a server.

    Args:
        root: where the server keeps objects and uploads as files, if it does. It looks at
            conditions before it stores, then, and not in one step, and lists no uploads.
    """

    def __init__(self, endpoint: str, root: Path | None = None) -> None:
        self.endpoint = endpoint
        self.root = root
        keys = {
            "aws_access_key_id": "key",
            "aws_secret_access_key": "secret",
            "region_name": "us-east-1",
        }
        self.client = boto3.client("s3", endpoint_url=endpoint, **keys)
        self.client.create_bucket(Bucket=BUCKET)

    def options(self, **more):
        keys = {
            "aws_access_key_id": "key",
            "aws_secret_access_key": "secret",
            "aws_region": "us-east-1",
        }
        return {**keys, "aws_endpoint": self.endpoint, "aws_allow_http": True, **more}

    def put_folder(self, folder, prefix):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.client.upload_file(str(path), BUCKET, f"{prefix}/{path.relative_to(folder)}")

    def keys(self, prefix):
        listed = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return [found["Key"] for found in listed.get("Contents", [])]

    def open_uploads(self):
        """What there is of uploads that are neither completed nor aborted."""
        if self.root is None:
            return self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        return [path.name for path in self.root.iterdir() if path.name.startswith(".upload")]

    def url(self, key):
        return f"s3://{BUCKET}/{key}"


@contextlib.contextmanager
def moto_server(_root):
    why = "moto's server is not installed: the group `stores` of pyproject.toml"
    pytest.importorskip("flask_cors", reason=why)
    moto = pytest.importorskip("moto.server", reason=why)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield Bucket("http://{}:{}".format(*server.get_host_and_port()))
    finally:
        server.stop()


@contextlib.contextmanager
def s3s_fs(root):
    """Objects are files in a folder."""
    program = shutil.which(
        "s3s-fs", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if program is None:
        pytest.skip("s3s-fs is not installed: make s3s-fs")
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    keys = ["--access-key", "key", "--secret-key", "secret"]
    command = [program, "--host", "127.0.0.1", "--port", str(port), *keys, str(root)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(port, process)
            yield Bucket(f"http://127.0.0.1:{port}", root)
        finally:
            process.kill()


def wait_for(port, process):
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        else:
            return


@pytest.fixture(params=[moto_server, s3s_fs], ids=["moto", "s3s-fs"])
def store(request, tmp_path_factory):
    with request.param(tmp_path_factory.mktemp("objects")) as bucket:
        yield bucket


@pytest.fixture
def state():
    torch.manual_seed(0)
    model = {"w": torch.randn(600, 300), "b": torch.arange(7), "none": torch.empty(0, 2)}
    return {
        "model": model,
        "many": {f"t{i}": torch.full((5,), float(i)) for i in range(9)},
        "step": 3,
    }


def test_native_checkpoints(tmp_path, store, state):
    dcp_rs.save(state, tmp_path / "x")
    store.put_folder(tmp_path / "x", "runs/x")
    into = blank(state)
    dcp_rs.load(into, store.url("runs/x"), storage_options=store.options(), verify=True)
    assert_state_equal(into, state)
    with dcp_rs.open(store.url("runs/x"), storage_options=store.options()) as ckpt:
        assert ckpt.get_slice("model.w")[:, 7:9].equal(state["model"]["w"][:, 7:9])
    assert dcp_rs.verify(store.url("runs/x"), storage_options=store.options()).ok


def test_checkpoints_of_others(tmp_path, store, state):
    dcp.save(dict(state), checkpoint_id=tmp_path / "stock", no_dist=True)
    store.put_folder(tmp_path / "stock", "stock")
    into = blank(state)
    dcp_rs.load(into, store.url("stock"), storage_options=store.options())
    assert_state_equal(into, state)
    (tmp_path / "model").mkdir()
    save_file(state["model"], tmp_path / "model" / "model.safetensors")
    store.put_folder(tmp_path / "model", "model")
    with dcp_rs.open(store.url("model"), storage_options=store.options()) as ckpt:
        assert ckpt["w"].equal(state["model"]["w"])


def test_missing_objects_are_not_found(store):
    with pytest.raises(CheckpointNotFoundError):
        dcp_rs.open(store.url("nothing"), storage_options=store.options())
    with pytest.raises(StorageNotFoundError, match="NoSuchBucket"):
        dcp_rs.open("s3://another/x", storage_options=store.options())


def test_an_object_that_is_replaced(tmp_path, store, state):
    dcp_rs.save(state, tmp_path / "x")
    store.put_folder(tmp_path / "x", "x")
    with dcp_rs.open(store.url("x"), storage_options=store.options()) as ckpt:
        assert ckpt["model.b"].equal(state["model"]["b"])
        (key,) = (key for key in store.keys("x") if key.endswith(".safetensors"))
        data = store.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        store.client.put_object(Bucket=BUCKET, Key=key, Body=data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(StoragePreconditionError):
            ckpt["model.w"]


def test_saves(tmp_path, store, state):
    options = store.options()
    dcp_rs.save(state, store.url("saved"), storage_options=options)
    into = blank(state)
    dcp_rs.load(into, store.url("saved"), storage_options=options, verify=True)
    assert_state_equal(into, state)
    first = set(store.keys("saved/"))
    dcp_rs.save({**state, "step": 4}, store.url("saved"), storage_options=options)
    with dcp_rs.open(store.url("saved"), storage_options=options) as ckpt:
        assert ckpt["step"] == 4
    assert first & set(store.keys("saved/")) == {"saved/index.dcprs"}
    assert store.open_uploads() == []


def test_a_save_in_parts(store):
    options = store.options()
    state = {"w": torch.arange(5 << 20), "b": torch.arange(7)}
    dcp_rs.save(state, store.url("large"), storage_options=options)
    into = blank(state)
    dcp_rs.load(into, store.url("large"), storage_options=options, verify=True)
    assert_state_equal(into, state)
    assert store.open_uploads() == []


def test_unchanged_tensors_are_copied(tmp_path, store, state):
    options = store.options()
    dcp_rs.save(state, store.url("step 1"), storage_options=options)
    later = {**state, "step": 4}
    saved = dcp_rs.save(
        later, store.url("step 2"), parent=store.url("step 1"), storage_options=options
    )
    assert saved.report.bytes_reused > state["model"]["w"].nbytes
    for key in store.keys("step 1/"):
        store.client.delete_object(Bucket=BUCKET, Key=key)
    into = blank(state)
    dcp_rs.load(into, store.url("step 2"), storage_options=options, verify=True)
    assert_state_equal(into, later)
    for key in store.keys("step 2/"):
        store.client.download_file(BUCKET, key, str(tmp_path / key.split("/")[1]))
    (tmp_path / "index.dcprs").unlink()
    dcp_rs.index(tmp_path)
    assert_state_equal(dcp_rs.open(tmp_path).state_dict()["model"], state["model"])


def test_file_replaced_before_its_copy_is_written(store, state, monkeypatch):
    """Its condition, as the server understands it; and a look at the object where it does not."""
    options = store.options()
    dcp_rs.save(state, store.url("one"), storage_options=options)
    (key,) = (key for key in store.keys("one") if key.endswith(".safetensors"))
    data = store.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    # After the parent was looked at, and before it is copied: what is compared is compared in
    # between.
    compare = dcp_rs.engine.reuse.write_entries

    def swap(*args, **more):
        store.client.put_object(
            Bucket=BUCKET, Key=key, Body=data[:9000] + bytes([data[9000] ^ 1]) + data[9001:]
        )
        return compare(*args, **more)

    monkeypatch.setattr(dcp_rs.engine.reuse, "write_entries", swap)
    with pytest.warns(UserWarning, match=r"what could be reused of .*(: copy|replaced)"):
        saved = dcp_rs.save(
            state, store.url("two"), parent=store.url("one"), storage_options=options
        )
    assert saved.report.bytes_reused == 0
    into = blank(state)
    dcp_rs.load(into, store.url("two"), storage_options=options, verify=True)
    assert_state_equal(into, state)


def test_an_index_is_removed_as_it_was_seen(store, state):
    dcp_rs.save(state, store.url("x"), storage_options=store.options())
    path = store.url("x/index.dcprs")
    options = {
        name: str(value).lower() if value is True else value
        for name, value in store.options().items()
    }
    seen = _core.Store(path, options)
    assert seen.read([path]) != [None]
    store.client.put_object(Bucket=BUCKET, Key="x/index.dcprs", Body=b"another")
    with pytest.raises(StoragePreconditionError, match="left alone"):
        seen.remove_seen(path)
    assert "x/index.dcprs" in store.keys("x/")
    seen = _core.Store(path, options)
    assert seen.read([path]) == [b"another"]
    seen.remove_seen(path)
    assert "x/index.dcprs" not in store.keys("x/")


def test_two_savers_leave_one_whole_save(store):
    """Both look at the same index, then commit: all that is there afterwards is of one of them."""
    if store.root is not None:
        pytest.skip("two may pass its conditions at a time")
    options = store.options()
    for _ in range(2):
        outcomes = race(store.url("raced"), options)
        won = [number for number, error in enumerate(outcomes) if not error]
        assert won
        assert set(outcomes) <= {"", "StoragePreconditionError"}
        with dcp_rs.open(store.url("raced"), storage_options=options) as ckpt:
            assert int(ckpt["w"][0]) in won
        assert len(store.keys("raced/")) == 2


SAVE = """
import json, sys, torch, dcp_rs
url, options, number = json.loads(sys.argv[1])
sys.stdin.readline()
try:
    dcp_rs.save({"w": torch.full((1000,), float(number))}, url, storage_options=options, no_dist=True)
except dcp_rs.errors.DcpRsError as error:
    print(type(error).__name__)
"""


def race(url, options):
    """Two processes save at the same time; the name of the error of each, or nothing."""
    savers = [
        programs.Popen(
            [sys.executable, "-c", SAVE, json.dumps([url, options, number])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for saver in savers:
        saver.stdin.write("\n")
        saver.stdin.flush()
    return [saver.communicate(timeout=120)[0].strip() for saver in savers]
