"""Jobs whose ranks come and go: one manager goes on with ``process_group=`` for each call.

A group is dead once one of its ranks is. The manager talked in that of its construction, for ever.
"""

import os
import signal
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_rs import CheckpointManager
from dcp_rs.errors import CheckpointExistsError, RankLostError, UnsupportedError
from dcp_rs.steps.coordinator import Coordinator
from support import rank_outcomes, run_ranks


def state_of(step, group):
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = torch.arange(39.0).reshape(13, 3) + step
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None),
        "step": step,
    }


def load(manager, group, step=None):
    """Load, and compare every value with those of the step."""
    state = state_of(-1, group)
    found = manager.load(state, step, process_group=group)
    want = state_of(-1 if found is None else found, group)
    assert torch.equal(state["rows"].to_local(), want["rows"].to_local())
    assert state["step"] == want["step"]
    return found


def save(manager, step, group, how="save"):
    getattr(manager, how)(step, state_of(step, group), process_group=group)


def begin(folder, name, members, me):
    """Make the group of all ranks anew, as a job does that goes on in the same processes."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/{name}", len(members)),
        rank=members.index(me),
        world_size=len(members),
        timeout=timedelta(seconds=60),
    )
    return dist.group.WORLD


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Bomb:
    """A value whose copy for a save kills the process."""

    def __reduce__(self):
        die()


def lose_one(manager, group, victim, how):
    """Save step 2. One rank is killed before it, or while it is saved in the background."""
    state = state_of(2, group)
    if dist.get_rank() == victim:
        if how == "before":
            die()
        elif how == "committed":
            Coordinator.committed = lambda *_: die()
        else:
            state["own"] = Bomb()
    if how == "during":
        manager.async_save(2, state, process_group=group)
        return  # the others find out in the background, or in the next call
    with pytest.raises(RankLostError):  # noqa: PT012  # in the one call or the other
        manager.async_save(2, state, process_group=group)
        manager.wait(process_group=group)


def shrink(folder, victim, how, again):
    """Four ranks, of which one is killed. The others go on in a group of three."""
    me, group = dist.get_rank(), dist.group.WORLD
    manager = CheckpointManager(f"{folder}/run", keep_last=2, save_every=1)
    assert load(manager, group) is None
    save(manager, 1, group)
    lose_one(manager, group, victim, how)
    stay = [rank for rank in range(4) if rank != victim]
    if again:
        group = begin(folder, "three", stay, me)
    else:
        group = dist.new_group(stay, use_local_synchronization=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        due = manager.should_save(2, process_group=group)
    told = [str(each.message) for each in caught if "lost a rank" in str(each.message)]
    assert len(told) == (how == "during" and me == stay[0])
    if due:
        save(manager, 2, group)
    for step, call in [(3, "async_save"), (4, "save"), (5, "async_save")]:
        assert manager.should_save(step, process_group=group)
        save(manager, step, group, call)
    assert load(manager, group) == 5
    assert load(manager, group, 4) == 4
    with pytest.raises(ValueError, match="pass the present one"):
        manager.should_save(9)
    manager.delete(5, process_group=group)
    manager.close()
    return due, manager.latest_step()


@pytest.mark.parametrize(
    "case",
    [
        (3, "during", True),
        pytest.param((3, "before", False), marks=pytest.mark.slow),
        pytest.param((0, "during", True), marks=pytest.mark.slow),
    ],
)
def test_three_ranks_go_on_after_the_fourth_was_killed(tmp_path, case):
    victim, how, again = case
    outcomes = rank_outcomes(4, shrink, str(tmp_path), victim, how, again, fresh=True)
    assert outcomes[victim].error is not None
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.error is None, outcome.traceback
            assert outcome.value == (True, 4)


@pytest.mark.slow
def test_a_save_that_was_committed_before_its_coordinator_died_is_not_repeated(tmp_path):
    outcomes = rank_outcomes(4, shrink, str(tmp_path), 0, "committed", True, fresh=True)
    for outcome in outcomes[1:]:
        assert outcome.error is None, outcome.traceback
        assert outcome.value == (False, 4)


def grow(folder, first):
    """Four ranks; one is killed; a new process takes its place, as the first or the last rank."""
    me = dist.get_rank()
    dist.destroy_process_group()
    got = []
    run = f"{folder}/run"
    if me < 4:
        group = begin(folder, "four", [0, 1, 2, 3], me)
        manager = CheckpointManager(run, keep_last=2, save_every=1)
        save(manager, 1, group)
        if me == 3:
            die()
        with pytest.raises(RankLostError):
            save(manager, 2, group)
        group = begin(folder, "three", [0, 1, 2], me)
        save(manager, 2, group)
        save(manager, 3, group, "async_save")
        manager.wait(process_group=group)
    members = [4, 0, 1, 2] if first else [0, 1, 2, 4]
    group = begin(folder, "again", members, me)
    if me == 4:
        manager = CheckpointManager(run, keep_last=2, save_every=1)
    # The new rank gets its state from the others, say: it knows no step, and agrees with them.
    got.append(manager.should_save(3, process_group=group))
    with pytest.raises(CheckpointExistsError):
        save(manager, 3, group)
    save(manager, 4, group, "async_save")
    got.append(load(manager, group))
    save(manager, 5, group)
    manager.close()
    return [*got, manager.latest_step()]


@pytest.mark.parametrize("first", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_group_that_grows_again(tmp_path, first):
    outcomes = rank_outcomes(5, grow, str(tmp_path), first, fresh=True)
    assert outcomes[3].error is not None
    for outcome in outcomes:
        if outcome.rank != 3:
            assert outcome.error is None, outcome.traceback
            assert outcome.value == [False, 4, 5]


def replace_meanwhile(folder):
    """The group of a save in the background is replaced, and all of its ranks live."""
    me = dist.get_rank()
    group = dist.group.WORLD
    manager = CheckpointManager(f"{folder}/run", save_every=1)
    save(manager, 1, group, "async_save")
    group = dist.new_group([1, 0])
    found = load(manager, group)
    if me == 0:
        manager._coordinator.committed = fail  # in the background, on one rank
    save(manager, 2, group, "async_save")
    group = dist.new_group([1, 0])
    with pytest.raises(OSError, match="no room"):
        manager.wait(process_group=group)
    manager.close()
    return found


def fail(*_args, **_options):
    raise OSError(28, "no room")


def test_a_save_in_the_background_ends_before_its_group_goes(tmp_path):
    assert run_ranks(2, replace_meanwhile, str(tmp_path)) == [1, 1]


def refuse(folder):
    group = dist.new_group([0, 1])
    with CheckpointManager(f"{folder}/run", local=f"{folder}/node") as manager:
        with pytest.raises(UnsupportedError, match=r"local=.*make one of the new"):
            manager.save(1, {"step": 1}, process_group=group)
        manager.save(1, {"step": 1}, process_group=dist.group.WORLD)  # as before
    alone = CheckpointManager(f"{folder}/alone", no_dist=True)
    with alone, pytest.raises(ValueError, match="no_dist=True"):
        alone.load({}, process_group=group)
    other = CheckpointManager(f"{folder}/other")
    with other, pytest.raises(TypeError, match="takes a group"):
        other.load({}, process_group=2)
    return True


def test_managers_that_cannot_change_their_ranks_say_so(tmp_path):
    assert run_ranks(2, refuse, str(tmp_path)) == [True, True]


def pass_a_group_that_is_gone(folder):
    gone = dist.new_group([0, 1])
    dist.destroy_process_group(gone)
    manager = CheckpointManager(f"{folder}/run")
    with manager, pytest.raises(ValueError, match="does not know the process_group="):
        manager.load({}, process_group=gone)
    return True


def test_a_group_that_torch_does_not_know(tmp_path):
    assert run_ranks(2, pass_a_group_that_is_gone, str(tmp_path)) == [True, True]
