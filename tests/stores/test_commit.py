"""The commit of a save to a store: who knows what came of it, what it compares, and what it takes back."""

import gc
import os
import pickle
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_rs
from dcp_rs import RsWriter
from dcp_rs._url import StorageOptions, Url
from dcp_rs.engine.destination import Destination, commit_outcome
from dcp_rs.errors import (
    CheckpointExistsError,
    CorruptDataError,
    StoragePreconditionError,
    StorageUnclearError,
)
from support import assert_state_equal, rank_outcomes
from support.object_server import Fault
from support.stored import large_state, loaded, names, small_state

SAVE_ID = "12345678-1234-4234-8234-123456789abc"


def index(request):
    return request.kind == "put" and request.key.endswith("index.dcprs")


def save(server, state, path="ckpt", **more):
    dcp_rs.save(state, server.url(path), storage_options=server.options(), **more)


def at(matches, work):
    """A fault that is none: the first time that a request matches, something else happens just before it is answered."""
    done = []

    def happens(request):
        if not done and matches(request):
            done.append(True)
            work()
        return False

    return Fault(matches=happens)


def another_save(server, state, **more):
    """Saves apart, as another process would have. Returns what commits that save to ``ckpt``, where it replaces what is there."""
    save(server, state, "another", **more)
    objects = {
        key.replace("another/", "ckpt/"): server.objects.pop(key).data
        for key in server.keys("another/")
    }

    def commit():
        for key in server.keys("ckpt/"):
            server.objects.pop(key)
        for key, data in sorted(objects.items()):
            server.put(key, data)

    return commit


def silent_after_the_commit(server):
    """The index is stored, and neither that nor anything after it is answered."""
    mark = len(server.requests)

    def after_the_commit(request):
        return request.key.endswith("index.dcprs") and any(
            index(asked) for asked in server.requests[mark:]
        )

    server.faults.append(Fault(lose=True, matches=index))
    server.faults.append(Fault(reset=True, matches=after_the_commit, times=None))


@pytest.mark.filterwarnings("ignore:the store of")
@pytest.mark.parametrize("ignores_conditions", [False, True])
@pytest.mark.parametrize("existing", [False, True])
def test_an_unclear_commit_is_said_and_nothing_removed(server, existing, ignores_conditions):
    """It is done, and no answer to it, nor to the question after it, arrives."""
    server.ignores_conditions = ignores_conditions
    if existing:
        save(server, large_state(1))
    state = large_state(2)
    silent_after_the_commit(server)
    with pytest.raises(StorageUnclearError) as caught:
        dcp_rs.save(state, server.url("ckpt"), storage_options=server.options(max_retries=1))
    assert type(pickle.loads(pickle.dumps(caught.value))) is StorageUnclearError
    server.faults.clear()
    assert_state_equal(loaded(server, state), state)


class PreemptedError(Exception):
    """What the handler of a signal raises."""


def preempt(*_):
    raise PreemptedError


def state_of_a_rank():
    return {**small_state(), f"own{dist.get_rank()}": torch.full((1000,), float(dist.get_rank()))}


def save_and_wait(url, options, pid, how):
    """Rank 0 says which process it is."""
    signal.signal(signal.SIGUSR2, preempt)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if dist.get_rank() == 0:
        pid.write_text(str(os.getpid()))
    if how == "api":
        dcp_rs.save(state_of_a_rank(), url, storage_options=options)
        return
    writer = RsWriter(url, storage_options=options)
    try:
        dcp.save(state_of_a_rank(), storage_writer=writer)
    finally:
        writer.reset()
        del writer
        gc.collect()


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("api", signal.SIGINT),
        pytest.param("torch", signal.SIGUSR2, marks=pytest.mark.slow),
        pytest.param("api", signal.SIGUSR2, marks=pytest.mark.slow),
        pytest.param("torch", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_commit_that_lands_after_its_saver_was_interrupted(server, tmp_path, how, number):
    """Every rank leaves its files: the store does what it was asked a moment later."""
    pid = tmp_path / "pid"

    def interrupt(request):
        if not index(request):
            return False
        os.kill(int(pid.read_text()), number)
        return True

    server.faults.append(Fault(delay=2.0, matches=interrupt))
    outcomes = rank_outcomes(
        2, save_and_wait, server.url("ckpt"), server.options(), pid, how, fresh=True
    )
    raised = {signal.SIGINT: KeyboardInterrupt, signal.SIGUSR2: PreemptedError}[number]
    if how == "api":
        assert [type(outcome.error) for outcome in outcomes] == [raised, StorageUnclearError]
    else:
        assert [type(outcome.error) for outcome in outcomes] == [CheckpointException] * 2
    deadline = time.monotonic() + 60
    while "ckpt/index.dcprs" not in server.objects:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(names(server)) == 3
    into = {**small_state(), "own0": torch.zeros(1000), "own1": torch.zeros(1000)}
    found = loaded(server, into)
    for rank in range(2):
        assert found[f"own{rank}"].eq(rank).all()


def test_interrupted_commit_says_why_files_are_left(server):
    server.faults.append(at(index, lambda: os.kill(os.getpid(), signal.SIGUSR2)))
    server.faults.append(Fault(delay=30.0, matches=index))
    before = signal.signal(signal.SIGUSR2, preempt)
    try:
        with pytest.raises(PreemptedError) as caught:
            save(server, small_state())
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert type(caught.value.__cause__) is StorageUnclearError
    assert caught.value.__cause__.path == server.url("ckpt/index.dcprs")


def interrupted_twice(first):
    try:
        raise first
    except StorageUnclearError:
        raise KeyboardInterrupt  # noqa: B904  # as a signal does


def test_a_second_interrupt_hides_nothing():
    """It comes while the first is dealt with."""
    first = StorageUnclearError("no answer")
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted_twice(first)
    assert commit_outcome(caught.value) is first
    assert commit_outcome(KeyboardInterrupt()) is None


class Refusing:
    def state_dict(self):
        raise ValueError("not this one")

    def load_state_dict(self, state):
        """Do nothing."""


def save_in_handler(path):
    try:
        raise_unclear()
    except StorageUnclearError:
        dcp_rs.save({"refusing": Refusing()}, path, no_dist=True)


def raise_unclear():
    raise StorageUnclearError("no answer")


def test_the_next_save_is_not_taken_for_the_one_that_it_follows(tmp_path):
    with pytest.raises(ValueError, match="not this one") as caught:
        save_in_handler(tmp_path / "fallback")
    first = StorageUnclearError("no answer")
    caught.value.__context__ = first
    assert commit_outcome(caught.value) is first
    assert commit_outcome(caught.value, first) is None


def test_overwrite_false_looks_once_more_where_it_begins(server):
    other = small_state()
    commit = another_save(server, other)
    server.faults.append(at(lambda request: request.kind == "get", commit))
    with pytest.raises(CheckpointExistsError, match="overwrite=False"):
        save(server, {"a": torch.ones(3)}, overwrite=False)
    assert_state_equal(loaded(server, other), other)
    assert not any(
        index(request) and request.key.startswith("ckpt/") for request in server.requests
    )


def test_two_savers_of_one_id(server):
    """The other's index has the same id and number, and other bytes."""
    other = small_state()
    commit = another_save(server, other, save_id=SAVE_ID)
    server.faults.append(at(index, commit))
    with pytest.raises(StoragePreconditionError, match="another save to this place"):
        save(server, {"a": torch.ones(3)}, save_id=SAVE_ID)
    assert_state_equal(loaded(server, other), other)


def test_another_save_between_the_last_look_and_the_commit(server):
    """A save that replaces another once replaced a third that came right before its index was stored."""
    save(server, {"a": torch.zeros(2)})
    other = {"a": torch.zeros(5)}
    server.faults.append(at(index, another_save(server, other)))
    with pytest.raises(StoragePreconditionError, match="another save to this place"):
        save(server, {"a": torch.ones(3)})
    assert_state_equal(loaded(server, other), other)


@pytest.mark.parametrize("when", ["before", "after"])
def test_two_first_savers_where_a_condition_is_ignored(server, when):
    """The other's commit comes before this one's, or just after it: this one looks what is there, both times."""
    server.ignores_new = True
    other = small_state()
    commit = another_save(server, other)
    mark = len(server.requests)

    def is_time(request):
        if when == "before":
            return request.kind == "put" and request.key.endswith(".safetensors")
        return request.kind == "get" and any(index(asked) for asked in server.requests[mark:])

    server.faults.append(at(is_time, commit))
    with pytest.raises(StoragePreconditionError, match="another save to this place"):
        save(server, {"a": torch.ones(3)})
    assert_state_equal(loaded(server, other), other)


@pytest.mark.filterwarnings("ignore:the store of")
@pytest.mark.parametrize("ignores_conditions", [False, True])
@pytest.mark.parametrize("existing", [False, True])
def test_a_file_that_goes_during_the_commit(server, existing, ignores_conditions):
    server.ignores_conditions = ignores_conditions
    first = large_state(1)
    if existing:
        save(server, first)
    before = names(server)

    def remove():
        (key,) = (key for key in server.keys("ckpt/g") if key.removeprefix("ckpt/") not in before)
        del server.objects[key]

    server.faults.append(at(index, remove))
    with pytest.raises(CorruptDataError, match="at the commit of its save it is missing"):
        save(server, small_state())
    assert names(server) == before
    if existing:
        assert_state_equal(loaded(server, first), first)


def removes_index(request):
    return request.kind == "delete" and request.key.endswith("index.dcprs")


def lose_data(server):
    """Just before the index is stored, the data goes: the index is taken back, which removes it where there was none before."""

    def remove():
        for key in server.keys("ckpt/g"):
            del server.objects[key]

    server.faults.append(at(index, remove))


@pytest.mark.filterwarnings("ignore:the store of")
@pytest.mark.parametrize("ignores_conditions", [False, True])
@pytest.mark.parametrize("fault", [{"lose": True}, {"status": 503, "done": True}], ids=str)
def test_a_removal_of_the_index_that_is_not_answered_spares_the_save_that_follows(
    server, fault, ignores_conditions
):
    """It was tried again blindly: had another save been committed since, its index was removed."""
    server.ignores_conditions = ignores_conditions
    other = small_state()
    commit = another_save(server, other)
    mark = len(server.requests)
    lose_data(server)
    server.faults.append(Fault(**fault, matches=removes_index))
    server.faults.append(at(lambda _: any(map(removes_index, server.requests[mark:-1])), commit))
    with pytest.raises(CorruptDataError, match="at the commit of its save it is missing"):
        save(server, {"a": torch.ones(3)})
    assert len([request for request in server.requests if removes_index(request)]) == 1
    assert_state_equal(loaded(server, other), other)


def test_a_removal_of_the_index_is_of_that_index_alone(server):
    """The other is committed after the last look, just before the second attempt: the store is told which one is meant."""
    other = small_state()
    commit = another_save(server, other)
    lose_data(server)
    server.faults.append(Fault(status=503, matches=removes_index))
    server.faults.append(at(removes_index, commit))
    with pytest.raises(CorruptDataError, match="at the commit of its save it is missing"):
        save(server, {"a": torch.ones(3)})
    asked = [request.condition for request in server.requests if removes_index(request)]
    assert [condition.split(":")[0] for condition in asked] == ["If-Match"] * 2
    assert_state_equal(loaded(server, other), other)


@pytest.mark.filterwarnings("ignore:the store of")
def test_an_index_is_removed_where_conditions_are_refused(server):
    server.refuses_conditions = True
    lose_data(server)
    with pytest.raises(CorruptDataError, match="at the commit of its save it is missing"):
        save(server, {"a": torch.ones(3)})
    assert names(server) == []
    assert [request.condition is None for request in server.requests if removes_index(request)] == [
        False,
        True,
    ]


def data_after_the_index(server):
    """What looks at data files once an index was stored."""
    mark = len(server.requests)

    def matches(request):
        is_data = request.kind == "get" and request.key.endswith(".safetensors")
        return is_data and any(index(asked) for asked in server.requests[mark:])

    return matches


def test_files_that_cannot_be_looked_at_again_are_no_failure_and_the_old_ones_stay(server):
    save(server, large_state(1))
    before = names(server)
    state = small_state()
    server.faults.append(
        Fault(status=403, code="AccessDenied", matches=data_after_the_index(server), times=None)
    )
    with pytest.warns(UserWarning, match="of the one before is still there.*403"):
        save(server, state)
    server.faults.clear()
    assert set(before) < set(names(server))
    assert_state_equal(loaded(server, state), state)


def test_the_first_files_that_cannot_be_looked_at_again(server, recwarn):
    state = small_state()
    server.faults.append(
        Fault(status=403, code="AccessDenied", matches=data_after_the_index(server), times=None)
    )
    save(server, state)
    server.faults.clear()
    assert not [warning for warning in recwarn if "still there" in str(warning.message)]
    assert_state_equal(loaded(server, state), state)


def test_a_save_that_another_has_followed_is_no_failure(server):
    """The other replaced it, and removed its files, before they were looked at again."""
    save(server, large_state(1))
    other = small_state()
    server.faults.append(at(data_after_the_index(server), another_save(server, other)))
    save(server, large_state(2))
    assert_state_equal(loaded(server, other), other)


def test_files_of_all_ranks_are_given_up_at_once(server):
    save(server, small_state(), "saved")
    written = server.objects["saved/index.dcprs"].data
    to = Destination(Url(server.url("ckpt")), StorageOptions.of(server.options(max_retries=0)))
    mark = len(server.requests)
    server.faults.append(Fault(reset=True, times=None))
    with pytest.warns(UserWarning, match="for dcp_rs.clean to remove") as warned:
        to.give_up([written] * 8, OSError())
    assert len(warned) == 1
    assert len(server.requests) == mark + 1


@pytest.mark.parametrize("tag", ['W/"1"', ""])
def test_an_index_without_a_strong_tag(server, tag):
    save(server, small_state())
    server.objects["ckpt/index.dcprs"].tag = tag
    state = large_state(2)
    with pytest.warns(UserWarning, match="no strong tag"):
        save(server, state)
    assert_state_equal(loaded(server, state), state)
    assert [request.condition for request in server.requests if index(request)][1:] == [None]
    assert len(names(server)) == 2
