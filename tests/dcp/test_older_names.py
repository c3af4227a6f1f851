"""Checkpoints with containers as single values, as torch before 2.4 saved those without tensors."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader
from dcp_rs.errors import PlanError


def save_whole(state, path):
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), planner=planner, no_dist=True)


class OfItems(RsLoadPlanner):
    def commit_tensor(self, read_item, tensor):
        super().commit_tensor(read_item, tensor)


@pytest.mark.parametrize("planner", [dcp.DefaultLoadPlanner, RsLoadPlanner, OfItems])
def test_values_fill_a_template_that_is_filled(ckpt, planner):
    save_whole({"w": torch.ones(2), "b": {"x": {"y": 1}}, "groups": [{"lr": 0.5}]}, ckpt)
    state = {"w": torch.zeros(2), "b": {"x": {"y": 0}}, "groups": [{"lr": 0.0}]}
    dcp.load(state, storage_reader=RsReader(ckpt), planner=planner(), no_dist=True)
    assert state["w"].eq(1).all()
    assert state["b"] == {"x": {"y": 1}}
    assert state["groups"] == [{"lr": 0.5}]


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float64}])
def test_excluded_entries_stay(ckpt, options):
    save_whole({"w": torch.ones(2), "a": {"x": 1}, "b": {"x": 1}}, ckpt)
    state = {"w": torch.zeros(2), "a": {"x": 0}, "b": {"x": 0}}
    dcp_rs.load(state, ckpt, exclude="b*", no_dist=True, **options)
    assert state["a"] == {"x": 1}
    assert state["b"] == {"x": 0}


@pytest.mark.parametrize("load", [dcp_rs.load, "stock"])
def test_a_value_that_became_a_dict_hides_no_others(ckpt, load):
    """Of `opt`, the checkpoint has the leaves: neither way of flattening has all names."""
    saved = {"w": torch.ones(2), "opt": {"lr": 0.5}, "sched": None}
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(ckpt), no_dist=True)
    state = {"w": torch.zeros(2), "opt": {"lr": 0.0}, "sched": {"last": 0}}
    if load == "stock":
        with pytest.raises(CheckpointException, match="Missing key"):
            dcp.load(state, storage_reader=dcp.FileSystemReader(ckpt), no_dist=True)
    else:
        with pytest.raises(PlanError, match="no 'opt'"):
            load(state, ckpt, no_dist=True)
        report = load(state, ckpt, no_dist=True, allow_partial_load=True)
        assert report.missing == ["opt"]


def test_entries_left_out_by_a_subclass_stay(ckpt):
    class LeavesOut(RsLoadPlanner):
        def set_up_planner(self, *args, **kwargs):
            super().set_up_planner(*args, **kwargs)
            del self.state_dict["b.x"]

    save_whole({"w": torch.ones(2), "a": {"x": 1}, "b": {"x": 1}}, ckpt)
    state = {"w": torch.zeros(2), "a": {"x": 0}, "b": {"x": 0}}
    dcp.load(state, storage_reader=RsReader(ckpt), planner=LeavesOut(), no_dist=True)
    assert (state["a"], state["b"]) == ({"x": 1}, {"x": 0})
