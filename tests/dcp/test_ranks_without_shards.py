"""Tensors that some ranks hold no part of, and tensors of several ranks that one rank saves alone."""

from collections import OrderedDict
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import dcp_rs
from dcp_rs import RsReader, RsWriter
from dcp_rs.errors import PlanError
from support import run_ranks
from support.both import HAS_RANK_LOCAL

#: The second is torch 2.8's own check of a plan of one rank.
REFUSED = "without no_dist=True|Failed to validate global plan"


def tables(fill):
    """Embedding tables by table, as torchrec divides them: each is whole on one rank."""
    mesh = init_device_mesh("cpu", (2,))
    state = {}
    for owner in (0, 1):
        parts = []
        if dist.get_rank() == owner:
            parts = [torch.full((4, 3), float(fill + owner)), torch.full((4, 2), float(-fill))]
        local = LocalShardsWrapper(parts, [(0, 0), (0, 3)][: len(parts)])
        state[f"table.{owner}"] = DTensor.from_local(
            local, mesh, [Replicate()], run_check=False, shape=torch.Size([4, 5]), stride=(5, 1)
        )
    state["rows"] = distribute_tensor(torch.arange(3.0).view(1, 3), mesh, [Shard(0)])
    state["none"] = distribute_tensor(torch.zeros(0, 3), mesh, [Shard(0)])
    return state


def save_tables(path, way):
    state = tables(3)
    if way == "save":
        dcp_rs.save(state, path)
    elif way == "async_save":
        dcp_rs.async_save(state, path).result(60)
    elif way == "dcp.async_save":
        dcp.async_save(state, storage_writer=RsWriter(path)).result(60)
    else:
        dcp.save(state, storage_writer=RsWriter(path), planner=DefaultSavePlanner())
    loads = [
        lambda into: dcp_rs.load(into, path, verify=True),
        lambda into: dcp.load(into, storage_reader=RsReader(path)),
    ]
    # torch 2.8 itself says that a table without parts is on meta, and cannot plan its load.
    for load in loads if HAS_RANK_LOCAL else loads[:1]:
        got = tables(9)
        load(got)
        rank = dist.get_rank()
        mine = got[f"table.{rank}"].to_local().local_shards()
        assert [part[0, 0].item() for part in mine] == [3.0 + rank, -3.0]
        assert got["rows"].full_tensor().tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("way", ["save", "async_save", "dcp.save", "dcp.async_save"])
def test_tables_that_one_rank_holds(ckpt, way):
    """The rank without the table was said to have sent a damaged plan: its offsets have no or other dimensions."""
    run_ranks(2, save_tables, ckpt, way)
    with dcp_rs.open(ckpt, verify=True) as saved:
        assert saved["table.1"].tolist() == [[4.0] * 3 + [-3.0] * 2] * 4
        assert saved["none"].shape == (0, 3)


def parallel(seed):
    """A layer of fewer columns than tensor-parallel ranks, which FSDP2 shards as well."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(OrderedDict(down=torch.nn.Linear(1, 3)))
    parallelize_module(model, mesh["tp"], {"down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


def save_parallel(path, way):
    state = parallel(0).state_dict()
    if dist.get_rank() == 1:  # of shape (0, 0) under torch 2.15
        assert not state["down.weight"].to_local().numel()
    if way == "dcp":
        dcp.save(state, storage_writer=RsWriter(path, fsync=False))
    else:
        dcp_rs.save(state, path, fsync=False)
    got = parallel(1).state_dict()
    if way == "dcp":
        dcp.load(got, storage_reader=RsReader(path))
    else:
        dcp_rs.load(got, path)
    return [(got[name].to_local().tolist(), state[name].to_local().tolist()) for name in state]


@pytest.mark.parametrize("way", ["dcp", "dcp_rs"])
def test_shard_without_elements_that_has_lost_its_shape(ckpt, way):
    """``RsWriter`` refused it: (0, 0) for a chunk of (3, 0)."""
    for of_rank in run_ranks(2, save_parallel, ckpt, way):
        for got, saved in of_rank:
            assert got == saved
    with dcp_rs.open(ckpt) as checkpoint:
        assert checkpoint["down.weight"].shape == (3, 1)


def save_alone(path):
    """A tensor of both ranks is refused by each way to save alone, and what is whole is saved."""
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    whole = {
        "plain": torch.arange(3.0),
        "replicated": distribute_tensor(torch.arange(4.0), mesh, [Replicate()]),
        "empty": distribute_tensor(torch.zeros(0, 2), mesh, [Shard(0)]),
        "step": 7,
    }
    sharded = {"w": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])}
    one_row = {"w": distribute_tensor(torch.ones(1, 2), mesh, [Shard(0)])}
    rows = torch.ones(2, 3)
    rows.global_shape, rows.global_offsets = (4, 3), [(2 * rank, 0)]
    rows.local_offsets, rows.local_sizes = [(0, 0)], [(2, 3)]
    group = [dist.new_group([one]) for one in (0, 1)][rank]
    here = f"{path}/{rank}"
    ways = [
        lambda s: dcp_rs.save(s, here, no_dist=True),
        lambda s: dcp_rs.save(s, here, process_group=group),
        lambda s: dcp_rs.async_save(s, here, no_dist=True).result(60),
        lambda s: dcp.save(s, storage_writer=RsWriter(here), no_dist=True),
    ]
    # torch plans nothing for a table without parts, so its own save cannot tell.
    with_tables = [(tables(1), way) for way in ways[:3]]
    # To torch 2.8, attributes say nothing.
    with_rows = [({"w": rows}, way) for way in (ways if HAS_RANK_LOCAL else ways[:3])]
    of_mesh = [sharded, *([one_row] if rank else [])]
    for state, save in [*product(of_mesh, ways), *with_rows, *with_tables]:
        with pytest.raises((PlanError, CheckpointException), match=REFUSED):
            save({**whole, **state})
    dcp_rs.save(whole, here, no_dist=True)
    with dcp_rs.open(here, verify=True) as saved:
        assert saved["plain"].tolist() == [0, 1, 2]
        assert saved["replicated"].tolist() == [0, 1, 2, 3]
        assert set(saved) == set(whole)
    got = {"replicated": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}
    dcp_rs.load(got, here, no_dist=True)
    assert got["replicated"].to_local().tolist() == [2 * rank, 2 * rank + 1]


def test_a_rank_does_not_save_its_part_of_a_tensor_alone(tmp_path):
    """One rank's shards were the checkpoint, without a word: `no_dist=True` was copied from the docs into a job."""
    run_ranks(2, save_alone, tmp_path)
