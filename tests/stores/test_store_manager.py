"""The checkpoint manager of a run on a store: on one rank, on two, beside another manager, and where requests fail."""

import random
import subprocess
import sys
import textwrap
import time
import warnings

import pytest
import torch
import torch.distributed as dist

import dcp_rs
import programs
from dcp_rs import CheckpointManager
from dcp_rs.errors import (
    CheckpointExistsError,
    RunTakenOverError,
    StorageError,
    StoragePermissionError,
    StoragePreconditionError,
    StorageUnclearError,
    UnsupportedError,
)
from dcp_rs.steps.object_store import step_store_at
from dcp_rs.steps.retention import Policies, prune
from support import run_ranks
from support.numbered import loaded, numbers, state_of
from support.object_server import Fault
from support.roots import DAY


@pytest.fixture
def make(server):
    """Makes a manager of the run on the server."""

    def manager(**options):
        store = server.options(max_retries=2)
        return CheckpointManager(server.url("run"), storage_options=store, no_dist=True, **options)

    return manager


def steps_on(server):
    return sorted(
        {int(key.split("/")[1].removeprefix("step-")) for key in server.keys("run/step-")}
    )


def is_index(request):
    return request.kind == "put" and request.key.endswith("index.dcprs")


# --- one manager


@pytest.mark.parametrize("reuse", [True, "frozen"])
@pytest.mark.parametrize("background", [False, True])
def test_unchanged_tensors_are_not_sent_again(make, server, reuse, background):
    frozen = torch.randn(500_000)
    with make(keep_last=2, reuse=reuse) as manager:
        for step in (1, 2, 3, 4):
            mark = len(server.requests)
            state = {"frozen": frozen.clone(), **state_of(step)}
            if background:
                manager.async_save(step, state)
                manager.wait()
            else:
                manager.save(step, state)
            sent = sum(request.length for request in server.requests[mark:])
            assert sent > frozen.nbytes if step == 1 else sent < frozen.nbytes // 20
        # Each that is left is whole, though those are gone that it came from.
        assert numbers(manager) == [3, 4]
        for found in manager.steps():
            assert found.reused >= frozen.nbytes
            assert found.written == found.nbytes  # on a store none shares what it takes
            assert dcp_rs.verify(found.path, storage_options=server.options()).ok
    with make(reuse=reuse) as manager:
        state = {"frozen": torch.zeros_like(frozen), **state_of(0)}
        assert manager.load(state) == 4
    assert state["frozen"].equal(frozen)
    assert state["w"].eq(4).all()


def test_senseless_arguments_are_refused_at_once(server, tmp_path):
    with pytest.raises(UnsupportedError, match="no storage_options"):
        CheckpointManager(tmp_path, storage_options=server.options())
    with (
        CheckpointManager(server.http_url("run"), no_dist=True) as manager,
        pytest.raises(UnsupportedError, match="read only"),
    ):
        manager.save(1, state_of(1))
    assert server.requests == []


def test_no_secret_is_shown(make, server):
    secret = server.options()["aws_secret_access_key"]
    with make() as manager:
        manager.save(1, state_of(1))
        server.faults.append(Fault(status=403, code="AccessDenied", times=None))
        with pytest.raises(StoragePermissionError) as caught:
            manager.save(2, state_of(2))
        for shown in (manager, vars(manager), manager._store.access, caught.value):
            assert secret not in repr(shown)


# --- requests that fail


@pytest.mark.slow
def test_one_request_in_ten_fails(server):
    kinds = [
        {"status": 503},
        {"status": 500},
        {"lose": True},
        {"reset": True},
        {"status": 503, "done": True},
    ]
    server.faults.extend(Fault(**kind, times=None, chance=0.1 / len(kinds)) for kind in kinds)
    with CheckpointManager(
        server.url("run"), keep_last=2, keep_every=4, storage_options=server.options(), no_dist=True
    ) as manager:
        for step in range(1, 10):
            (manager.save if step % 2 else manager.async_save)(
                step, state_of(step), metrics={"loss": step}
            )
        manager.wait()
        assert numbers(manager) == [4, 8, 9]
        assert [step.metrics["loss"] for step in manager.steps()] == [4, 8, 9]
        assert loaded(manager, verify=True) == 9
    server.faults.clear()
    assert steps_on(server) == [4, 8, 9]


def test_a_save_whose_commit_was_lost_is_there_with_what_was_noted(make, server):
    with make() as manager:
        manager.save(1, state_of(1))
        is_sent = []

        def is_deaf(request):
            """From the commit on nothing of that step is answered."""
            is_sent.extend([request] if is_index(request) else [])
            return bool(is_sent) and request.kind != "put" and "step-2" in request.key

        server.faults[:] = [
            Fault(status=503, times=None, matches=is_deaf),
            Fault(lose=True, times=None, matches=is_index),
        ]
        with pytest.raises(StorageUnclearError):
            manager.save(2, state_of(2), metrics={"loss": 0.5})
        server.faults.clear()
        # Nothing was removed, and what was noted is believed.
        assert manager.steps()[-1].metrics == {"loss": 0.5}
        assert loaded(manager, verify=True) == 2
        with pytest.raises(CheckpointExistsError):
            manager.save(2, state_of(2))


def test_a_save_that_failed_is_no_step_and_can_be_made_again(make, server):
    with make(keep_last=1) as manager:
        manager.save(1, state_of(1))
        server.faults[:] = [Fault(status=403, code="AccessDenied", times=None, matches=is_index)]
        with pytest.raises(StoragePermissionError):
            manager.save(2, state_of(2))
        future = manager.async_save(3, state_of(3))
        with pytest.raises(StoragePermissionError):
            manager.wait()
        assert isinstance(future.exception(), StoragePermissionError)
        server.faults.clear()
        assert numbers(manager) == [1]
        assert loaded(manager) == 1
        manager.save(2, state_of(2), metrics={"loss": 2})
        manager.save(3, state_of(3), metrics={"loss": 3})
        # The one that this run resumed from stays.
        assert [(step.number, step.metrics) for step in manager.steps()] == [
            (1, {}),
            (3, {"loss": 3.0}),
        ]


def test_undeletable_step_is_warned_of_and_removed_later(make, server):
    with make(keep_last=1) as manager:
        manager.save(1, state_of(1))
        key = next(iter(server.keys("run/step-1/g")))
        server.undeletable.add(key)
        with pytest.warns(UserWarning, match="step 1 could not be removed.*AccessDenied"):
            manager.save(2, state_of(2))
        assert numbers(manager) == [2]  # its index went first
        server.undeletable.clear()
        manager.save(3, state_of(3))
        assert steps_on(server) == [
            1,
            3,
        ]  # nothing tells what is left of 1 from a save that goes on
        for key in server.keys("run/step-1/"):
            server.objects[key].modified = time.time() - 2 * DAY
        manager.save(4, state_of(4))
    assert steps_on(server) == [4]


# --- another manager


def commits_meanwhile(server, make):
    """A fault with which another manager has saved step 7 by the time that this one's index is stored."""
    with make() as other:
        other.save(7, state_of(70))
    theirs = {key: server.objects.pop(key) for key in server.keys("run/step-7/")}

    def commits(request):
        if is_index(request) and request.key.startswith("run/step-7/"):
            server.objects |= theirs
        return False

    return Fault(matches=commits, times=None), set(theirs)


@pytest.mark.parametrize("force", [False, True])
def test_two_saves_of_a_step_leave_one(make, server, force):
    fault, theirs = commits_meanwhile(server, make)
    server.faults.append(fault)
    with make() as manager:
        with pytest.raises((StoragePreconditionError, CheckpointExistsError)):
            manager.save(7, state_of(7), force=force)
        server.faults.clear()
        left = set(server.keys("run/step-7/")) - theirs
        assert len(left) == 1  # what the other noted, which goes a day later
        assert "saving-" in left.pop()
        state = state_of(0)
        assert manager.load(state) == 7
        assert state["w"].eq(70).all()


def test_a_step_of_a_killed_run_is_saved_again_without_a_wait(make, server):
    with make() as manager:
        manager.save(1, state_of(1))
        manager.save(2, state_of(22))
    del server.objects["run/step-2/index.dcprs"]
    note = next(key for key in server.keys("run/step-2/") if "saved-" in key)
    server.objects[note.replace("saved-", "saving-")] = server.objects.pop(note)
    dead = set(server.keys("run/step-2/"))
    with make(keep_last=2) as manager:
        assert loaded(manager) == 1
        manager.save(2, state_of(2))
        assert loaded(manager, verify=True) == 2
        assert dead.isdisjoint(server.keys("run/"))  # that run cannot commit any more


def test_another_manager_prunes_nothing_that_is_being_saved(make, server):
    with make() as manager:
        manager.save(4, state_of(4))
        server.faults.append(
            Fault(delay=2.0, matches=lambda request: is_index(request) and "step-5/" in request.key)
        )
        saving = manager.async_save(5, state_of(5))
        while not any(key.endswith(".safetensors") for key in server.keys("run/step-5/")):
            time.sleep(0.01)
        done = prune(step_store_at(server.url("run"), server.options()), Policies(keep_last=1))
        assert done.removed == []
        saving.result(60)
        assert numbers(manager) == [4, 5]
        assert loaded(manager, 5, verify=True) == 5


def test_a_job_that_was_taken_over_removes_no_save_that_has_no_index_yet(make, server):
    with make() as old, make() as new:
        old.save(1, state_of(1))
        assert loaded(new) == 1
        new._store.begin(2, f"{2:032x}", {})
        with pytest.raises(RunTakenOverError):
            old.delete(2)
        assert steps_on(server) == [1, 2]
        new.delete(2)
        assert steps_on(server) == [1]


def test_a_save_makes_no_way_by_removing_one_that_begins_beside_it(make, server, monkeypatch):
    """It removed all that it found without an index, whatever its age."""
    with make() as manager:
        manager._store.begin(2, f"{2:032x}", {})
        for key in server.keys("run/step-2/"):
            server.objects[key].modified = time.time() - 2 * DAY
        look = manager._store.look_at

        def look_before_another_save_begins(number):
            found = look(number)
            step_store_at(server.url("run"), server.options()).begin(2, f"{3:032x}", {})
            return found

        monkeypatch.setattr(manager._store, "look_at", look_before_another_save_begins)
        manager._coordinator._make_way(2, force=False)
        assert server.keys("run/step-2/") == [f"run/step-2/saving-{3:032x}.json"]


# --- killed

RUN = """
    import os, signal, sys, warnings
    import torch
    from dcp_rs import CheckpointManager

    url, endpoint = sys.argv[1:]
    options = {"aws_endpoint": endpoint, "aws_region": "us-east-1", "aws_allow_http": True, "aws_skip_signature": True}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    def run():
        with CheckpointManager(url, keep_last=2, keep_every=5, storage_options=options, no_dist=True) as manager:
            state = {"w": torch.zeros(1000), "at": {"step": -1}}
            first = manager.load(state, verify=True) or 0
            assert state["w"].eq(float(first)).all()
            print("resumed", first, flush=True)
            for step in range(first + 1, first + 100):
                now = {"w": torch.full((1000,), float(step)), "at": {"step": step}}
                (manager.save if step % 3 else manager.async_save)(step, now, metrics={"loss": 1.0 / step})
                manager.wait()
                print("saved", step, flush=True)

    for word in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                run()
            except BaseException as error:
                print("failed", repr(error), flush=True)
            finally:
                os._exit(0)
        sys.stdin.readline()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print("killed", flush=True)
"""


@pytest.mark.slow
def test_killed_at_any_moment_a_run_goes_on_from_the_newest(make, server):
    """The soak of the folder, shortly: what was saved is resumed from, and what retention promised is there."""
    command = [sys.executable, "-c", textwrap.dedent(RUN), server.url("run"), server.endpoint]
    saved, rng, server.page = 0, random.Random(0), 100
    with programs.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as runs:
        try:
            for _ in range(20):
                last = len(server.requests) + rng.randrange(20, 120)
                # From this request on nothing is answered until the process is gone.
                is_late = Fault(
                    delay=0.3, times=None, matches=lambda _, last=last: len(server.requests) >= last
                )
                server.faults[:] = [is_late]
                runs.stdin.write("run\n")
                runs.stdin.flush()
                word, resumed = runs.stdout.readline().split()
                assert word == "resumed"
                assert int(resumed) in (
                    saved,
                    saved + 1,
                )  # committed, and killed before that was said
                saved, deadline = int(resumed), time.monotonic() + 60
                while len(server.requests) < last and time.monotonic() < deadline:
                    time.sleep(0.002)
                runs.stdin.write("kill\n")
                runs.stdin.flush()
                while (told := runs.stdout.readline().split()) != ["killed"]:
                    assert told[0] == "saved", told
                    saved = int(told[1])
                assert len(server.requests) >= last
                time.sleep(0.4)  # what was sent may still be done
        finally:
            runs.kill()
    server.faults.clear()
    for stored in server.objects.values():
        stored.modified = time.time() - 2 * DAY
    with make(keep_last=2, keep_every=5) as manager, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "not resumed from")
        last = loaded(manager, verify=True)
        assert last in (saved, saved + 1)
        manager.save(last + 1, state_of(last + 1))
        found = numbers(manager)
        kept = {*range(5, last + 1, 5), last, last + 1}
        assert set(found) == kept
        assert steps_on(server) == found
        for step in manager.steps():
            assert dcp_rs.verify(step.path, **manager._store.access).ok
            # A step is its index, its data, and what is noted of it.
            assert len(server.keys(f"run/step-{step.number}/")) == 3


# --- ranks


def fail_together(url, options):
    with CheckpointManager(url, storage_options=options) as manager:
        with pytest.raises(StorageError) as caught:
            manager.save(1, {f"own.{dist.get_rank()}": torch.ones(1000)})
        assert "raised on rank 0" in "\n".join(caught.value.__notes__)
        return [type(caught.value).__name__, numbers(manager)]


def test_refusal_of_the_store_is_raised_on_every_rank(server):
    server.faults.append(Fault(status=403, code="AccessDenied", times=None, matches=is_index))
    for got in run_ranks(2, fail_together, server.url("run"), server.options()):
        assert got == ["StoragePermissionError", []]
    assert not any(key.endswith(".safetensors") for key in server.keys("run/"))
