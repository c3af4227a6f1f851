"""``RsWriter``: a storage writer of DCP, which also stages for ``dcp.async_save``."""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
import sys
import uuid
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
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
from dcp_rs._arguments import choose_argument, suggest_option
from dcp_rs._reports import short_repr
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs._url import StrPath, absolute, location
from dcp_rs.checkpoint.folders import rank_index_name, warn_of_foreign_model
from dcp_rs.engine.destination import Destination
from dcp_rs.engine.metadata import tensor_flags
from dcp_rs.engine.ranks import has_group
from dcp_rs.engine.reports import Phases, SaveReport
from dcp_rs.engine.save import (
    SaveOptions,
    SaveTicket,
    WrittenFiles,
    commit_files,
    write_files,
)
from dcp_rs.engine.writes import Entry, Writes, as_object, check_complete, refuse_meta
from dcp_rs.errors import PlanError, SaveInProgressError, UnsupportedError
from dcp_rs.options import WriteOptions, WriterArguments, given, job_size, take_options
from dcp_rs.tensors import pickles
from dcp_rs.tensors.dtypes import NAMES
from dcp_rs.tensors.memory import clone, memory_of, why_not_raw
from dcp_rs.transfer.stage import stage


class RsWriter(StorageWriter, BlockingAsyncStager):
    """Storage writer for ``dcp.save(state_dict, storage_writer=RsWriter(path))``.

    A checkpoint that is at ``path`` already stays whole until the new one is complete. Then one
    rename replaces it. Files that dcp-rs did not write stay. If two jobs save to one URL at the
    same time, one wins and the other raises.

    Args:
        path: the folder, which is created if needed; or its URL: ``s3://``, ``gs://``, ``az://``.
        threads, fsync, io, max_inflight_bytes: see :class:`dcp_rs.options.WriteOptions`.
        overwrite: ``False`` raises if there is a checkpoint already. ``True`` warns if this
            process has neither opened nor saved it.
        strict_values: raise for values that do not load under ``weights_only=True``, and for keys
            that would come back as text. By default they are saved with a warning.
        progress: ``True`` draws a bar on the first rank, on a terminal and in notebooks. A
            callable is called on its rank with the bytes written so far and the bytes to write. It
            has no effect if another process saves (``AsyncCheckpointerType.PROCESS``).
        parent: an earlier checkpoint. Entries that it holds with the same name, place, shape,
            dtype and content are not written again. Their data files are linked, so that each
            checkpoint is whole without the other. A store copies them, if both are in one bucket
            and ``storage_options`` reach both. Where that is not possible, everything is written,
            and a warning says why.
        reuse: globs over names of tensors that do not change from save to save. They are written
            apart. If the parent's save had the same ``reuse``, only the first MiB of each is
            compared.
        verify_reuse: read the reused data of ``parent``, and write again what does not match its
            digests.
        storage_options: for a URL, see :class:`RsReader`. Secrets are not pickled: a save in
            another process takes them from its environment.
        save_id: a UUID for the first save with this writer; the coordinator's counts. Default: a
            random one. A save in another process has a random one.
        guard: called once on the coordinator. It returns a context manager, in which the commit
            runs. If entering that raises, nothing is committed.
        thread_count, sync_files: ``threads`` and ``fsync``, as torch's ``FileSystemWriter`` names
            them.
        single_file_per_rank, per_thread_copy_ahead, serialization_format, cache_staged_state_dict:
            arguments of torch's ``FileSystemWriter``, without effect.

    Attributes:
        report: the :class:`dcp_rs.SaveReport` of the last save on this rank; None before it. The
            log ``dcp_rs`` has it as one line.

    Raises:
        ValueError: an option has an invalid value, or is given under two names.
        CheckpointExistsError: with ``overwrite=False``, there is a checkpoint, or another save was
            committed meanwhile.
        SaveInProgressError: the writer was used for two saves at a time.
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

    _written: WrittenFiles | None = None  # until it is committed

    @suggest_option
    def __init__(
        self,
        path: StrPath,
        single_file_per_rank: bool = True,
        sync_files: bool | None = None,
        thread_count: int | None = None,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = None,
        **options: Unpack[WriterArguments],
    ) -> None:
        BlockingAsyncStager.__init__(self)
        if _extensions:
            names = ", ".join(type(extension).__name__ for extension in _extensions)
            msg = (
                f"RsWriter cannot apply _extensions ({names}): "
                "the data would be stored without them"
            )
            raise UnsupportedError(msg, path=path)
        given = take_options(RsWriter.__init__, options)
        fsync = choose_argument("fsync", given.get("fsync"), "sync_files", sync_files)
        threads = choose_argument("threads", given.get("threads"), "thread_count", thread_count)
        given |= {"threads": threads, "fsync": True if fsync is None else fsync}
        self._options = SaveOptions.of(given | {"overwrite": overwrite})
        self.path = location(path)
        self.save_id = str(self._options.save_id)
        self.report: SaveReport | None = None
        self._staged_ranks: int | None = None  # of a copy that the next save writes
        self._is_used = False  # files were written under this save id
        # Of the present save, from set_up_storage_writer() on:
        self._to: Destination
        self._is_coordinator: bool
        self._clock: Phases
        self._generation: int  # the coordinator knows it

    def __repr__(self) -> str:
        options, parent = self._options, self._options.parent
        shown = given(options.write)
        if not options.overwrite:
            shown["overwrite"] = False
        if options.strict_values:
            shown["strict_values"] = True
        if parent is not None and parent.path is not None:
            shown["parent"] = os.fspath(parent.path)
        return short_repr(self, repr(os.fspath(self.path)), **shown)

    @property
    def options(self) -> WriteOptions:
        """How bytes are written."""
        return self._options.write

    @property
    def overwrite(self) -> bool:
        """A checkpoint that is there is replaced."""
        return self._options.overwrite

    @property
    def checkpoint_id(self) -> StrPath:
        """The path, as DCP calls it."""
        return self.path

    # --- DCP's protocol, in the order of the calls ------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state dict to host memory, for ``dcp.async_save``."""
        self._staged_ranks = job_size()
        self.path = absolute(self.path)  # until the save begins, the current folder may change
        if self._staged_ranks == 0 or dist.get_rank() == 0:
            warn_of_foreign_model(self.path)  # here, as a thread or a process saves
        return stage(state_dict)

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin a new save, and take another path if one is given."""
        self._discard_failed()
        if checkpoint_id:
            self.path = location(checkpoint_id)
        self._renew_id()

    def storage_meta(self) -> StorageMeta | None:
        """Return the path and the id of this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save. Torch passes the rank, and ``use_collectives``.

        Raises:
            PlanError: torch calls it for all ranks, and there is no process group of these.
        """
        if self._is_used:  # a save with the same writer, without reset()
            self._renew_id()
        use_collectives = kwargs.get("use_collectives", True)
        rank = None if use_collectives else kwargs.get("rank") or 0
        self._to = Destination(
            self.path, self._options.storage_options, rank=rank, overwrite=self.overwrite
        )
        self._is_coordinator = is_coordinator
        self._clock = Phases()
        ranks, self._staged_ranks = self._staged_ranks, None
        if ranks is None and is_coordinator:
            warn_of_foreign_model(self.path)
        if ranks is not None and ranks > 1 and job_size() == 0:
            # torch takes that for a save of one rank, and each rank would commit its part alone.
            msg = (
                f"the process group of {ranks} ranks was destroyed before the save that was "
                "staged under it began: wait for its future first"
            )
            raise PlanError(msg, path=self.path)
        if kwargs.get("use_collectives"):
            has_group()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder, and check that it may be saved to. The coordinator begins the save."""
        self._to.prepare()
        if self._is_coordinator or self._to.rank is not None:
            self._generation = self._to.begin()
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Add the ticket of each rank to its plan."""
        save_id = uuid.UUID(self.save_id).bytes
        ranks = [(rank, len(plans)) for rank in range(len(plans))]
        if self._to.rank is not None:
            ranks = [(self._to.rank, 0)]
        return [
            dataclasses.replace(
                plan, storage_data=SaveTicket(rank, size, save_id, self._generation)
            )
            for plan, (rank, size) in zip(plans, ranks, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's data files. The result carries this rank's index."""
        ticket = plan.storage_data
        # A cached plan would carry the ids of this save into the next one.
        _torch.forget_plans(planner)
        if not isinstance(ticket, SaveTicket):
            raise PlanError(
                "this rank was not told which part of the save it is: a writer's "
                "prepare_global_plan was skipped, or torch's planner had cached the plan of a "
                "save by another writer (enable_plan_caching=True). Save again"
            )
        self.save_id, self._is_used = str(uuid.UUID(bytes=ticket.save_id)), True
        self._clock.end("plan")
        self._discard_failed()  # all ranks have come here, so the save before is over
        writes = resolve_items(
            plan,
            planner,
            strict=self._options.strict_values,
            is_partial=ticket.world_size != 1 or job_size() <= 1,
        )
        written = write_files(writes, self._to, ticket, self._options, self._clock)
        self._written = written
        self.report = written.report
        if not self._is_coordinator and self._to.rank is None:
            self._clock.report(self.report)  # the coordinator reports in finish()
        result = WriteResult(
            index=MetadataIndex(rank_index_name(ticket.rank)),
            size_in_bytes=written.save.bytes,
            storage_data=zlib.compress(written.index, 1),  # to a sixth of its size
        )
        (future := Future[list[WriteResult]]()).set_result([result])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Merge the indexes of all ranks, and commit the checkpoint."""
        handled = sys.exception()
        indexes = [zlib.decompress(each.storage_data) for of_rank in results for each in of_rank]
        written = self._written
        if written is None or written.index not in indexes:
            msg = "this writer wrote nothing for this save: give each save a writer of its own"
            raise SaveInProgressError(msg, path=self.path)
        try:
            lazy = commit_files(
                written,
                indexes,
                self._options,
                self._clock,
                planner_data=metadata.planner_data,
                items=None,
                names=metadata.state_dict_metadata,
            )
        except BaseException as error:
            self.close()
            # Other ranks may not hear of it.
            written.to.give_up(indexes, error, handled)
            raise
        self.close()
        self._clock.report(written.report)
        vars(metadata).update(vars(lazy))

    def close(self) -> None:
        """Unlock the files of this save: it is over, or :func:`dcp_rs.clean` removes them."""
        written, self._written = self._written, None
        if written is not None:
            written.release()

    # --- a save -----------------------------------------------------------------------------------

    def _renew_id(self) -> None:
        self.save_id, self._is_used = str(uuid.uuid4()), False

    def _discard_failed(self) -> None:
        """Remove the files of the save before, which did not end.

        On a store, the commit of another rank may still be on its way. The files stay there, for
        :func:`dcp_rs.clean`.
        """
        if self._written is not None and self._written.to.store is None:
            self._written.discard()
        self.close()

    def __del__(self) -> None:
        self._discard_failed()

    def __getstate__(self) -> dict[str, Any]:
        # A save in another process begins anew there. torch sends the staged state dict itself.
        options = dataclasses.replace(self._options, progress=None)
        # torch sends the same writer for each save, and each save needs an id of its own.
        return {
            **self.__dict__,
            **dict.fromkeys(("_to", "_written")),
            "_options": options,
            "_is_used": True,
        }

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return true if the id can be a path of the file system, or a URL to save to."""
        scheme, is_url, _ = os.fspath(checkpoint_id).partition("://")
        return not is_url or scheme.lower() in ("file", "s3", "gs", "az")


# --- items ----------------------------------------------------------------------------------------


def resolve_items(
    plan: SavePlan, planner: SavePlanner, *, strict: bool, is_partial: bool
) -> Writes:
    """Resolve the items of this rank's plan.

    Args:
        plan, planner: as in ``write_data``.
        strict: raise in place of warnings.
        is_partial: other ranks may save parts of the tensors.

    Raises:
        UnsupportedError: a value cannot be stored.
        UnsafePickleError: with ``strict``, a value would not load under ``weights_only=True``.
        PlanError: the planner resolved something else than it planned.
    """
    paths: Mapping[str, Any] = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
    state_dicts = _state_dicts(planner)
    values = state_dicts[0] if state_dicts else {}
    known = {place for one in state_dicts for value in one.values() for place in _storages(value)}
    whole: list[WriteItem] = []
    tensors: list[Any] = []
    entries: list[Entry] = []
    for item in plan.items:
        data = planner.resolve_data(item)
        fqn, is_raw = item.index.fqn, True
        if isinstance(data, torch.Tensor):
            data = _torch.wait_tensor(data)
            if not _is_strided(data) or _torch.storage_id(data) not in known:
                # A planner may resolve each item in the memory of the one before, as torch's
                # writer writes one before it asks for the next.
                is_raw = data.is_meta or why_not_raw(data) is None
                data = clone(data).requires_grad_(data.requires_grad) if is_raw else data
        if is_raw and _is_whole(item):
            whole.append(item)
            tensors.append(data)
        else:
            entries.append(_entry(item, data, paths.get(fqn)))
            if isinstance(data, io.BytesIO) and fqn in values:
                pickles.warn_unless_loadable(fqn, values[fqn], data.getvalue(), strict=strict)
    if not is_partial:
        by_name = itertools.groupby(sorted(entries, key=lambda entry: entry.fqn), lambda e: e.fqn)
        for fqn, parts in ((fqn, list(parts)) for fqn, parts in by_name):
            check_complete(fqn, parts[0].shape, parts)
    core = _core.SavePlan()
    names = [item.index.fqn for item in whole]
    where = [paths.get(name) for name in names]
    shapes = [item.tensor_data.size for item in whole if item.tensor_data]
    others = core.add_plain(names, where, tensors, PLAIN_TYPES, NAMES, shapes=shapes)
    entries += [_entry(whole[i], tensors[i], where[i]) for i in others]
    core.add([entry.item() for entry in entries])
    return Writes(core, tensors, entries)


def _is_whole(item: WriteItem) -> bool:
    """Return true if the item is a whole tensor."""
    data: TensorWriteData | None = item.tensor_data
    if item.type != WriteItemType.TENSOR or data is None:
        return False
    return data.chunk.sizes == data.size and not any(data.chunk.offsets)


def _entry(item: WriteItem, data: torch.Tensor | io.BytesIO, path: Any) -> Entry:
    """Return the entry that stores what a planner resolved for an item."""
    fqn = item.index.fqn
    path = path if isinstance(path, tuple) else None
    if item.type == WriteItemType.BYTE_IO and isinstance(data, io.BytesIO):
        return Entry(fqn, data.getvalue(), path=path)
    if not isinstance(data, torch.Tensor) or item.tensor_data is None:
        type_name = type(data).__name__
        msg = f"{fqn!r}: the planner resolved a {type_name} for an item {item.type.name}"
        raise PlanError(msg, tensor=fqn)
    tensor = _torch.wait_tensor(data.detach())
    refuse_meta(fqn, tensor)
    if why_not_raw(tensor) is not None:
        return Entry(fqn, as_object(fqn, tensor), path=path)
    chunk = item.tensor_data.chunk
    if 0 in chunk.sizes and not tensor.numel():
        # FSDP2 does not keep the shape of a shard that tensor parallelism left without elements.
        tensor = tensor.new_empty(chunk.sizes)
    if tuple(tensor.shape) != tuple(chunk.sizes):
        msg = (
            f"tensor {fqn!r}: the planner resolved {tuple(tensor.shape)} "
            f"for a chunk of {tuple(chunk.sizes)}"
        )
        raise PlanError(msg, tensor=fqn)
    return Entry(
        fqn,
        tensor,
        shape=tuple(item.tensor_data.size),
        offsets=tuple(chunk.offsets),
        sizes=tuple(chunk.sizes),
        flags=tensor_flags(item.tensor_data.properties),
        path=path,
    )


def _state_dicts(planner: object, above: tuple[object, ...] = ()) -> list[Mapping[str, Any]]:
    """Return the state dicts of a planner and of the planners that it wraps.

    Args:
        planner: the planner.
        above: the planners that wrap it.
    """
    own = getattr(planner, "state_dict", None)
    found = [own] if isinstance(own, Mapping) else []
    above = (*above, planner)
    for inner in getattr(planner, "__dict__", {}).values():
        if isinstance(inner, SavePlanner) and not any(inner is one for one in above):
            found += _state_dicts(inner, above)
    return found


def _storages(value: Any) -> list[int]:
    """Return the storages that hold the elements of a value of a state dict."""
    if isinstance(value, ShardedTensor):
        return [place for shard in value.local_shards() for place in _storages(shard.tensor)]
    if not isinstance(value, torch.Tensor) or not _is_strided(value):
        return []
    if type(value) in PLAIN_TYPES:  # as most are, and this is fast
        return [_torch.storage_id(value)]
    with torch.no_grad():
        return [_torch.storage_id(part.tensor) for part in memory_of(value)]


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested
