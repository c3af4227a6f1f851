"""``RsLoadPlanner(flatten_state_dict=False)`` refused a state dict with an empty dict in it: nothing is saved for that.

Torch's planner loads the rest.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from dcp_rs import RsLoadPlanner, RsReader, RsSavePlanner, RsWriter
from support import assert_state_equal


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("empty", [{}, [], {"a": {}}, {"a": {"b": {}}, "c": {}}], ids=str)
def test_empty_containers_need_no_entry(tmp_path, empty, flatten):
    state = {"w": torch.ones(2), "e": empty}
    stock, ours = (
        DefaultSavePlanner(flatten_state_dict=flatten),
        RsSavePlanner(flatten_state_dict=flatten),
    )
    dcp.save(
        state, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), planner=stock, no_dist=True
    )
    dcp.save(state, storage_writer=RsWriter(tmp_path / "rs"), planner=ours, no_dist=True)
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    want = {"w": torch.zeros(2), "e": empty}
    dcp.load(
        want, storage_reader=dcp.FileSystemReader(tmp_path / "stock"), planner=planner, no_dist=True
    )
    for folder in ("stock", "rs"):
        got = {"w": torch.zeros(2), "e": empty}
        reader = RsReader(tmp_path / folder)
        dcp.load(
            got,
            storage_reader=reader,
            planner=RsLoadPlanner(flatten_state_dict=False),
            no_dist=True,
        )
        assert_state_equal(got, want)
        assert "entries" not in str(reader.report)
