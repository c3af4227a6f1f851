"""Saves in the background, cached save plans, and rank-local saves: torch's variations of one protocol."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_rs
from dcp_rs import RsReader, RsWriter
from dcp_rs.errors import CheckpointNotFoundError, DcpRsError, UnsupportedError
from support import assert_state_equal, files_in, rank_outcomes, run_ranks
from support.both import HAS_RANK_LOCAL

needs_rank_local = pytest.mark.skipif(
    not HAS_RANK_LOCAL, reason="this torch has no rank-local saves"
)


def state_of(seed):
    """A sharded tensor, one that each rank has alone, and values."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    weight = torch.arange(30.0).reshape(10, 3) + seed
    return {
        "w": distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None),
        f"own.{rank}": torch.full((4,), float(seed * 10 + rank)),
        "step": seed,
        "groups": [{"lr": 0.1 * seed, "moment": torch.ones(2) * seed}],
    }


def blank_of(seed):
    state = state_of(seed)
    state["w"].to_local().fill_(-1)
    state[f"own.{dist.get_rank()}"] = torch.zeros(4)
    return state | {"step": None, "groups": [{"lr": None, "moment": torch.zeros(2)}]}


def check(path, seed):
    got = blank_of(seed)
    dcp.load(got, storage_reader=RsReader(path, verify=True))
    assert_state_equal(got, state_of(seed))


# --- in the background


def test_the_writer_is_a_stager(ckpt):
    writer = RsWriter(ckpt)
    assert isinstance(writer, AsyncStager)
    assert writer.should_synchronize_after_execute is False or isinstance(
        writer.should_synchronize_after_execute, bool
    )


def save_in_background(path, kind):
    state = state_of(1)
    future = dcp.async_save(
        state, storage_writer=RsWriter(path), async_checkpointer_type=AsyncCheckpointerType[kind]
    )
    # What is staged is a copy: training goes on.
    state["w"].to_local().fill_(-5)
    state[f"own.{dist.get_rank()}"].fill_(-5)
    future.result()
    dist.barrier()
    check(path, 1)


@pytest.mark.parametrize("kind", ["THREAD", pytest.param("PROCESS", marks=pytest.mark.slow)])
def test_a_state_is_saved_in_the_background(ckpt, kind):
    # Every rank starts a process more, which imports torch as well.
    run_ranks(2, save_in_background, ckpt, kind, fresh=kind == "PROCESS", timeout=200)


def save_in_background_twice(path):
    writer = RsWriter(path)
    for seed in (1, 2):
        future = dcp.async_save(state_of(seed), storage_writer=writer)
        future.result()
    dist.barrier()
    check(path, 2)


def test_a_writer_serves_several_background_saves(ckpt):
    run_ranks(2, save_in_background_twice, ckpt)
    assert len(list(ckpt.glob("*.safetensors"))) == 2


def test_a_background_save_that_fails_says_so(tmp_path):
    (tmp_path / "file").write_text("in the way")
    future = dcp_rs.async_save({"w": torch.ones(2)}, tmp_path / "file" / "ckpt")
    with pytest.raises(NotADirectoryError, match="file"):
        future.result(60)


# --- each rank for itself


def save_rank_local(path, seed, **options):
    rank = dist.get_rank()
    state = {
        "mine": torch.full((3,), float(seed + rank)),
        f"x{rank}": torch.arange(2),
        "step": seed,
    }
    dcp.save(state, storage_writer=RsWriter(path, **options), use_collectives=False)
    dist.barrier()
    return state


def save_and_load_rank_local(path):
    for seed in (10, 20):
        state = save_rank_local(path, seed)
        rank = dist.get_rank()
        got = {"mine": torch.zeros(3), f"x{rank}": torch.zeros(2).long(), "step": None}
        dcp.load(got, storage_reader=RsReader(path))
        assert_state_equal(got, state)
        dist.barrier()


@needs_rank_local
def test_a_rank_local_save_is_loaded_by_the_ranks_that_saved_it(ckpt):
    run_ranks(2, save_and_load_rank_local, ckpt)
    names = os.listdir(ckpt)
    assert {"__0.index.dcprs", "__1.index.dcprs"} <= set(names)
    assert "index.dcprs" not in names
    with pytest.raises(CheckpointNotFoundError, match="rank-local"):
        dcp_rs.open(ckpt)


@needs_rank_local
@pytest.mark.parametrize("order", [(0, 1), (1,)])
def test_a_rank_local_save_is_no_checkpoint_to_rebuild(ckpt, tmp_path, order):
    """Of rank 0 alone it would look like one: an index over it would hide the others, and be taken by every rank."""
    run_ranks(2, save_rank_local, ckpt, 3)
    for rank in {0, 1} - set(order):
        (ckpt / f"__{rank}.index.dcprs").unlink()
    before = sorted(os.listdir(ckpt))
    for options in ({}, {"overwrite": True}, {"out": tmp_path / "elsewhere"}):
        with pytest.raises(UnsupportedError, match=f"__{order[0]}.index.dcprs"):
            dcp_rs.index(ckpt, **options)
    for rank in order:
        (ckpt / f"__{rank}.index.dcprs").unlink()
    with pytest.raises(CheckpointNotFoundError, match="is of a rank-local save"):
        dcp_rs.index(ckpt)
    assert [file.name for file in files_in(ckpt)] == [
        name for name in before if name.endswith(".safetensors")
    ]


@needs_rank_local
def test_an_index_over_data_of_others_hides_no_rank_local_save(ckpt):
    run_ranks(2, save_rank_local, ckpt, 3)
    for file in ckpt.glob("g*.safetensors"):
        file.unlink()
    save_file({"w": torch.ones(3)}, ckpt / "model.safetensors")
    for source in (ckpt, ckpt / "model.safetensors"):
        with pytest.raises(UnsupportedError, match="rank-local"):
            dcp_rs.index(source)


def save_rank_local_twice(path):
    save_rank_local(path, 1, overwrite=False)
    save_rank_local(path, 2, overwrite=False)


@needs_rank_local
def test_a_rank_local_save_may_refuse_to_overwrite(ckpt):
    for outcome in rank_outcomes(2, save_rank_local_twice, ckpt, timeout=30):
        error = outcome.error
        assert "overwrite=False" in str(error), outcome.traceback
        assert not isinstance(error, DcpRsError) or type(error).__name__ == "CheckpointExistsError"


def load_rank_local_with_our_load(path):
    state = save_rank_local(path, 5)
    got = {"mine": torch.zeros(3), "step": None}
    dcp_rs.load(got, path)
    assert_state_equal(got, {name: state[name] for name in got})


@needs_rank_local
def test_our_load_takes_a_rank_local_save(ckpt):
    run_ranks(2, load_rank_local_with_our_load, ckpt)
