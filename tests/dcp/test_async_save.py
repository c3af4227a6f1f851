"""Saves in the background, saves that overlap, and what a failed save leaves behind: nothing."""

import gc
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_rs
from dcp_rs import RsSavePlanner, RsWriter
from dcp_rs.errors import PlanError, SaveInProgressError, UnsupportedError
from dcp_rs.transfer.stage import HostStager
from support import assert_state_equal, dtypes_state, nested_state, rank_outcomes, run_ranks, shapes_state


def data_files(path):
    return sorted(file.name for file in path.glob("g*")) if path.exists() else []


# --- staging -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_a_staged_copy_is_a_copy(shared):
    state = {**nested_state(), "dtypes": dtypes_state(), "shapes": shapes_state(), "pair": (torch.ones(2), [1])}
    staged = HostStager(shared=shared).stage(state)
    assert_state_equal(contiguous(staged), contiguous(state))
    state["buffers"][0].zero_()
    state["pair"][0].zero_()
    state["pair"][1].append(2)
    assert staged["pair"][0].tolist() == [1, 1]
    assert staged["pair"][1] == [1]
    assert staged["buffers"][0].any()


def contiguous(value):
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().resolve_neg().contiguous()
    if isinstance(value, dict):
        return {key: contiguous(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [contiguous(entry) for entry in value]
    return value


def test_a_stager_keeps_its_memory_and_tied_weights_share_theirs():
    stager = HostStager(cache=True)
    weight = torch.nn.Parameter(torch.randn(10, 10))
    first = stager.stage({"a": weight, "b": weight})
    assert first["a"].data_ptr() == first["b"].data_ptr()
    assert first["a"].requires_grad
    place = first["a"].data_ptr()
    second = stager.stage({"a": torch.ones(5, 10), "b": torch.ones(3)})
    assert second["a"].data_ptr() != place  # the first copy is still somebody's
    del first
    third = stager.stage({"a": torch.ones(9, 10), "b": torch.ones(3)})
    assert third["a"].data_ptr() == place
    assert second["a"].all()


def test_tied_weights_are_staged_once_and_stay_tied():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(300, 40), "head": torch.nn.Linear(40, 300, bias=False)})
    model["head"].weight = model["embed"].weight
    weight = model["embed"].weight
    state = model.state_dict()  # other tensors over the same memory
    state |= {"parameter": weight, "t": weight.t(), "half": weight[:150], "empty": weight[:0], "none": weight[:0]}
    with torch.no_grad():
        state["conj"] = torch.view_as_complex(weight.view(-1, 2)).conj()
        state["unconj"] = torch.view_as_complex(weight.view(-1, 2))
    for shared in (False, True):
        staged = HostStager(shared=shared).stage(state)
        if shared:  # as the other process gets it
            function, arguments = staged.__reduce__()
            assert sum(block.nbytes for block in arguments[0]) < 6 * weight.nbytes
            staged = function(*arguments)
        assert_state_equal(dict(staged), {name: value.detach().resolve_conj() for name, value in state.items()})
        places = {name: value.data_ptr() for name, value in staged.items() if value.numel()}
        assert places["embed.weight"] == places["head.weight"] == places["parameter"]
        assert len(set(places.values())) == len(places) - 2
        assert staged["parameter"].requires_grad
        assert not staged["embed.weight"].requires_grad


# --- our async_save ------------------------------------------------------------------------------------


def test_training_may_go_on(ckpt):
    state = {"w": torch.randn(300, 1000), "n": {"b": torch.ones(2)}, "step": 1}
    want = {"w": state["w"].clone(), "n": {"b": torch.ones(2)}, "step": 1}
    future = dcp_rs.async_save(state, ckpt)
    state["w"].zero_()
    state["n"]["b"].zero_()
    metadata = future.result(60)
    assert set(metadata.state_dict_metadata) == {"w", "n.b", "step"}
    got = {"w": torch.zeros(300, 1000), "n": {"b": torch.zeros(2)}, "step": 0}
    dcp_rs.load(got, ckpt, verify=True)
    assert_state_equal(got, want)


def test_a_stager_serves_several_saves(ckpt):
    stager = HostStager(cache=True)
    for step in range(3):
        state = {"w": torch.full((1000,), float(step))}
        dcp_rs.async_save(state, ckpt, stager=stager).result(60)
        assert dcp_rs.open(ckpt)["w"][0] == step


class Slow(RsSavePlanner):
    """Waits for a word before it plans."""

    def __init__(self):
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self.begun.set()
        self.go.wait(60)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def test_a_stager_does_not_write_to_memory_that_a_save_still_reads(tmp_path):
    """W7: two queued saves shared the one block, and the first checkpoint held the second's numbers, with right digests."""
    stager, planner = HostStager(cache=True), Slow()
    state = {"w": torch.ones(1000)}
    first = dcp_rs.async_save(state, tmp_path / "first", planner=planner, stager=stager)
    state["w"].fill_(2)
    timer = threading.Timer(0.2, planner.go.set)
    timer.start()
    second = dcp_rs.async_save(state, tmp_path / "second", stager=stager)
    assert planner.go.is_set()  # it waited
    first.result(60)
    second.result(60)
    assert dcp_rs.open(tmp_path / "first")["w"].eq(1).all()
    assert dcp_rs.open(tmp_path / "second")["w"].eq(2).all()


def test_a_stager_waits_for_nobody_who_keeps_a_staged_tensor():
    stager = HostStager(cache=True)
    over = threading.Event()
    kept = stager.stage({"w": torch.ones(100)}, under_way=lambda: not over.is_set())
    over.set()  # the save is over, and somebody has the tensors
    again = stager.stage({"w": torch.zeros(100)})
    assert kept["w"].all()
    assert not again["w"].any()


def test_a_second_save_to_the_path_is_refused_until_the_first_is_over(ckpt, tmp_path):
    planner = Slow()
    first = dcp_rs.async_save({"w": torch.ones(2)}, ckpt, planner=planner)
    with pytest.raises(SaveInProgressError, match="wait for its future"):
        dcp_rs.async_save({"w": torch.zeros(2)}, ckpt)
    with pytest.raises(SaveInProgressError):
        dcp_rs.save({"w": torch.zeros(2)}, ckpt.parent / "." / "ckpt")
    with pytest.raises(SaveInProgressError):
        dcp.async_save({"w": torch.zeros(2)}, storage_writer=RsWriter(ckpt))
    other = dcp_rs.async_save({"w": torch.zeros(2)}, tmp_path / "other")  # queued
    planner.go.set()
    first.result(60)
    other.result(60)
    dcp_rs.async_save({"w": torch.full((2,), 2.0)}, ckpt).result(60)
    assert dcp_rs.open(ckpt)["w"].tolist() == [2, 2]


def test_the_future_tells_what_went_wrong(ckpt):
    dcp_rs.save({"w": torch.ones(2)}, ckpt)
    before = data_files(ckpt)
    future = dcp_rs.async_save({"w": torch.ones(2), "m": torch.empty(1, device="meta")}, ckpt)
    with pytest.raises(UnsupportedError, match="meta device"):
        future.result(60)
    assert data_files(ckpt) == before
    dcp_rs.async_save({"w": torch.zeros(2)}, ckpt).result(60)
    assert not dcp_rs.open(ckpt)["w"].any()


def test_another_process_needs_a_process_group(ckpt):
    with pytest.raises(ValueError, match="process group"):
        dcp_rs.async_save({"w": torch.ones(2)}, ckpt, executor="process")
    with pytest.raises(ValueError, match="one of 'thread', 'process'"):
        dcp_rs.async_save({"w": torch.ones(2)}, ckpt, executor="fork")


def sharded_state(seed):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(21.0).reshape(7, 3) + seed
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None),
        "all": distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None),
        "model": {f"w{i}": torch.full((50,), float(i + seed)) for i in range(40)},
        "step": seed,
    }


def save_in_background(path, executor):
    stager = HostStager(cache=True, shared=executor == "process")
    for seed in (1, 2):
        state = sharded_state(seed)
        future = dcp_rs.async_save(state, path, executor=executor, stager=stager)
        state["rows"].to_local().zero_()
        state["model"]["w3"].zero_()
        metadata = future.result(150)
        assert len(metadata.state_dict_metadata) == 43
        dist.barrier()
        got = sharded_state(9)
        dcp_rs.load(got, path, verify=True)
        assert_state_equal(got, sharded_state(seed))
        dist.barrier()
    state["bad"] = torch.empty(1, device="meta")
    try:
        dcp_rs.async_save(state, path, executor=executor).result(150)
    except UnsupportedError as error:
        return str(error)
    return None


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_ranks_save_in_the_background(ckpt, executor):
    for message in run_ranks(2, save_in_background, ckpt, executor, fresh=executor == "process", timeout=200):
        assert "'bad' is on the meta device" in message
    assert len(data_files(ckpt)) == 2


# --- torch's async_save with our writer ----------------------------------------------------------------


def test_torchs_async_save_is_refused_while_another_one_is_under_way(ckpt):
    planner = Slow()
    writer = RsWriter(ckpt, cache_staged_state_dict=True)
    state = {"w": torch.ones(100)}
    future = dcp.async_save(state, storage_writer=writer, planner=planner)
    state["w"].zero_()
    with pytest.raises(SaveInProgressError):
        dcp.async_save(state, storage_writer=writer)
    with pytest.raises(SaveInProgressError):
        dcp.async_save(state, storage_writer=RsWriter(ckpt))
    planner.go.set()
    future.result(60)
    assert dcp_rs.open(ckpt)["w"].all()
    for value in (3.0, 4.0):  # right after each other, through the same writer and a new one
        dcp.async_save({"w": torch.full((100,), value)}, storage_writer=writer).result(60)
    dcp.async_save({"w": torch.full((100,), 5.0)}, storage_writer=RsWriter(ckpt)).result(60)
    assert dcp_rs.open(ckpt)["w"][0] == 5


def test_a_writer_that_still_saves_is_not_sent_elsewhere(tmp_path):
    """W7: torch names the next path to the writer when the save begins, in the midst of the one before; that one's memory was written over."""
    planner = Slow()
    writer = RsWriter(tmp_path, cache_staged_state_dict=True)
    state = {"w": torch.ones(1000)}
    first = dcp.async_save(state, checkpoint_id=tmp_path / "first", storage_writer=writer, planner=planner)
    assert planner.begun.wait(60)
    state["w"].fill_(2)
    with pytest.raises(SaveInProgressError, match="still saves"):
        dcp.async_save(state, checkpoint_id=tmp_path / "second", storage_writer=writer)
    planner.go.set()
    first.result(60)
    dcp.async_save(state, checkpoint_id=tmp_path / "second", storage_writer=writer).result(60)
    assert dcp_rs.open(tmp_path / "first")["w"].eq(1).all()
    assert dcp_rs.open(tmp_path / "second")["w"].eq(2).all()


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


def test_torchs_checkpoint_process_gets_what_is_staged(ckpt):
    """E5: it ended with SIGSEGV as soon as two DTensors lay in one block. E4: the next save was refused while the thread of the last one ended."""
    assert run_ranks(2, send_to_torchs_process, ckpt, fresh=True, timeout=200) == [True, True]


# --- failures leave nothing behind -----------------------------------------------------------------------


class Failing(RsSavePlanner):
    """Fails on rank 1, when the others have written."""

    def finish_plan(self, new_plan):
        if dist.get_rank() == 1:
            time.sleep(0.3)
            raise PlanError("no")
        return super().finish_plan(new_plan)


def fail_on_one_rank(path, how):
    state = {"w": torch.full((1000,), float(dist.get_rank())), f"own.{dist.get_rank()}": torch.ones(3)}
    dcp_rs.save(state, path)
    before = data_files(path)
    dist.barrier()
    assert len(before) == 2
    if how == "ours":
        with pytest.raises(PlanError, match="no"):
            dcp_rs.save(state, path, planner=Failing())
    else:
        writer = RsWriter(path)
        with pytest.raises(CheckpointException):
            dcp.save(state, storage_writer=writer, planner=Failing())
        if how == "writer goes":
            del writer
            gc.collect()
        else:
            dcp.save(state, storage_writer=writer)
    dist.barrier()
    after = data_files(path)
    dcp_rs.load({"w": torch.zeros(1000)}, path, verify=True)
    return before == after if how != "next save" else len(after) == 2


@pytest.mark.parametrize("how", ["ours", "writer goes", "next save"])
def test_a_failed_save_leaves_no_files_on_any_rank(ckpt, how):
    assert run_ranks(2, fail_on_one_rank, ckpt, how) == [True, True]


def keep_files_of_a_good_save(path):
    writer = RsWriter(path)
    dcp.save({f"own.{dist.get_rank()}": torch.ones(3)}, storage_writer=writer)
    del writer
    gc.collect()
    dist.barrier()
    return len(data_files(path))


def test_the_files_of_a_good_save_stay_when_the_writer_goes(ckpt):
    assert run_ranks(2, keep_files_of_a_good_save, ckpt) == [2, 2]


def disagree(path):
    dcp_rs.save({"w": torch.ones(2 + dist.get_rank())}, path)


def test_a_plan_that_does_not_fit_leaves_no_files(ckpt):
    assert all(isinstance(o.error, PlanError) for o in rank_outcomes(2, disagree, ckpt))
    assert data_files(ckpt) == []
