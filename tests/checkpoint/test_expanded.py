"""Strides of 0: a tensor of any size in a few bytes of a file.

1.6 kB became 8.6 GB in `convert` and kept `stats` busy for hours; `info` gave 4 bytes for 64 GiB.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs.checkpoint.compare import compare
from dcp_rs.errors import UnsupportedError
from support.commands import in_a_process

SMALL, LARGE = 1 << 20, 1 << 34


def save(path, count):
    torch.save({"ones": torch.ones(1).expand(count), "rest": torch.arange(3.0)}, path)
    return path


def stock(path, count, monkeypatch):
    """A checkpoint of stock DCP whose item is an expanded tensor."""

    class Large(dcp.DefaultSavePlanner):
        def create_global_plan(self, plans):
            plans, metadata = super().create_global_plan(plans)
            entry = metadata.state_dict_metadata["ones"]
            entry.size = torch.Size([count])
            entry.chunks = [dcp.metadata.ChunkStorageMetadata(torch.Size([0]), entry.size)]
            return plans, metadata

    write, state = torch.save, {"ones": torch.ones(1)}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda _, file: write(torch.ones(1).expand(count), file))
        dcp.save(state, checkpoint_id=path, planner=Large(), no_dist=True)
    return path


def test_bytes_are_those_of_the_whole_tensor(tmp_path):
    checkpoint = dcp_rs.open(save(tmp_path / "m.pt", LARGE))
    assert checkpoint.info("ones").nbytes == 4 * LARGE
    assert checkpoint.info("rest").nbytes == 12
    assert checkpoint["ones"][LARGE - 1] == 1  # a view takes no memory


def uses(path, out):
    yield lambda: dcp_rs.convert(path, out / "native")
    yield lambda: dcp_rs.convert(path, out / "out.safetensors", to="safetensors")
    yield lambda: dcp_rs.merge([path, path], out / "merged")
    yield lambda: compare(path, path)
    yield lambda: list(dcp_rs.open(path).stream())
    yield lambda: dcp_rs.open(path).state_dict(copy=True)
    yield lambda: dcp_rs.open(path, io="buffered").state_dict()


def test_large_expanded_tensor_is_written_nowhere(tmp_path):
    path = save(tmp_path / "m.pt", LARGE)
    for use in uses(path, tmp_path):
        with pytest.raises(UnsupportedError, match=r'"ones".*strides of 0'):
            use()
    assert in_a_process("stats", path).returncode != 0
    dcp_rs.convert(path, tmp_path / "rest", exclude="ones")
    assert set(dcp_rs.open(tmp_path / "rest")) == {"rest"}


def test_large_expanded_tensor_of_a_stock_checkpoint(tmp_path, monkeypatch):
    path = stock(tmp_path / "ckpt", LARGE, monkeypatch)
    assert dcp_rs.open(path).info("ones").nbytes == 4 * LARGE
    for use in uses(path, tmp_path):
        with pytest.raises(UnsupportedError, match="strides of 0"):
            use()


def test_small_expanded_tensor_is_written(tmp_path):
    path = save(tmp_path / "m.pt", SMALL)
    dcp_rs.convert(path, tmp_path / "out")
    assert torch.equal(dcp_rs.open(tmp_path / "out")["ones"], torch.ones(SMALL))
