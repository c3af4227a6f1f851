"""State dicts that a checkpoint does not fit."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader
from dcp_rs.errors import PlanError
from support import assert_state_equal, blank, random_tensor
from support.both import load_rs, save_rs
from support.failures import STATE, failure


def test_a_missing_key(saved_blocks):
    template = {"small": blank(STATE["small"]), "unheard.of": torch.zeros(2)}
    before = template["small"].clone()
    error = failure(
        PlanError, dcp_rs.load_state_dict, template, RsReader(saved_blocks), planner=RsLoadPlanner()
    )
    assert error.tensor == "unheard.of"
    assert_state_equal(template["small"], before)
    with pytest.raises(CheckpointException, match=r"unheard\.of"):
        load_rs(template, saved_blocks)


@pytest.mark.parametrize("shape", [(5, 4), (5,), (), (15,), (5, 3, 1), (0, 3)])
def test_another_shape(saved_blocks, shape):
    template = {"small": torch.zeros(shape)}
    error = failure(
        PlanError, dcp_rs.load_state_dict, template, RsReader(saved_blocks), planner=RsLoadPlanner()
    )
    assert error.tensor == "small"
    assert "(5, 3)" in str(error) or "[5, 3]" in str(error)
    with pytest.raises(CheckpointException, match="small"):
        load_rs(template, saved_blocks)


def test_a_value_where_a_tensor_was_saved(saved_blocks):
    """Stock DCP fails with an AttributeError here; what matters is that it fails by name."""
    failure(
        PlanError,
        dcp_rs.load_state_dict,
        {"small": 3},
        RsReader(saved_blocks),
        planner=RsLoadPlanner(),
    )


def test_a_plan_for_another_checkpoint(saved_blocks, tmp_path):
    """A planner set up with one checkpoint's metadata, a reader of another."""
    other = {"small": random_tensor((5, 3)), "else": torch.ones(2)}
    save_rs(other, tmp_path / "other")

    class Stale(RsReader):
        def set_up_storage_reader(self, metadata, is_coordinator, *args, **kwargs):
            super().set_up_storage_reader(
                RsReader(saved_blocks).read_metadata(), is_coordinator, *args, **kwargs
            )

    with pytest.raises(CheckpointException) as raised:
        dcp.load(blank(other), storage_reader=Stale(tmp_path / "other"), no_dist=True)
    error = raised.value.failures[0][0]
    assert isinstance(error, PlanError)
    assert "else" in str(error)
