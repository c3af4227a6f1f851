"""docs/format.md is enough to write a reader from: one that was agrees with this package on random checkpoints.

The second reader checks every rule of the page on the way, so the writer is held to them too.
"""

import uuid

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_rs
from dcp_rs import RsReader, RsWriter, _core
from support import (
    ALL_DTYPES,
    dtypes_state,
    nested_state,
    random_tensor,
    run_ranks,
    shapes_state,
    strange_names_state,
)
from support.both import HAS_RANK_LOCAL, save_rs
from support.oracle import raw_bytes
from support.second_reader import FormatError, SecondReader, xxh3_64


def assert_agree(path):
    """Both readers say the same of everything."""
    reader = SecondReader.open(path)
    metadata = RsReader(path).read_metadata()
    with dcp_rs.open(path, verify=True) as checkpoint:
        assert list(reader.tensors) == list(checkpoint)
        assert checkpoint.save_id == str(uuid.UUID(bytes=reader.save_id))
        text = {
            name: tuple(str(p[0]) if type(p) is tuple else p for p in path)
            for name, path in reader.paths().items()
        }
        assert dict(metadata.planner_data) == text
        for name, tensor in reader.tensors.items():
            info = checkpoint.info(name)
            assert [(c.offsets, c.sizes, c.offset, c.nbytes) for c in checkpoint.chunks(name)] == [
                (c.offsets, c.sizes, c.offset, c.length) for c in tensor.chunks
            ]
            if tensor.is_bytes:
                assert info.dtype is None
                reader.read(name)
                continue
            dtype, shape, raw = reader.read(name)
            assert str(info.dtype) == f"torch.{dtype}"
            assert info.shape == shape
            assert raw_bytes(checkpoint[name]) == raw
            properties = metadata.state_dict_metadata[name].properties
            assert properties.requires_grad == bool(tensor.flags & 1)
    return reader


@pytest.mark.parametrize(
    ("data", "digest"),
    [
        # From the reference implementation, xxHash 0.8.
        (b"", 0x2D06800538D394C2),
        (b"a", 0xE6C632B61E964E1F),
        (b"abc", 0x78AF5F94892F3950),
    ],
)
def test_the_hash_is_xxh3(data, digest):
    assert xxh3_64(data) == digest


@pytest.mark.parametrize(
    "make",
    [dtypes_state, shapes_state, nested_state, strange_names_state],
    ids=lambda f: f.__name__,
)
def test_the_readers_agree_on_every_kind_of_state(ckpt, make):
    save_rs(make(), ckpt)
    assert_agree(ckpt)


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
leaves = st.tuples(
    st.sampled_from(ALL_DTYPES),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    st.integers(0, 100),
).map(lambda spec: random_tensor(spec[1], spec[0], spec[2])) | st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5)
)
states = st.dictionaries(
    names,
    st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=5,
)


@given(state=states)
def test_the_readers_agree_on_random_states(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("ckpt")
    try:
        save_rs(state, path, fsync=False)
    except ValueError as error:  # two paths with one name: torch refuses
        assert "duplicated flatten key" in str(error)  # noqa: PT017
        return
    assert_agree(path)


def save_over_ranks(path):
    size = dist.get_world_size()
    flat = init_device_mesh("cpu", (size,))
    square = init_device_mesh("cpu", (2, size // 2))
    whole = random_tensor((9, 5), seed=1)
    state = {
        "rows": distribute_tensor(whole, flat, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(whole, flat, [Shard(1)], src_data_rank=None),
        "blocks": distribute_tensor(whole, square, [Shard(0), Shard(1)], src_data_rank=None),
        "hybrid": distribute_tensor(whole, square, [Replicate(), Shard(0)], src_data_rank=None),
        "few": distribute_tensor(whole[:2], flat, [Shard(0)], src_data_rank=None),
        "none": distribute_tensor(whole[:0], flat, [Shard(0)], src_data_rank=None),
        "plain": whole,
        "own": {str(dist.get_rank()): torch.arange(3)},
        "step": 3,
    }
    for _ in range(2):
        dcp.save(state, storage_writer=RsWriter(path))


def test_the_readers_agree_on_what_four_ranks_saved(ckpt):
    run_ranks(4, save_over_ranks, ckpt)
    reader = assert_agree(ckpt)
    assert reader.generation == 2
    assert reader.tensors["rows"].split_dim == 0
    assert reader.tensors["columns"].split_dim == 1
    assert reader.tensors["blocks"].split_dim is None
    assert len(reader.tensors["few"].chunks) >= 2


def save_rank_local(path):
    rank = dist.get_rank()
    state = {"mine": random_tensor((4,), seed=rank), "step": rank}
    dcp.save(state, storage_writer=RsWriter(path), use_collectives=False)


@pytest.mark.skipif(not HAS_RANK_LOCAL, reason="this torch has no rank-local saves")
def test_the_readers_agree_on_what_two_ranks_saved_for_themselves(ckpt):
    run_ranks(2, save_rank_local, ckpt)
    for rank in range(2):
        reader = SecondReader.open(ckpt, rank)
        index = _core.Index.open(str(ckpt), rank, False)
        assert list(reader.tensors) == index.names() == ["mine", "step"]
        assert reader.read("mine") == ("float32", (4,), raw_bytes(random_tensor((4,), seed=rank)))


def test_several_blocks_of_a_chunk_have_several_digests(ckpt):
    save_rs({"w": random_tensor(((1 << 20) + 100,), torch.uint8)}, ckpt)
    reader = assert_agree(ckpt)
    assert len(reader.tensors["w"].chunks[0].digests) == 2


def test_the_second_reader_sees_damage(ckpt):
    save_rs({"w": random_tensor((4, 4))}, ckpt)
    file = next(ckpt.glob("*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(FormatError, match="digest"):
        SecondReader.open(ckpt).read("w")
