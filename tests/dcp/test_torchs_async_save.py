"""torch's async_save with our writer."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import dcp_rs
from dcp_rs import RsSavePlanner, RsWriter
from dcp_rs.errors import PlanError
from support import assert_state_equal, run_ranks
from support.faults import FailingSavePlanner
from support.layouts import sharded_state
from support.places import data_files


def test_saves_of_one_writer_right_after_each_other(ckpt):
    writer = RsWriter(ckpt, cache_staged_state_dict=True)
    for value in (3.0, 4.0):  # right after each other, through the same writer and a new one
        dcp.async_save({"w": torch.full((100,), value)}, storage_writer=writer).result(60)
    dcp.async_save({"w": torch.full((100,), 5.0)}, storage_writer=RsWriter(ckpt)).result(60)
    assert dcp_rs.open(ckpt)["w"][0] == 5


class Slow(RsSavePlanner):
    """Waits for a word before it plans."""

    def __init__(self):
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self.begun.set()
        self.go.wait(60)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def test_last_commit_to_a_path_wins(ckpt):
    planner = Slow()
    first = dcp.async_save({"w": torch.ones(100)}, storage_writer=RsWriter(ckpt), planner=planner)
    assert planner.begun.wait(60)
    dcp.async_save({"w": torch.full((100,), 2.0)}, storage_writer=RsWriter(ckpt)).result(60)
    assert dcp_rs.open(ckpt)["w"].eq(2).all()
    planner.go.set()
    first.result(60)
    with dcp_rs.open(ckpt, verify=True) as saved:
        assert saved["w"].eq(1).all()
    assert len(data_files(ckpt)) == 1


def save_when_the_group_is_gone(path):
    writer = RsWriter(path)
    staged = writer.stage({f"w{dist.get_rank()}": torch.ones(10)})
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(CheckpointException) as failed:
        dcp.save(staged, storage_writer=writer)
    return failed.value.failures[0][0]


def test_ranks_whose_group_is_gone_do_not_each_save_alone(ckpt):
    """Half of the checkpoint would be committed last, and be whole by all its digests."""
    for error in run_ranks(2, save_when_the_group_is_gone, ckpt, fresh=True):
        assert isinstance(error, PlanError)
        assert "2 ranks was destroyed before the save" in str(error)
    assert not (ckpt / "index.dcprs").exists()


def send_to_torchs_process(path):
    """Sharded tensors, two of which lie in one block, and save after save, each right after the one before."""
    process = AsyncCheckpointerType.PROCESS
    for cache in (True, False):
        writer = RsWriter(path, cache_staged_state_dict=cache, fsync=False)
        for seed in range(3):
            state = sharded_state(seed)
            state["more"] = sharded_state(seed)
            if not cache:
                writer = RsWriter(path, fsync=False)
            future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=process)
            future.add_done_callback(lambda _: time.sleep(0.5))  # the thread ends only then
            metadata = future.result(150)
            assert len(metadata.state_dict_metadata) == 86
        dist.barrier()
        got = {**sharded_state(9), "more": sharded_state(9)}
        dcp_rs.load(got, path, verify=True)
        assert_state_equal(got, {**sharded_state(2), "more": sharded_state(2)})
        dist.barrier()
    return True


@pytest.mark.slow
def test_torchs_checkpoint_process_gets_what_is_staged(ckpt):
    """E5: it ended with SIGSEGV as soon as two DTensors lay in one block. E4: the next save was refused while the thread of the last one ended."""
    assert run_ranks(2, send_to_torchs_process, ckpt, fresh=True, timeout=200) == [True, True]


METHODS = [
    "set_up_planner",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "resolve_data",
]


def save_again(way, writer, path):
    if way == "the same writer":
        dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
    elif way == "another writer":
        dcp.save({"w": torch.ones(2)}, storage_writer=RsWriter(path), no_dist=True)
    else:
        dcp_rs.save({"w": torch.ones(2)}, path, no_dist=True)


@pytest.mark.parametrize("way", ["the same writer", "another writer", "dcp_rs.save"])
@pytest.mark.parametrize("method", METHODS)
def test_a_save_that_failed_in_a_thread_that_lives_on_is_over(ckpt, method, way):
    """It was refused to the others for as long as the thread lived, though there was no future to wait for."""
    writer = RsWriter(ckpt, fsync=False)
    how = {"storage_writer": writer, "planner": FailingSavePlanner(method), "no_dist": True}
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(CheckpointException):
            pool.submit(dcp.save, {"w": torch.zeros(2)}, **how).result(60)
        save_again(way, writer, ckpt)
    assert dcp_rs.open(ckpt)["w"].tolist() == [1, 1]


@pytest.mark.parametrize("way", ["the same writer", "another writer", "dcp_rs.save"])
@pytest.mark.parametrize("method", METHODS)
def test_once_the_future_of_a_save_that_failed_is_done_the_next_may_begin(tmp_path, method, way):
    """Of forty, five to nine were refused: the thread had a moment to live. And all, where it failed before it had told the writer that it saves."""
    for number in range(8):
        writer = RsWriter(tmp_path / str(number), fsync=False)
        how = {"storage_writer": writer, "planner": FailingSavePlanner(method)}
        with pytest.raises(CheckpointException):
            dcp.async_save({"w": torch.zeros(2)}, **how).result(60)
        save_again(way, writer, writer.path)
        assert dcp_rs.open(writer.path)["w"].tolist() == [1, 1]
