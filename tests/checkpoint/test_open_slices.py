"""Slices of the tensors of an opened checkpoint, which lie in any pieces."""

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcp_rs
from dcp_rs.errors import CorruptDataError
from support import assert_state_equal
from support.both import save_rs
from support.layouts import CUBE, WHOLE


@pytest.mark.parametrize("name", ["rows", "columns", "blocks", "alone"])
def test_a_tensor_in_any_pieces_is_whole(sharded, name):
    with dcp_rs.open(sharded) as checkpoint:
        assert_state_equal(checkpoint[name], WHOLE)
        assert_state_equal(checkpoint.get_slice(name)[...], WHOLE)
        assert_state_equal(checkpoint.get_slice(name)[:], WHOLE)
        assert checkpoint.get_slice(name).get_shape() == [11, 7]
        assert checkpoint.get_slice(name).dtype == torch.float64
    with dcp_rs.open(sharded, verify=True) as checkpoint:
        assert_state_equal(checkpoint[name], WHOLE)


def indices(size):
    bound = st.none() | st.integers(-size - 3, size + 3)
    slices = st.builds(slice, bound, bound, st.none() | st.integers(1, 4))
    return st.integers(-size - 1, size) | slices


@given(
    name=st.sampled_from(["rows", "columns", "blocks", "alone", "cube"]),
    data=st.data(),
    verify=st.booleans(),
)
def test_slices_are_those_of_torch(sharded, name, data, verify):
    whole = CUBE if name == "cube" else WHOLE
    count = data.draw(st.integers(0, whole.dim()))
    key = [data.draw(indices(whole.shape[dim])) for dim in range(count)]
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(key)))
        tail = len(key) - at
        # What comes after the dots is for the last dimensions.
        key[at:] = [data.draw(indices(whole.shape[whole.dim() - tail + i])) for i in range(tail)]
        key.insert(at, Ellipsis)
    key = key[0] if len(key) == 1 and data.draw(st.booleans()) else tuple(key)
    with dcp_rs.open(sharded, verify=verify) as checkpoint:
        sliced = checkpoint.get_slice(name)
        try:
            want = whole[key]
        except IndexError:
            with pytest.raises(IndexError):
                sliced[key]
        else:
            assert_state_equal(sliced[key], want)


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ((0, 0, 0), IndexError),
        (11, IndexError),
        ((0, -8), IndexError),
        ((..., ...), IndexError),
        (slice(None, None, -1), ValueError),
        (None, TypeError),
        ("0", TypeError),
        (True, TypeError),
        ([0, 1], TypeError),
        (torch.tensor([0, 1]), TypeError),
    ],
)
def test_indices_that_make_no_slice(sharded, key, error):
    with dcp_rs.open(sharded) as checkpoint:
        for name in ("rows", "alone"):
            with pytest.raises(error):
                checkpoint.get_slice(name)[key]


def test_scalars_and_empty_tensors_slice_too(ckpt):
    save_rs({"s": torch.tensor(5.0), "e": torch.empty(3, 0, 2), "v": 1}, ckpt)
    with dcp_rs.open(ckpt) as checkpoint:
        assert_state_equal(checkpoint.get_slice("s")[...], torch.tensor(5.0))
        assert_state_equal(checkpoint.get_slice("s")[()], torch.tensor(5.0))
        assert checkpoint.get_slice("e")[1:, :, 0].shape == (2, 0)
        with pytest.raises(TypeError, match="not a tensor"):
            checkpoint.get_slice("v")


def test_a_slice_reads_only_what_it_needs(sharded, tmp_path):
    """With the files of all other ranks gone, the rows of one rank are still there."""
    path = tmp_path / "copy"
    shutil.copytree(sharded, path)
    with dcp_rs.open(path) as checkpoint:
        keep = checkpoint.chunks("rows")[1].file
        for file in path.glob("*.safetensors"):
            if file.name != keep:
                file.unlink()
        assert_state_equal(checkpoint.get_slice("rows")[3:6], WHOLE[3:6])
        assert_state_equal(checkpoint.get_slice("rows")[4, 1:3], WHOLE[4, 1:3])
        with pytest.raises(CorruptDataError):
            checkpoint.get_slice("rows")[2:6]
