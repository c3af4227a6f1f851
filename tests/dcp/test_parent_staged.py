"""What was frozen when one save was staged says nothing of the next through the same writer.

A save that failed left its names with the writer. The module was trained since, and the next save
took the parent's bytes for tensors that had changed.
"""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_rs
from dcp_rs import RsSavePlanner, RsWriter
from support.faults import FailingSavePlanner


def frozen_module():
    return torch.nn.Linear(512, 1024, bias=False).requires_grad_(
        False
    )  # 2 MiB: of what is trusted only the first is compared


def train(module):
    module.requires_grad_(True)
    with torch.no_grad():
        module.weight[-1] += 1


def save_of(module):
    return {"w": module.weight.detach()}


@pytest.fixture
def module(tmp_path):
    module = frozen_module()
    dcp_rs.save(save_of(module), tmp_path / "parent", reuse=module, no_dist=True, fsync=False)
    return module


def writer_to(path, module):
    return RsWriter(path, parent=path.parent / "parent", reuse=module, fsync=False)


def assert_saved_anew(writer, module):
    dcp.save(save_of(module), storage_writer=writer, planner=RsSavePlanner(), no_dist=True)
    with dcp_rs.open(writer.path, verify=True) as checkpoint:
        assert torch.equal(checkpoint["w"], module.weight)
    assert writer.report.bytes_reused == 0


@pytest.mark.parametrize(
    "method", ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"]
)
def test_after_a_save_that_failed(tmp_path, module, method):
    writer = writer_to(tmp_path / "child", module)
    with pytest.raises(CheckpointException):
        dcp.async_save(
            save_of(module), storage_writer=writer, planner=FailingSavePlanner(method)
        ).result(60)
    train(module)
    assert_saved_anew(writer, module)


def test_after_a_save_in_another_process(tmp_path, module):
    writer = writer_to(tmp_path / "child", module)
    staged = writer.stage(save_of(module))
    there = pickle.loads(pickle.dumps(writer))
    for _ in range(2):
        dcp.save(staged, storage_writer=there, planner=RsSavePlanner(), no_dist=True)
        with dcp_rs.open(there.path, verify=True) as checkpoint:
            assert torch.equal(checkpoint["w"], staged["w"])
        with torch.no_grad():
            staged["w"][-1] += 2
    train(module)
    assert_saved_anew(writer, module)


@pytest.mark.parametrize("method", ["set_up_planner", "create_local_plan"])
def test_a_writer_whose_save_failed_takes_nothing_to_another_process(tmp_path, module, method):
    writer = writer_to(tmp_path / "child", module)
    with pytest.raises(CheckpointException):
        dcp.async_save(
            save_of(module), storage_writer=writer, planner=FailingSavePlanner(method)
        ).result(60)
    train(module)
    assert_saved_anew(pickle.loads(pickle.dumps(writer)), module)


def test_torchs_async_save_compares_what_it_could_trust(tmp_path, module):
    for number, reuse in enumerate(("w", module)):
        writer = RsWriter(
            tmp_path / str(number), parent=tmp_path / "parent", reuse=reuse, fsync=False
        )
        dcp.async_save(save_of(module), storage_writer=writer, planner=RsSavePlanner()).result(60)
        assert writer.report.bytes_reused == 2 << 20
    train(module)
    assert_saved_anew(writer, module)
