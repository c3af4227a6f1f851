"""Planner data of a stock checkpoint that is no plain data is named where it gets lost."""

import dataclasses
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_rs


class Owners:
    pass


class Own(DefaultSavePlanner):
    def __init__(self, planner_data):
        super().__init__()
        self.planner_data = planner_data

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        data = self.planner_data
        if isinstance(data, dict):
            data = {**metadata.planner_data, **data}
        return plans, dataclasses.replace(metadata, planner_data=data)


STATE = {"w": torch.arange(4.0), "deep": {"step": 3}}


@pytest.mark.parametrize(
    ("planner_data", "named"),
    [
        ({"owners": {1, 2}, "mesh": [2, 2]}, "'owners'"),
        ({"owners": {"of": {"w": Owners()}}}, "'owners'"),
        ({"seed": 1 << 70}, "'seed'"),
        (Owners(), "'all of it'"),
    ],
    ids=["set", "object", "integer", "alone"],
)
def test_left_out_planner_data_is_named(tmp_path, planner_data, named):
    stock = tmp_path / "stock"
    dcp.save(STATE, checkpoint_id=stock, planner=Own(planner_data), no_dist=True)
    with pytest.warns(UserWarning, match=f"left out: {named}"):
        dcp_rs.RsReader(stock).read_metadata()
    for to in ("dcp-rs", "dcp"):
        with pytest.warns(UserWarning, match=f"left out: {named}"):
            dcp_rs.convert(stock, tmp_path / to, to=to)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dcp_rs.convert(stock, tmp_path / "x.pt")  # no planner has a use for it
        for path in (stock, tmp_path / "dcp-rs", tmp_path / "dcp", tmp_path / "x.pt"):
            assert dcp_rs.open(path)["w"].equal(STATE["w"])
        state = {"w": torch.zeros(4), "deep": {"step": 0}}
        dcp_rs.load(state, stock)
    assert state["w"].equal(STATE["w"])
    assert state["deep"]["step"] == 3


def test_plain_planner_data_is_kept(tmp_path):
    dcp.save(STATE, checkpoint_id=tmp_path, planner=Own({"mesh": [2, 2]}), no_dist=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = dcp_rs.RsReader(tmp_path).read_metadata().planner_data
    assert found["mesh"] == [2, 2]
