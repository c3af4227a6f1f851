"""An index that is cut short, changed, of noise, or of another checkpoint: one typed error that names it."""

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcp_rs
from dcp_rs.errors import CorruptDataError, CorruptIndexError, DcpRsError, UnsupportedError
from support import random_tensor
from support.both import save_rs
from support.failures import STATE, WAYS, data_file, failure, read_whole
from support.forged import sealed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [0, 1, 8, 255, 256, 300, -8, -1, None])
def test_an_index_that_is_too_short_or_too_long(saved_blocks, way, size):
    index = saved_blocks / "index.dcprs"
    raw = index.read_bytes()
    index.write_bytes(raw + bytes(8) if size is None else raw[:size])
    error = failure(CorruptIndexError, way, saved_blocks)
    assert str(index) in str(error)
    assert error.path == str(index)


def test_an_index_of_a_later_version_is_not_called_corrupt(tmp_path):
    save_rs({"w": torch.ones(1)}, tmp_path)
    index = tmp_path / "index.dcprs"
    raw = bytearray(index.read_bytes())
    raw[8] = 2
    index.write_bytes(raw)
    error = failure(UnsupportedError, read_whole, tmp_path)
    assert "version 2" in str(error)


@given(data=st.data())
def test_an_index_of_noise(tmp_path_factory, data):
    """Anything at all in place of the index, with a head and a digest that are right."""
    path = tmp_path_factory.mktemp("ckpt")
    save_rs({"w": random_tensor((4, 3)), "n": [1]}, path)
    index = path / "index.dcprs"
    raw = bytearray(index.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 8))
        value = data.draw(
            st.sampled_from([0, 1, 255, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
        )
        raw[at : at + 8] = value.to_bytes(8, "little")
    raw[:8] = index.read_bytes()[:8]
    index.write_bytes(sealed(raw))
    try:
        read_whole(path)
        with dcp_rs.open(path) as checkpoint:
            checkpoint.state_dict()
    except (DcpRsError, OSError):
        pass


def test_an_index_of_another_checkpoint(tmp_path):
    save_rs(STATE, tmp_path / "one")
    save_rs(STATE, tmp_path / "two")
    shutil.copy(tmp_path / "two" / "index.dcprs", tmp_path / "one" / "index.dcprs")
    for way in WAYS:
        error = failure(CorruptDataError, way, tmp_path / "one")
        assert data_file(tmp_path / "two").name in str(error)
