"""Destinations that share memory: what stock DCP leaves in it, or an error; never a mixture."""

import pickle
import tempfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader
from dcp_rs.errors import PlanError
from support import assert_state_equal, run_ranks
from support.both import load_rs, load_stock, save_rs, save_stock

MIB = 1 << 20


def test_tied_weights_with_different_values_hold_one_of_them(tmp_path):
    # Large against a job of the engine: filled at once, they would be a mixture.
    save_stock({"m": {"a": torch.ones(MIB), "b": torch.full((MIB,), 2.0)}}, tmp_path / "stock")
    dcp_rs.save(
        {"m": {"a": torch.ones(MIB), "b": torch.full((MIB,), 2.0)}}, tmp_path / "ours", fsync=False
    )
    for order in ("ab", "ba"):

        def tied(order=order):
            memory = torch.zeros(MIB)
            return {"m": {name: memory.detach() for name in order}}

        want = load_stock(tied(), tmp_path / "stock")
        for path in ("stock", "ours"):
            for _ in range(4):
                got = tied()
                dcp_rs.load(got, tmp_path / path)
                assert_state_equal(got, want)
                assert_state_equal(load_rs(tied(), tmp_path / path), want)


def test_tensors_in_one_memory_are_read_once(tmp_path):
    save_rs({"a": torch.ones(MIB), "b": torch.ones(MIB)}, tmp_path)
    memory = torch.zeros(MIB)
    report = dcp_rs.load({"a": memory, "b": memory}, tmp_path, no_dist=True)
    assert torch.equal(memory, torch.ones(MIB))
    assert report.bytes_read < 2 * memory.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda memory: memory.as_strided((3, 3), (1, 1)), id="as_strided"),
        pytest.param(lambda memory: memory.unfold(0, 3, 2)[:3], id="unfold"),
        pytest.param(lambda memory: memory[:3].expand(3, 3), id="expand"),
    ],
)
def test_a_destination_whose_elements_share_memory_is_refused(tmp_path, view, dtype):
    save_rs({"fine": torch.ones(3, 3), "w": torch.arange(9.0).reshape(3, 3)}, tmp_path)
    for load in (dcp_rs.load, load_rs):
        memory, fine = torch.zeros(9, dtype=dtype), torch.zeros(3, 3)
        with pytest.raises(
            (PlanError, CheckpointException), match="several elements in one place of memory"
        ) as raised:
            load({"fine": fine, "w": view(memory)}, tmp_path)
        error = raised.value if load is dcp_rs.load else raised.value.failures[0][0]
        assert type(error) is PlanError
        assert pickle.loads(pickle.dumps(error)).tensor == "w"
        assert not memory.any()
        assert not fine.any()  # it is said before anything is filled


# --- views of the same memory, drawn

#: What loads may be given of a matrix of 6 by 8.
VIEWS = {
    "all": lambda memory: memory,
    "flat": lambda memory: memory.view(-1),
    "rows": lambda memory: memory[1:4],
    "more rows": lambda memory: memory[2:6],
    "columns": lambda memory: memory[:, 0:4],
    "other columns": lambda memory: memory[:, 4:8],
    "middle": lambda memory: memory[2:5, 2:7],
    "transposed": lambda memory: memory.t(),
    "every other": lambda memory: memory[::2, 1::2],
    "between those": lambda memory: memory[1::2, 1::2],
    "one": lambda memory: memory[3, 3],
    "none": lambda memory: memory[3:3],
    "halves": lambda memory: (
        memory.view(torch.float32) if memory.dtype == torch.float64 else memory
    ),
    "negated": torch._neg_view,
    "a parameter": torch.nn.Parameter,
}


@st.composite
def destinations(draw):
    """(name, memory, view) for some entries of a state dict, in its order. The memories: float32, float32, and float64 (a cast)."""
    entries = draw(
        st.lists(
            st.tuples(st.integers(0, 2), st.sampled_from(sorted(VIEWS))), min_size=1, max_size=7
        )
    )
    names = draw(st.permutations([f"n{i}" for i in range(len(entries))]))
    return [(name, *entry) for name, entry in zip(names, entries, strict=True)]


def template(entries):
    memories = [torch.zeros(6, 8), torch.zeros(6, 8), torch.zeros(6, 8, dtype=torch.float64)]
    return memories, {"m": {name: VIEWS[view](memories[memory]) for name, memory, view in entries}}


class Committing(dcp.DefaultLoadPlanner):
    """Sees each tensor filled, and with its own values."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def commit_tensor(self, read_item, tensor):
        self.seen[read_item.dest_index.fqn] = tensor.detach().clone()


@settings(max_examples=60)
@given(entries=destinations(), several_files=st.booleans())
def test_views_of_the_same_memory_are_filled_as_by_stock(entries, several_files):
    with tempfile.TemporaryDirectory() as folder:
        generator = torch.Generator().manual_seed(len(entries))
        state = {
            name: torch.rand(tensor.shape, generator=generator)
            for name, tensor in sorted(template(entries)[1]["m"].items())
        }
        writer = dcp.FileSystemWriter(
            folder, single_file_per_rank=not several_files, thread_count=1 + several_files
        )
        dcp.save({"m": state}, storage_writer=writer, no_dist=True)
        want, state = template(entries)
        planner = Committing()
        with torch.no_grad():
            dcp.load(
                state, storage_reader=dcp.FileSystemReader(folder), planner=planner, no_dist=True
            )
            seen = planner.seen
            for planner in (
                RsLoadPlanner(dtype_policy="cast"),
                dcp.DefaultLoadPlanner(),
                Committing(),
            ):
                memories, state = template(entries)
                dcp.load(state, storage_reader=RsReader(folder), planner=planner, no_dist=True)
                assert_state_equal(memories, want)
        assert_state_equal(planner.seen, seen)


# --- planners that use memory again


class OneBuffer(dcp.DefaultLoadPlanner):
    """Has everything read into one buffer, and copies from there."""

    def __init__(self):
        super().__init__()
        self.buffer = torch.zeros(64)

    def resolve_tensor(self, read_item):
        return self.buffer[: read_item.lengths.numel()].view(read_item.lengths)

    def commit_tensor(self, read_item, tensor):
        super().resolve_tensor(read_item).copy_(tensor)


def test_a_planner_may_use_a_buffer_again(tmp_path):
    state = {f"w{i}": torch.full((i + 1, 3), float(i)) for i in range(8)}
    save_rs(state, tmp_path)
    got = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(got, storage_reader=RsReader(tmp_path), planner=OneBuffer(), no_dist=True)
    assert_state_equal(got, state)


# --- ranks


def _sharded(path, tie):
    """DTensors, what is theirs here, and ties of both, on two ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    whole = torch.arange(64.0).reshape(8, 8)
    first, second = (distribute_tensor(t, mesh, [Shard(0)]) for t in (whole, whole + 100))
    replica = torch.full((8, 8), 7.0)
    dcp.save(
        {"a": first, "b": second, "c": replica, "d": replica + 1},
        storage_writer=dcp.FileSystemWriter(path),
    )

    def fresh():
        local = torch.zeros(8, 4)
        memory = torch.zeros(8, 8)
        columns = DTensor.from_local(local, mesh, [Shard(1)])
        state = {
            "a": columns,
            "b": DTensor.from_local(local, mesh, [Shard(1)]),
            "c": memory,
            "d": memory,
        }
        if tie:  # a DTensor of a part of the replica, too: "c" is filled before, or after
            state["b"] = DTensor.from_local(memory[:, 4 * rank : 4 * rank + 4], mesh, [Shard(1)])
        return (local, memory), state

    want, state = fresh()
    dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    results = [want]
    for replicas in ("each", "all"):
        for planner in (RsLoadPlanner(), None):
            got, state = fresh()
            dcp.load(state, storage_reader=RsReader(path, replicas=replicas), planner=planner)
            results.append(got)
    return results


@pytest.mark.parametrize("tie", [False, True])
def test_ties_of_sharded_tensors_and_replicas(tmp_path, tie):
    for results in run_ranks(2, _sharded, str(tmp_path), tie):
        for got in results[1:]:
            assert_state_equal(got, results[0])
