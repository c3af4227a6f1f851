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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [0, 1, 8, 255, 256, 300, -8, -1])
def test_a_truncated_index(saved_blocks, way, size):
    index = saved_blocks / "index.dcprs"
    raw = index.read_bytes()
    index.write_bytes(raw[:size])
    error = failure(CorruptIndexError, way, saved_blocks)
    assert str(index) in str(error)
    assert error.path == str(index)


@pytest.mark.parametrize("way", WAYS)
def test_an_index_with_more_behind_it(saved_blocks, way):
    with (saved_blocks / "index.dcprs").open("ab") as file:
        file.write(bytes(8))
    failure(CorruptIndexError, way, saved_blocks)


def test_every_flipped_byte_of_an_index_is_found(tmp_path):
    want = {"w": random_tensor((4, 3)), "b": random_tensor((2,), torch.int16), "n": 3}
    save_rs(want, tmp_path)
    index = tmp_path / "index.dcprs"
    raw = index.read_bytes()
    for at in range(len(raw)):
        altered = bytearray(raw)
        altered[at] ^= 1 << (at % 8)
        index.write_bytes(altered)
        error = failure((CorruptIndexError, UnsupportedError), read_whole, tmp_path)
        assert str(index) in str(error), at


def test_an_index_of_a_later_version_is_not_called_corrupt(tmp_path):
    save_rs({"w": torch.ones(1)}, tmp_path)
    index = tmp_path / "index.dcprs"
    raw = bytearray(index.read_bytes())
    raw[8] = 2
    index.write_bytes(raw)
    error = failure(UnsupportedError, read_whole, tmp_path)
    assert "version 2" in str(error)
    raw[8], raw[24] = 1, 4
    index.write_bytes(raw)
    error = failure((UnsupportedError, CorruptIndexError), read_whole, tmp_path)


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
    raw[40:48] = digest_of(raw).to_bytes(8, "little")
    index.write_bytes(raw)
    try:
        read_whole(path)
        with dcp_rs.open(path) as checkpoint:
            checkpoint.state_dict()
    except (DcpRsError, OSError):
        pass


def digest_of(raw):
    """As section 3.1 of the format has it."""
    from support.second_reader import xxh3_64  # the one in pure Python

    zeroed = bytes(raw[:40]) + bytes(8) + bytes(raw[48:])
    return xxh3_64(zeroed)


def test_an_index_of_another_checkpoint(tmp_path):
    save_rs(STATE, tmp_path / "one")
    save_rs(STATE, tmp_path / "two")
    shutil.copy(tmp_path / "two" / "index.dcprs", tmp_path / "one" / "index.dcprs")
    for way in WAYS:
        error = failure(CorruptDataError, way, tmp_path / "one")
        assert data_file(tmp_path / "two").name in str(error)
