"""A checkpoint whose tensors lack elements: `verify` was content with it."""

import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
from support.commands import in_a_process
from support.forged import save_with_hole


def test_hole_is_a_problem(tmp_path):
    save_with_hole(tmp_path)
    report = dcp_rs.verify(tmp_path)
    assert not report
    (problem,) = report.problems
    assert (problem.tensor, report.lost) == ("w", ["w"])
    assert problem.expected == "all elements of shape [8, 1]"
    assert problem.got == "no chunk with the elements [4, 1] at [4, 0]"
    assert in_a_process("verify", tmp_path).returncode == 1


def test_hole_in_a_stock_checkpoint_is_a_problem(tmp_path):
    class Half(dcp.DefaultSavePlanner):
        def create_global_plan(self, plans):
            plans, metadata = super().create_global_plan(plans)
            metadata.state_dict_metadata["w"].size = torch.Size([8])
            return plans, metadata

    dcp.save(
        {"w": torch.ones(4), "other": torch.ones(3)},
        checkpoint_id=tmp_path,
        planner=Half(),
        no_dist=True,
    )
    report = dcp_rs.verify(tmp_path)
    assert [problem.tensor for problem in report.problems] == ["w"]
    assert "[4] at [4]" in report.problems[0].got


def test_empty_tensors_have_no_holes(tmp_path):
    state = {"empty": torch.empty(0, 3), "scalar": torch.tensor(1.0), "value": 3}
    dcp_rs.save(state, tmp_path, no_dist=True)
    assert dcp_rs.verify(tmp_path)
