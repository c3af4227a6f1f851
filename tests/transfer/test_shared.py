"""Ranks of one machine that want the same of a checkpoint, or parts that lie between each other, have the disk deliver it once."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_rs
from dcp_rs import RsReader
from dcp_rs.options import ReadOptions, default_shared
from support import assert_state_equal, run_ranks

SHAPE = (2048, 4096)  # 32 MiB in float32; a quarter of a row is 4 KiB
RANKS = 4


def numbered():
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.int32).view(torch.float32).reshape(SHAPE)


def drop_from_page_cache(folder):
    for file in Path(folder).iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def delivered():
    """Bytes that storage delivered for this process so far."""
    (line,) = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes:")]
    return int(line.split()[1])


def load_cold(folder, placement, shared):
    """What the disk delivered for all ranks, for each byte of the checkpoint."""
    want = numbered()
    if placement is not None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        want = distribute_tensor(want, mesh, [placement], src_data_rank=None)
    got = {"w": torch.zeros_like(want)}
    if dist.get_rank() == 0:
        drop_from_page_cache(folder)
    dist.barrier()
    before = delivered()
    dcp_rs.load_state_dict(got, RsReader(folder, shared=shared))
    total = torch.tensor([delivered() - before])
    dist.all_reduce(total)
    assert_state_equal(got, {"w": want})
    return total.item() / numbered().nbytes


@pytest.fixture
def saved(ckpt):
    """A checkpoint that can be made cold: not where files lie in memory, or the kernel does not count."""
    dcp_rs.save({"w": numbered()}, ckpt, no_dist=True)
    drop_from_page_cache(ckpt)
    before = delivered()
    for file in ckpt.iterdir():
        file.read_bytes()
    if delivered() - before < numbered().nbytes:
        pytest.skip("files here do not come from a disk, or stay in the page cache")
    return ckpt


@pytest.mark.parametrize(
    "placement", [None, Replicate(), Shard(1), Shard(0)], ids=["plain", "replica", "columns", "rows"]
)
def test_the_disk_delivers_once(saved, placement):
    for share in run_ranks(RANKS, load_cold, saved, placement, None):
        assert share <= 1.2


def test_who_does_not_share_reads_alone(saved):
    for share in run_ranks(RANKS, load_cold, saved, None, False):
        assert share > 1.2


def test_ranks_of_a_machine_share_by_default(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert not default_shared()
    for ranks, shared in (("1", False), ("8", True), ("many", False)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert ReadOptions().engine()["shared"] is shared
        assert ReadOptions(shared=True).engine()["shared"]
        assert not ReadOptions(shared=False).engine()["shared"]
    with pytest.raises(ValueError, match="shared='yes': one of True, False, None"):
        ReadOptions(shared="yes")


def _shared_without_a_word():
    del os.environ["LOCAL_WORLD_SIZE"]
    return default_shared()


def test_without_a_word_all_ranks_are_taken_to_be_here():
    assert run_ranks(2, _shared_without_a_word) == [True, True]
