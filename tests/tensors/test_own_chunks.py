"""Tensors that describe their own chunks, as Megatron-FSDP's do: 10 rows divided 6 and 4.

It puts `__create_chunk_list__` and `__create_write_items__` on the plain local tensor of a DTensor.
The placements alone would say 5 and 5: rank 1 got rows 5 to 8, without a word.
"""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import dcp_rs
from dcp_rs import CheckpointManager, RsLoadPlanner, RsReader, RsWriter
from dcp_rs.errors import PlanError
from dcp_rs.transfer.stage import stage
from support import run_ranks

WHOLE = torch.arange(30.0).reshape(10, 3)
ROWS = [(0, 6), (6, 4)]


def describe(local, shape, chunks):
    """Put the methods on a plain tensor, as Megatron-FSDP does."""

    def write_items(fqn, _):
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=dcp.metadata.TensorProperties(dtype=local.dtype),
                    size=torch.Size(shape),
                ),
            )
            for chunk in chunks
        ]

    local.__create_chunk_list__ = lambda: chunks
    local.__create_write_items__ = write_items
    return local


def chunk(offsets, sizes):
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def uneven(filled, *, dtype=torch.float32, device="cpu", rows=ROWS, parameter=False):
    """A DTensor of the rows of this rank."""
    at, count = rows[dist.get_rank()]
    local = (
        WHOLE[at : at + count].to(dtype).clone() if filled else torch.zeros(count, 3, dtype=dtype)
    )
    local = describe(local.to(device), WHOLE.shape, [chunk((at, 0), (count, 3))])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=WHOLE.shape, stride=WHOLE.stride()
    )
    made = torch.nn.Parameter(made) if parameter else made
    describe(made._local_tensor, WHOLE.shape, local.__create_chunk_list__())
    return made


def wrapped(filled):
    """Two shards of a rank, the rows 0 to 2 and 6 to 7, or 3 to 5 and 8 to 9, as torchrec has them."""
    places = [[(0, 3), (6, 2)], [(3, 3), (8, 2)]][dist.get_rank()]
    shards = [WHOLE[at : at + n].clone() if filled else torch.zeros(n, 3) for at, n in places]
    made = LocalShardsWrapper(shards, [(at, 0) for at, _ in places])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(
        made, mesh, [Shard(0)], run_check=False, shape=WHOLE.shape, stride=WHOLE.stride()
    )


def mine(tensor):
    """Whether a rank has its rows."""
    local = tensor.to_local()
    if isinstance(local, LocalShardsWrapper):
        return all(
            torch.equal(shard, WHOLE[at : at + len(shard)])
            for shard, (at, _) in zip(local.local_shards(), local.local_offsets(), strict=True)
        )
    at, count = ROWS[dist.get_rank()]
    return torch.equal(local.float(), WHOLE[at : at + count])


LOADS = {
    "load": dcp_rs.load,
    "reader": lambda state, path: dcp.load(state, storage_reader=RsReader(path)),
    "planner": lambda state, path: dcp.load(
        state, storage_reader=RsReader(path), planner=RsLoadPlanner()
    ),
    "replicas": lambda state, path: dcp_rs.load(state, path, replicas="all"),
    "stock": lambda state, path: dcp.load(state, checkpoint_id=path),
}
MAKES = {
    "plain": functools.partial(uneven, False),
    "parameter": functools.partial(uneven, False, parameter=True),
    "wrapper": functools.partial(wrapped, False),
}


def load_on_rank(path, stock):
    found = {}
    for way, load in LOADS.items():
        for kind, make in MAKES.items():
            state = {"w": make()}
            load(state, stock if way == "stock" else path)
            found[way, kind] = mine(state["w"].detach())
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    dcp_rs.save({"w": WHOLE}, folder / "rs", no_dist=True)
    dcp.save({"w": WHOLE}, checkpoint_id=folder / "stock", no_dist=True)
    return folder


@pytest.mark.parametrize("of", ["rs", "stock"])
def test_each_rank_gets_the_rows_that_its_tensor_describes(saved, of):
    for found in run_ranks(2, load_on_rank, saved / of, saved / "stock"):
        assert not [cell for cell, right in found.items() if not right]


def load_replaced(path):
    found = {}
    options = {"dtype": {"dtype": torch.bfloat16}, "meta": {}}
    for name, given in options.items():
        state = {"w": uneven(False, device="meta" if name == "meta" else "cpu")}
        dcp_rs.load(state, path, **given)
        found[name] = mine(state["w"])
        # The new tensor describes its chunks, too.
        dcp_rs.save(state, f"{path}-{name}")
        with dcp_rs.open(f"{path}-{name}") as checkpoint:
            found[f"{name} saved"] = torch.equal(checkpoint["w"].float(), WHOLE)
    return found


def test_new_tensors_describe_the_same_rows(saved, tmp_path):
    dcp_rs.save({"w": WHOLE}, tmp_path / "c", no_dist=True)
    for found in run_ranks(2, load_replaced, tmp_path / "c"):
        assert not [cell for cell, right in found.items() if not right]


def save_on_rank(folder):
    for kind, make in {"plain": uneven, "wrapper": wrapped}.items():
        state = {"w": make(True)}
        dcp_rs.save(state, f"{folder}/save-{kind}")
        dcp_rs.async_save(state, f"{folder}/async-{kind}").result()
        dcp_rs.save(stage(state), f"{folder}/staged-{kind}")
        dcp.save(state, storage_writer=RsWriter(f"{folder}/writer-{kind}"))
        dcp.save(state, checkpoint_id=f"{folder}/stock-{kind}")
        with CheckpointManager(f"{folder}/steps-{kind}") as manager:
            manager.async_save(1, state).result()
    # A writer stages as that of torch does, which cannot copy a wrapper.
    state = {"nested": [{"w": uneven(True)}]}
    dcp.async_save(state, storage_writer=RsWriter(f"{folder}/async-writer")).result()


def test_saves_hold_the_whole_tensor(tmp_path):
    run_ranks(2, save_on_rank, str(tmp_path))
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 13
    for folder in folders:
        path = folder / "step-1" if "steps" in folder.name else folder
        with dcp_rs.open(path) as checkpoint:
            (saved,) = checkpoint.values()
            assert torch.equal(saved, WHOLE), folder


def test_plain_tensor_that_describes_its_rows(saved):
    """Without a mesh: stock finds a shard at the origin only, and narrows it to the chunk."""

    def template():
        return {"w": describe(torch.full((10, 3), -1.0), WHOLE.shape, [chunk((0, 0), (4, 3))])}

    want = template()
    dcp.load(want, checkpoint_id=saved / "stock", no_dist=True)
    assert torch.equal(want["w"][:4], WHOLE[:4])
    assert bool((want["w"][4:] == -1).all())
    for load in (
        lambda state: dcp_rs.load(state, saved / "rs", no_dist=True),
        lambda state: dcp.load(state, storage_reader=RsReader(saved / "rs"), no_dist=True),
    ):
        got = template()
        load(got)
        assert torch.equal(got["w"], want["w"])


def test_chunk_that_a_tensor_does_not_hold_is_an_error(saved):
    for chunks in ([chunk((4, 0), (6, 3))], [chunk((0, 0), (10, 4))], [chunk((0,), (10,))]):
        state = {"w": describe(torch.zeros(10, 3), WHOLE.shape, chunks)}
        with pytest.raises(PlanError, match=r"'w'.*chunk"):
            dcp_rs.load(state, saved / "rs", no_dist=True)
        assert bool((state["w"] == 0).all())
