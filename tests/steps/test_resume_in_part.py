"""Resuming with ``allow_partial_load`` past a step that turns out to be damaged.

What the step before lacks was said to be left alone, and held what the load of the damaged one had written there by then, damaged bytes among it.
"""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs import CheckpointManager, RsLoadPlanner
from dcp_rs.errors import CorruptDataError
from dcp_rs.optim import training_state
from support import run_ranks

LEFT = r"step-1 does not hold all of 'head', and a load of .*step-2 that failed may have written there"


def damage(manager, name):
    """Changes bytes of a tensor of step 2."""
    with dcp_rs.open(manager.path(2)) as opened:
        (chunk,) = opened.chunks(name)
    with (manager.path(2) / chunk.file).open("r+b") as file:
        file.seek(chunk.offset + 100)
        old = file.read(2)
        file.seek(-2, os.SEEK_CUR)
        file.write(bytes(byte ^ 0xFF for byte in old))


def steps(run, first, second, damaged):
    manager = CheckpointManager(run, no_dist=True, fsync=False)
    manager.save(1, first)
    manager.save(2, second)
    damage(manager, damaged)
    return manager


def filled(value, *names):
    return {name: torch.full((1000,), float(value)) for name in names}


class Items(RsLoadPlanner):
    """Its values and new tensors are put into the state dict one after the other."""

    def commit_tensor(self, read_item, tensor):
        super().commit_tensor(read_item, tensor)


PLANNERS = {
    "own": lambda: RsLoadPlanner(allow_partial_load=True),
    "items": lambda: Items(allow_partial_load=True),
    "torch": lambda: dcp.DefaultLoadPlanner(allow_partial_load=True),
}


@pytest.mark.parametrize("damaged", ["w", "head"])
@pytest.mark.parametrize("planner", PLANNERS)
def test_no_mixture_of_two_steps(tmp_path, planner, damaged):
    with steps(tmp_path, filled(1, "w"), filled(2, "w", "head"), damaged) as manager:
        state = filled(0, "w", "head")
        with pytest.raises(CorruptDataError, match=LEFT) as raised:
            manager.load(state, planner=PLANNERS[planner](), verify=True)
        assert (raised.value.tensor, raised.value.path) == ("head", str(manager.path(1)))


@pytest.mark.parametrize("planner", PLANNERS)
def test_what_the_damaged_step_did_not_touch_is_left_alone(tmp_path, planner):
    with steps(tmp_path, filled(1, "w"), filled(2, "w"), "w") as manager:
        state = filled(0, "w", "other")
        with pytest.warns(UserWarning, match="not resumed from step-2"):
            assert manager.load(state, planner=PLANNERS[planner](), verify=True) == 1
        assert state["other"].unique().tolist() == [0]


def test_what_the_planner_leaves_out_is_left_alone(tmp_path):
    with steps(tmp_path, filled(1, "w"), filled(2, "w", "head"), "w") as manager:
        state = {"w": torch.zeros(1000), "head": torch.zeros(1000)}
        planner = RsLoadPlanner(allow_partial_load=True, exclude="head")
        with pytest.warns(UserWarning, match="not resumed from step-2"):
            assert manager.load(state, planner=planner, verify=True) == 1
        assert state["head"].unique().tolist() == [0]


def test_what_was_not_put_into_the_state_dict_is_as_it_was(tmp_path):
    """Tensors that are replaced, and values, appear when all was read."""
    second = filled(2, "w", "head") | {"at": {"step": 2}}
    with steps(tmp_path, filled(1, "w"), second, "w") as manager:
        state = filled(0, "w", "head") | {"at": {"step": 0}}
        planner = RsLoadPlanner(allow_partial_load=True, dtype=torch.float16)
        with pytest.warns(UserWarning, match="not resumed from step-2"):
            assert manager.load(state, planner=planner, verify=True) == 1
        assert sorted(planner.report.missing) == ["at.step", "head"]
        assert (state["w"].unique().tolist(), state["head"].unique().tolist()) == ([1], [0])
        assert (state["w"].dtype, state["head"].dtype, state["at"]) == (torch.float16, torch.float32, {"step": 0})


def made(*, stepped):
    model = torch.nn.Linear(40, 40)
    optimizer = torch.optim.Adam(model.parameters())
    if stepped:
        model(torch.ones(1, 40)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_an_optimizer_that_the_step_before_lacks(tmp_path):
    model, optimizer = made(stepped=True)
    name = "optim.state.weight.exp_avg"
    with steps(tmp_path, training_state(model), training_state(model, optimizer), name) as manager:
        other, fresh = made(stepped=False)
        with pytest.warns(UserWarning, match="not resumed from step-2"):
            assert manager.load_training_state(other, fresh, allow_partial_load=True, verify=True) == 1
        assert torch.equal(other.weight, model.weight)
        assert not fresh.state
        other, used = made(stepped=True)
        with pytest.raises(CorruptDataError, match=r"step-1 does not hold all of 'optim.state.*step-2 that failed"):
            manager.load_training_state(other, used, allow_partial_load=True, verify=True)


def on_ranks(root):
    rank = dist.get_rank()
    own = {f"own.{rank}": torch.full((1000,), float(rank))}
    with CheckpointManager(root, fsync=False) as manager:
        manager.save(1, own)
        manager.save(2, own | filled(2, "head"))
        if rank == 0:
            damage(manager, "own.1")
        dist.barrier()
        # The first rank has nothing that step 1 lacks.
        state = {f"own.{rank}": torch.zeros(1000)} | (filled(0, "head") if rank == 1 else {})
        try:
            manager.load(state, planner=RsLoadPlanner(allow_partial_load=True), verify=True)
        except CorruptDataError as error:
            return str(error)
    return None


def test_all_ranks_raise_it(tmp_path):
    first, second = run_ranks(2, on_ranks, tmp_path / "run")
    assert first == second
    assert "does not hold all of 'head'" in first
