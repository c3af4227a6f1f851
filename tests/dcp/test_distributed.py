"""Real ranks: what N of them save, M of them load, however each shards it.

The elements are numbered, so a rank knows what its part must hold without asking anyone.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader, RsWriter
from dcp_rs.errors import PlanError
from support import assert_state_equal, run_ranks

SIZES = [1, 2, 4]


def numbered(shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int64).reshape(shape).to(dtype)


def meshes():
    """A flat mesh and a square one (as square as the number of ranks allows)."""
    size = dist.get_world_size()
    rows = 2 if size == 4 else 1
    return init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (rows, size // rows))


# Name: shape, dtype, which mesh, placements.
LAYOUTS = {
    "rows": ((8, 6), torch.float32, 0, [Shard(0)]),
    "columns": ((8, 6), torch.bfloat16, 0, [Shard(1)]),
    "replicated": ((5, 3), torch.int64, 0, [Replicate()]),
    "block": ((8, 6), torch.float64, 1, [Shard(0), Shard(1)]),
    "block_uneven": ((7, 5), torch.float32, 1, [Shard(0), Shard(1)]),
    "hybrid": ((8, 6), torch.float32, 1, [Replicate(), Shard(0)]),
    "hybrid_columns": ((8, 7), torch.int16, 1, [Replicate(), Shard(1)]),
    "twice": ((9, 3), torch.float32, 1, [Shard(0), Shard(0)]),
    "uneven": ((7, 3), torch.float32, 0, [Shard(0)]),
    "uneven_columns": ((3, 5), torch.uint8, 0, [Shard(1)]),
    "some_empty": ((1, 3), torch.float32, 0, [Shard(0)]),
    "all_empty": ((0, 3), torch.float32, 0, [Shard(0)]),
    "vector": ((10,), torch.float16, 0, [Shard(0)]),
    "deep": ((2, 3, 4, 5, 6), torch.float32, 0, [Shard(3)]),
    "complex": ((6, 2), torch.complex64, 0, [Shard(0)]),
    "scalar": ((), torch.float32, 0, [Replicate()]),
}

# Where each is loaded to, apart from where it was saved from.
OTHER_PLACEMENTS = {
    "rows": (0, [Shard(1)]),
    "columns": (1, [Shard(0), Shard(1)]),
    "replicated": (0, [Shard(0)]),
    "block": (0, [Shard(0)]),
    "block_uneven": (1, [Shard(1), Shard(0)]),
    "hybrid": (0, [Replicate()]),
    "uneven": (1, [Shard(0), Shard(1)]),
    "some_empty": (0, [Shard(1)]),
    "deep": (1, [Shard(0), Shard(4)]),
}


def distributed(name, pair, empty=False, other=False):
    shape, dtype, mesh, placements = LAYOUTS[name]
    if other:
        mesh, placements = OTHER_PLACEMENTS.get(name, (mesh, placements))
    whole = torch.full(shape, -1).to(dtype) if empty else numbered(shape, dtype)
    # All ranks have the whole of it: nothing needs to be sent, which gloo could not for every
    # dtype.
    return distribute_tensor(whole, pair[mesh], placements, src_data_rank=None)


def sharded_tensor(empty=False):
    """A ShardedTensor of 11 rows: rank r of n holds the rows from r * 11 // n."""
    size, rank = dist.get_world_size(), dist.get_rank()
    begin, end = rank * 11 // size, (rank + 1) * 11 // size
    rows = numbered((11, 3))[begin:end].clone()
    if empty:
        rows.fill_(-1)
    shard = LocalShard.from_tensor_and_offsets(rows, [begin, 0], rank)
    return init_from_local_shards([shard], 11, 3)


def make_state(empty=False, other=False):
    pair = meshes()
    state = {name: distributed(name, pair, empty, other) for name in LAYOUTS}
    state["plain"] = torch.full((3,), -1.0) if empty else numbered((3,))
    state["nested"] = {"step": 0 if empty else 17, "list": [state.pop("vector")]}
    return state


def save_with(writer, path):
    dcp.save(make_state() | {"sharded": sharded_tensor()}, storage_writer=writer(path))


def load_all(path):
    for other in (False, True):
        sharded = sharded_tensor(empty=True)
        got = make_state(empty=True, other=other) | {"sharded": sharded}
        dcp.load(got, storage_reader=RsReader(path, verify=other))
        assert got.pop("sharded") is sharded
        assert_state_equal(got, make_state(other=other))
        wanted = sharded_tensor().local_shards()[0].tensor
        assert_state_equal(sharded.local_shards()[0].tensor, wanted)
    # Every rank takes the whole of every tensor.
    plain = {name: torch.full(shape, -1).to(dtype) for name, (shape, dtype, *_) in LAYOUTS.items()}
    plain["nested"] = {"list": [plain.pop("vector")]}
    plain["sharded"] = torch.full((11, 3), -1.0)
    dcp_rs.load(plain, path)
    plain["vector"] = plain.pop("nested")["list"][0]
    want = {name: numbered(shape, dtype) for name, (shape, dtype, *_) in LAYOUTS.items()}
    assert_state_equal(plain, want | {"sharded": numbered((11, 3))})


def load_what_is_missing(path):
    sharded = sharded_tensor(empty=True)
    state = {"plain": torch.full((3,), -1.0), "not there": sharded}
    with pytest.raises(PlanError, match="not there"):
        dcp_rs.load(dict(state), path)
    planner = RsLoadPlanner(allow_partial_load=True)
    dcp_rs.load_state_dict(state, RsReader(path), planner=planner)
    assert planner.report.missing == ["not there"]
    assert_state_equal(state["plain"], numbered((3,)))
    assert torch.all(sharded.local_shards()[0].tensor == -1)


def test_a_sharded_tensor_that_is_missing(ckpt):
    """The search for a tie of it asked for its number of elements, which ShardedTensors do not tell."""
    run_ranks(2, save_with, RsWriter, ckpt)
    run_ranks(2, load_what_is_missing, ckpt)


@pytest.mark.parametrize("saved", SIZES)
def test_any_number_of_ranks_loads(ckpt, saved):
    run_ranks(saved, save_with, RsWriter, ckpt)
    for loaded in SIZES:
        run_ranks(loaded, load_all, ckpt)
    with dcp_rs.open(ckpt) as checkpoint:
        for name, (shape, dtype, *_) in LAYOUTS.items():
            fqn = "nested.list.0" if name == "vector" else name
            assert_state_equal(checkpoint[fqn], numbered(shape, dtype))
        assert_state_equal(checkpoint["sharded"], numbered((11, 3)))


def test_stock_dcp_writes_the_same_chunks(tmp_path):
    run_ranks(4, save_with, RsWriter, tmp_path / "ours")
    run_ranks(4, save_with, dcp.FileSystemWriter, tmp_path / "stock")
    ours = RsReader(tmp_path / "ours").read_metadata()
    stock = dcp.FileSystemReader(tmp_path / "stock").read_metadata()
    assert set(ours.state_dict_metadata) == set(stock.state_dict_metadata)
    for name, theirs in stock.state_dict_metadata.items():
        own = ours.state_dict_metadata[name]
        assert type(own) is type(theirs)
        if hasattr(theirs, "size"):
            assert own.size == theirs.size
            assert own.properties.dtype == theirs.properties.dtype
            # Ranks beyond the end of a tensor all have the same empty chunk, which is kept once.
            chunks = {(tuple(c.offsets), tuple(c.sizes)) for c in theirs.chunks}
            assert {(tuple(c.offsets), tuple(c.sizes)) for c in own.chunks} == chunks, name
    assert dict(ours.planner_data) == stock.planner_data


def save_and_sum(path):
    """One rank's part is large, the others have none: their files hold nothing of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(numbered((1, 300_000)), mesh, [Shard(0)])
    dcp.save({"w": weight}, storage_writer=RsWriter(path))
    mine = DTensor.from_local(
        torch.full((1 if dist.get_rank() == 0 else 0, 300_000), -1.0),
        mesh,
        [Shard(0)],
        shape=torch.Size((1, 300_000)),
        stride=(300_000, 1),
    )
    dcp.load({"w": mine}, storage_reader=RsReader(path))
    return float(mine.to_local().sum())


def test_ranks_without_data_take_part(ckpt):
    whole = float(numbered((1, 300_000)).sum())
    assert run_ranks(4, save_and_sum, ckpt) == [whole, 0.0, 0.0, 0.0]


def save_in_a_group(path, coordinator):
    """Ranks 1 and 2 of 4 save among themselves."""
    group = dist.new_group([1, 2])
    if dist.get_rank() not in (1, 2):
        return None
    rank = dist.get_rank()
    state = {f"of_rank_{rank}": torch.full((3,), rank), "both": torch.arange(4)}
    dcp.save(state, storage_writer=RsWriter(path), process_group=group)
    got = {f"of_rank_{rank}": torch.zeros(3, dtype=torch.int64), "both": torch.zeros(4).long()}
    dcp_rs.load_state_dict(got, RsReader(path), process_group=group, coordinator_rank=coordinator)
    assert_state_equal(got, state)
    return sorted(RsReader(path).read_metadata().state_dict_metadata)


def test_a_process_group_of_some_ranks(ckpt):
    names = ["both", "of_rank_1", "of_rank_2"]
    assert run_ranks(4, save_in_a_group, ckpt, 1) == [None, names, names, None]


def save_with_coordinator(path):
    rank = dist.get_rank()
    dcp.save({f"x{rank}": torch.tensor(rank)}, storage_writer=RsWriter(path))
    got = {f"x{rank}": torch.tensor(-1)}
    dcp_rs.load_state_dict(got, RsReader(path), coordinator_rank=1)
    return int(got[f"x{rank}"])


def test_another_rank_may_coordinate(ckpt):
    assert run_ranks(2, save_with_coordinator, ckpt) == [0, 1]
