"""Planners that keep plans for the next save, and ranks that plan in two ways."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

import dcp_rs
from dcp_rs import RsSavePlanner, RsWriter
from dcp_rs.errors import PlanError
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
    for save in ("dcp", "own"):
        for number in range(3):
            planner = DefaultSavePlanner(enable_plan_caching=True)
            state = {"w": torch.full((3,), float(number)), "deep": {"step": number}}
            state[f"of {rank}"] = torch.tensor([rank, number])
            if number == 2:
                state["new"] = torch.ones(2)
            if save == "dcp":
                dcp.save(state, storage_writer=RsWriter(path, fsync=False), planner=planner)
            else:
                dcp_rs.save(state, path, planner=planner, fsync=False)
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


class Own(RsSavePlanner):
    def resolve_data(self, write_item):
        return super().resolve_data(write_item)


def save_with_planners_of_two_kinds(path):
    told = []
    for own in (0, 1):
        planner = Own() if dist.get_rank() == own else None
        with pytest.raises(PlanError) as caught:
            dcp_rs.save({"w": torch.ones(2)}, path, planner=planner)
        told.append(str(caught.value))
    return told


def test_ranks_that_plan_in_two_ways_are_told(ckpt):
    for told in run_ranks(2, save_with_planners_of_two_kinds, ckpt):
        assert all("give all ranks the same kind" in message for message in told)
    assert not list(ckpt.glob("*.dcprs"))
