"""The checkpoint manager on several ranks: they agree on everything, and fail together."""

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_rs
from dcp_rs import CheckpointManager
from dcp_rs.errors import (
    CheckpointExistsError,
    DcpRsError,
    PlanError,
    RunTakenOverError,
    UnsupportedError,
)
from support import rank_outcomes, run_ranks


def state_of(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(21.0).reshape(7, 3) + step
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None),
        f"own.{dist.get_rank()}": torch.full((100_000,), float(step)),
        "step": step,
    }


def loaded(manager, step=None, **options):
    state = state_of(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = manager.load(state, step, **options)
    want = state_of(-1 if found is None else found)
    assert torch.equal(state["rows"].to_local(), want["rows"].to_local())
    assert state["step"] == want["step"]
    return found


def numbers(manager):
    """What the first rank sees, once all have come here."""
    dist.barrier()
    told = [[step.number for step in manager.steps()]]
    dist.broadcast_object_list(told)
    return told[0]


def save_and_resume(root, options=None):
    got, how = [], {"storage_options": options}
    with CheckpointManager(root, save_every=2, keep_last=2, keep_every=6, **how) as manager:
        got.append(loaded(manager))
        for step in range(1, 10):
            if manager.should_save(step):
                (manager.save if step % 4 else manager.async_save)(
                    step, state_of(step), metrics={"loss": 1.0}
                )
        manager.wait()
        got.append(numbers(manager))
        with pytest.raises(CheckpointExistsError):
            manager.save(8, state_of(8))
    with CheckpointManager(root, keep_last=1, **how) as manager:
        got += [loaded(manager, 6), manager.resumed]
        manager.save(9, state_of(9))
        got.append(numbers(manager))
        manager.delete(6)
        got += [numbers(manager), loaded(manager), manager.latest_step()]
    return got


def resume_on_more(root, options):
    state = {"rows": state_of(0)["rows"], "step": 0}
    with CheckpointManager(root, storage_options=options) as manager:
        found = manager.load(state)
    assert torch.equal(state["rows"].full_tensor(), torch.arange(21.0).reshape(7, 3) + found)
    return found


def test_ranks_save_prune_and_resume_together(root):
    for got in run_ranks(2, save_and_resume, root.url, root.options):
        assert got == [None, [6, 8], 6, 6, [6, 9], [9], 9, 9]
    assert root.names() == ["step-9"]
    assert run_ranks(3, resume_on_more, root.url, root.options) == [9, 9, 9]


def give_different_steps(root, call):
    with CheckpointManager(root) as manager:
        manager.save(1, state_of(1))
        rank = dist.get_rank()
        with pytest.raises(PlanError, match="different steps: rank 0 gives 5, rank 1 gives 6"):
            getattr(manager, call)(
                *([{}] if call == "load" else []), 5 + rank, *([{}] if "save" in call else [])
            )
        return numbers(manager)


def take_over(root):
    with CheckpointManager(root) as old, CheckpointManager(root) as new:
        old.save(1, state_of(1))
        assert loaded(new) == 1
        with pytest.raises(RunTakenOverError):
            old.save(2, state_of(2))
        new.save(2, state_of(2))
        return loaded(new)


def test_all_ranks_of_a_job_hear_that_another_took_over(tmp_path):
    assert run_ranks(2, take_over, tmp_path / "run") == [2, 2]


@pytest.mark.parametrize("call", ["save", "async_save", "load", "delete"])
def test_ranks_that_give_different_steps_fail_together(tmp_path, call):
    assert run_ranks(2, give_different_steps, tmp_path / "run", call) == [[1], [1]]


def save_over(root):
    with CheckpointManager(root) as manager:
        manager.save(1, state_of(1))
        with pytest.raises(CheckpointExistsError) as raised:
            manager.save(1, state_of(2))
        assert "raised on rank 0" in "\n".join(raised.value.__notes__)
        return loaded(manager)


def test_refusal_of_the_first_rank_is_raised_on_all(tmp_path):
    assert run_ranks(2, save_over, tmp_path / "run") == [1, 1]


class NotCopied:
    def __deepcopy__(self, memo):
        raise UnsupportedError("no copy for the meta device")


def meet(manager, call):
    if call == "should_save":
        while not manager.should_save(3):
            time.sleep(0.01)
    elif call == "save":
        manager.save(3, state_of(3))
    else:
        getattr(manager, call)()


def fail_in_background(root, call, bad):
    """On the last rank alone."""
    manager = CheckpointManager(root, keep_last=1)
    manager.save(1, state_of(1))
    bad = {"bad": bad} if dist.get_rank() == dist.get_world_size() - 1 else {}
    manager.async_save(2, state_of(2) | bad)
    with pytest.raises(UnsupportedError, match="meta device"):
        meet(manager, call)
    if call == "close":
        return None
    manager.save(3, state_of(3))
    found = numbers(manager), loaded(manager)
    manager.close()
    return found


@pytest.mark.parametrize(
    ("call", "bad"),
    [
        ("save", "meta"),
        ("should_save", "meta"),
        ("wait", "meta"),
        ("close", "meta"),
        ("wait", "staging"),
        ("save", "staging"),
    ],
)
def test_a_failure_of_one_rank_in_the_background_is_raised_on_all(tmp_path, call, bad):
    value = NotCopied() if bad == "staging" else torch.empty(1, device="meta")
    found = run_ranks(3, fail_in_background, tmp_path / "run", call, value)
    assert found == [None if call == "close" else ([3], 3)] * 3


def raise_in_a_block(root):
    with CheckpointManager(root) as manager:
        manager.async_save(1, state_of(1))
        if dist.get_rank() == 1:
            raise KeyError("the loop's own, of one rank")
        manager.wait()  # the others wait for it here, until it is gone


def test_an_error_of_one_rank_waits_for_nobody(tmp_path):
    begun = time.monotonic()
    outcomes = rank_outcomes(2, raise_in_a_block, tmp_path / "run", timeout=60)
    assert isinstance(outcomes[1].error, KeyError)
    assert outcomes[0].error is not None
    assert time.monotonic() - begun < 50  # not the limit of the group


def be_preempted(root):
    told = []
    asked = []

    def is_told():
        asked.append(1)
        return dist.get_rank() == 1 and len(asked) == 3

    with CheckpointManager(root, save_every=100, preemption=is_told) as manager:
        for step in range(1, 10):
            if manager.should_save(step):
                manager.save(step, state_of(step))
                told.append(step)
            if manager.preempted:
                break
        return told, numbers(manager)


def test_ranks_agree_on_the_step_before_which_one_was_told_to_stop(tmp_path):
    assert run_ranks(3, be_preempted, tmp_path / "run") == [([3], [3])] * 3


def ask_in_vain(root, last):
    asked = []

    def ask():
        asked.append(1)
        if len(asked) == 2 and dist.get_rank() >= last:
            raise ConnectionError("the scheduler does not answer")
        return False

    with CheckpointManager(root, save_every=1, preemption=ask) as manager:
        assert manager.should_save(1)
        with pytest.raises(ConnectionError, match="does not answer") as raised:
            manager.should_save(2)
        assert manager.should_save(2)  # it is asked again
        manager.save(2, state_of(2))
        return "\n".join(raised.value.__notes__)


@pytest.mark.parametrize("last", [0, 2])
def test_a_question_that_fails_on_one_rank_fails_on_all(tmp_path, last):
    """The others went on to wait for the message of that rank."""
    for notes in run_ranks(3, ask_in_vain, tmp_path / "run", last):
        assert f"raised on rank{'s 0, 1, 2' if last == 0 else ' 2'}" in notes


def pass_over_damage_of_one_rank(root):
    with CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
        if dist.get_rank() == 0:
            # In what the last rank alone reads.
            (chunk,) = dcp_rs.open(manager.path(2)).chunks("own.1")
            with (manager.path(2) / chunk.file).open("r+b") as data:
                data.seek(chunk.offset + 100)
                data.write(b"\xff\xff")
        dist.barrier()
        found = loaded(manager, verify=True)
        return found, [(passed.number, passed.kind) for passed in manager.passed_over]


def test_damage_seen_by_one_rank_is_skipped_by_all(tmp_path):
    assert (
        run_ranks(2, pass_over_damage_of_one_rank, tmp_path / "run") == [(1, [(2, "damaged")])] * 2
    )


def warn_where_warnings_are_errors(root):
    told = []
    with CheckpointManager(root) as manager:
        manager.save(1, state_of(1))
        manager.path(2).mkdir(exist_ok=True)
        dist.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="not resumed from step-2") as raised:
                manager.load(state_of(-1))
            told.append("\n".join(raised.value.__notes__))
            assert manager.resumed == 1
            manager._store.settle = fail_to_settle
            with pytest.raises(UserWarning, match="step 3 is saved, but its notes") as raised:
                manager.save(3, state_of(3))
            told.append("\n".join(raised.value.__notes__))
            manager.async_save(4, state_of(4))
            with pytest.raises(UserWarning, match="step 4 is saved, but its notes") as raised:
                manager.wait()
            told.append("\n".join(raised.value.__notes__))
        manager.save(5, state_of(5))
        return told, numbers(manager)


def fail_to_settle(*_):
    raise OSError("the disk is away")


def test_a_warning_that_is_an_error_is_one_on_all_ranks(tmp_path):
    """The first rank alone raised it, and the others went on without it."""
    for told, steps in run_ranks(2, warn_where_warnings_are_errors, tmp_path / "run"):
        assert all("raised on rank 0" in notes for notes in told)
        assert len(told) == 3
        assert steps == [1, 3, 4, 5]


def save_in_a_part(root):
    """Two managers of two ranks each, side by side."""
    rank = dist.get_rank()
    parts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    part = parts[rank // 2]
    with CheckpointManager(f"{root}-{rank // 2}", process_group=part, keep_last=1) as manager:
        for step in (1, 2):
            manager.async_save(step, {f"own.{rank}": torch.full((10,), float(step))})
        state = {f"own.{rank}": torch.zeros(10)}
        found = manager.load(state)
        assert state[f"own.{rank}"].eq(2).all()
    return found


def test_a_part_of_the_ranks_has_a_manager_of_its_own(tmp_path):
    assert run_ranks(4, save_in_a_part, tmp_path / "run") == [2] * 4
    assert sorted(os.listdir(tmp_path)) == ["run-0", "run-1"]


def save_alone(root):
    with CheckpointManager(f"{root}-{dist.get_rank()}", no_dist=True) as manager:
        if dist.get_rank() == 0:  # the other ranks need not take part
            manager.async_save(1, {"w": torch.ones(3)})
            manager.wait()
        return manager.latest_step()


def test_a_rank_by_itself(tmp_path):
    assert run_ranks(2, save_alone, tmp_path / "run") == [1, None]


def make_managers(root):
    """One rank after another gets an argument that is wrong."""
    wrong = {
        "keep_last": 0,
        "save_every": -1,
        "preemption": "SIGTERM",
        "on_saved": 3,
        "step_name": "step",
        "reuse": 7,
        "storage_options": {"region": "x"},
        "local": "s3://bucket/run",
        "keeps_last": 3,
    }
    signals = signal.getsignal(signal.SIGUSR1)
    for number, (name, value) in enumerate(wrong.items()):
        is_mine = dist.get_rank() == number % dist.get_world_size()
        arguments = {"preemption": signal.SIGUSR1} | ({name: value} if is_mine else {})
        began = time.monotonic()
        with pytest.raises((TypeError, ValueError, DcpRsError)) as raised:
            CheckpointManager(root, **arguments)
        assert time.monotonic() - began < 30
        assert any(f"raised on rank {number % 2}" in note for note in raised.value.__notes__)
        assert signal.getsignal(signal.SIGUSR1) is signals, name
    with CheckpointManager(root) as manager:
        manager.save(1, state_of(1))
        assert numbers(manager) == [1]


def test_wrong_argument_of_one_rank_is_raised_on_all(tmp_path):
    """The others waited for its group until the time limit of the process group."""
    run_ranks(2, make_managers, tmp_path / "run", timeout=60)
