"""Two tensors of a file of torch.save may begin at the same byte and be of different lengths.

A block that was hashed for the one was taken for the first block of the other: what followed the
shorter one was not checked, and ``verify=True`` let damage through.
"""

import os

import pytest
import torch

import dcp_rs
from dcp_rs.errors import CorruptDataError

BLOCK = (1 << 20) // 4  # elements


def flip(path, values):
    """Changes one bit of where these values are, and nothing else that a file says of itself."""
    raw, times = path.read_bytes(), path.stat()
    at = raw.index(values.numpy().tobytes())
    with path.open("r+b") as file:
        file.seek(at + 1)
        file.write(bytes([raw[at + 1] ^ 0x40]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.fixture(
    params=[(10, 20_000, 15_000), (BLOCK + 10, BLOCK + 5000, BLOCK + 2000)], ids=["first", "second"]
)
def damaged(request, tmp_path):
    """A part, all of it, and damage behind the part: in the first block of both, or in the second."""
    part, length, at = request.param
    whole = torch.arange(length, dtype=torch.float32) + 1
    state = {"a_part": whole[:part], "m_full": whole, "z_part": whole[:part]}
    path = tmp_path / "source" / "s.pt"
    path.parent.mkdir()
    torch.save(state, path)
    dcp_rs.index(path, digests=True)
    flip(path, whole[at : at + 8])
    assert "m_full" in dcp_rs.verify(path.parent).lost
    return path.parent, state


@pytest.mark.parametrize("io", ["mmap", "buffered", "direct", "auto"])
def test_damage_behind_a_part_is_noticed(damaged, io):
    path, state = damaged
    got = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with pytest.raises(CorruptDataError, match="m_full"):
        dcp_rs.load(got, path, verify=True, io=io)
    parts = {name: torch.zeros_like(state[name]) for name in ("a_part", "z_part")}
    if len(state["a_part"]) < BLOCK:  # the part's own blocks are whole
        dcp_rs.load(parts, path, verify=True, io=io)
        assert all(torch.equal(parts[name], state[name]) for name in parts)


@pytest.mark.parametrize("to", ["dcp-rs", "torch", "safetensors"])
def test_a_conversion_does_not_launder_it(damaged, tmp_path, to):
    path, _ = damaged
    with pytest.raises(CorruptDataError, match="m_full"):
        dcp_rs.convert(path, tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


def test_one_at_a_time_and_in_slices(damaged):
    path, state = damaged
    with dcp_rs.open(path, verify=True) as opened:
        with pytest.raises(CorruptDataError, match="m_full"):
            opened.state_dict(copy=True)
        assert torch.equal(opened.get_slice("a_part")[:5], state["a_part"][:5])
