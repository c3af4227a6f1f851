"""Sharing of the page cache: ranks of one machine tell each other which bytes they read."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from dcp_rs import _core
from dcp_rs.options import ReadOptions, local_ranks

__all__ = [
    "CommonReads",
    "ReadSample",
    "Region",
    "common_reads",
    "compare_samples",
    "sample_of",
    "share",
]


@dataclass(frozen=True)
class ReadSample:
    """Sample of the reads of a rank. Its size does not depend on the model.

    Attributes:
        machine: identifies the page cache.
        sample: what the rank reads of each section of the checkpoint.
    """

    machine: bytes
    sample: bytes


@dataclass(frozen=True)
class CommonReads:
    """Coordinator's reply to a rank.

    Attributes:
        size: the number of ranks of the load.
        ranks: the number of ranks of the machine that sent a sample.
        bits: the sections that several ranks of the machine read.
    """

    size: int
    ranks: int
    bits: bytes


#: Number of a tensor or chunk, true for a chunk, offsets and sizes.
Region = tuple[int, bool, Sequence[int], Sequence[int]]


def sample_of(
    index: _core.Index,
    options: ReadOptions,
    regions: Callable[[], Sequence[Region]],
    batch: _core.Batch | None = None,
) -> _core.Sample | None:
    """Sample the reads of this rank; None if reads of other ranks make no difference.

    Args:
        index: the index of the checkpoint.
        options: how to read.
        regions: returns the regions to read.
        batch: whole tensors to read.
    """
    if index.is_remote or not options.shares_page_cache:
        return None
    sample = _core.Sample(index)
    if batch is not None:
        sample.add_batch(batch)
    sample.add(regions())
    return sample


def share(sample: _core.Sample) -> ReadSample:
    """Prepare the sample for the coordinator."""
    return ReadSample(_machine(), sample.to_bytes())


def compare_samples(samples: Sequence[ReadSample | None]) -> list[CommonReads | None]:
    """Compare the samples of all ranks, on the coordinator. Return the reply for each rank."""
    sent = [(each.machine, each.sample) for each in samples if each is not None]
    replies = iter(_core.compare_samples(sent))
    size = len(samples)
    return [None if each is None else CommonReads(size, *next(replies)) for each in samples]


def common_reads(
    sample: _core.Sample | None, reply: CommonReads | None
) -> _core.SharedSections | None:
    """Return what other ranks of this machine read too; None if some of them sent no sample.

    Args:
        sample: the sample of this rank.
        reply: the coordinator's reply.
    """
    if sample is None or reply is None:
        return None
    here = local_ranks()
    is_known = reply.size >= dist.get_world_size() if here is None else reply.ranks >= here
    return sample.with_reply(reply.bits) if is_known else None


@functools.cache
def _machine() -> bytes:
    """Return a digest of the running kernel's id, or else of the name of the machine."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = platform.node()
    return hashlib.blake2b(name.encode(), digest_size=8).digest()
