"""`dcp_rs.open`: a checkpoint as a mapping."""

import uuid
from collections.abc import Mapping

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs import RsReader, RsWriter
from dcp_rs.errors import CheckpointNotFoundError, CorruptDataError, UnsafePickleError
from support import (
    assert_state_equal,
    dtypes_state,
    nested_state,
    shapes_state,
    strange_names_state,
)
from support.both import HAS_RANK_LOCAL, save_rs
from support.files import flip
from support.layouts import WHOLE


def test_a_part_of_a_checkpoint_is_not_opened_alone(sharded, saved_whole, tmp_path):
    """Of the first rank it looks like a whole one of smaller tensors, of the others like one that misses shards."""
    for rank in range(4):
        (file,) = sharded.glob(f"g*-r0000{rank}-f00000.safetensors")
        with pytest.raises(
            CheckpointNotFoundError, match=f"rank {rank}, of 4 ranks.*open the folder"
        ):
            dcp_rs.open(file)
    (whole,) = saved_whole.glob("g*.safetensors")
    with dcp_rs.open(whole) as checkpoint:
        assert torch.equal(checkpoint["w"], WHOLE)
    if HAS_RANK_LOCAL:
        alone = tmp_path / "alone"
        dcp.save({"w": WHOLE}, storage_writer=RsWriter(alone), use_collectives=False, no_dist=True)
        with pytest.raises(CheckpointNotFoundError, match="what rank 0 saved for itself"):
            dcp_rs.open(next(alone.glob("g*.safetensors")))


@pytest.mark.parametrize(
    "make", [dtypes_state, shapes_state, strange_names_state], ids=lambda f: f.__name__
)
def test_every_entry_is_found_by_its_name(ckpt, make):
    want = make()
    save_rs(want, ckpt)
    with dcp_rs.open(ckpt) as checkpoint:
        assert isinstance(checkpoint, Mapping)
        assert len(checkpoint) == len(want)
        assert set(checkpoint) == set(want)
        for name, tensor in want.items():
            assert name in checkpoint
            assert_state_equal(checkpoint[name], tensor)


def test_a_name_that_is_not_there(saved_whole):
    with dcp_rs.open(saved_whole) as checkpoint:
        assert "nothing" not in checkpoint
        assert 3 not in checkpoint
        assert checkpoint.get("nothing", 5) == 5
        for look_up in (
            checkpoint.__getitem__,
            checkpoint.get_slice,
            checkpoint.info,
            checkpoint.chunks,
        ):
            with pytest.raises(KeyError, match="nothing"):
                look_up("nothing")


def test_the_nesting_is_rebuilt(ckpt):
    want = nested_state()
    save_rs(want, ckpt)
    with dcp_rs.open(ckpt) as checkpoint:
        assert_state_equal(checkpoint.state_dict(), want)
        assert checkpoint["step"] == 12
        assert checkpoint["optimizer.param_groups.0.betas"] == (0.9, 0.95)
        assert str(uuid.UUID(checkpoint.save_id)) == checkpoint.save_id
        assert checkpoint.save_id == RsReader(ckpt).read_metadata().storage_meta.save_id
        assert str(ckpt) in repr(checkpoint)


def test_an_empty_checkpoint_is_still_true(ckpt):
    save_rs({}, ckpt)
    with dcp_rs.open(ckpt) as checkpoint:
        assert checkpoint
        assert checkpoint.state_dict() == {}


def test_info_and_chunks_of_a_sharded_tensor(sharded):
    with dcp_rs.open(sharded) as checkpoint:
        info = checkpoint.info("rows")
        assert (info.name, info.dtype, info.shape) == ("rows", torch.float64, WHOLE.shape)
        assert (info.chunks, info.nbytes) == (4, WHOLE.nbytes)
        chunks = checkpoint.chunks("rows")
        assert [chunk.offsets for chunk in chunks] == [(0, 0), (3, 0), (6, 0), (9, 0)]
        assert [chunk.sizes for chunk in chunks] == [(3, 7), (3, 7), (3, 7), (2, 7)]
        assert len({chunk.file for chunk in chunks}) == 4
        for chunk in chunks:
            data = (sharded / chunk.file).read_bytes()[chunk.offset : chunk.offset + chunk.nbytes]
            rows = slice(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
            assert data == WHOLE[rows].numpy().tobytes()
        value = checkpoint.info("step")
        assert (value.dtype, value.shape, value.chunks) == (None, torch.Size(()), 1)
        assert checkpoint.chunks("step")[0].nbytes == value.nbytes


def test_everything_streams_in_the_order_of_the_files(sharded):
    with dcp_rs.open(sharded) as checkpoint:
        streamed = dict(checkpoint.stream())
        assert_state_equal(streamed, dict(checkpoint))
        places = [(c.file, c.offset) for c in (checkpoint.chunks(name)[0] for name in streamed)]
        files = list(dict.fromkeys(file for file, _ in places))
        # Each file once, from its beginning to its end.
        assert places == sorted(places, key=lambda place: (files.index(place[0]), place[1]))
        assert_state_equal(dict(checkpoint.stream(device="cpu")), streamed)


def test_values_that_are_not_safe_need_leave(ckpt):
    save_rs({"w": torch.ones(1), "odd": _Custom()}, ckpt)
    with dcp_rs.open(ckpt) as checkpoint:
        assert checkpoint["w"] == 1
        with pytest.raises(UnsafePickleError, match="_Custom") as raised:
            checkpoint["odd"]
        assert raised.value.tensor == "odd"
    with dcp_rs.open(ckpt, weights_only=False) as checkpoint:
        assert isinstance(checkpoint["odd"], _Custom)


class _Custom:
    pass


def test_verification_of_a_look_up(saved_whole):
    with dcp_rs.open(saved_whole) as checkpoint:
        chunk = checkpoint.chunks("w")[0]
    flip(saved_whole / chunk.file, chunk.offset + 100)
    with dcp_rs.open(saved_whole, verify=True) as checkpoint:
        assert_state_equal(checkpoint["b"], torch.arange(5))
        for look_up in (checkpoint.__getitem__, lambda name: checkpoint.get_slice(name)[0]):
            with pytest.raises(CorruptDataError) as raised:
                look_up("w")
            assert raised.value.tensor == "w"
            assert raised.value.offset == chunk.offset
            assert raised.value.path == str(saved_whole / chunk.file)


def test_a_skeleton_reads_no_tensor(sharded, tmp_path):
    state = dtypes_state() | {"p": torch.nn.Parameter(torch.ones(2, 3)), "empty": torch.empty(0, 3)}
    dcp_rs.save({"model": state}, tmp_path / "ckpt", no_dist=True)
    for file in (tmp_path / "ckpt").glob("g*.safetensors"):
        file.unlink()
    with dcp_rs.open(tmp_path / "ckpt", device="meta") as checkpoint:
        skeleton = checkpoint.state_dict()["model"]
        assert checkpoint.get_slice("model.p")[1:].shape == (1, 3)
        assert checkpoint.get_slice("model.p")[1:].is_meta
        with pytest.raises(ValueError, match="state_dict"):
            checkpoint.stream()
    assert skeleton.keys() == state.keys()
    for name, want in state.items():
        got = skeleton[name]
        assert got.is_meta
        assert (got.shape, got.dtype, got.requires_grad) == (
            want.shape,
            want.dtype,
            want.requires_grad,
        ), name
    with dcp_rs.open(sharded, device="meta") as checkpoint:
        assert checkpoint["blocks"].shape == WHOLE.shape
        assert checkpoint["step"] == 4  # a value is one anywhere
        target = checkpoint.state_dict()
    dcp_rs.load(target, sharded, no_dist=True)  # what people want it for
    assert torch.equal(target["columns"], WHOLE)
