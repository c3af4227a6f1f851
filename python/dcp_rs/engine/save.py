"""Save of a state dict by all ranks of a process group."""

from __future__ import annotations

import os
import secrets
import uuid
import zlib
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from dcp_rs import _core
from dcp_rs._progress import Progress, watching
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs._url import StorageOptions
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.metadata import with_versions
from dcp_rs.engine.destination import Destination
from dcp_rs.engine.metadata import make_metadata
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.engine.reports import Phases, SavedMetadata, SaveReport
from dcp_rs.engine.reuse import Parent
from dcp_rs.engine.writes import Selected, Writes, plan_locally, turns, write_entries
from dcp_rs.errors import PlanError
from dcp_rs.options import Globs, WriteOptions, check_choice, job_size, split_options, uuid_of
from dcp_rs.tensors.dtypes import NAMES, parse_dtype


def save(  # one function to read from top to bottom
    ranks: RankGroup, make_request: Callable[[], SaveRequest]
) -> SavedMetadata:
    """Save a state dict. Every rank calls it.

    It takes two steps, and each ends on all ranks alike:

    1. Every rank describes its entries (``describe``). The coordinator gives each entry to one
       rank (``assign``), and chooses the id and the generation of the save: a reduce_scatter.
    2. Every rank writes its data files (``write``). The coordinator merges the indexes of all
       ranks, and commits by one rename (``commit``): an all_reduce.

    The checkpoint that was there is whole until the rename. If a rank fails, all ranks raise, and
    each removes its files. The files stay if a rank is lost, or if a store did not say how the
    commit ended.

    Args:
        ranks: the ranks that save.
        make_request: returns the request of this rank. It is called in the first step, so that
            its error is raised on all ranks.

    Returns:
        The metadata of the checkpoint, with the report of this rank.
    """
    clock = Phases()
    request: SaveRequest
    to: Destination
    writes: Writes
    keep: bytes
    ticket: SaveTicket
    items = 0  # of all ranks; the coordinator knows it
    written: WrittenFiles | None = None

    def describe() -> bytes:
        nonlocal request, to, writes
        request = make_request()
        options = request.options
        to = Destination(request.path, options.storage_options, overwrite=options.overwrite)
        is_partial = not ranks.is_alone or job_size() <= 1
        writes = plan_locally(request.entries, options.dtype, is_partial=is_partial)
        to.prepare()
        return writes.plan.request()

    def assign(requests: list[bytes]) -> list[tuple[bytes, SaveTicket]]:
        nonlocal items
        keeps, items, _ = _core.assign_saves(requests)
        if items == 0 and request.entries.nothing_to_save is not None:
            raise PlanError(request.entries.nothing_to_save, path=to.path)
        save_id = request.options.save_id.bytes
        generation = to.begin()
        size = len(requests)
        return [
            (keep, SaveTicket(rank, size, save_id, generation)) for rank, keep in enumerate(keeps)
        ]

    def write() -> bytes:
        nonlocal written
        options = request.options
        clock.end("plan")
        writes.choose(keep, strict=options.strict_values)
        written = write_files(writes, to, ticket, options, clock)
        # To a sixth of its size, for the coordinator.
        return written.index if ranks.is_alone else zlib.compress(written.index, 1)

    def commit(indexes: list[bytes]) -> Metadata:
        assert written is not None  # noqa: S101  # the coordinator writes, too
        return commit_files(
            written,
            indexes if ranks.is_alone else list(map(zlib.decompress, indexes)),
            request.options,
            clock,
            planner_data=with_versions({}, request.entries.containers),
            items=items,
        )

    try:
        keep, ticket = ranks.reduce_scatter(describe, assign)
        metadata = ranks.all_reduce(write, commit)
    except BaseException:
        # Without failures that all ranks know of, another rank may still commit.
        if written is not None and ranks.failures and not ranks.may_be_committed:
            written.discard()
        raise
    finally:
        if written is not None:
            written.release()
    assert written is not None  # noqa: S101  # step 2 is over
    clock.report(written.report)
    return SavedMetadata(**vars(metadata), report=written.report)


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Options of one save. :func:`dcp_rs.save` describes the attributes.

    Attributes:
        write: how bytes are written.
        parent: the checkpoint that unchanged tensors are taken from.

    """

    write: WriteOptions = field(default_factory=WriteOptions)
    overwrite: bool = True
    include: Globs = None
    exclude: Globs = None
    dtype: torch.dtype | None = None
    strict_values: bool = False
    progress: Progress = None
    parent: Parent | None = None
    storage_options: StorageOptions | None = None
    save_id: uuid.UUID = field(default_factory=uuid.uuid4)
    guard: Callable[[], AbstractContextManager[object]] | None = None
    publish: Callable[[bytes], object] | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SaveOptions:
        """Return the options for arguments of :func:`dcp_rs.save` that ``take_options`` took.

        Raises:
            ValueError, TypeError, UnsupportedError: an option has an invalid value.
        """
        of_write, rest = split_options(options, WriteOptions)
        check_choice("overwrite", rest.get("overwrite", True), True, False)
        parent, reuse = rest.pop("parent", None), rest.pop("reuse", None)
        verify = rest.pop("verify_reuse", False)
        if parent is not None or reuse is not None:
            rest["parent"] = Parent(parent, reuse, verify=verify) or None
        if (save_id := rest.pop("save_id", None)) is not None:
            rest["save_id"] = uuid_of(save_id)
        return cls(
            write=WriteOptions(**of_write),
            dtype=parse_dtype(rest.pop("dtype", None)),
            **rest,
        )


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """Request of one rank.

    Attributes:
        entries: the entries of the state dict.
        path: a folder, or the URL of one on a store.
        options: how to save.
    """

    entries: Selected
    path: Path
    options: SaveOptions


@dataclass(frozen=True)
class SaveTicket:
    """Reply of the coordinator to a rank of a save.

    Attributes:
        rank: this rank.
        world_size: the number of ranks; 0 in a rank-local save.
        save_id: the id of the save, the same on all ranks.
        generation: section 1.1 of the format.
    """

    rank: int
    world_size: int
    save_id: bytes
    generation: int


@dataclass(frozen=True)
class WrittenFiles:
    """Complete data files of one rank that no committed index names yet.

    Attributes:
        to: the destination.
        ticket: the save.
        index: bytes of the index of the files.
        save: the engine's save. It locks the files against ``dcp_rs.clean`` of other processes.
        report: how much this rank wrote.
        process: the process that wrote. A fork of it changes nothing.
    """

    to: Destination
    ticket: SaveTicket
    index: bytes
    save: _core.Save
    report: SaveReport
    process: int

    def release(self) -> None:
        """Unlock the files: an index names them, or nobody needs them."""
        if self.process == os.getpid():
            self.save.unlock()

    def discard(self) -> None:
        """Remove the files, unless the index of this save is there. Release them afterwards."""
        if self.process == os.getpid():
            self.to.remove([self.index])


def write_files(
    writes: Writes,
    to: Destination,
    ticket: SaveTicket,
    options: SaveOptions,
    clock: Phases,
) -> WrittenFiles:
    """Write the data files of one rank. If that fails, remove them.

    Args:
        writes: what this rank writes.
        to: the destination.
        ticket: the save.
        options: how to write, and the parent to compare with.
        clock: measures the phases of the save.
    """
    parent, how = options.parent, options.write
    reuse = None
    if parent is not None:
        reuse = parent.find_reuse(writes, to, how)
        clock.end("compare")
    save = writes.plan.create(
        to.folder,
        writes.keep,
        [entry.nbytes for entry in writes.entries],
        save_id=ticket.save_id,
        generation=ticket.generation,
        token=secrets.randbits(64),
        rank=ticket.rank,
        world_size=ticket.world_size,
        turns=turns(writes.entries),
        reuse=reuse,
        store=to.store,
        **how.engine(remote=to.store is not None),
    )
    containers = None
    if writes.containers is not None:
        containers = [(c.position, c.path, c.kind) for c in writes.containers]
    try:
        with watching(options.progress, "saving") as watch:
            if watch is not None:
                save.watch(lambda done: watch(done, save.bytes))
            save.write_plain(writes.tensors, PLAIN_TYPES, NAMES)
            is_new = [not reused for reused in save.reused()]
            write_entries(save, writes.entries, how, save.plain_count, only=is_new)
        index = save.finish(containers)
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
    if parent is not None:
        parent.warn(to, save.problems)
    clock.end("write")
    return WrittenFiles(to, ticket, index, save, report, os.getpid())


def commit_files(
    written: WrittenFiles,
    indexes: list[bytes],
    options: SaveOptions,
    clock: Phases,
    *,
    planner_data: Any,
    items: int | None,
    names: Collection[str] = (),
) -> Metadata:
    """Merge the indexes of all ranks, and commit the checkpoint.

    Args:
        written: the files of this rank.
        indexes: the indexes of all ranks.
        options: the options of the save.
        clock: measures the phases of the save.
        planner_data, items, names: as for :meth:`Destination.commit`.

    Returns:
        The metadata of the checkpoint.
    """
    to, ticket = written.to, written.ticket
    with (options.guard or nullcontext)():
        index = to.commit(
            indexes,
            save_id=ticket.save_id,
            generation=ticket.generation,
            planner_data=planner_data,
            items=items,
            names=names,
            fsync=options.write.fsync,
            publish=options.publish,
        )
    clock.end("commit")
    written.report.entries = index.tensor_count
    return make_metadata(
        index,
        rank=to.rank,
        checkpoint_id=to.path,
        storage_options=options.storage_options,
    )
