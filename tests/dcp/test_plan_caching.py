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


@pytest.mark.usefixtures("_no_plans")
@pytest.mark.parametrize("before", [0, 1])
def test_a_planner_that_keeps_its_plan_is_refused(tmp_path, before):
    """The kept plan has the id and the generation of another save."""
    planner = DefaultSavePlanner(enable_plan_caching=True)
    state = {"w": torch.ones(3), "deep": {"step": 1}}
    for number in range(before):
        writer = dcp.FileSystemWriter(tmp_path / str(number))
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    for _ in range(2):
        with pytest.raises(CheckpointException, match="enable_plan_caching"):
            dcp.save(state, storage_writer=RsWriter(tmp_path), planner=planner, no_dist=True)
        with pytest.raises(PlanError, match="enable_plan_caching"):
            dcp_rs.save(state, tmp_path, planner=planner)
    assert not list(tmp_path.glob("*.dcprs"))
    planner = RsSavePlanner(enable_plan_caching=True)
    for _ in range(2):
        dcp.save(state, storage_writer=RsWriter(tmp_path), planner=planner, no_dist=True)
        assert dcp_rs.open(tmp_path, verify=True)["w"].eq(1).all()


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
