"""``RsWriter``: DCP's ``StorageWriter`` (and stager for ``dcp.async_save``)."""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_rs import _torch
from dcp_rs._progress import Progress, watching
from dcp_rs._shown import call
from dcp_rs._url import StorageOptions, location
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.locate import rank_index_name, warn_of_a_foreign_model
from dcp_rs.dcp.local_paths import stay_here
from dcp_rs.dcp.place import Place, arrived, await_place
from dcp_rs.dcp.save_planner import SavedMeta, writes_of
from dcp_rs.dcp.stock_arguments import STOCK_COPY_AHEAD, judge_writer, one_of
from dcp_rs.dcp.written import Written, packed, unpacked
from dcp_rs.engine.destination import Destination
from dcp_rs.engine.metadata import describe_saved, plain_data
from dcp_rs.engine.reports import Phases, SaveReport
from dcp_rs.engine.reuse import Frozen, Parent
from dcp_rs.errors import PlanError, SaveInProgressError
from dcp_rs.options import WriteOptions, uuid_of
from dcp_rs.tensors.dtypes import NAMES
from dcp_rs.transfer.save import turns, write_entries
from dcp_rs.transfer.stage import HostStager, Staging

__all__ = ["RsWriter"]


class RsWriter(StorageWriter, BlockingAsyncStager):
    """Writes a checkpoint under DCP's save protocol: ``dcp.save(state_dict, storage_writer=RsWriter(path))``.

    The old checkpoint at ``path``, if there is one, stays whole until the new one is complete; then one rename replaces it. No file that
    dcp-rs did not write is touched. On a store, of two saves at a time one wins, and the other raises.

    Args:
        path: the folder; it is created where it does not exist. Or the URL of one on a store: ``s3://``, ``gs://``, ``az://``.
        threads, fsync, io, max_inflight_bytes: see :class:`dcp_rs.options.WriteOptions`.
        overwrite: ``False`` refuses to replace a checkpoint.
        strict_values: refuse values that would not load back under ``weights_only=True``, and keys that come back as text; without it they are saved,
            with a warning.
        progress: ``True`` draws a bar for the first rank, on a terminal and in notebooks; a callable hears on its rank, now and then and at the end, of the bytes
            that it has written, and of all that it is to write. Not where another process saves (``AsyncCheckpointerType.PROCESS``).
        parent: a checkpoint, of an earlier step, say. What it holds with the same name, place, shape, dtype and content is not written again: its data files
            are linked, so that either checkpoint is whole without the other. On a store, where it is in the same bucket and ``storage_options`` reach both, the
            store copies them, and no byte of them is sent. Where that cannot be, and why is a warning, all is written.
        reuse: globs over names of what does not change from save to save; or a module: its parameters that need no gradient. It is written apart, and where the
            parent's save was told the same, only the first MiB of each tensor is compared.
        verify_reuse: read what would be reused of ``parent``, and write what is not as its digests say.
        storage_options: for a URL, as for :class:`RsReader`. Secrets are not pickled: a save in another process takes them from its environment.
        save_id: what is to identify the first save with this writer, as a UUID; the coordinator's counts. Default: a random one.
        guard: called once on the coordinator. The commit happens within what it returns, and what that raises when it is entered stops the commit.
        cache_staged_state_dict: keep the host memory that ``dcp.async_save`` stages to for the next save with this writer.
        thread_count, sync_files: ``threads`` and ``fsync``, as torch's ``FileSystemWriter`` calls them. Its other arguments are taken, in its
            order: ``single_file_per_rank`` and ``per_thread_copy_ahead`` change nothing here, which is warned of once, nor does
            ``serialization_format``; ``_extensions`` are refused.

    Attributes:
        report: what the last save through this writer took on this rank (:class:`dcp_rs.SaveReport`); None before it. The log ``dcp_rs`` has it as a line.

    Raises:
        ValueError: an option that is none, one option under two names, or a ``save_id`` of another form.
        UnsupportedError: ``_extensions``: they change what is stored; a ``path`` or ``parent`` of a scheme that is not known.

    Raises (from a save, on every rank):
        CheckpointExistsError: with ``overwrite=False``; also where another save was committed meanwhile.
        SaveInProgressError: another thread began a save with this writer before this one was over.
        UnsupportedError: a value that the format cannot hold; with ``strict_values`` also a key.
        UnsafePickleError: with ``strict_values``, a value that would not load back.
        StoragePreconditionError: another save to the URL was committed meanwhile.
        StorageError: a store could not be reached, or refused. A ``StorageUnclearError``: the checkpoint may be there all the same.
        OSError: a write failed; the files of this save have been removed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool | None = None,
        thread_count: int | None = None,
        per_thread_copy_ahead: int = STOCK_COPY_AHEAD,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = None,
        *,
        threads: int | None = None,
        fsync: bool | None = None,
        io: Literal["auto", "direct", "buffered"] = "auto",
        max_inflight_bytes: int | None = None,
        strict_values: bool = False,
        progress: Progress = None,
        parent: str | os.PathLike[str] | None = None,
        reuse: str | Iterable[str] | torch.nn.Module | Frozen | None = None,
        verify_reuse: bool = False,
        storage_options: Mapping[str, Any] | Any | None = None,
        save_id: str | None = None,
        guard: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        super().__init__()
        judge_writer(path, _extensions, single_file_per_rank, per_thread_copy_ahead)
        threads = one_of("threads", threads, "thread_count", thread_count)
        fsync = one_of("fsync", fsync, "sync_files", sync_files)
        self._stager = HostStager(cache=cache_staged_state_dict)
        self.storage_options = StorageOptions.of(storage_options)
        self._parent = Parent(parent, reuse, verify=verify_reuse)
        self.path = location(path)
        self.options = WriteOptions(
            threads=threads, fsync=True if fsync is None else fsync, io=io, max_inflight_bytes=max_inflight_bytes
        )
        self.overwrite = overwrite
        self.strict_values = strict_values
        self.progress = progress
        self._guard = guard or nullcontext
        self.save_id = str(uuid.uuid4() if save_id is None else uuid_of(save_id))
        self._rank: int | None = None
        self._use_collectives = True
        self._chosen: Place | None = None
        self._is_used = False  # whether something was written under this save id
        self._commits = True
        self._clock = Phases()
        self.report: SaveReport | None = None
        self._thread: int | None = None  # that began the save under way
        self._staged_ranks = 0  # when a state dict was staged; 0: no process group
        self._staged_frozen: frozenset[str] | None = None  # names that were frozen then
        self._frozen: frozenset[str] | None = None  # those of the save under way
        self._looked_at: Path | None = None
        self._to: Destination | None = None  # of the save under way
        self._written: Written | None = None  # until it is known to be committed

    def __repr__(self) -> str:
        given = {"path": os.fspath(self.path), **self.options.given(), "storage_options": self.storage_options}
        return call("RsWriter", given)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, to another path where one is given.

        A save that another thread has under way through this writer fails with a ``SaveInProgressError``.
        """
        to = location(checkpoint_id) if checkpoint_id else self.path
        # First, so that what the other thread reads before it looks at this is its own.
        self._thread = threading.get_ident()
        if self._written is not None and self._written.thread == self._thread:
            self._forget()
        self.path = to
        self._take_new_id()

    def _check_alone(self) -> None:
        """Raise where another thread began a save with this writer: path and ids are of that save."""
        if self._thread != threading.get_ident():
            msg = (
                "another thread began a save with this writer before this save was over: "
                "wait for the future of a save before the next, or give each a writer of its own"
            )
            raise SaveInProgressError(msg, path=self.path)

    def _take_new_id(self) -> None:
        self.save_id, self._is_used = str(uuid.uuid4()), False

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The path, under DCP's name for it."""
        return self.path

    def storage_meta(self) -> StorageMeta | None:
        """Return the path and the id of this save. torch asks for them first, in the thread that saves.

        Raises:
            PlanError: the process group under which the state dict was staged is gone.
        """
        self._thread = threading.get_ident()
        # They are of this save, or of none: one that fails must not leave them to the next.
        self._frozen, self._staged_frozen = self._staged_frozen, None
        staged_ranks, self._staged_ranks = self._staged_ranks, 0
        if staged_ranks > 1 and _ranks() == 0:
            # torch would take that for a save of one rank, and each rank would commit what it has.
            msg = (
                f"the process group of {staged_ranks} ranks was destroyed before the save that was staged under it "
                "began: wait for its future first"
            )
            raise PlanError(msg, path=self.path)
        return SavedMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def stage_with(self, stager: HostStager) -> None:
        """Sets what :meth:`stage` copies with."""
        self._stager = stager

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state dict to host memory, for ``dcp.async_save``."""
        # torch does not tell when the save before is over: the memory of one that is not is left alone.
        staging = self.begin_staging(state_dict, under_way=lambda: False)
        staging.finish()
        return staging.state_dict

    def begin_staging(
        self, state_dict: dict[str, Any], *, under_way: Callable[[], bool], watched: bool = False
    ) -> Staging:
        """Begin such a copy, which the caller finishes. Arguments as for :meth:`HostStager.begin`."""
        self._staged_ranks = _ranks()
        if not (dist.is_available() and dist.is_initialized() and dist.get_rank() != 0):
            self._look_at_folder()
        frozen = self._parent.look_at(state_dict)
        staging = self._stager.begin(state_dict, under_way=under_way, watched=watched)
        self._staged_frozen = frozen
        return staging

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes the rank, and whether this save is rank-local (``use_collectives=False``), from newer torch.

        Raises:
            SaveInProgressError: another thread began a save with this writer.
        """
        if self._thread is None:
            self._thread = threading.get_ident()
        to = Destination(self.path, self.storage_options)
        self._check_alone()
        if self._is_used:  # nothing said that this is another save with the same writer
            self._take_new_id()
        self._rank = kwargs.get("rank")
        self._use_collectives = kwargs.get("use_collectives", True)
        self._to = to
        if is_coordinator:
            self._look_at_folder()
        self._clock = Phases()
        self._commits = is_coordinator or not self._use_collectives

    def _look_at_folder(self) -> None:
        """Once a save: where it is staged, that is on the caller's thread, and the rest is not."""
        if self._looked_at != self.path:
            self._looked_at = self.path
            warn_of_a_foreign_model(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Creates the folder, and looks at what is in it."""
        to = self._where()
        self._check_alone()
        to.prepare(self._own_rank(), overwrite=self.overwrite)
        self._chosen = None
        await_place()
        return stay_here(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Chooses the save's generation and id, and tells each rank. No rank writes before it is told."""
        to, save_id = self._where(), uuid.UUID(self.save_id).bytes
        self._check_alone()
        chosen = save_id, to.begin(self._own_rank(), overwrite=self.overwrite)
        places = (
            [Place(rank, len(plans), *chosen) for rank in range(len(plans))]
            if self._use_collectives
            else [Place(self._rank or 0, 0, *chosen)]
        )
        self._chosen = places[0] if len(places) == 1 else None
        return [dataclasses.replace(plan, storage_data=place) for plan, place in zip(plans, places, strict=True)]

    def _where(self) -> Destination:
        """Where this save goes."""
        if self._to is None or self._to.path != self.path:
            self._to = Destination(self.path, self.storage_options)
        return self._to

    def _place(self, plan: SavePlan) -> Place:
        """Which part of which save this rank writes."""
        place = arrived() or self._chosen or plan.storage_data
        if not isinstance(place, Place):
            raise PlanError(
                "this rank was not told which part of the save it is: a writer's prepare_global_plan was passed over"
            )
        return place

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's data files. The one result carries this rank's index."""
        place, to, frozen = self._place(plan), self._where(), self._frozen
        self._check_alone()
        self.save_id, self._is_used = str(uuid.UUID(bytes=place.save_id)), True
        self._clock.end("plan")
        # All ranks have come this far, so the save before this one is over.
        self._forget()
        how = {
            "save_id": place.save_id,
            "generation": place.generation,
            "token": secrets.randbits(64),
            "rank": place.rank,
            "world_size": place.world_size,
            **self.options.engine(remote=to.store is not None),
        }
        writes = writes_of(plan, planner, strict=self.strict_values)
        entries = writes.entries
        reuse = self._parent.find_reuse(writes, planner, to, frozen, rank=self._own_rank(), options=self.options)
        if reuse is not None:
            self._clock.end("compare")
        how |= {"turns": turns(entries), "reuse": reuse, "store": to.store}
        save = writes.plan.create(to.folder, writes.keep, [entry.nbytes for entry in entries], **how)
        self._parent.warn(to, save.problems)
        try:
            with watching(self.progress, "saving") as watch:
                if watch is not None:
                    save.watch(lambda done: watch(done, save.bytes))
                save.write_plain(writes.tensors, _torch.PLAIN_TYPES, NAMES)
                write_entries(
                    save, entries, self.options, save.plain_count, only=[not reused for reused in save.reused()]
                )
            index = save.finish(None if writes.nesting is None else writes.nesting.to_core())
            self._check_alone()
        except BaseException:
            for reason in save.abort():
                warn_caller(f"the failed save left something on the store: {reason}")
            raise
        self._written = Written(to, self._own_rank(), place, index, save, threading.get_ident(), os.getpid())
        result = WriteResult(
            index=MetadataIndex(rank_index_name(place.rank)),
            size_in_bytes=save.bytes,
            storage_data=packed(index, place.world_size),
        )
        self._clock.end("write")
        self.report = SaveReport(
            os.fspath(self.path), bytes_written=save.bytes, bytes_reused=save.bytes_reused, requests=save.requests
        )
        if not self._commits:
            self._tell()
        (future := Future[list[WriteResult]]()).set_result([result])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Merges the indexes of all ranks and commits the checkpoint."""
        entries = metadata.state_dict_metadata
        indexes = [unpacked(result) for rank_results in results for result in rank_results]
        written = self._written
        if written is None or written.index not in indexes:
            msg = "another thread began a save with this writer before this save was over, or the writer wrote nothing"
            raise SaveInProgressError(msg, path=self.path)
        to, rank, place = written.to, written.rank, written.place
        try:
            with self._guard():
                index, left = to.commit(
                    rank,
                    indexes,
                    save_id=place.save_id,
                    generation=place.generation,
                    planner_data=plain_data(metadata.planner_data),
                    items=getattr(entries, "planned_items", None),
                    names=entries,
                    fsync=self.options.fsync,
                    overwrite=self.overwrite,
                )
        except BaseException as error:
            self.close()
            to.give_up(rank, indexes, error)
            raise
        self.close()
        self._clock.end("commit")
        self.report = self.report or SaveReport(path=os.fspath(self.path))
        self.report.entries = index.tensor_count
        self._tell()
        for reason in left:
            warn_caller(f"the checkpoint is saved, but a file of the one before is still there: {reason}")
        meta = SavedMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)
        if any(metadata is cached for cached in SavePlanner._cached_metadata.values()):  # noqa: SLF001  # the cache of torch's planner
            metadata.storage_meta = meta
        else:
            describe_saved(metadata, index, meta, rank=rank, storage_options=self.storage_options)

    def _tell(self) -> None:
        if self.report is not None:
            self._clock.tell(self.report)

    def _own_rank(self) -> int | None:
        """The rank whose index it is, in a rank-local save."""
        return None if self._use_collectives else self._rank or 0

    def discard(self) -> None:
        """Removes what this rank wrote for a save that failed since, on this rank or another. Without such a save it does nothing."""
        written, self._written = self._written, None
        if written is not None:
            written.discard()

    def _forget(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            written.forget()

    def close(self) -> None:
        """Leave what this rank wrote as it is: the save is over, or :func:`dcp_rs.clean` is to look at it."""
        written, self._written = self._written, None
        if written is not None:
            written.let_go()
        self._looked_at = None

    def __del__(self) -> None:
        if getattr(self, "_written", None) is not None:
            self._forget()

    def __getstate__(self) -> dict[str, Any]:
        # For a save in another process, which begins anew there. What was staged goes with it: it is not of the next save here.
        here = dict.fromkeys(("_thread", "_frozen", "_written", "_to", "_stager", "progress"))
        state = {**self.__dict__, **here}
        self._staged_frozen, self._staged_ranks = None, 0
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stager = HostStager()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id can be a path of the local file system, or a URL that can be saved to."""
        scheme, is_url, _ = os.fspath(checkpoint_id).partition("://")
        return not is_url or scheme.lower() in ("file", "s3", "gs", "az")


def _ranks() -> int:
    """Return how many ranks there are; 0 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
