"""Under torchrun, a script that forgot ``init_process_group`` saved on each rank a checkpoint of its own to the one path.

Nothing was said: each commit replaced the one before, and removed the files of the other ranks.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner

import dcp_rs
from dcp_rs import RsReader, RsWriter
from dcp_rs.errors import PlanError
from dcp_rs.optim import (
    load_optim_state_dict,
    load_training_state,
    save_training_state,
    training_state,
)
from support.both import HAS_RANK_LOCAL

STATE = {"w": torch.ones(2)}
FORGOTTEN = r"WORLD_SIZE=2.*no process group.*init_process_group.*no_dist=True"


@pytest.fixture
def saved(tmp_path):
    dcp_rs.save(STATE, tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def of_two(monkeypatch, saved):
    monkeypatch.setenv("WORLD_SIZE", "2")


def optimizer_of(model):
    return torch.optim.SGD(model.parameters())


@pytest.mark.parametrize(
    "call",
    [
        lambda path, **how: dcp_rs.save(STATE, path, **how),
        lambda path, **how: dcp_rs.async_save(STATE, path, **how).result(),
        lambda path, **how: dcp_rs.load({"w": torch.zeros(2)}, path, **how),
        lambda path, **how: dcp_rs.load_state_dict({"w": torch.zeros(2)}, RsReader(path), **how),
        lambda path, **how: dcp_rs.CheckpointManager(path.parent / "run", **how).close(),
        lambda path, **how: save_training_state(path, torch.nn.Linear(1, 1), **how),
    ],
    ids=["save", "async_save", "load", "load_state_dict", "manager", "save_training_state"],
)
def test_a_rank_without_a_process_group_says_so(call, saved, of_two):
    before = sorted(saved.iterdir())
    with pytest.raises(PlanError, match=FORGOTTEN):
        call(saved)
    assert sorted(saved.iterdir()) == before
    call(saved, no_dist=True)


def test_training_state_is_made_and_its_save_says_so(saved, of_two):
    model = torch.nn.Linear(1, 1)
    state = training_state(model)
    with pytest.raises(PlanError, match=FORGOTTEN):
        dcp_rs.save(state, saved)
    with pytest.raises(PlanError, match=FORGOTTEN):
        load_training_state(saved, model)
    with pytest.raises(PlanError, match=FORGOTTEN):
        load_optim_state_dict(saved, model, optimizer_of(model))


@pytest.mark.skipif(not HAS_RANK_LOCAL, reason="this torch tells no writer of no_dist=True")
@pytest.mark.parametrize(
    "call",
    [
        lambda path: dcp.save(STATE, storage_writer=RsWriter(path)),
        lambda path: dcp.async_save(STATE, storage_writer=RsWriter(path)).result(),
    ],
    ids=["save", "async_save"],
)
def test_saves_by_torch_s_functions_say_so_too(call, saved, of_two, monkeypatch):
    """Torch only warned, and each rank's save replaced those of the others."""
    before = sorted(saved.iterdir())
    with pytest.raises(BaseException, match=FORGOTTEN):  # torch wraps the error
        call(saved)
    assert sorted(saved.iterdir()) == before
    monkeypatch.delenv("WORLD_SIZE")
    call(saved)


def test_each_rank_may_load_by_itself_with_torch_s_functions(saved, of_two):
    """A reader cannot see ``no_dist=True``, and a rank that reads alone harms nobody."""
    into = {"w": torch.zeros(2)}
    dcp.load(into, storage_reader=RsReader(saved), no_dist=True)
    assert torch.equal(into["w"], STATE["w"])


def test_a_rank_may_be_alone(saved, of_two):
    class Planner(DefaultLoadPlanner):
        pass

    dcp_rs.save(STATE, saved, no_dist=True)
    dcp_rs.load({"w": torch.zeros(2)}, saved, no_dist=True)
    dcp_rs.load_state_dict({"w": torch.zeros(2)}, RsReader(saved), planner=Planner(), no_dist=True)


@pytest.mark.parametrize("size", ["1", "", "many"])
def test_one_rank_needs_no_process_group(size, saved, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", size)
    dcp_rs.load({"w": torch.zeros(2)}, saved)
