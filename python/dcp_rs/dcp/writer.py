"""``RsWriter``: DCP's ``StorageWriter`` (and stager for ``dcp.async_save``)."""

from __future__ import annotations

import dataclasses
import os
import secrets
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
from dcp_rs.dcp import commits
from dcp_rs.dcp.background import may_wait
from dcp_rs.dcp.commits import Place, SavedMeta, Saving
from dcp_rs.dcp.destination import Destination
from dcp_rs.dcp.local_paths import stay_here
from dcp_rs.dcp.metadata import describe_saved, plain_data
from dcp_rs.dcp.reports import Phases, SaveReport
from dcp_rs.dcp.reuse import Frozen, Parent
from dcp_rs.dcp.save_planner import writes_of
from dcp_rs.dcp.stock_arguments import STOCK_COPY_AHEAD, judge_writer, one_of
from dcp_rs.dcp.written import Written, packed, unpacked
from dcp_rs.errors import PlanError
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
        SaveInProgressError: another save to the path is not over in this process, or one that this writer staged.
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
        self._saving: Saving | None = None
        self._sent: frozenset[str] | None = None  # what was frozen, where another process staged
        self._looked_at: Path | None = None
        self._to: Destination | None = None  # of the save under way
        self._written: Written | None = None  # until it is known to be committed

    def __repr__(self) -> str:
        given = {"path": os.fspath(self.path), **self.options.given(), "storage_options": self.storage_options}
        return call("RsWriter", given)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new save, to another path where one is given. While another thread saves through this writer, that is a ``SaveInProgressError``."""
        to = location(checkpoint_id) if checkpoint_id else self.path
        if checkpoint_id and self._saving is not None:
            commits.take_up(self._saving, to)
        if self._written is not None and self._written.is_over:
            self._forget()
        self.path = to
        self._take_new_id()

    def _take_new_id(self) -> None:
        self.save_id, self._is_used = str(uuid.uuid4()), False

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The path, under DCP's name for it."""
        return self.path

    def storage_meta(self) -> StorageMeta | None:
        """The path and the id of this save. torch asks for them first, in the thread that saves."""
        if self._saving is not None and self._saving.is_staged:
            commits.take_up(self._saving, self.path)
        return SavedMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def stage_with(self, stager: HostStager) -> None:
        """Sets what :meth:`stage` copies with."""
        self._stager = stager

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies the state dict to host memory, for ``dcp.async_save``. Until this save is over, another one to the path or through this writer is refused."""
        return self.begin_staging(state_dict).state_dict

    def begin_staging(self, state_dict: dict[str, Any], *, queued: bool = False, watched: bool = False) -> Staging:
        """Such a copy. With ``queued``, the caller finishes it, and the save may begin much later: :meth:`close` will tell when it is over."""
        if self._saving is not None:
            commits.await_end(self._saving)
        self._saving = commits.begin(self.path, self, queued=queued)
        if not (dist.is_available() and dist.is_initialized() and dist.get_rank() != 0):
            self._look_at_folder()
        try:
            self._saving.frozen = self._parent.look_at(state_dict)
            staging = self._stager.begin(state_dict, under_way=may_wait(self._saving.is_under_way), watched=watched)
            if not queued:
                staging.finish()
        except BaseException:
            self._saving.ended = True
            raise
        return staging

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes the rank, and whether this save is rank-local (``use_collectives=False``), from newer torch.

        Raises:
            PlanError: what was staged, was so under a process group that is gone.
        """
        if self._is_used:  # nothing said that this is another save with the same writer
            self._take_new_id()
        self._rank = kwargs.get("rank")
        self._use_collectives = kwargs.get("use_collectives", True)
        if self._saving is None or not self._saving.is_staged:
            self._saving = commits.begin(self.path, self)
            self._saving.frozen, self._sent = self._sent, None
        commits.start(self._saving)
        if is_coordinator:
            self._look_at_folder()
        self._clock = Phases()
        self._to = Destination(self.path, self.storage_options)
        self._commits = is_coordinator or not self._use_collectives

    def _look_at_folder(self) -> None:
        """Once a save: where it is staged, that is on the caller's thread, and the rest is not."""
        if self._looked_at != self.path:
            self._looked_at = self.path
            warn_of_a_foreign_model(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Creates the folder, and looks at what is in it."""
        self._where().prepare(self._own_rank(), overwrite=self.overwrite)
        self._chosen = None
        commits.await_place()
        return stay_here(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Chooses the save's generation and id, and tells each rank. No rank writes before it is told."""
        chosen = uuid.UUID(self.save_id).bytes, self._where().begin(self._own_rank(), overwrite=self.overwrite)
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
        place = commits.arrived() or self._chosen or plan.storage_data
        if not isinstance(place, Place):
            raise PlanError(
                "this rank was not told which part of the save it is: a writer's prepare_global_plan was passed over"
            )
        return place

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's data files. The one result carries this rank's index."""
        place = self._place(plan)
        self.save_id, self._is_used = str(uuid.UUID(bytes=place.save_id)), True
        self._clock.end("plan")
        # All ranks have come this far, so the save before this one is over.
        self._forget()
        to = self._where()
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
        frozen = None if self._saving is None else self._saving.frozen
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
            self._written = Written(to, self._own_rank(), place.generation, index, self._saving, os.getpid())
        except BaseException:
            save.abort()
            self._end()
            raise
        if self._saving is not None:
            commits.writing(self._saving, save)
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
        to, rank, generation = self._where(), self._own_rank(), 0
        if self._written is not None:
            to, rank, generation = self._written.to, self._written.rank, self._written.generation
        indexes = [unpacked(result) for rank_results in results for result in rank_results]
        try:
            with self._guard():
                index, left = to.commit(
                    rank,
                    indexes,
                    save_id=uuid.UUID(self.save_id).bytes,
                    generation=generation,
                    planner_data=plain_data(metadata.planner_data),
                    items=getattr(entries, "planned_items", None),
                    names=entries,
                    fsync=self.options.fsync,
                    overwrite=self.overwrite,
                )
        except BaseException as error:
            self._written = None
            self._end()
            to.give_up(rank, indexes, error)
            raise
        self._written = None
        self._end()
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
            commits.reported(self.report)

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

    def leave(self) -> None:
        """Leaves what this rank wrote: whether the save was committed is not known here. :func:`dcp_rs.clean` removes it if not."""
        self._written = None

    def close(self) -> None:
        """Says that the save through this writer is over, well or not."""
        self._end()

    def _end(self) -> None:
        if self._saving is not None:
            self._saving.ended = True
            self._saving.let_go()
        self._looked_at = None

    def __del__(self) -> None:
        if getattr(self, "_written", None) is not None:
            self._forget()

    def __getstate__(self) -> dict[str, Any]:
        # For a save in another process: it begins anew there, and is under way here for as long as this thread waits for it.
        sent = None if self._saving is None else commits.sent(self._saving)
        here = dict.fromkeys(("_saving", "_written", "_to", "_stager", "progress"))
        return {**self.__dict__, **here, "_sent": sent}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stager = HostStager()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id can be a path of the local file system, or a URL that can be saved to."""
        scheme, is_url, _ = os.fspath(checkpoint_id).partition("://")
        return not is_url or scheme.lower() in ("file", "s3", "gs", "az")
