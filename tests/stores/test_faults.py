"""A store that fails: loads finish right, or say in time what is wrong."""

import socket
import threading
import time

import pytest

import dcp_rs
from dcp_rs.errors import (
    DcpRsError,
    StorageError,
    StorageNotFoundError,
    StoragePermissionError,
    StoragePreconditionError,
)
from support import assert_state_equal, blank, stopped
from support.object_server import Fault


def is_data(request):
    return request.method == "GET" and request.key.endswith(".safetensors")


def is_index(request):
    return request.method == "GET" and request.key.endswith("index.dcprs")


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=503),
        Fault(status=500, code="InternalError"),
        pytest.param(Fault(status=429, code="TooManyRequests"), marks=pytest.mark.slow),
        pytest.param(Fault(cut=0), marks=pytest.mark.slow),
        Fault(cut=1000, matches=is_data),
        Fault(cut=700_001, matches=is_data, times=3),
        Fault(cut=1000, matches=is_index, times=3),
        Fault(short=1000, matches=is_index),
        Fault(short=1000, matches=is_data),
        Fault(silent=1000, delay=1.5, matches=is_index),
        Fault(reset=True),
        Fault(lose=True),
        pytest.param(Fault(silent=5000, delay=1.5, matches=is_data), marks=pytest.mark.slow),
        pytest.param(Fault(delay=1.5), marks=pytest.mark.slow),
    ],
    ids=lambda fault: ",".join(
        f"{name}={value}"
        for name, value in vars(fault).items()
        if name in ("status", "cut", "reset", "lose", "silent", "short", "delay", "times") and value
    ),
)
def test_passing_faults_are_retried(saved, server, fault):
    state, _ = saved
    server.faults.append(fault)
    into = blank(state)
    dcp_rs.load(into, server.url("runs/ckpt"), storage_options=server.options(read_timeout=0.5))
    assert_state_equal(into, state)
    assert fault.times == 0


def test_one_request_in_ten_fails(saved, server):
    state, _ = saved
    kinds = [
        {"status": 503},
        {"status": 500},
        {"cut": 100},
        {"reset": True},
        {"lose": True},
        {"cut": 300_000},
    ]
    server.faults.extend(Fault(**kind, times=None, chance=0.1 / len(kinds)) for kind in kinds)
    for _ in range(10):
        into = blank(state)
        dcp_rs.load(into, server.url("runs/ckpt"), storage_options=server.options(), verify=True)
        assert_state_equal(into, state)


def span(request):
    first, last = request.range.removeprefix("bytes=").split("-")
    return int(first), int(last)


def is_long(request):
    return is_data(request) and span(request)[1] - span(request)[0] > 600_000


def test_a_cut_body_goes_on_from_where_it_was_cut(saved, server):
    state, _ = saved
    server.faults.append(Fault(cut=500_000, matches=is_long))
    into = blank(state)
    dcp_rs.load(into, server.url("runs/ckpt"), storage_options=server.options())
    assert_state_equal(into, state)
    spans = [span(request) for request in server.requests if is_data(request)]
    again = [
        (one, other) for one in spans for other in spans if one[1] == other[1] and one[0] < other[0]
    ]
    assert len(again) == 1
    ((first, _), (second, _)) = again[0]
    assert 0 < second - first <= 500_000


@pytest.mark.parametrize("matches", [is_index, is_long], ids=["index", "data"])
def test_slow_progress_is_no_failure(saved, server, matches):
    state, _ = saved
    fault = Fault(cut=1000, matches=matches, times=5)
    server.faults.append(fault)
    into = blank(state)
    dcp_rs.load(into, server.url("runs/ckpt"), storage_options=server.options(max_retries=1))
    assert_state_equal(into, state)
    assert fault.times == 0


def test_a_body_that_comes_slowly_is_waited_for(saved, server):
    """Each piece within the time for one, all of them not."""
    server.faults.append(Fault(pause=0.3, matches=is_index))
    options = server.options(read_timeout=1.5, max_retries=0)
    with dcp_rs.open(server.url("runs/ckpt"), storage_options=options) as ckpt:
        assert ckpt["step"] == 17
    assert len([request for request in server.requests if is_index(request)]) == 1


def test_an_object_replaced_while_its_first_bytes_come(saved, server):
    key = "runs/ckpt/index.dcprs"

    def replaces(request):
        if is_index(request):
            server.put(key, server.objects[key].data + b"x")
            return False
        return False

    server.faults += [Fault(cut=1000, matches=is_index), Fault(matches=replaces)]
    with pytest.raises(StoragePreconditionError, match="replaced while it was read"):
        dcp_rs.open(server.url("runs/ckpt"), storage_options=server.options())


def test_an_endpoint_without_credentials_is_no_missing_object(saved, server):
    server.faults.append(
        Fault(status=404, code="x", matches=lambda request: request.key == "api/token", times=None)
    )
    options = server.options(
        aws_access_key_id=None,
        aws_secret_access_key=None,
        aws_metadata_endpoint=server.endpoint,
        max_retries=1,
    )
    with pytest.raises(StoragePermissionError, match="no credentials") as caught:
        dcp_rs.open(server.url("runs/ckpt"), storage_options=options)
    assert caught.value.attempts == 2


@pytest.mark.parametrize("limit", [{"max_retries": 2}, {"retry_timeout": 1.5}])
def test_lasting_fault_raises_in_time(saved, server, limit):
    server.faults.append(Fault(status=503, times=None))
    begin = time.monotonic()
    # The last time may begin as the time for all ends.
    said = "503 SlowDown" if "max_retries" in limit else "503 SlowDown|no answer in time"
    with pytest.raises(StorageError, match=said) as caught:
        dcp_rs.open(server.url("runs/ckpt"), storage_options=server.options(**limit))
    assert time.monotonic() - begin < 60  # the default is 120 s
    error = caught.value
    assert isinstance(error, OSError)
    assert isinstance(error, DcpRsError)
    assert error.path == server.url("runs/ckpt/index.dcprs")
    assert error.operation == "read"
    assert error.attempts == len(server.requests)
    assert f"{error.attempts} attempts" in str(error)


def test_a_store_that_says_nothing_is_given_up(saved, server):
    server.faults.append(Fault(delay=30.0, times=None))
    with pytest.raises(StorageError, match="no answer in time"):
        dcp_rs.open(
            server.url("runs/ckpt"),
            storage_options=server.options(retry_timeout=1, read_timeout=0.3),
        )


def test_nobody_there(server):
    server_options = server.options(aws_endpoint="http://127.0.0.1:1", max_retries=1)
    with pytest.raises(StorageError, match="no connection"):
        dcp_rs.open(server.url("x"), storage_options=server_options)


def test_missing_permission_raises_at_once(saved, server):
    server.access_key = "another"
    with pytest.raises(StoragePermissionError, match="403 InvalidAccessKeyId") as caught:
        dcp_rs.open(server.url("runs/ckpt"), storage_options=server.options())
    assert isinstance(caught.value, PermissionError)
    assert len(server.requests) == 1


def test_no_such_bucket(server):
    with pytest.raises(StorageNotFoundError, match="NoSuchBucket") as caught:
        dcp_rs.open("s3://other/x", storage_options=server.options())
    assert isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize("ignored", [False, True])
def test_an_object_that_changes_is_an_error(saved, server, ignored):
    """Also where the store ignores the condition: the tag of the answer is compared."""
    state, _ = saved
    server.ignores_conditions = ignored
    with dcp_rs.open(server.url("runs/ckpt"), storage_options=server.options()) as ckpt:
        assert ckpt["model.small"].equal(state["model"]["small"])
        for key, stored in list(server.objects.items()):
            if key.endswith(".safetensors"):
                server.put(key, stored.data[:-1] + bytes([stored.data[-1] ^ 1]))
        with pytest.raises(StoragePreconditionError) as caught:
            ckpt["model.big"]
    assert caught.value.path.endswith(".safetensors")


def test_an_endpoint_where_nobody_listens_fails_in_seconds():
    """It took two minutes."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        options = {"aws_endpoint": url, "aws_region": "x", "aws_skip_signature": "true"}
        for path, more in ((f"{url}/ckpt", {}), ("s3://bucket/ckpt", options)):
            begin = time.monotonic()
            with pytest.raises(StorageError, match=r"no connection .*refused"):
                dcp_rs.open(path, storage_options={**more, "allow_http": "true"})
            assert time.monotonic() - begin < 30


def test_an_object_of_another_length_is_an_error(saved, server):
    for key, stored in list(server.objects.items()):
        if key.endswith(".safetensors"):
            server.put(key, stored.data + b"x")
    state, _ = saved
    with pytest.raises(DcpRsError, match="bytes long, expected"):
        dcp_rs.load(blank(state), server.url("runs/ckpt"), storage_options=server.options())


def test_ctrl_c_ends_a_load(saved, server):
    server.faults.append(Fault(delay=60.0, times=None, matches=is_data))
    where = f"{server.url('runs/ckpt')!r}, storage_options={server.options()!r}"
    setup = 'into = {"model": {"big": torch.zeros(1500, 1024)}}'
    stopped.interrupt(stopped.begin(server, is_data, f"dcp_rs.load(into, {where})", setup))


def test_many_threads_may_read_one_open_checkpoint(saved, server):
    state, _ = saved
    server.faults.append(Fault(status=503, times=None, chance=0.2))
    ckpt = dcp_rs.open(server.url("runs/ckpt"), storage_options=server.options())
    wrong = []

    def read(i):
        if not ckpt[f"many.t{i}"].equal(state["many"][f"t{i}"]):
            wrong.append(i)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
