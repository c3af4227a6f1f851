"""Planners that keep plans for the next save."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

import dcp_rs
from dcp_rs import RsWriter
from support import run_ranks


@pytest.fixture
def _no_plans():
    """The caches are attributes of torch's classes, and processes live on."""
    yield
    for name, value in vars(SavePlanner).items():
        if name.startswith("_cached") and isinstance(value, dict):
            value.clear()


def save_with_caching(path):
    """Saves by torch's planner, which would send no plan from the second on."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for number in range(3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = {"w": torch.full((3,), float(number)), "deep": {"step": number}}
        state[f"of {rank}"] = torch.tensor([rank, number])
        if number == 2:
            state["new"] = torch.ones(2)
        dcp.save(state, storage_writer=RsWriter(path, fsync=False), planner=planner)
        with dcp_rs.open(path, verify=True) as saved:
            assert saved["w"].eq(number).all()
            assert saved["deep.step"] == number
            assert saved[f"of {rank}"].tolist() == [rank, number]
            assert ("new" in saved) == (number == 2)


@pytest.mark.usefixtures("_no_plans")
def test_a_planner_that_keeps_its_plans(tmp_path):
    save_with_caching(tmp_path)


def test_planners_of_ranks_that_keep_their_plans(tmp_path):
    run_ranks(2, save_with_caching, tmp_path)


@pytest.mark.usefixtures("_no_plans")
def test_a_plan_of_another_writer_is_refused_once(tmp_path):
    planner = DefaultSavePlanner(enable_plan_caching=True)
    state = {"w": torch.ones(3), "deep": {"step": 1}}
    dcp.save(state, checkpoint_id=tmp_path / "stock", planner=planner, no_dist=True)
    path = tmp_path / "native"
    with pytest.raises(CheckpointException, match="enable_plan_caching"):
        dcp.save(state, storage_writer=RsWriter(path), planner=planner, no_dist=True)
    assert not list(path.glob("*.dcprs"))
    dcp.save(state, storage_writer=RsWriter(path), planner=planner, no_dist=True)
    assert dcp_rs.open(path, verify=True)["w"].eq(1).all()
