"""``RsWriter``: DCP's ``StorageWriter`` (and stager for ``dcp.async_save``)."""

from __future__ import annotations

import copy
import dataclasses
import io
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_rs import _core, _torch
from dcp_rs._progress import Progress
from dcp_rs._shown import call
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs._url import location
from dcp_rs.checkpoint.locate import rank_index_name, warn_of_a_foreign_model
from dcp_rs.dcp.save_planner import RsSavePlanner
from dcp_rs.dcp.stock_arguments import STOCK_COPY_AHEAD, judge_writer, one_of
from dcp_rs.engine.destination import Destination
from dcp_rs.engine.local_plan import Writes
from dcp_rs.engine.metadata import describe_saved, plain_data, tensor_flags
from dcp_rs.engine.reports import Phases, SaveReport
from dcp_rs.engine.reuse import Frozen, Parent
from dcp_rs.engine.save import Place, SaveOptions, Written, packed, unpacked, write_files
from dcp_rs.errors import PlanError, SaveInProgressError
from dcp_rs.options import WriteOptions
from dcp_rs.tensors import pickles
from dcp_rs.tensors.dtypes import NAMES
from dcp_rs.tensors.memory import parts, why_not_raw
from dcp_rs.transfer.save import Entry, as_object, refuse_meta
from dcp_rs.transfer.stage import HostStager, Staging

__all__ = ["Resolved", "RsWriter", "writes_of"]


class Resolved:
    """Keeps apart what a planner resolves: it may make the next item in the memory of this one, as stock's writer lets it.

    What lies in the memory of the state dict stays there, and is not copied.

    Args:
        planner: it, or one that wraps it. Where none of them has a ``state_dict``, everything
            counts as made for the save.
    """

    def __init__(self, planner: object) -> None:
        self._held = [
            value for state_dict in _state_dicts(planner, set()) for value in state_dict.values()
        ]
        self._storages = {
            _torch.storage_id(tensor) for value in self._held for tensor in _memory(value)
        }

    def apart(self, data: Any) -> Any:
        """A tensor in memory that the planner does not have: a copy, where it is not the state dict's. Anything else as it is."""
        if (
            not isinstance(data, torch.Tensor)
            or data.device.type == "meta"
            or self.is_passing(data)
        ):
            return data
        tensor = _torch.wait_tensor(data)
        if _torch.storage_id(tensor) in self._storages:
            return data
        return (
            tensor.detach()
            .clone(memory_format=torch.contiguous_format)
            .requires_grad_(tensor.requires_grad)
        )

    def is_passing(self, data: Any) -> bool:
        """Whether it is a tensor that raw bytes cannot hold: what is stored of it is made at once, and there is nothing to keep."""
        return isinstance(data, torch.Tensor) and why_not_raw(_torch.wait_tensor(data)) is not None


def _state_dicts(planner: object, seen: set[int]) -> Iterator[Mapping[str, Any]]:
    """Those of a planner and of the planners that it wraps."""
    seen.add(id(planner))
    state_dict = getattr(planner, "state_dict", None)
    if isinstance(state_dict, Mapping):
        yield state_dict
    for inner in getattr(planner, "__dict__", {}).values():
        if isinstance(inner, SavePlanner) and id(inner) not in seen:
            yield from _state_dicts(inner, seen)


def _memory(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in whose memory a value of a state dict lies, as far as that is known."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield from _memory(shard.tensor)
    elif isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested:
        with torch.no_grad():
            yield from (part.tensor for part in parts(value))


def writes_of(plan: SavePlan, planner: SavePlanner, *, strict: bool) -> Writes:
    """Resolve the items of this rank's plan. Warn of keys that come back as text.

    Raises:
        UnsupportedError, UnsafePickleError: what cannot be stored; with ``strict`` also what would
            not load back as it is.
        PlanError: the planner resolved something else than it planned.
    """
    # Else somebody changed the plan's paths, or the planner does not know them.
    nesting = planner._nesting(plan.planner_data) if isinstance(planner, RsSavePlanner) else None
    paths: Mapping[str, Any] = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
    positions: Mapping[str, int] = {}
    if nesting is not None:
        paths, positions = nesting.paths, nesting.positions
    # torch's planner and ours resolve what is the state dict's, or a copy that nobody else has.
    is_own = isinstance(planner, DefaultSavePlanner) and all(
        _is_own(planner, name) for name in _OWN
    )
    resolved = None if is_own else Resolved(planner)
    whole: list[WriteItem] = []
    tensors: list[Any] = []
    entries: list[Entry] = []
    for item in plan.items:
        data = planner.resolve_data(item)
        fqn, is_passing = item.index.fqn, False
        if resolved is not None:
            data, is_passing = resolved.apart(data), resolved.is_passing(data)
        if (
            not is_passing
            and item.type == WriteItemType.TENSOR
            and item.tensor_data
            and _is_whole(item.tensor_data)
        ):
            whole.append(item)
            tensors.append(data)
        else:
            entries.append(_entry(item, data, paths.get(fqn), positions.get(fqn)))
            _judge(item, data, planner, strict=strict)
    core = _core.SavePlan()
    names = [item.index.fqn for item in whole]
    where, at = [paths.get(name) for name in names], [positions.get(name) for name in names]
    shapes = [item.tensor_data.size for item in whole if item.tensor_data]
    others = core.add_plain(names, where, tensors, PLAIN_TYPES, NAMES, positions=at, shapes=shapes)
    entries += [_entry(whole[i], tensors[i], where[i], at[i]) for i in others]
    core.add([entry.item() for entry in entries])
    if nesting is not None:
        nesting.judge(strict=strict)
    return Writes(core, None, tensors, entries, nesting)


def _is_whole(data: TensorWriteData) -> bool:
    return data.chunk.sizes == data.size and not any(data.chunk.offsets)


#: What writers call for each item, and what that calls, as torch and this package have them before
#: anybody patches them.
_OWN = {
    name: (getattr(DefaultSavePlanner, name), getattr(RsSavePlanner, name))
    for name in ("resolve_data", "lookup_object", "transform_object")
}


def _is_own(planner: SavePlanner, name: str) -> bool:
    return getattr(getattr(planner, name), "__func__", None) in _OWN[name]


def _judge(item: WriteItem, data: Any, planner: SavePlanner, *, strict: bool) -> None:
    """Warns of a value that will not load (``strict``: refuses it), where the planner is one that tells which value it was."""
    if item.type != WriteItemType.BYTE_IO or not isinstance(planner, DefaultSavePlanner):
        return
    if _is_own(planner, "lookup_object"):
        pickles.warn_unless_loadable(
            item.index.fqn, planner.lookup_object(item.index), data.getvalue(), strict=strict
        )


def _entry(
    item: WriteItem, data: torch.Tensor | io.BytesIO, path: Any, position: int | None
) -> Entry:
    fqn = item.index.fqn
    path = path if isinstance(path, tuple) else None
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            msg = f"value {fqn!r}: the planner resolved a {type(data).__name__}, not io.BytesIO"
            raise PlanError(msg, tensor=fqn)
        return Entry(fqn, data.getvalue(), path=path, position=position)
    if not isinstance(data, torch.Tensor) or item.tensor_data is None:
        msg = f"tensor {fqn!r}: the planner resolved a {type(data).__name__}"
        raise PlanError(msg, tensor=fqn)
    tensor = _torch.wait_tensor(data.detach())
    refuse_meta(fqn, tensor)
    refusal = why_not_raw(tensor)
    if refusal is not None:
        return Entry(fqn, as_object(fqn, tensor, refusal), path=path, position=position)
    chunk = item.tensor_data.chunk
    if tuple(tensor.shape) != tuple(chunk.sizes):
        msg = f"tensor {fqn!r}: the planner resolved {tuple(tensor.shape)} for a chunk of {tuple(chunk.sizes)}"
        raise PlanError(msg, tensor=fqn)
    return Entry(
        fqn,
        tensor,
        shape=tuple(item.tensor_data.size),
        offsets=tuple(chunk.offsets),
        sizes=tuple(chunk.sizes),
        flags=tensor_flags(item.tensor_data.properties),
        path=path,
        position=position,
    )


class RsWriter(StorageWriter, BlockingAsyncStager):
    """Storage writer for ``dcp.save(state_dict, storage_writer=RsWriter(path))``.

    A checkpoint that is at ``path`` already stays whole until the new one is complete. Then one
    rename replaces it. Files that dcp-rs did not write stay. If two jobs save to one URL at the
    same time, one wins and the other raises.

    Args:
        path: the folder, which is created if needed; or its URL: ``s3://``, ``gs://``, ``az://``.
        threads, fsync, io, max_inflight_bytes: see :class:`dcp_rs.options.WriteOptions`.
        overwrite: ``False`` raises if there is a checkpoint already.
        strict_values: raise for values that do not load under ``weights_only=True``, and for keys
            that load as text. By default they are saved with a warning.
        progress: ``True`` draws a bar on the first rank, on a terminal and in notebooks. A
            callable is called on its rank with the bytes written so far and the bytes to write. It
            has no effect if another process saves (``AsyncCheckpointerType.PROCESS``).
        parent: an earlier checkpoint. Entries that it holds with the same name, place, shape,
            dtype and content are not written again. Their data files are linked, so that each
            checkpoint is whole without the other. A store copies them, if both are in one bucket
            and ``storage_options`` reach both. Where that is not possible, everything is written,
            and a warning says why.
        reuse: globs over names of tensors that do not change from save to save; or a module, for
            its parameters without gradient. They are written apart. If the parent's save had the
            same ``reuse``, only the first MiB of each is compared.
        verify_reuse: read the reused data of ``parent``, and write again what does not match its
            digests.
        storage_options: for a URL, see :class:`RsReader`. Secrets are not pickled: a save in
            another process takes them from its environment.
        save_id: a UUID for the first save with this writer; the coordinator's counts. Default: a
            random one.
        guard: called once on the coordinator. It returns a context manager, in which the commit
            runs. If entering that raises, nothing is committed.
        thread_count, sync_files: ``threads`` and ``fsync``, as torch's ``FileSystemWriter`` names
            them.
        single_file_per_rank, per_thread_copy_ahead: accepted with a warning, and without effect.
        serialization_format, cache_staged_state_dict: accepted, and without effect.

    Attributes:
        report: the :class:`dcp_rs.SaveReport` of the last save on this rank; None before it. The
            log ``dcp_rs`` has it as one line.

    Raises:
        ValueError: an option has an invalid value, or is given under two names.
        CheckpointExistsError: with ``overwrite=False``, there is a checkpoint, or another save was
            committed meanwhile.
        SaveInProgressError: another thread began a save with this writer before this one was over.
        UnsupportedError: the format cannot hold a value or (``strict_values``) a key; ``path`` or
            ``parent`` has an unknown scheme; ``_extensions`` are given.
        UnsafePickleError: with ``strict_values``, a value would not load.
        StoragePreconditionError: another save to the URL was committed meanwhile.
        StorageError: a store cannot be reached, or refuses a request. After a
            ``StorageUnclearError`` the checkpoint may be there.
        OSError: a write failed. The files of this save have been removed.

    Example:
        ```python
        dcp.save({"model": model.state_dict()}, storage_writer=dcp_rs.RsWriter("ckpt"))
        ```
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
        fsync = one_of("fsync", fsync, "sync_files", sync_files)
        self._how = SaveOptions(
            io=io,
            threads=one_of("threads", threads, "thread_count", thread_count),
            fsync=True if fsync is None else fsync,
            max_inflight_bytes=max_inflight_bytes,
            overwrite=overwrite,
            strict_values=strict_values,
            progress=progress,
            parent=parent,
            reuse=reuse,
            verify_reuse=verify_reuse,
            storage_options=storage_options,
            save_id=save_id,
            guard=guard,
        )
        self.path = location(path)
        self.save_id = str(self._how.save_id)
        self.report: SaveReport | None = None
        self._stager = HostStager()
        self._staged: _Staged | None = None  # the last copy, until a save begins
        self._staged_of_save: _Staged | None = (
            None  # what was the last copy when the save under way began
        )
        self._rank: int | None = None  # of a rank-local save
        self._is_used = False  # whether something was written under this save id
        self._commits = True
        self._clock = Phases()
        self._thread: int | None = None  # that began the save under way
        self._looked_at: Path | None = None
        self._to: Destination | None = None  # of the save under way
        self._plans_before: dict[
            str, SavePlan
        ] = {}  # what torch's planner remembered when it began
        self._written: Written | None = None  # until it is known to be committed

    @classmethod
    def _of(cls, path: str | os.PathLike[str], how: SaveOptions) -> RsWriter:
        """Return a writer with options that were checked before."""
        writer = cls(path)
        writer._how, writer.save_id = how, str(how.save_id)
        return writer

    @property
    def options(self) -> WriteOptions:
        """How bytes are written."""
        return self._how.write

    @property
    def overwrite(self) -> bool:
        """Whether a checkpoint that is there is replaced."""
        return self._how.overwrite

    def __repr__(self) -> str:
        given = {
            "path": os.fspath(self.path),
            **self.options.given(),
            "storage_options": self._how.storage_options,
        }
        return call("RsWriter", given)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, to another path where one is given.

        A save that another thread has under way through this writer fails with a
        ``SaveInProgressError``.
        """
        to = location(checkpoint_id) if checkpoint_id else self.path
        mine = self._thread == threading.get_ident()
        # First, so that what the other thread reads before it looks at this is its own.
        self._thread = threading.get_ident()
        if mine:
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
        """Return the path and the id of this save. torch asks for them first, in the thread that saves."""
        self._thread = threading.get_ident()
        # It is of this save, or of none: one that fails must not leave it to the next.
        self._staged_of_save, self._staged = self._staged, None
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state dict to host memory, for ``dcp.async_save``."""
        ranks = _ranks()
        if not (ranks and dist.get_rank() != 0):
            self._look_at_folder()
        parent = self._how.parent and self._how.parent.looked_up(state_dict)
        self._staged = None
        staging = self._stager._begin(state_dict)
        staging.finish()
        self._staged = _Staged(staging, parent, ranks)
        return staging.state_dict

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes the rank, and whether this save is rank-local (``use_collectives=False``), from newer torch.

        Raises:
            SaveInProgressError: another thread began a save with this writer.
        """
        if self._thread is None:
            self._thread = threading.get_ident()
        to = Destination(self.path, self._how.storage_options)
        self._check_alone()
        if self._is_used:  # nothing said that this is another save with the same writer
            self._take_new_id()
        self._rank = None if kwargs.get("use_collectives", True) else kwargs.get("rank") or 0
        self._to = to
        if is_coordinator:
            self._look_at_folder()
        self._clock = Phases()
        self._commits = is_coordinator or self._rank is not None

    def _look_at_folder(self) -> None:
        """Once a save: where it is staged, that is on the caller's thread, and the rest is not."""
        if self._looked_at != self.path:
            self._looked_at = self.path
            warn_of_a_foreign_model(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Creates the folder, and looks at what is in it."""
        to = self._where()
        self._check_alone()
        to.prepare(self._rank, overwrite=self._how.overwrite)
        # Not what a save left that ended between the two methods: such a plan has no items.
        known = _torch.remembered_plans().items()
        self._plans_before = {
            key: plan
            for key, plan in known
            if not (isinstance(told := plan.storage_data, _Told) and told.remembered)
        }
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Chooses the save's generation and id, and tells each rank. No rank writes before it is told."""
        to, save_id = self._where(), uuid.UUID(self.save_id).bytes
        self._check_alone()
        chosen = save_id, to.begin(self._rank, overwrite=self._how.overwrite)
        places = [Place(rank, len(plans), *chosen) for rank in range(len(plans))]
        if self._rank is not None:
            places = [Place(self._rank, 0, *chosen)]
        # Of a plan that it remembers (`enable_plan_caching`), torch sends none, and the rank's
        # planner would drop what comes in its place. So it goes as a plan that is to be used, and
        # `write_data` puts the remembered one there.
        return [
            dataclasses.replace(
                plan, usable=True, storage_data=_Told(place, remembered=not plan.usable)
            )
            for plan, place in zip(plans, places, strict=True)
        ]

    def _where(self) -> Destination:
        """Where this save goes."""
        if self._to is None or self._to.path != self.path:
            self._to = Destination(self.path, self._how.storage_options)
        return self._to

    def _told(self, plan: SavePlan) -> tuple[SavePlan, Place]:
        """Return the rank's plan, and which part of which save it is.

        Raises:
            PlanError: the coordinator's answer did not arrive.
        """
        told = plan.storage_data
        if isinstance(told, _Told) and told.remembered:
            before = _torch.put_back_remembered(
                plan, self._plans_before, storage_data=_Told(told.place)
            )
            plan, told = (before, told) if before is not None else (plan, None)
        if not isinstance(told, _Told):
            raise PlanError(
                "this rank was not told which part of the save it is: a writer's prepare_global_plan was passed over"
            )
        return plan, told.place

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's data files. The one result carries this rank's index."""
        plan, place = self._told(plan)
        to = self._where()
        self._check_alone()
        self.save_id, self._is_used = str(uuid.UUID(bytes=place.save_id)), True
        self._clock.end("plan")
        # All ranks have come this far, so the save before this one is over.
        self._forget()
        writes = writes_of(plan, planner, strict=self._how.strict_values)
        staged = self._staged_in(writes)
        parent = self._how.parent if staged is None else staged.parent
        reuse = None
        try:
            if parent is not None:
                values = getattr(planner, "state_dict", {})
                reuse = parent.find_reuse(
                    writes, to, values, rank=place.own_rank, options=self.options
                )
                self._clock.end("compare")
            written = write_files(
                writes, to, place, self.options, reuse=reuse, progress=self._how.progress
            )
        finally:
            if staged is not None and staged.staging is not None:
                staged.staging.release()
        if parent is not None:
            parent.warn(to, written.save.problems)
        try:
            self._check_alone()
        except SaveInProgressError:
            written.discard()
            raise
        self._written = written
        self._clock.end("write")
        self.report = written.report
        if not self._commits:
            self._clock.tell(self.report)
        result = WriteResult(
            index=MetadataIndex(rank_index_name(place.rank)),
            size_in_bytes=written.save.bytes,
            storage_data=packed(written.index, place.world_size),
        )
        (future := Future[list[WriteResult]]()).set_result([result])
        return future

    def _staged_in(self, writes: Writes) -> _Staged | None:
        """Return what :meth:`stage` made for this save; None where what is written is not that.

        Raises:
            PlanError: the process group under which the state dict was staged is gone.
        """
        staged, self._staged_of_save = self._staged_of_save, None
        if staged is None or staged.staging is None:
            return staged
        if not staged.staging.holds([*writes.tensors, *(entry.data for entry in writes.entries)]):
            return None
        if staged.ranks > 1 and _ranks() == 0:
            # torch takes that for a save of one rank, and each rank would commit what it has.
            msg = (
                f"the process group of {staged.ranks} ranks was destroyed before the save that was staged under it "
                "began: wait for its future first"
            )
            raise PlanError(msg, path=self.path)
        return staged

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Merges the indexes of all ranks and commits the checkpoint."""
        handled = sys.exception()
        entries = metadata.state_dict_metadata
        indexes = [
            unpacked(result.storage_data) for rank_results in results for result in rank_results
        ]
        written = self._written
        if written is None or written.index not in indexes:
            msg = "another thread began a save with this writer before this save was over, or the writer wrote nothing"
            raise SaveInProgressError(msg, path=self.path)
        to, place = written.to, written.place
        try:
            with self._how.guard():
                index = to.commit(
                    place.own_rank,
                    indexes,
                    save_id=place.save_id,
                    generation=place.generation,
                    planner_data=plain_data(metadata.planner_data),
                    items=None,
                    names=entries,
                    fsync=self.options.fsync,
                    overwrite=self._how.overwrite,
                )
        except BaseException as error:
            self.close()
            to.give_up(place.own_rank, indexes, error, handled)
            raise
        self.close()
        self._clock.end("commit")
        self.report = self.report or SaveReport(path=os.fspath(self.path))
        self.report.entries = index.tensor_count
        self._clock.tell(self.report)
        meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)
        if _torch.is_remembered(metadata):  # by the planner, for the next save
            metadata.storage_meta = meta
        else:
            describe_saved(
                metadata,
                index,
                meta,
                rank=place.own_rank,
                storage_options=self._how.storage_options,
            )

    def _discard(self) -> None:
        """Removes what this rank wrote for a save that failed since, on this rank or another. Without such a save it does nothing."""
        written, self._written = self._written, None
        if written is not None:
            written.discard()

    def _forget(self) -> None:
        """Give up on hearing whether the save was committed.

        In a folder the index tells. On a store the commit of another rank may still be on its way:
        there :func:`dcp_rs.clean` removes files that no index names.
        """
        if self._written is not None and self._written.to.store is not None:
            self._written.let_go()
            self._written = None
        self._discard()

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
        # For a save in another process, which begins anew there. The state dict goes beside it.
        here = dict.fromkeys(("_thread", "_staged_of_save", "_written", "_to", "_stager"))
        staged = self._staged and dataclasses.replace(self._staged, staging=None)
        how = copy.copy(self._how)
        how.progress = None
        return {**self.__dict__, **here, "_how": how, "_staged": staged, "_plans_before": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stager = HostStager()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id can be a path of the local file system, or a URL that can be saved to."""
        scheme, is_url, _ = os.fspath(checkpoint_id).partition("://")
        return not is_url or scheme.lower() in ("file", "s3", "gs", "az")


@dataclasses.dataclass(frozen=True)
class _Told:
    """What the coordinator tells a rank in its plan.

    Attributes:
        place: which part of which save it writes.
        remembered: the plan is the one that the rank's planner remembers.
    """

    place: Place
    remembered: bool = False


@dataclasses.dataclass(frozen=True)
class _Staged:
    """A state dict that was copied for the next save.

    Attributes:
        staging: the copy; None in another process, to which the writer was sent.
        parent: the parent, as it is for a save of the copy.
        ranks: how many there were; 0: no process group.
    """

    staging: Staging | None
    parent: Parent | None
    ranks: int


def _ranks() -> int:
    """Return how many ranks there are; 0 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
