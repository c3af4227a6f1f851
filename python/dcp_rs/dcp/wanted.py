"""What the ranks of a machine want alike: each says in its plan what it wants, the coordinator compares, and each knows what others want too."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan

from dcp_rs import _core
from dcp_rs.dcp.load_planner import local_reads
from dcp_rs.dcp.local_items import planner_of
from dcp_rs.errors import PlanError
from dcp_rs.options import ReadOptions, local_ranks

__all__ = ["Answer", "Told", "common", "compare", "tell", "wanted_of"]


@dataclass(frozen=True)
class Told:
    """What a rank says of what it wants.

    Attributes:
        machine: whose page cache it reads through.
        sample: of the blocks of data files that it wants; it does not grow with the model.
    """

    machine: bytes
    sample: bytes


@dataclass(frozen=True)
class Answer:
    """What the coordinator says to that.

    Attributes:
        ranks: how many of its machine have told.
        bits: which blocks of the sample others of them want too.
    """

    ranks: int
    bits: bytes


def wanted_of(plan: LoadPlan, index: _core.Index, options: ReadOptions) -> _core.Wanted | None:
    """What this rank wants; None where no use is made of what others want, or a plan of others names what is not there."""
    if index.is_remote or not options.asks_what_others_want():
        return None
    own = planner_of(plan)
    reads = None if own is None else local_reads(plan, own)
    wanted = _core.Wanted(index if reads is None else reads.index)
    if reads is not None:
        if reads.whole is not None:
            wanted.add_batch(reads.whole)
        wanted.add([(t.index, t.of_chunk, t.offsets, t.tensor.shape) for t in reads.targets])
        return wanted
    items = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
    try:
        chunks = index.locate([(i.storage_index.fqn, i.storage_index.offset, i.storage_index.index) for i in items])
    except PlanError:  # raised again where it is read, if that is what the planner means
        return None
    wanted.add([(c, True, i.storage_offsets, i.lengths) for c, i in zip(chunks, items, strict=True)])
    return wanted


def tell(wanted: _core.Wanted | None) -> Told | None:
    """What is said of it."""
    return None if wanted is None else Told(_machine(), wanted.told())


def compare(told: Sequence[Told | None]) -> list[Answer | None]:
    """The coordinator's answers to all ranks.

    Raises:
        PlanError: what a rank told is no sample.
    """
    some = [each for each in told if each is not None]
    answers = iter(_core.compare_wanted([(each.machine, each.sample) for each in some]))
    return [None if each is None else Answer(*next(answers)) for each in told]


def common(wanted: _core.Wanted | None, answer: Answer | None, ranks: int) -> _core.Common | None:
    """What others of this machine want too; None where there are some who did not tell.

    Args:
        wanted: of this rank.
        answer: the coordinator's.
        ranks: how many there are in the load.
    """
    if wanted is None or answer is None:
        return None
    here = local_ranks()
    is_known = ranks >= dist.get_world_size() if here is None else answer.ranks >= here
    return wanted.judged(answer.bits) if is_known else None


@functools.cache
def _machine() -> bytes:
    """The same for all processes that share a page cache, in whichever containers: of the running kernel, else the machine's name."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = platform.node()
    return hashlib.blake2b(name.encode(), digest_size=8).digest()
