"""Resuming with ``allow_partial_load`` where the newest step turns out to be damaged.

A load of the step before left alone what that lacks, and there was what the load of the damaged one
had written, damaged bytes among it.
"""

import os

import pytest
import torch
import torch.distributed as dist

import dcp_rs
from dcp_rs import CheckpointManager
from dcp_rs.errors import CorruptDataError
from dcp_rs.optim import training_state
from support import run_ranks

NOTE = "No older step takes the place of this one"


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


@pytest.mark.parametrize("damaged", ["w", "head"])
def test_no_mixture_of_two_steps(tmp_path, damaged):
    with steps(tmp_path, filled(1, "w"), filled(2, "w", "head"), damaged) as manager:
        state = filled(0, "w", "head")
        with pytest.raises(CorruptDataError) as raised:
            manager.load(state, allow_partial_load=True, verify=True)
        assert raised.value.tensor == damaged
        assert any(NOTE in note for note in raised.value.__notes__)


def test_whole_loads_go_on_with_the_step_before(tmp_path):
    with steps(tmp_path, filled(1, "w"), filled(2, "w"), "w") as manager:
        state = filled(0, "w")
        with pytest.warns(UserWarning, match="not resumed from step-2"):
            assert manager.load(state, verify=True) == 1
        assert state["w"].unique().tolist() == [1]


def test_excluded_entries_stay_if_the_step_before_is_loaded(tmp_path):
    """The damaged step took the globs of an iterator, and the step before loaded everything."""
    both = ("w", "head")
    with steps(tmp_path, filled(1, *both), filled(2, *both), "w") as manager:
        state = filled(0, *both)
        with pytest.warns(UserWarning, match="not resumed from step-2"):
            assert manager.load(state, exclude=iter(["head"]), verify=True) == 1
        assert state["w"].unique().tolist() == [1]
        assert state["head"].unique().tolist() == [0]


def test_modules_of_an_iterator_are_loaded_from_the_step_before(tmp_path):
    model = torch.nn.Linear(40, 40)
    manager = steps(tmp_path, training_state(model), training_state(model), "model.weight")
    with manager, pytest.warns(UserWarning, match="not resumed from step-2"):
        assert manager.load_training_state(iter([model]), verify=True) == 1


def test_an_optimizer_that_the_step_before_lacks(tmp_path):
    model = torch.nn.Linear(40, 40)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    name = "optim.state.weight.exp_avg"
    manager = steps(tmp_path, training_state(model), training_state(model, optimizer), name)
    with manager, pytest.raises(CorruptDataError):
        manager.load_training_state(model, optimizer, partial=True, verify=True)


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
            manager.load(state, allow_partial_load=True, verify=True)
        except CorruptDataError as error:
            return error.tensor, error.__notes__
    return None


def test_all_ranks_raise_it(tmp_path):
    for name, notes in run_ranks(2, on_ranks, tmp_path / "run"):
        assert name == "own.1"
        assert any(NOTE in note for note in notes)
