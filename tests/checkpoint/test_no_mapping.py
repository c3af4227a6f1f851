"""`io="buffered"` and `io="direct"` map no data file: a mapped one ends the process if it shrinks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import dcp_rs

STATE = {"w": torch.arange(3000.0).reshape(1000, 3), "b": torch.ones(5)}


def mapped(folder):
    return str(folder) in Path("/proc/self/maps").read_text()


@pytest.fixture(params=["native", "safetensors", "torch"])
def path(request, tmp_path):
    if request.param == "native":
        dcp_rs.save(STATE, tmp_path / "ckpt", no_dist=True)
        return tmp_path / "ckpt"
    if request.param == "safetensors":
        save_file(STATE, tmp_path / "m.safetensors")
        return tmp_path / "m.safetensors"
    torch.save(STATE, tmp_path / "m.pt")
    return tmp_path / "m.pt"


@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_nothing_is_mapped(path, io, tmp_path):
    checkpoint = dcp_rs.open(path, io=io)
    whole, part = checkpoint["w"], checkpoint.get_slice("w")[1:3]
    assert torch.equal(whole, STATE["w"])
    assert torch.equal(part, STATE["w"][1:3])
    assert torch.equal(checkpoint.state_dict()["b"], STATE["b"])
    assert not mapped(tmp_path)


@pytest.mark.parametrize("io", ["auto", "mmap"])
def test_otherwise_a_tensor_is_a_view(path, io, tmp_path):
    tensor = dcp_rs.open(path, io=io)["w"]
    assert torch.equal(tensor, STATE["w"])
    assert mapped(tmp_path)
