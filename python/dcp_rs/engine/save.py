"""Save a state dict: every rank describes what it holds, the coordinator assigns it, every rank writes, the coordinator commits."""

from __future__ import annotations

import os
import secrets
import sys
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from dcp_rs import _core
from dcp_rs._progress import Progress, watching
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs._url import StorageOptions
from dcp_rs._warnings import warn_caller
from dcp_rs.engine.destination import Destination, commit_outcome
from dcp_rs.engine.local_plan import LocalPlan, PlanOptions, Writes, plan_locally
from dcp_rs.engine.metadata import make_metadata
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.engine.reports import Phases, SavedMetadata, SaveReport
from dcp_rs.engine.reuse import Frozen, Parent
from dcp_rs.errors import PlanError
from dcp_rs.options import WriteOptions, uuid_of
from dcp_rs.tensors.dtypes import NAMES
from dcp_rs.transfer.save import turns, write_entries

__all__ = [
    "MIXED",
    "Place",
    "SaveOptions",
    "SaveRequest",
    "Written",
    "packed",
    "save",
    "unpacked",
    "write_files",
]

#: What to say where some ranks plan here, and others as torch does.
MIXED = "some ranks save with a planner of their own class, and others without: give all ranks the same kind"


def save(ranks: RankGroup, plan: PlanOptions, ask: Callable[[], SaveRequest]) -> SavedMetadata:  # noqa: PLR0915  # in one place, in its order
    """Save from all ranks. Return what the committed checkpoint holds, and what this rank's part took.

    The checkpoint that was there is whole until the commit, which is one rename. An error on any
    rank is raised on all of them. Then each rank removes what it wrote, unless a store did not say
    whether it committed, or a rank was lost.

    Args:
        ranks: who saves.
        plan: which of the state dict is saved, and as what; the same on all ranks.
        ask: gives this rank's request. It is called in the first step, so that what it raises is
            raised on all ranks.
    """
    handled = (
        sys.exception()
    )  # is in the context of every error raised here, and is of something else
    clock = Phases()
    request: SaveRequest
    to: Destination
    local: LocalPlan
    report: SaveReport
    items = 0  # of all ranks; the coordinator knows it
    written: Written | None = None

    def describe() -> bytes:
        nonlocal request, to, local
        request = ask()
        to = Destination(request.path, request.options.storage_options)
        local = plan_locally(request.state_dict, plan)
        to.prepare(None, overwrite=request.options.overwrite)
        return local.items.request()

    def assign(held: list[bytes]) -> list[tuple[bytes, Place]]:  # on the coordinator
        nonlocal items
        if not all(isinstance(one, bytes) for one in held):
            raise PlanError(MIXED, path=to.path)
        keeps, items, _ = _core.assign_saves(held, lowest_rank=plan.lowest_rank)
        local.selected.refuse_nothing(items)
        chosen = request.options.save_id.bytes, to.begin(None, overwrite=request.options.overwrite)
        return [(keep, Place(rank, len(held), *chosen)) for rank, keep in enumerate(keeps)]

    def write() -> bytes:
        nonlocal written, report
        clock.end("plan")
        options = request.options
        writes = local.writes(keep, strict=options.strict_values)
        reuse = None
        if options.parent is not None:
            reuse = options.parent.find_reuse(
                writes, to, local.selected.values, rank=None, options=options.write
            )
            clock.end("compare")
        written = write_files(
            writes, to, place, options.write, reuse=reuse, progress=options.progress
        )
        report = written.report
        if options.parent is not None:
            options.parent.warn(to, written.save.problems)
        clock.end("write")
        return packed(written.index, ranks.size)

    def commit(indexes: list[bytes]) -> Metadata:  # on the coordinator
        options = request.options
        with options.guard():
            index = to.commit(
                None,
                [unpacked(index) for index in indexes],
                save_id=place.save_id,
                generation=place.generation,
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
        metadata.storage_meta = StorageMeta(
            checkpoint_id=to.path, save_id=str(uuid.UUID(bytes=place.save_id))
        )
        return metadata

    try:
        keep, place = ranks.reduce_scatter(describe, assign)
        metadata = ranks.all_reduce(write, commit)
    except BaseException:
        if (
            written is not None
            and ranks.failures
            and not any(commit_outcome(e, handled) for e in ranks.failures.values())
        ):
            written.discard()
        raise
    finally:
        if written is not None:
            written.let_go()
    clock.tell(report)
    return SavedMetadata._of(metadata, report)


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
        self.write = WriteOptions(
            threads=threads, fsync=fsync, io=io, max_inflight_bytes=max_inflight_bytes
        )
        self.overwrite = overwrite
        self.strict_values = strict_values
        self.progress = progress
        self.parent: Parent | None = None
        if parent is not None or reuse is not None:
            self.parent = Parent(parent, reuse, verify=verify_reuse) or None
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
class Place:
    """Which part of which save a rank writes. The coordinator chooses the save.

    Attributes:
        rank: the number of this rank.
        world_size: the number of ranks; 0 in a rank-local save.
        save_id: the id of the save, the same on all ranks.
        generation: section 1.1 of the format.
    """

    rank: int
    world_size: int
    save_id: bytes
    generation: int

    @property
    def own_rank(self) -> int | None:
        """The rank whose index it becomes, in a rank-local save; None: all ranks share one."""
        return self.rank if self.world_size == 0 else None


@dataclass(frozen=True)
class Written:
    """The complete files of one rank, and the claim on them.

    Attributes:
        to: where the files are.
        place: which save it is.
        index: names the files.
        save: claims the files, so that ``dcp_rs.clean`` in another process leaves them alone.
        report: how much this rank wrote.
        process: the process that wrote.
    """

    to: Destination
    place: Place
    index: bytes
    save: _core.Save
    report: SaveReport
    process: int

    def let_go(self) -> None:
        """End the claim: an index names the files, or nobody needs them."""
        if self.process == os.getpid():  # in a fork, the parent decides
            self.save.let_go()

    def discard(self) -> None:
        """Remove the files, unless the index of this save is there."""
        if self.process == os.getpid():
            self.to.remove(self.place.own_rank, [self.index])
            self.save.let_go()


def write_files(
    writes: Writes,
    to: Destination,
    place: Place,
    options: WriteOptions,
    *,
    reuse: _core.Reuse | None,
    progress: Progress,
) -> Written:
    """Write the data files of one rank. If that fails, remove them.

    Args:
        writes: what the rank writes.
        to: where it goes.
        place: which save it is.
        options: how bytes are written.
        reuse: what of it a parent holds.
        progress: who hears of the bytes.
    """
    save = writes.plan.create(
        to.folder,
        writes.keep,
        [entry.nbytes for entry in writes.entries],
        save_id=place.save_id,
        generation=place.generation,
        token=secrets.randbits(64),
        rank=place.rank,
        world_size=place.world_size,
        turns=turns(writes.entries),
        reuse=reuse,
        store=to.store,
        **options.engine(remote=to.store is not None),
    )
    nesting = writes.nesting
    try:
        with watching(progress, "saving") as watch:
            if watch is not None:
                save.watch(lambda done: watch(done, save.bytes))
            save.write_plain(writes.tensors, PLAIN_TYPES, NAMES)
            to_write = [not reused for reused in save.reused()]
            write_entries(save, writes.entries, options, save.plain_count, only=to_write)
        index = save.finish(
            None if nesting is None else [(c.position, c.path, c.kind) for c in nesting.containers]
        )
    except BaseException:
        for reason in save.abort():
            warn_caller(f"the failed save left something on the store: {reason}")
        raise
    report = SaveReport(
        os.fspath(to.path),
        bytes_written=save.bytes,
        bytes_reused=save.bytes_reused,
        requests=save.requests,
    )
    return Written(to, place, index, save, report, os.getpid())


#: What every index begins with (section 3.1 of the format).
_INDEX_MAGIC = b"\x89DCPRS"


def packed(index: bytes, ranks: int) -> bytes:
    """Return an index as it travels to the coordinator: it repeats itself, and is a sixth of its size then."""
    return index if ranks <= 1 else zlib.compress(index, 1)


def unpacked(data: bytes) -> bytes:
    """Return the index that a rank sent."""
    return data if data.startswith(_INDEX_MAGIC) else zlib.decompress(data)
