"""``RsReader``: a storage reader of DCP over an index."""

from __future__ import annotations

import dataclasses
import io
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Unpack

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_rs import _core, _torch
from dcp_rs._arguments import choose_argument, suggest_option
from dcp_rs._log import current_rank
from dcp_rs._progress import Counts, watching
from dcp_rs._reports import short_repr
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs._url import StrPath, location
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.locate import LoadSource
from dcp_rs.checkpoint.metadata import warn_of_left_out
from dcp_rs.checkpoint.open import Checkpoint
from dcp_rs.dcp.load_planner import RsLoadPlanner
from dcp_rs.engine import cache_sharing
from dcp_rs.engine.load import check_same_save
from dcp_rs.engine.matching import warn_of_left_out_state
from dcp_rs.engine.metadata import index_of, make_metadata
from dcp_rs.engine.reports import LoadReport, Phases
from dcp_rs.errors import (
    CheckpointNotFoundError,
    PlanError,
    UnsupportedError,
)
from dcp_rs.options import ReaderArguments, ReadOptions, take_options
from dcp_rs.tensors import pickles
from dcp_rs.transfer.load import fill, fill_tensor, read_values
from dcp_rs.transfer.target import Target, stored_dtype

#: Bytes of destinations that are resolved before they are filled. A planner may allocate each.
BATCH_BYTES = 256 << 20


class RsReader(StorageReader):
    """Storage reader for ``dcp.load(state_dict, storage_reader=RsReader(path))``.

    Args:
        path: a folder of dcp-rs, Hugging Face or stock DCP, a ``.safetensors`` file, a file of
            ``torch.save``, or the URL of one on a store: ``s3://``, ``gs://``, ``az://``,
            ``http://``, ``https://``.
        io, threads, verify, shared, max_inflight_bytes: see :class:`dcp_rs.options.ReadOptions`.
        weights_only: check that each value loads under ``torch.load(weights_only=True)`` before a
            planner gets it, as stock planners unpickle anything. That is the default. Pass
            ``False`` only for checkpoints that you wrote yourself.
        allow_external: open data files outside of the checkpoint's folder, if its index names any.
        replicas: who reads what several ranks need, such as the model under DDP. ``"each"``, the
            default: every rank reads for itself. ``"node"``: the ranks of a node
            (``LOCAL_WORLD_SIZE`` of them) read a part each and send it to the others. ``"all"``:
            all ranks do so. Pieces that are sent are bounded by ``max_inflight_bytes``. It takes
            effect in :func:`dcp_rs.load` and :func:`dcp_rs.load_state_dict`, and not with a planner
            of your own.
        storage_options: for a URL, how to reach the store. Names and values are those of the Rust
            crate ``object_store`` (``aws_endpoint``, ``aws_region``, ``aws_access_key_id``, ...),
            and ``max_retries``, ``retry_timeout`` and ``read_timeout`` (in seconds). Or pass a
            store of ``obstore``, whose options are taken. The rest comes from the environment.
            Secrets are not pickled with the reader.
        tiers: folders that may have some of the checkpoint's files, such as the copy of it on a
            local disk. Each data file is read from the first of them that has it, in its full
            length, and otherwise from ``path``. A file of another length, or one that a read finds
            damaged (``verify=True`` finds all damage), is passed over with a warning. If ``path``
            has no index, or cannot be reached, that of a tier counts.
        dequantize: the dtype that quantized weights become; ``True`` means ``torch.bfloat16``. The
            format is detected by ``config.json`` and by names. Other tensors keep their dtype.
        views: how stored tensors are joined, cut or transposed after that: :class:`dcp_rs.Stack`
            and its relatives, one after another.
        progress: ``True`` draws a bar on the first rank, on a terminal and in notebooks. A
            callable is called on its rank with the bytes loaded so far and the bytes to load.
        thread_count: ``threads``, as torch's ``HuggingFaceStorageReader`` names it.
        token, _extension_registry: arguments of torch's readers, without effect. Data that was
            stored through extensions is refused.

    Attributes:
        report: the :class:`dcp_rs.LoadReport` of the last load; None before it. The log ``dcp_rs``
            has it as one line.

    Raises:
        CheckpointNotFoundError, CorruptIndexError, UnsupportedError: the metadata cannot be read.
            Under ``dcp.load``, errors of :meth:`read_metadata` become an ``AssertionError``.
        CheckpointReplacedError: another save replaced the checkpoint after its metadata was read.
            ``dcp_rs.load`` and ``dcp_rs.load_state_dict`` then load the new one.
        CorruptDataError: a data file is missing, has another length, or does not match its digests.
        UnsafePickleError: a value does not load under ``weights_only=True``.
        StorageError: a store cannot be reached, or refuses a request.
        QuantizationError: quantized weights have an unknown format, or a part that does not fit.
        PlanError: a plan asks for what the checkpoint does not have.

    Example:
        ```python
        state = {"model": model.state_dict()}
        dcp.load(state, storage_reader=dcp_rs.RsReader("ckpt", verify=True))
        ```
    """

    @suggest_option
    def __init__(
        self,
        path: StrPath,
        *,
        thread_count: int | None = None,
        token: str | None = None,
        _extension_registry: Any = None,
        **options: Unpack[ReaderArguments],
    ) -> None:
        super().__init__()
        given = take_options(RsReader.__init__, options)
        threads = given.get("threads")
        given["threads"] = choose_argument("threads", threads, "thread_count", thread_count)
        self._source = LoadSource.of(path, given)
        self.report: LoadReport | None = None
        self.load_id = str(uuid.uuid4())
        self._index: _core.Index | None = None
        self._is_of_all = True
        self._sample: _core.Sample | None = None  # of what this rank reads
        self._clock = Phases()

    @property
    def path(self) -> os.PathLike[str]:
        """The path."""
        return self._source.path

    def __repr__(self) -> str:
        return short_repr(self, repr(os.fspath(self.path)), **self._source.given())

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin a new load, and take another path if one is given."""
        if checkpoint_id:
            self._source = dataclasses.replace(self._source, path=location(checkpoint_id))
        self.load_id = str(uuid.uuid4())
        self._index = self._sample = None

    @property
    def checkpoint_id(self) -> StrPath:
        """The path, as DCP calls it."""
        return self.path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open the index of all ranks. ``rank=r`` opens the rank-local save of that rank.

        Raises:
            CheckpointNotFoundError: with ``rank``: there is a checkpoint of all ranks, which comes
                first, or there is none of this rank.
        """
        self._clock = Phases()
        rank = kwargs.get("rank")
        self._index, is_of_all = self._source.open(rank)
        if rank is not None and is_of_all:
            msg = f"the checkpoint is one of all ranks, and none of rank {rank} alone: {self.path}"
            raise CheckpointNotFoundError(msg, path=self.path)
        if not current_rank():
            warn_of_left_out(self._index)
        metadata = make_metadata(
            self._index,
            rank=rank,
            checkpoint_id=os.fspath(self.path),
            load_id=self.load_id,
            storage_options=self._source.storage_options,
            views=self._source.views,
        )
        self._clock.end("metadata")
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the index from the metadata, which may come from another process."""
        self._index = index_of(metadata) or self._index
        self._is_of_all = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the id of the save, and what this rank reads, for the other ranks."""
        index = self._open_once()

        def regions() -> list[cache_sharing.Region]:
            items = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
            chunks = _locate(index, items)
            return [
                (chunk, True, item.storage_offsets, item.lengths)
                for chunk, item in zip(chunks, items, strict=True)
            ]

        if not self._is_of_all:
            return dataclasses.replace(plan, storage_data=_Note())
        self._sample = None
        with suppress(PlanError):  # `finish_plan` may leave out what the checkpoint lacks
            self._sample = cache_sharing.sample_of(index, self._source.read, regions)
        shared = None if self._sample is None else cache_sharing.share(self._sample)
        note = _Note(is_of_all=True, save_id=index.save_id, sample=shared)
        return dataclasses.replace(plan, storage_data=note)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks opened the same save, and tell each what the others read.

        Raises:
            CheckpointReplacedError: another save was committed while the ranks opened it.
        """
        notes = [plan.storage_data for plan in plans]
        own = [note for note in notes if isinstance(note, _Note)]
        check_same_save(((note.is_of_all, note.save_id) for note in own), self.path)
        samples = [note.sample if isinstance(note, _Note) else None for note in notes]
        return [
            dataclasses.replace(plan, storage_data=reply)
            for plan, reply in zip(plans, cache_sharing.compare_samples(samples), strict=True)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors that ``planner`` resolves, and load values. The future is done."""
        source = self._source
        if source.replicas != "each":
            warn_caller(
                "replicas= has no effect under dcp.load, or with a planner of your own, as these "
                "name each item: use dcp_rs.load()"
            )
        index, clock = self._open_once(), self._clock
        clock.end("plan")
        warn_of_left_out_state(index, [item.storage_index.fqn for item in plan.items], ())
        with watching(source.progress, "loading") as watch:
            counts = Counts(watch=watch)
            options = source.read if self._is_of_all else source.read.alone()
            common, reply = None, plan.storage_data
            if isinstance(reply, tuple):
                common = cache_sharing.common_reads(self._sample, reply)
            tensors, values = _located(index, plan)
            if watch is not None:
                counts.expected = sum(
                    item.lengths.numel() * stored_dtype("", index.dtype_of(chunk)).itemsize
                    for chunk, item in tensors
                )
            stored = read_values(index, [chunk for chunk, _ in values], options, counts)
            path = os.fspath(self.path)
            for (_, item), data in zip(values, stored, strict=True):
                if _fill_from_value(
                    planner, item, data, weights_only=source.weights_only, path=path
                ):
                    continue
                if source.weights_only:
                    pickles.check_loadable(item.storage_index.fqn, data, path=path)
                planner.load_bytes(item, io.BytesIO(data))
            _read_tensors(index, tensors, planner, options, counts, common)
            if watch is not None and counts.expected:
                watch(counts.expected, counts.expected)  # hidden destinations were not read
        clock.end("read")
        self.report = planner.report if isinstance(planner, RsLoadPlanner) else LoadReport()
        self.report._finish(os.fspath(self.path), counts, clock, index)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_value(self, fqn: str) -> Any:
        """Read a value, or a tensor into host memory, without a planner.

        Raises:
            KeyError: the checkpoint has no such entry.
        """
        source = self._source
        checkpoint = Checkpoint(
            self._open_once(), weights_only=source.weights_only, options=source.read
        )
        return checkpoint[fqn]

    @property
    def source(self) -> str:
        """The format of the data files: ``dcp-rs``, ``safetensors``, ``dcp`` or ``torch``."""
        return self._open_once().source

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return true if the id can be a path of the file system, or a URL of a store."""
        try:
            location(checkpoint_id)
        except UnsupportedError:
            return False
        return True

    def _open_once(self) -> _core.Index:
        if self._index is None:
            self._index, _ = self._source.open()
        return self._index

    def __getstate__(self) -> dict[str, Any]:
        # An open index and a callable stay in this process.
        source = dataclasses.replace(self._source, progress=None)
        return {**self.__dict__, "_source": source, "_index": None, "_sample": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Note:
    """Note of a rank for the coordinator, in ``plan.storage_data``.

    Attributes:
        is_of_all: it opened a save of all ranks.
        save_id: the id of that save; None for a rank-local save.
        sample: a sample of the rank's reads.
    """

    is_of_all: bool = False
    save_id: str | None = None
    sample: cache_sharing.ReadSample | None = None


#: A read item, and the number of the stored chunk that has it.
_Located = tuple[int, ReadItem]


def _locate(index: _core.Index, items: Sequence[ReadItem]) -> list[int]:
    """Return the number of the chunk that each item reads."""
    keys = [item.storage_index for item in items]
    return index.locate([(key.fqn, key.offset, key.index) for key in keys])


def _located(index: _core.Index, plan: LoadPlan) -> tuple[list[_Located], list[_Located]]:
    """Return the items of a plan that are tensors, and those that are values.

    The tensors are in the order of torch's readers: file by file, as the plan first needs them.
    """
    chunks = _locate(index, plan.items)
    index.check_files(chunks)
    tensors: list[_Located] = []
    values: list[_Located] = []
    for chunk, item in zip(chunks, plan.items, strict=True):
        (values if item.type == LoadItemType.BYTE_IO else tensors).append((chunk, item))
    by_file: dict[int, list[_Located]] = {}
    for file, located in zip(index.files_of([n for n, _ in tensors]), tensors, strict=True):
        by_file.setdefault(file, []).append(located)
    return [located for of_file in by_file.values() for located in of_file], values


def _read_tensors(
    index: _core.Index,
    items: list[_Located],
    planner: LoadPlanner,
    options: ReadOptions,
    counts: Counts,
    common: _core.SharedSections | None,
) -> None:
    """Fill the destinations that the planner resolves, and commit them.

    Raises:
        PlanError: the planner resolved a tensor of another shape.
    """
    resolve: Callable[[ReadItem], torch.Tensor] = planner.resolve_tensor
    limit = BATCH_BYTES
    if not _overrides(planner, "resolve_tensor", "lookup_tensor", "transform_tensor"):
        resolve, limit = partial(_resolve, planner), sys.maxsize  # the memory of the state dict
    commits = _overrides(planner, "commit_tensor")
    if commits:
        # As in torch's readers: items may be resolved to one buffer, one after another.
        limit = 0
    targets: list[Target] = []
    nbytes = 0
    for chunk, item in items:
        tensor = resolve(item)
        fqn = item.storage_index.fqn
        if tensor.shape != item.lengths:
            msg = (
                f"tensor {fqn!r}: the planner resolved {tuple(tensor.shape)} "
                f"for a read of {tuple(item.lengths)}"
            )
            raise PlanError(msg, tensor=fqn)
        values = tensor.detach() if tensor.requires_grad else tensor
        dtype = stored_dtype(fqn, index.dtype_of(chunk))
        place = len(targets)
        targets.append(
            Target(chunk, item.storage_offsets, values, fqn, dtype, place, of_chunk=True)
        )
        nbytes += values.nbytes
        if nbytes >= limit:
            _fill(index, targets, options, counts, common)
            targets, nbytes = [], 0
        if commits:
            with torch.no_grad():  # a planner may copy from a tensor that requires grad
                planner.commit_tensor(item, tensor)
    _fill(index, targets, options, counts, common)


def _resolve(planner: Any, item: ReadItem) -> torch.Tensor:
    """Resolve as torch's planner, without its 20 microseconds for a whole plain tensor."""
    value = planner.state_dict.get(item.dest_index.fqn)
    is_whole = (
        type(value) in PLAIN_TYPES and value.shape == item.lengths and not _torch.is_shard(value)
    )
    tensor: torch.Tensor = value if is_whole else planner.resolve_tensor(item)
    return tensor


def _fill_from_value(
    planner: Any, item: ReadItem, data: bytes, *, weights_only: bool, path: str
) -> bool:
    """Fill a tensor that is stored as a value, as torch's ``load_bytes`` would replace it.

    Returns:
        False if the entry is no tensor, or a user overrides the method.
    """
    fqn = item.dest_index.fqn
    tensor = getattr(planner, "state_dict", {}).get(fqn)
    if not isinstance(tensor, torch.Tensor) or _overrides(planner, "load_bytes"):
        return False
    value = pickles.load(fqn, data, weights_only=weights_only, path=path)
    return fill_tensor(fqn, tensor, value)


def _fill(
    index: _core.Index,
    targets: list[Target],
    options: ReadOptions,
    counts: Counts,
    common: _core.SharedSections | None,
) -> None:
    try:
        fill(index, targets, options, counts, common)
    finally:
        # A failed read may have filled some. Autograd refuses gradients of changed tensors.
        torch.autograd.graph.increment_version([target.tensor for target in targets])


#: Methods of torch's planner and of ours, as they are before a user patches a class.
_STOCK_METHODS = {
    DefaultLoadPlanner.resolve_tensor,
    DefaultLoadPlanner.lookup_tensor,
    DefaultLoadPlanner.transform_tensor,
    DefaultLoadPlanner.commit_tensor,
    DefaultLoadPlanner.load_bytes,
    RsLoadPlanner.load_bytes,
}


def _overrides(planner: LoadPlanner, *names: str) -> bool:
    """Return true if a user overrides a method: in a subclass, on the object, or in the class."""
    methods = [getattr(getattr(planner, name, None), "__func__", None) for name in names]
    return not _STOCK_METHODS.issuperset(methods)
