"""Sharing of the page cache: ranks of one machine tell each other which bytes they read."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from dcp_rs import _core
from dcp_rs.options import ReadOptions, local_ranks
from dcp_rs.transfer.target import Target

__all__ = ["CommonReads", "ReadSample", "common_reads", "compare_samples", "sample_of", "share"]


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
        ranks: the number of ranks of the machine that sent a sample.
        bits: the sections that several ranks of the machine read.
    """

    ranks: int
    bits: bytes


def sample_of(
    index: _core.Index, batch: _core.Batch, targets: Sequence[Target], options: ReadOptions
) -> _core.Sample | None:
    """Sample the reads of this rank; None if reads of other ranks make no difference."""
    if index.is_remote or not options.shares_page_cache:
        return None
    sample = _core.Sample(index)
    sample.add_batch(batch)
    sample.add([(t.index, t.of_chunk, t.offsets, t.tensor.shape) for t in targets])
    return sample


def share(sample: _core.Sample | None) -> ReadSample | None:
    """Prepare the sample for the coordinator."""
    return None if sample is None else ReadSample(_machine(), sample.told())


def compare_samples(samples: Sequence[ReadSample | None]) -> list[CommonReads | None]:
    """Compare the samples of all ranks, on the coordinator. Return the reply for each rank."""
    told = [(each.machine, each.sample) for each in samples if each is not None]
    replies = iter(_core.compare_wanted(told))
    return [None if each is None else CommonReads(*next(replies)) for each in samples]


def common_reads(
    sample: _core.Sample | None, reply: CommonReads | None, ranks: int
) -> _core.SharedSections | None:
    """Return what other ranks of this machine read too; None if some of them sent no sample.

    Args:
        sample: the sample of this rank.
        reply: the coordinator's reply.
        ranks: the number of ranks of the load.
    """
    if sample is None or reply is None:
        return None
    here = local_ranks()
    is_known = ranks >= dist.get_world_size() if here is None else reply.ranks >= here
    return sample.judged(reply.bits) if is_known else None


@functools.cache
def _machine() -> bytes:
    """Return a digest of the running kernel's id, or else of the name of the machine."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = platform.node()
    return hashlib.blake2b(name.encode(), digest_size=8).digest()
