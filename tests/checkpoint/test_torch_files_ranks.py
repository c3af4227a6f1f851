"""One file of torch.save, loaded by ranks: each takes its part of what one process saved whole."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader
from support import assert_state_equal, run_ranks
from support.torch_files import ROWS, tensors, whole


def placed(state, make):
    return tree_map_only(torch.Tensor, make, state)


def as_sharded_tensor(value):
    """Of which rank r of n holds the rows from r * rows // n."""
    size, rank, rows = dist.get_world_size(), dist.get_rank(), value.shape[0]
    begin, end = rank * rows // size, (rank + 1) * rows // size
    mine = value[begin:end].resolve_conj().clone(memory_format=torch.contiguous_format)
    return init_from_local_shards(
        [LocalShard.from_tensor_and_offsets(mine, [begin, 0], rank)], *value.shape
    )


def load_parts(path):
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    square = init_device_mesh("cpu", (2, size // 2)) if size > 2 else None
    ways = [(mesh, [Shard(0)]), (mesh, [Shard(1)]), (mesh, [Replicate()])]
    ways += [(square, [Shard(1), Shard(0)]), (square, [Replicate(), Shard(0)])] if square else []
    loads = [
        lambda state: dcp.load(state, storage_reader=RsReader(path)),
        lambda state: dcp.load(state, storage_reader=RsReader(path), planner=RsLoadPlanner()),
        lambda state: dcp_rs.load(state, path),
    ]
    for at, (over, placements) in enumerate(ways):

        def sharded(value, over=over, placements=placements):
            return distribute_tensor(
                value.resolve_conj().contiguous(), over, placements, src_data_rank=None
            )

        want = placed(whole(), sharded)
        got = placed(
            whole(), lambda value, sharded=sharded: sharded(torch.full_like(value, 99))
        ) | {"step": 0}
        loads[at % len(loads)](got)
        assert_state_equal(got, want)
    for load in loads:
        got = placed(whole(), lambda value: as_sharded_tensor(torch.full_like(value, 99)))
        load(got)
        for (name, sharded), (_, value) in zip(_leaves(got), tensors(whole()), strict=True):
            mine = as_sharded_tensor(value).local_shards()[0].tensor
            assert_state_equal({name: sharded.local_shards()[0].tensor}, {name: mine})
    report = dcp_rs.load(
        {"rows": distribute_tensor(torch.empty(ROWS, 3), mesh, [Shard(0)], src_data_rank=None)},
        path,
    )
    together = RsReader(path, replicas="all")
    everything = placed(whole(), lambda value: torch.full_like(value, 99).contiguous())
    dcp_rs.load_state_dict(everything, together, planner=RsLoadPlanner())
    assert_state_equal(
        dict(tensors(everything)), {n: v.resolve_conj().contiguous() for n, v in tensors(whole())}
    )
    return report.bytes_wanted, report.bytes_read


def _leaves(tree):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        elif not isinstance(value, int):
            yield key, value


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_rank_takes_its_part(tmp_path, ranks, zipped):
    path = tmp_path / "checkpoint.pth"
    torch.save(whole(), path, _use_new_zipfile_serialization=zipped)
    nbytes = ROWS * 3 * 4
    for wanted, read in run_ranks(ranks, load_parts, path):
        assert wanted == nbytes // ranks
        assert read < nbytes // ranks + (1 << 20)  # its rows, and no more
