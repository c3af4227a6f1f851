"""A store that fails while a checkpoint is saved to it: the save finishes right, or says what is wrong, and the one before is whole."""

import pickle
import time
import traceback

import pytest
import torch

import dcp_rs
from dcp_rs.errors import StorageError, StoragePermissionError, StorageUnclearError
from support import assert_state_equal, stopped
from support.object_server import Fault
from support.stored import large_state, loaded, names

SECRETS = ("test-secret-key-0123456789", "session-token-9876543210")


def has_secret(text) -> bool:
    return any(secret in str(text) for secret in SECRETS)


def of(kind, key=""):
    return lambda request: request.kind == kind and key in request.key


def index(request):
    return request.kind == "put" and request.key.endswith("index.dcprs")


def small(request):
    return request.kind == "put" and request.key.endswith(".safetensors")


def save(server, state, **more):
    dcp_rs.save(state, server.url("ckpt"), storage_options=server.options(**more))


KINDS = {
    "create": of("create"),
    "part": of("part"),
    "complete": of("complete"),
    "index": index,
    "look": of("head"),
    "list": of("list"),
    "read": of("get"),
    "remove": of("delete"),
    "ask": lambda request: ".dcp-rs-asks-" in request.key and request.method == "PUT",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "fault",
    [
        {"status": 503},
        {"status": 500, "code": "InternalError"},
        {"status": 503, "done": True},
        {"lose": True},
        {"reset": True},
    ],
    ids=str,
)
def test_passing_faults_are_retried(server, kind, fault):
    first, second = large_state(1), large_state(2)
    if kind != "ask":
        save(server, first)
    server.faults.append(Fault(**fault, matches=KINDS[kind]))
    save(server, second)
    assert server.faults[0].times == 0
    assert_state_equal(loaded(server, second), second)
    assert len(names(server)) == 2
    if (
        kind != "create"
    ):  # an upload that was begun, and whose name nobody heard, is for the store's lifecycle rule
        assert server.open_uploads() == []


@pytest.mark.parametrize(
    "fault",
    [{"lose": True}, {"status": 503, "done": True}, {"broken": 100}, {"reset": True}],
    ids=str,
)
@pytest.mark.parametrize("existing", [False, True])
def test_lost_answers_of_the_commit(server, fault, existing):
    """Twice: what is tried again meets its own index, and knows it."""
    if existing:
        save(server, large_state(1))
    server.faults.append(Fault(**fault, matches=index, times=2))
    state = large_state(2)
    save(server, state)
    assert server.faults[0].times == 0
    assert_state_equal(loaded(server, state), state)


def test_a_small_file_whose_answer_is_lost(server):
    server.faults.append(Fault(lose=True, matches=small, times=2))
    state = {"a": torch.arange(1000)}
    save(server, state)
    assert_state_equal(loaded(server, state), state)
    assert len([request for request in server.requests if small(request)]) == 3


@pytest.mark.parametrize("kind", ["create", "part", "complete", "index"])
def test_a_conflict_that_passes_is_tried_again(server, kind):
    """S3 asks for another attempt; the save ended as if another one had been committed."""
    server.faults.append(Fault(status=409, code="OperationAborted", matches=KINDS[kind]))
    state = large_state(2)
    save(server, state)
    assert server.faults[0].times == 0
    assert_state_equal(loaded(server, state), state)


def test_a_completion_that_says_200_and_failed(server):
    server.faults.append(Fault(status=200, code="InternalError", matches=of("complete")))
    state = large_state(2)
    save(server, state)
    assert_state_equal(loaded(server, state), state)


@pytest.mark.slow
def test_one_request_in_ten_fails(server):
    kinds = [
        {"status": 503},
        {"status": 500},
        {"lose": True},
        {"reset": True},
        {"broken": 1000},
        {"status": 503, "done": True},
    ]
    server.faults.extend(Fault(**kind, times=None, chance=0.1 / len(kinds)) for kind in kinds)
    for seed in range(4):
        state = large_state(seed)
        save(server, state)
        assert_state_equal(loaded(server, state), state)


@pytest.mark.parametrize("kind", ["create", "part", "complete", "index"])
@pytest.mark.parametrize(
    ("status", "code", "kind_of"),
    [(403, "AccessDenied", StoragePermissionError), (507, "XMinioStorageFull", StorageError)],
)
def test_lasting_fault_raises_and_leaves_nothing(server, kind, status, code, kind_of):
    first = large_state(1)
    save(server, first)
    before = names(server)
    server.faults.append(Fault(status=status, code=code, matches=KINDS[kind], times=None))
    with pytest.raises(kind_of, match=f"{status} {code}") as caught:
        save(server, large_state(2))
    assert caught.value.operation == "write"
    assert not isinstance(caught.value, StorageUnclearError)
    assert not has_secret("".join(traceback.format_exception(caught.value)))
    assert names(server) == before
    assert server.open_uploads() == []
    server.faults.clear()
    assert_state_equal(loaded(server, first), first)


def test_an_object_whose_name_cannot_be_read_is_named(server):
    """It ends every save and listing there: the error did not say what to do."""
    save(server, large_state(1))
    server.put("ckpt//notes.txt", b"x")
    with pytest.raises(StorageError, match=r'"ckpt//".*rename or remove it'):
        save(server, large_state(2))
    del server.objects["ckpt//notes.txt"]
    save(server, large_state(2))


def test_an_upload_that_cannot_be_aborted_is_named(server):
    """Its parts are in no listing and cost money: the error of the save said nothing of them."""
    server.faults += [
        Fault(status=403, code="AccessDenied", times=1000, matches=of(kind))
        for kind in ("part", "abort")
    ]
    with pytest.raises(
        StoragePermissionError,
        match=r"left something on the store: abort the upload of s3://.*ckpt/",
    ):
        save(server, large_state(1))
    assert server.open_uploads()


def test_a_store_that_stays_busy_is_given_up(server):
    server.faults.append(Fault(status=503, matches=of("part"), times=None))
    with pytest.raises(StorageError, match="503 SlowDown") as caught:
        save(server, large_state(1), max_retries=2)
    assert caught.value.attempts == 3
    assert names(server) == []
    assert server.open_uploads() == []


def test_no_secret_in_the_writer(server):
    options = server.options(aws_session_token=SECRETS[1])
    writer = dcp_rs.RsWriter(server.url("ckpt"), storage_options=options)
    assert not has_secret(vars(writer))
    data = pickle.dumps(writer)
    assert not any(secret.encode() in data for secret in SECRETS)
    server.faults.append(Fault(status=400, code="x", times=None))
    with pytest.raises(StorageError) as caught:
        dcp_rs.save({"a": 1}, server.url("ckpt"), storage_options=options)
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(caught.value.__traceback__)][1:]
    assert not any(
        has_secret({**variables, "storage_options": None, "write_options": None})
        for variables in frames
    )


def begin_save(server, matches, seed):
    where = f"{server.url('ckpt')!r}, storage_options={server.options()!r}"
    setup = "from support.stored import large_state"
    return stopped.begin(server, matches, f"dcp_rs.save(large_state({seed}), {where})", setup)


def test_ctrl_c_ends_a_save(server):
    server.faults.append(Fault(delay=60.0, times=None, matches=of("part")))
    stopped.interrupt(begin_save(server, of("part"), 1))
    assert names(server) == []
    end = time.monotonic() + 10  # what was asked may still be on its way
    while server.open_uploads() and time.monotonic() < end:
        time.sleep(0.01)
    assert server.open_uploads() == []


@pytest.mark.parametrize(
    "kind",
    [
        "part",
        "index",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("create", "complete", "look")),
    ],
)
def test_a_kill_leaves_the_one_before_whole(server, kind):
    first = large_state(1)
    save(server, first)
    server.faults.append(Fault(delay=120.0, times=None, matches=KINDS[kind]))
    process = begin_save(server, KINDS[kind], 2)
    process.kill()
    process.wait(30)
    server.faults.clear()
    assert_state_equal(loaded(server, first), first)
