"""Ranks of one machine share its page cache: each says what it reads, and hears what the others read too."""

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

__all__ = ["Answer", "Demand", "answers_to", "demand_of", "in_common", "sample_of"]


@dataclass(frozen=True)
class Demand:
    """What a rank tells the coordinator.

    Attributes:
        machine: whose page cache it reads through.
        sample: what it reads of each section of the checkpoint. Its size does not grow with the
            model.
    """

    machine: bytes
    sample: bytes


@dataclass(frozen=True)
class Answer:
    """What the coordinator answers.

    Attributes:
        ranks: how many ranks of the machine told their demand.
        bits: which sections the rank shares with others of the machine.
    """

    ranks: int
    bits: bytes


def sample_of(
    index: _core.Index, batch: _core.Batch, targets: Sequence[Target], options: ReadOptions
) -> _core.Wanted | None:
    """Return what this rank reads of each section of the checkpoint; None where it makes no difference what other ranks read."""
    if index.is_remote or not options.asks_what_others_want():
        return None
    sample = _core.Wanted(index)
    sample.add_batch(batch)
    sample.add([(t.index, t.of_chunk, t.offsets, t.tensor.shape) for t in targets])
    return sample


def demand_of(sample: _core.Wanted) -> Demand:
    """Return what this rank tells the coordinator."""
    return Demand(_machine(), sample.told())


def answers_to(demands: Sequence[Demand | None]) -> list[Answer | None]:
    """Return the coordinator's answer for each rank.

    Raises:
        PlanError: a rank sent something else.
    """
    told = [(demand.machine, demand.sample) for demand in demands if demand is not None]
    answers = iter(_core.compare_wanted(told))
    return [None if demand is None else Answer(*next(answers)) for demand in demands]


def in_common(sample: _core.Wanted, answer: Answer, ranks: int) -> _core.Common | None:
    """Return what other ranks of this machine read too; None where some of them did not tell.

    Args:
        sample: of this rank.
        answer: of the coordinator.
        ranks: how many ranks the load has.
    """
    here = local_ranks()
    is_known = ranks >= dist.get_world_size() if here is None else answer.ranks >= here
    return sample.judged(answer.bits) if is_known else None


@functools.cache
def _machine() -> bytes:
    """Return the same for all processes that share a page cache: the id of the running kernel, else the machine's name."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = platform.node()
    return hashlib.blake2b(name.encode(), digest_size=8).digest()
