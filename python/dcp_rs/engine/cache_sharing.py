"""Sharing of the page cache: ranks of one machine tell each other which bytes they read."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from dcp_rs import _core
from dcp_rs.options import ReadOptions, local_ranks

#: The machine, which has one page cache, and a sample of what a rank of it reads. Its size does not
#: depend on the model.
ReadSample = tuple[bytes, bytes]
#: The coordinator's reply to a rank: the number of ranks of the load, the number of those on its
#: machine that sent a sample, and the sections that several of these read.
CommonReads = tuple[int, int, bytes]
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
    return _machine(), sample.to_bytes()


def compare_samples(samples: Sequence[ReadSample | None]) -> list[CommonReads | None]:
    """Compare the samples of all ranks, on the coordinator. Return the reply for each rank."""
    replies = iter(_core.compare_samples([each for each in samples if each is not None]))
    return [None if each is None else (len(samples), *next(replies)) for each in samples]


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
    size, of_machine, sections = reply
    here = local_ranks()
    is_known = size >= dist.get_world_size() if here is None else of_machine >= here
    return sample.with_reply(sections) if is_known else None


@functools.cache
def _machine() -> bytes:
    """Return a digest of the running kernel's id, or else of the name of the machine."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = platform.node()
    return hashlib.blake2b(name.encode(), digest_size=8).digest()
