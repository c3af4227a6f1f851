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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_rs
import programs
from dcp_rs import CheckpointManager
from dcp_rs.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    RunTakenOverError,
    StorageError,
    StoragePermissionError,
    StoragePreconditionError,
    StorageUnclearError,
    UnsupportedError,
)
from dcp_rs.optim import training_state
from dcp_rs.steps.object_store import step_store_at
from dcp_rs.steps.retention import Policies, prune
from support import run_ranks
from support.numbered import loaded, numbers
from support.object_server import Fault

DAY = 24 * 60 * 60


def state_of(step):
    return {"w": torch.full((1000,), float(step)), "at": {"step": step}}


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
# -----------------------------------------------------------------------------------------


def test_a_run_begins_and_goes_on(make, server):
    with make(save_every=10, keep_last=2) as manager:
        assert str(manager.root) == server.url("run")
        assert repr(manager) == f"CheckpointManager({server.url('run')!r})"
        assert loaded(manager) is None
        assert manager.latest_step() is None
        for step in range(1, 36):
            if manager.should_save(step):
                manager.save(step, state_of(step))
    assert steps_on(server) == [20, 30]
    with make(save_every=10, keep_last=2) as manager:
        assert loaded(manager) == 30
        assert manager.resumed == manager.latest_step() == 30
        assert manager.passed_over == []
        assert not manager.should_save(30)
        assert loaded(manager, 20) == 20
        with pytest.raises(
            CheckpointNotFoundError, match=r"there is no step 10 in s3://.*: it has 20, 30"
        ):
            manager.load({}, 10)
        manager.delete(20)
        assert numbers(manager) == [30]
        with pytest.raises(CheckpointNotFoundError):
            manager.delete(20)


def test_saves_in_the_background_follow_each_other(make, server):
    with make(keep_last=3, metric="loss") as manager:
        state = state_of(0)
        for step in range(1, 7):
            state["w"].fill_(step)
            state["at"]["step"] = step
            future = manager.async_save(step, state, metrics={"loss": abs(step - 2)})
        future.result(60)
        assert numbers(manager) == [2, 4, 5, 6]
        assert manager.best_step() == 2
        assert loaded(manager) == 6
        assert [step.metrics for step in manager.steps()] == [
            {"loss": float(abs(step - 2))} for step in (2, 4, 5, 6)
        ]
        manager.wait()
    assert server.open_uploads() == []
    assert not any("saving-" in key for key in server.keys("run/"))


def test_a_step_that_is_there_is_not_replaced_unless_that_is_asked_for(make):
    with make() as manager:
        manager.save(5, state_of(5), metrics={"loss": 1})
        for save in (manager.save, manager.async_save):
            with pytest.raises(
                CheckpointExistsError, match=r"a step 5 in s3://.* already: force=True replaces it"
            ):
                save(5, state_of(6))
        assert loaded(manager) == 5
        manager.save(5, {"w": torch.ones(3)}, metrics={"loss": 3}, force=True)
        assert manager.steps()[0].metrics == {"loss": 3}
        with dcp_rs.open(
            manager.path(5), storage_options=manager._store.access["storage_options"]
        ) as ckpt:
            assert ckpt["w"].tolist() == [1, 1, 1]


def test_a_forced_save_removes_the_files_of_what_it_replaced_and_not_before(make, server):
    with make() as manager:
        mine, theirs = "run/step-1/deeper/thing", "run/step-1/model.pt"
        server.put(mine, b"mine")
        server.put(theirs, b"theirs")
        with pytest.raises(CheckpointExistsError, match=r"delete\(1\) removes it"):
            manager.save(1, state_of(1), force=True)
        assert {mine, theirs} == set(server.keys("run/step-1/"))
        server.objects.pop(theirs)  # only what may be a checkpoint is in the way
        manager.save(1, state_of(1), extra_files={"a.txt": b"old", "b.txt": b"old"})
        assert mine in server.objects
        bad = {"bad": torch.empty(1, device="meta")}
        with pytest.raises(UnsupportedError, match="meta device"):
            manager.save(1, bad, force=True, extra_files={"a.txt": b"new"})
        assert server.objects["run/step-1/a.txt"].data == b"old"
        assert "run/step-1/b.txt" in server.objects
        manager.save(1, state_of(1), force=True, extra_files={"a.txt": b"new"})
        assert server.objects["run/step-1/a.txt"].data == b"new"
        assert "run/step-1/b.txt" not in server.objects
        assert mine in server.objects
        assert loaded(manager) == 1
        manager.delete(1)
        assert server.keys("run/step-1/") == []


def test_there_is_room_for_a_save_before_it_begins(make, server):
    with make() as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
        each = manager.steps()[0].nbytes
    with make(max_bytes=3 * each) as manager:
        manager.save(4, state_of(4))
        assert numbers(manager) == [2, 3, 4]
        begin = len(server.requests)
        manager.save(5, state_of(5))
        asked = [
            request.key
            for request in server.requests[begin:]
            if request.method in ("PUT", "DELETE")
        ]
        assert asked.index("run/step-2/index.dcprs") < asked.index("run/step-5/index.dcprs")
        assert numbers(manager) == [3, 4, 5]


def test_training_state_is_saved_and_resumed(make):
    def job(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = job(0)
    extra = {"step": 7}
    with make() as manager:
        manager.save(7, training_state(model, optimizer, extra))
        other, its_optimizer = job(1)
        assert manager.load_training_state(other, its_optimizer, found := {"step": 0}) == 7
    assert found == extra
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(
        its_optimizer.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"]
    )


def test_a_damaged_step_is_passed_over(make, server):
    with make() as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
    del server.objects[next(iter(server.keys("run/step-3/g")))]
    key = next(iter(server.keys("run/step-2/g")))
    server.put(key, server.objects[key].data[:-1] + b"\xff")
    with make() as manager:
        with pytest.warns(UserWarning, match=r"not resumed from step-[32]"):
            assert loaded(manager, verify=True) == 1
        assert [(found.number, found.kind) for found in manager.passed_over] == [
            (3, "damaged"),
            (2, "damaged"),
        ]


@pytest.mark.parametrize("reuse", [True, "frozen"])
@pytest.mark.parametrize("background", [False, True])
def test_what_stays_the_same_is_not_sent_again(make, server, reuse, background):
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


def test_what_makes_no_sense_is_refused_at_once(server, tmp_path):
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
# ----------------------------------------------------------------------------------


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


def test_what_cannot_be_removed_is_warned_of_and_removed_later(make, server):
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
# ---------------------------------------------------------------------------------------


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
def test_of_two_that_save_a_step_one_wins(make, server, force):
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
        dead = {key for key in dead if "saving-" not in key}  # that of no save that can commit
        assert dead < set(server.keys("run/step-2/"))  # it might go on
        for key in dead:
            server.objects[key].modified = time.time() - 2 * DAY
        manager.save(3, state_of(3))
        assert dead.isdisjoint(server.keys("run/"))
        assert loaded(manager, 2, verify=True) == 2


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


def test_a_job_that_was_taken_over_commits_and_removes_nothing(make, server):
    """A job that was stopped, and woke up, committed its step into the run of the next one, and removed what that had resumed from."""
    with make(keep_last=1) as old, make() as new:
        old.save(1, state_of(1))
        old.save(2, state_of(2))
        assert loaded(new) == 2
        with pytest.raises(RunTakenOverError, match=r"was taken over by process \d+ on "):
            old.save(3, state_of(3))
        old._coordinator._prune(2)
        with pytest.raises(RunTakenOverError):
            old.delete(2)
        assert steps_on(server) == [2]
        new.save(3, state_of(3))
        assert loaded(new, take_over=False) == 3


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
# --------------------------------------------------------------------------------------------------

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
# ---------------------------------------------------------------------------------------------------


def sharded(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(21.0).reshape(7, 3) + step
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None),
        f"own.{dist.get_rank()}": torch.full((1000,), float(step)),
        "step": step,
    }


def save_and_resume(url, options):
    def resumed(manager, step=None):
        state = sharded(-1)
        found = manager.load(state, step)
        want = sharded(-1 if found is None else found)
        assert torch.equal(state["rows"].to_local(), want["rows"].to_local())
        assert state["step"] == want["step"]
        return found

    def numbers_together(manager):
        dist.barrier()
        told = [numbers(manager)]
        dist.broadcast_object_list(told)
        return told[0]

    got = []
    with CheckpointManager(
        url, save_every=2, keep_last=2, keep_every=6, storage_options=options
    ) as manager:
        got.append(resumed(manager))
        for step in range(1, 10):
            if manager.should_save(step):
                (manager.save if step % 4 else manager.async_save)(
                    step, sharded(step), metrics={"loss": 1.0}
                )
        manager.wait()
        got.append(numbers_together(manager))
        with pytest.raises(CheckpointExistsError):
            manager.save(8, sharded(8))
    with CheckpointManager(url, keep_last=1, storage_options=options) as manager:
        got += [resumed(manager, 6), manager.resumed]
        manager.save(9, sharded(9))
        got.append(numbers_together(manager))
        manager.delete(6)
        got += [numbers_together(manager), resumed(manager), manager.latest_step()]
    return got


def test_ranks_save_prune_and_resume_together(server):
    for got in run_ranks(2, save_and_resume, server.url("run"), server.options()):
        assert got == [None, [6, 8], 6, 6, [6, 9], [9], 9, 9]
    assert steps_on(server) == [9]


def fail_together(url, options):
    with CheckpointManager(url, storage_options=options) as manager:
        with pytest.raises(StorageError) as caught:
            manager.save(1, sharded(1))
        assert "raised on rank 0" in "\n".join(caught.value.__notes__)
        return [type(caught.value).__name__, numbers(manager)]


def test_what_the_store_refuses_is_raised_on_every_rank(server):
    server.faults.append(Fault(status=403, code="AccessDenied", times=None, matches=is_index))
    for got in run_ranks(2, fail_together, server.url("run"), server.options()):
        assert got == ["StoragePermissionError", []]
    assert not any(key.endswith(".safetensors") for key in server.keys("run/"))
