"""Save a state dict: every rank describes what it holds, the coordinator assigns it, every rank writes, the coordinator commits."""

from __future__ import annotations

import hashlib
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from dcp_rs import _core
from dcp_rs._progress import Progress
from dcp_rs._url import StorageOptions
from dcp_rs.engine.destination import Destination, commit_outcome
from dcp_rs.engine.local_plan import LocalPlan, PlanOptions, plan_locally
from dcp_rs.engine.metadata import make_metadata
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.engine.reports import Phases, SavedMetadata, SaveReport
from dcp_rs.engine.reuse import Frozen, Parent
from dcp_rs.engine.writes import Place, Written, packed, unpacked, write_files
from dcp_rs.errors import PlanError
from dcp_rs.options import WriteOptions, uuid_of

__all__ = ["MIXED", "Offer", "PlanMemory", "SaveOptions", "SaveRequest", "assign", "memory_of", "offer", "save"]


@dataclass(frozen=True)
class Offer:
    """What a rank tells the coordinator of its items.

    Attributes:
        data: what it holds; None where the coordinator has it from the save before.
        digest: of the data, where plans are remembered.
    """

    data: bytes | None
    digest: bytes = b""


@dataclass
class PlanMemory:
    """What this process knows of the last save in one group.

    Attributes:
        sent: the digest of what the coordinator has of this rank.
        received: on the coordinator, what all ranks hold, by digest.
        digests, answer: on the coordinator, what was assigned last, and how.
    """

    sent: bytes | None = None
    received: dict[bytes, bytes] = field(default_factory=dict)
    digests: tuple[bytes, ...] = ()
    answer: tuple[bool, list[bytes], int] | None = None


#: By the group's identity: one that is made anew, of whichever ranks, begins with nothing.
_by_group: WeakKeyDictionary[dist.ProcessGroup, PlanMemory] = WeakKeyDictionary()


def memory_of(group: dist.ProcessGroup | None) -> PlanMemory | None:
    """Return what is remembered of a group; None where there is none."""
    return None if group is None else _by_group.setdefault(group, PlanMemory())


def offer(data: bytes, memory: PlanMemory | None) -> Offer:
    """Return what the rank sends of its data. The caller sets ``memory.sent`` once the coordinator has answered."""
    if memory is None:
        return Offer(data)
    digest = hashlib.blake2b(data, digest_size=16).digest()
    # A save that fails may have changed what the coordinator remembers, so nothing counts as sent before its answer.
    known, memory.sent = memory.sent, None
    return Offer(None if known == digest else data, digest)


def assign(offers: Sequence[Offer], memory: PlanMemory | None, *, lowest_rank: bool) -> tuple[list[bytes], int]:
    """Assign what ranks hold to the ranks that write it.

    Returns:
        For each rank the bits of the items that it writes, and the number of items of all ranks.

    Raises:
        PlanError: what the ranks hold does not fit together; or a rank sent a digest of what the coordinator does not have.
    """
    received = {} if memory is None else memory.received
    data: list[bytes] = []
    for rank, told in enumerate(offers):
        known = received.get(told.digest) if told.data is None else told.data
        if known is None:
            msg = f"rank {rank} sent the digest of a plan that the coordinator does not have: save with the same function on all ranks"
            raise PlanError(msg)
        data.append(known)
    digests = tuple(told.digest for told in offers)
    if memory is not None and memory.digests == digests and memory.answer is not None:
        was_lowest, shares, items = memory.answer
        if was_lowest == lowest_rank:
            return shares, items
    shares, items, _ = _core.assign_saves(data, lowest_rank=lowest_rank)
    if memory is not None:
        memory.received = dict(zip(digests, data, strict=True))
        memory.digests, memory.answer = digests, (lowest_rank, shares, items)
    return shares, items


#: What to say where some ranks plan here, and others as torch does.
MIXED = "some ranks save with a planner of their own class, and others without: give all ranks the same kind"


class SaveOptions:
    """What the caller of a save may choose, checked.

    Args:
        io, threads, fsync, max_inflight_bytes: see :class:`dcp_rs.options.WriteOptions`.
        overwrite: replace a checkpoint that is there.
        strict_values: refuse what would not load back as it is.
        progress: who hears of the bytes that are written.
        parent, reuse, verify_reuse: see :class:`dcp_rs.engine.reuse.Parent`.
        storage_options: how to reach a store.
        save_id: the UUID of the save; the coordinator's counts. Default: a random one.
        guard: the coordinator commits within what it returns.

    Raises:
        ValueError: an option that does not make sense.
        TypeError: ``reuse`` is neither globs nor a module.
    """

    def __init__(
        self,
        *,
        io: Literal["auto", "direct", "buffered"] = "auto",
        threads: int | None = None,
        fsync: bool = True,
        max_inflight_bytes: int | None = None,
        overwrite: bool = True,
        strict_values: bool = False,
        progress: Progress = None,
        parent: str | os.PathLike[str] | None = None,
        reuse: str | Iterable[str] | torch.nn.Module | Frozen | None = None,
        verify_reuse: bool = False,
        storage_options: Mapping[str, Any] | Any | None = None,
        save_id: str | None = None,
        guard: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        self.write = WriteOptions(threads=threads, fsync=fsync, io=io, max_inflight_bytes=max_inflight_bytes)
        self.overwrite = overwrite
        self.strict_values = strict_values
        self.progress = progress
        self.parent = Parent(parent, reuse, verify=verify_reuse)
        self.storage_options = StorageOptions.of(storage_options)
        self.save_id = uuid.uuid4() if save_id is None else uuid_of(save_id)
        self.guard = guard or nullcontext


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """What one rank asks of a save.

    Attributes:
        state_dict: what to save, without ``Stateful`` objects.
        path: a folder, or the URL of one on a store.
        options: how.
    """

    state_dict: dict[Any, Any]
    path: Path
    options: SaveOptions


@dataclass(frozen=True)
class _Share:
    """The coordinator's answer to one rank: which of its items it writes (a bit for each), into which save."""

    keep: bytes
    place: Place


def save(ranks: RankGroup, plan: PlanOptions, ask: Callable[[], SaveRequest]) -> SavedMetadata:  # noqa: PLR0915  # in one place, in its order
    """Save from all ranks. Return what the committed checkpoint holds, and what this rank's part took.

    The checkpoint that was there is whole until the commit, which is one rename. An error on any rank is raised on all of them. Then
    each rank removes what it wrote, unless a store did not say whether it committed, or a rank was lost.

    Args:
        ranks: who saves.
        plan: which of the state dict is saved, and as what; the same on all ranks.
        ask: gives this rank's request. It is called in the first step, so that what it raises is raised on all ranks.
    """
    handled = sys.exception()  # is in the context of every error raised here, and is of something else
    clock, report = Phases(), SaveReport()
    request: SaveRequest
    to: Destination
    local: LocalPlan
    told: Offer
    memory: PlanMemory | None = None
    items = 0  # of all ranks; the coordinator knows it
    written: Written | None = None

    def describe() -> Offer:
        nonlocal request, to, local, memory, told
        request = ask()
        to = Destination(request.path, request.options.storage_options)
        local = plan_locally(request.state_dict, plan)
        to.prepare(None, overwrite=request.options.overwrite)
        memory = memory_of(ranks.group) if plan.remember else None
        told = offer(local.items.request(), memory)
        return told

    def divide(offers: list[Offer]) -> list[_Share]:  # on the coordinator
        nonlocal items
        if not all(isinstance(one, Offer) for one in offers):
            raise PlanError(MIXED, path=to.path)
        shares, items = assign(offers, memory, lowest_rank=plan.lowest_rank)
        local.selected.refuse_nothing(items)
        save_id, generation = request.options.save_id.bytes, to.begin(None, overwrite=request.options.overwrite)
        return [_Share(keep, Place(rank, len(offers), save_id, generation)) for rank, keep in enumerate(shares)]

    def write() -> bytes:
        nonlocal written, report
        if memory is not None:
            memory.sent = told.digest
        clock.end("plan")
        options = request.options
        writes = local.writes(share.keep, strict=options.strict_values)
        reuse = options.parent.find_reuse(writes, to, local.selected.values, rank=None, options=options.write)
        if reuse is not None:
            clock.end("compare")
        written = write_files(writes, to, share.place, options.write, reuse=reuse, progress=options.progress)
        options.parent.warn(to, written.save.problems)
        report = written.report()
        clock.end("write")
        return packed(written.index, ranks.size)

    def commit(indexes: list[bytes]) -> Metadata:  # on the coordinator
        options = request.options
        with options.guard():
            index = to.commit(
                None,
                [unpacked(index) for index in indexes],
                save_id=share.place.save_id,
                generation=share.place.generation,
                planner_data={} if plan.flatten else None,
                items=items,
                names={},
                fsync=options.write.fsync,
                overwrite=options.overwrite,
            )
        clock.end("commit")
        report.entries = index.tensor_count
        metadata = make_metadata(
            index, rank=None, checkpoint_id="", load_id="", storage_options=options.storage_options
        )
        metadata.storage_meta = StorageMeta(checkpoint_id=to.path, save_id=str(uuid.UUID(bytes=share.place.save_id)))
        return metadata

    try:
        share = ranks.reduce_scatter(describe, divide)
        metadata = ranks.all_reduce(write, commit)
    except BaseException:
        if (
            written is not None
            and ranks.failures
            and not any(commit_outcome(e, handled) for e in ranks.failures.values())
        ):
            to.remove(None, [written.index])
        raise
    finally:
        if written is not None:
            written.save.let_go()
    clock.tell(report)
    return SavedMetadata._of(metadata, report)
