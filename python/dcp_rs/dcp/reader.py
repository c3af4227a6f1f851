"""``RsReader``: DCP's ``StorageReader`` over an index."""

from __future__ import annotations

import dataclasses
import io
import os
import sys
import uuid
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_rs import _core
from dcp_rs._progress import Counts, Progress, watching
from dcp_rs._shown import call
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs._url import StorageOptions, location
from dcp_rs.checkpoint.locate import is_of_all_ranks
from dcp_rs.checkpoint.open import Checkpoint
from dcp_rs.checkpoint.views import Layout, LayoutView
from dcp_rs.dcp.load_planner import RsLoadPlanner
from dcp_rs.dcp.stock_arguments import one_of, say_ignored
from dcp_rs.engine.load import Source
from dcp_rs.engine.matching import warn_of_left_out_state
from dcp_rs.engine.metadata import index_of, make_metadata
from dcp_rs.engine.reports import LoadReport, Phases
from dcp_rs.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    PlanError,
    UnsupportedError,
)
from dcp_rs.options import ReadOptions, checks_pickles
from dcp_rs.tensors import pickles
from dcp_rs.transfer.load import fill
from dcp_rs.transfer.target import Target, stored_dtype

__all__ = ["ItemReads", "RsReader"]

#: So many bytes of destinations are resolved and filled together, where a planner may make a new
#: tensor for each.
BATCH_BYTES = 256 << 20


class ItemReads:
    """What one rank reads, item by item.

    Args:
        index: of the checkpoint.
        options: how to read.
        counts: what is read is added here.
        planner: resolves items, and hears when they are filled.
        weights_only: check that every value loads under ``torch.load(weights_only=True)`` before
            the planner gets it.
    """

    def __init__(
        self,
        index: _core.Index,
        options: ReadOptions,
        counts: Counts,
        planner: LoadPlanner,
        *,
        weights_only: bool,
    ) -> None:
        self._index = index
        self._options = options
        self._counts = counts
        self._planner = planner
        self._weights_only = weights_only

    def read(self, plan: LoadPlan) -> None:
        """Fills what the planner resolves for the items of ``plan``, and commits it.

        Raises:
            PlanError: the planner resolved something of another shape.
            UnsafePickleError: with ``weights_only``, a value that needs more.
        """
        index = self._index
        chunks = index.locate(
            [
                (item.storage_index.fqn, item.storage_index.offset, item.storage_index.index)
                for item in plan.items
            ]
        )
        index.check_files(chunks)
        if self._counts.watch is not None:
            self._counts.expected = sum(
                item.lengths.numel() * stored_dtype("", index.dtype_of(chunk)).itemsize
                for chunk, item in zip(chunks, plan.items, strict=True)
                if item.type != LoadItemType.BYTE_IO
            )
        tensors = [
            (c, item)
            for c, item in zip(chunks, plan.items, strict=True)
            if item.type != LoadItemType.BYTE_IO
        ]
        values = [
            (c, item)
            for c, item in zip(chunks, plan.items, strict=True)
            if item.type == LoadItemType.BYTE_IO
        ]
        self._read_values(values)
        self._read_tensors(tensors)

    def _read_tensors(self, items: list[tuple[int, ReadItem]]) -> None:
        index, planner = self._index, self._planner
        resolve, limit = planner.resolve_tensor, BATCH_BYTES
        if isinstance(planner, DefaultLoadPlanner) and _resolves_in_place(planner):
            resolve, limit = partial(_resolve, planner), sys.maxsize
        if _commits(planner):
            # As torch's readers: one is committed before the next is resolved, and may be resolved
            # to the same memory
            limit = 0
        batch: list[tuple[ReadItem, torch.Tensor]] = []
        targets: list[Target] = []
        batch_bytes = 0
        for chunk, item in _file_by_file(index, items):
            tensor = resolve(item)
            fqn = item.storage_index.fqn
            if tensor.shape != item.lengths:
                msg = f"tensor {fqn!r}: the planner resolved {tuple(tensor.shape)} for a read of {tuple(item.lengths)}"
                raise PlanError(msg, tensor=fqn)
            values = tensor.detach() if tensor.requires_grad else tensor
            dtype = stored_dtype(fqn, index.dtype_of(chunk))
            targets.append(
                Target(chunk, item.storage_offsets, values, fqn, dtype, len(batch), of_chunk=True)
            )
            batch.append((item, tensor))
            batch_bytes += values.nbytes
            if batch_bytes >= limit:
                self._fill(batch, targets)
                batch, targets, batch_bytes = [], [], 0
        self._fill(batch, targets)

    def _fill(self, batch: list[tuple[ReadItem, torch.Tensor]], targets: list[Target]) -> None:
        try:
            fill(self._index, targets, self._options, self._counts)
        # What failed may have filled some, and autograd refuses gradients that need the old values
        finally:
            torch.autograd.graph.increment_version([target.tensor for target in targets])
        if _commits(self._planner):
            with (
                torch.no_grad()
            ):  # a resolved tensor may require grad, and a planner may copy from it
                for item, tensor in batch:
                    self._planner.commit_tensor(item, tensor)

    def _read_values(self, items: list[tuple[int, ReadItem]]) -> None:
        stored = self._index.read_bytes([c for c, _ in items], **self._options.engine())
        nbytes = sum(map(len, stored))
        self._counts.expected += nbytes
        self._counts.add(Counts(nbytes, nbytes))
        for (_, item), data in zip(items, stored, strict=True):
            if self._weights_only:
                pickles.check_loadable(item.storage_index.fqn, data)
            self._planner.load_bytes(item, io.BytesIO(data))


#: What torch's planner resolves and commits an item by, as they are before anybody patches them.
_RESOLVING = {
    name: getattr(DefaultLoadPlanner, name)
    for name in ("resolve_tensor", "lookup_tensor", "transform_tensor")
}
_OWN = RsLoadPlanner.resolve_tensor
_COMMIT = DefaultLoadPlanner.commit_tensor


def _resolves_in_place(planner: DefaultLoadPlanner) -> bool:
    """Return whether the planner resolves memory of the state dict, so that no load has to be cut to bound what is new."""
    return all(
        getattr(getattr(planner, name), "__func__", None) in (method, _OWN)
        for name, method in _RESOLVING.items()
    )


def _commits(planner: LoadPlanner) -> bool:
    """Return whether the planner wants to hear of each item that is filled."""
    return getattr(planner.commit_tensor, "__func__", None) is not _COMMIT


def _file_by_file(
    index: _core.Index, items: list[tuple[int, ReadItem]]
) -> list[tuple[int, ReadItem]]:
    """The items in the order in which stock DCP's readers come to them."""
    files = index.files_of([chunk for chunk, _ in items])
    order = {file: number for number, file in enumerate(dict.fromkeys(files))}
    if len(order) == 1:
        return items
    return [
        item for _, item in sorted(zip(files, items, strict=True), key=lambda pair: order[pair[0]])
    ]


def _resolve(planner: DefaultLoadPlanner, item: ReadItem) -> torch.Tensor:
    """What torch's own ``resolve_tensor`` gives, without its 20 microseconds where that is all of a plain tensor."""
    held: Any = planner.state_dict.get(item.dest_index.fqn)
    whole = (
        type(held) in PLAIN_TYPES
        and held.shape == item.lengths
        and "global_shape" not in held.__dict__
    )
    tensor: torch.Tensor = held if whole else planner.resolve_tensor(item)
    return tensor


@dataclasses.dataclass(frozen=True)
class _Opened:
    """Which save a rank opened. None: a rank-local one, of which each rank has its own."""

    save_id: str | None
    is_of_all: bool


class RsReader(StorageReader):
    """Storage reader for ``dcp.load(state_dict, storage_reader=RsReader(path))``.

    Args:
        path: a folder of dcp-rs, Hugging Face or stock DCP, a ``.safetensors`` file, a file of
            ``torch.save``, or the URL of one of the first four on a store: ``s3://``, ``gs://``,
            ``az://``, ``http://``, ``https://``.
        io, threads, verify, shared, max_inflight_bytes: see :class:`dcp_rs.options.ReadOptions`.
        weights_only: check that each value loads under ``torch.load(weights_only=True)`` before a
            planner gets it, as stock planners unpickle anything. ``None`` means ``True``. Pass
            ``False`` only for checkpoints that you wrote yourself.
        allow_external: open data files outside of the checkpoint's folder, if its index names any.
        replicas: who reads what several ranks need, such as the model under DDP. ``"each"``: every
            rank reads for itself. ``"node"``: the ranks of a node (``LOCAL_WORLD_SIZE`` of them)
            read a part each and send it to the others. ``"all"``: all ranks do so. Pieces that are
            sent are bounded by ``max_inflight_bytes``. It takes effect in :func:`dcp_rs.load` and
            :func:`dcp_rs.load_state_dict`, and not with a planner of your own.
        storage_options: for a URL, how to reach the store. Names and values are those of the Rust
            crate ``object_store`` (``aws_endpoint``, ``aws_region``, ``aws_access_key_id``, ...),
            and ``max_retries``, ``retry_timeout`` and ``read_timeout`` (in seconds). Or pass a
            store of ``obstore``, whose options are taken. The rest comes from the environment.
            Secrets are not pickled with the reader.
        dequantize: the dtype that quantized weights become; ``True`` means ``torch.bfloat16``. The
            format is detected by ``config.json`` and by names. Other tensors keep their dtype.
        views: how stored tensors are joined, cut or transposed after that: :class:`dcp_rs.Stack`
            and its relatives, one after another.
        progress: ``True`` draws a bar on the first rank, on a terminal and in notebooks. A
            callable is called on its rank with the bytes loaded so far and the bytes to load.
        thread_count: ``threads``, as torch's ``HuggingFaceStorageReader`` names it. ``token`` and
            ``_extension_registry`` of torch's readers are accepted with a warning, and have no
            effect.

    Attributes:
        report: the :class:`dcp_rs.LoadReport` of the last load; None before it. The log ``dcp_rs``
            has it as one line.

    Raises:
        CheckpointNotFoundError, CorruptIndexError, UnsupportedError: the metadata cannot be read.
        CheckpointReplacedError: another save replaced the checkpoint after its metadata was read.
            ``dcp_rs.load`` and ``dcp_rs.load_state_dict`` then load the new one.
        CorruptDataError: a data file is missing, has another length, or (``verify=True``) does not
            match its digests.
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

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        io: Literal["auto", "mmap", "direct", "buffered"] = "auto",
        threads: int | None = None,
        verify: Literal["auto"] | bool = False,
        shared: bool | None = None,
        max_inflight_bytes: int | None = None,
        weights_only: bool | None = True,
        allow_external: bool = False,
        replicas: Literal["each", "node", "all"] = "each",
        storage_options: Mapping[str, Any] | Any | None = None,
        dequantize: bool | torch.dtype = False,
        views: LayoutView | Iterable[LayoutView] | None = None,
        progress: Progress = None,
        thread_count: int | None = None,
        token: str | None = None,
        _extension_registry: Any = None,
    ) -> None:
        super().__init__()
        if _extension_registry is not None:
            say_ignored(
                "RsReader",
                "_extension_registry",
                "data that was stored through extensions is refused",
            )
        if token is not None:
            say_ignored(
                "RsReader", "token", "nothing is read from the Hub; stores take storage_options="
            )
        threads = one_of("threads", threads, "thread_count", thread_count)
        self._source = Source(
            path=location(path),
            read=ReadOptions(
                io=io,
                threads=threads,
                verify=verify,
                shared=shared,
                max_inflight_bytes=max_inflight_bytes,
            ),
            weights_only=checks_pickles(weights_only),
            allow_external=allow_external,
            replicas=replicas,
            storage_options=StorageOptions.of(storage_options),
            layout=Layout.of(dequantize, views),
            progress=progress,
        )
        self.report: LoadReport | None = None
        self.load_id = str(uuid.uuid4())
        self._index: _core.Index | None = None
        self._is_of_all = True
        self._clock = Phases()

    @classmethod
    def _of(cls, source: Source) -> RsReader:
        """Return a reader of a source whose options were checked before."""
        reader = cls(source.path)
        reader._source = source
        return reader

    def __repr__(self) -> str:
        source, layout = self._source, self._source.layout or Layout()
        replicas = None if source.replicas == "each" else source.replicas
        shown = {"path": os.fspath(source.path), **source.read.given(), "replicas": replicas}
        shown |= {"dequantize": layout.dequantize, "views": layout.views or None}
        return call("RsReader", {**shown, "storage_options": source.storage_options})

    @property
    def path(self) -> os.PathLike[str]:
        """The path."""
        return self._source.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, of another path where one is given."""
        if checkpoint_id:
            self._source = dataclasses.replace(self._source, path=location(checkpoint_id))
        self.load_id = str(uuid.uuid4())
        self._index = None

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The path, under DCP's name for it."""
        return self.path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open the index. With ``rank=r`` it is that rank's own index of a rank-local save (``use_collectives=False``).

        Raises (with ``rank``, beside the errors of a load):
            CheckpointNotFoundError: there is one of all ranks, which comes before those of single
                ranks, be they left there from a save before.
        """
        self._clock = Phases()
        rank = kwargs.get("rank")
        self._index = self._source.open() if rank is None else self._open_own(rank)
        metadata = make_metadata(
            self._index,
            rank=rank,
            checkpoint_id=os.fspath(self.path),
            load_id=self.load_id,
            storage_options=self._source.storage_options,
            layout=self._source.layout,
        )
        self._clock.end("metadata")
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the index from the metadata that :meth:`read_metadata` returned, in whichever process this is."""
        self._index = index_of(metadata) or self._index
        self._is_of_all = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note in the plan which save it is for."""
        save_id = self._opened().save_id if self._is_of_all else None
        return dataclasses.replace(plan, storage_data=_Opened(save_id, self._is_of_all))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks opened the same save, or each its own.

        Raises:
            CheckpointReplacedError: a save was committed while the ranks were opening it.
        """
        opened = {plan.storage_data for plan in plans if isinstance(plan.storage_data, _Opened)}
        if len({each.is_of_all for each in opened}) > 1:
            msg = f"a save of all ranks replaced those of single ranks while the ranks were opening it: {self.path}"
            raise CheckpointReplacedError(msg, path=self.path)
        if len(opened) > 1:
            msg = f"the checkpoint was replaced by another save while the ranks were opening it: {self.path}"
            raise CheckpointReplacedError(msg, path=self.path)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what ``planner`` resolves for the items of ``plan``, and commit it. The future is done when this returns."""
        if self._source.replicas != "each":
            why = "torch's planners and your own name each item: dcp_rs.load() and dcp_rs.load_state_dict() without them do"
            say_ignored("RsReader under dcp.load, or with a planner of your own,", "replicas", why)
        index, clock = self._opened(), self._clock
        clock.end("plan")
        warn_of_left_out_state(index, [item.storage_index.fqn for item in plan.items], ())
        with watching(self._source.progress, "loading") as watch:
            counts = Counts(watch=watch)
            how = self._source.read if self._is_of_all else self._source.read.alone()
            ItemReads(index, how, counts, planner, weights_only=self._source.weights_only).read(
                plan
            )
            if (
                watch is not None and counts.expected
            ):  # of what lies under other destinations nothing was read
                watch(counts.expected, counts.expected)
        clock.end("read")
        self.report = planner.report if isinstance(planner, RsLoadPlanner) else LoadReport()
        self.report.path = os.fspath(self.path)
        self.report._take(counts, io=self._source.read.io)
        clock.tell(self.report)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_value(self, fqn: str) -> Any:
        """The value or, in host memory, the tensor ``fqn``, read now and without a planner.

        Raises:
            KeyError: there is none.
        """
        return Checkpoint(
            self._opened(), weights_only=self._source.weights_only, options=self._source.read
        )[fqn]

    @property
    def source(self) -> str:
        """What the data files are: ``dcp-rs``, ``safetensors``, ``dcp`` or ``torch``. Opens the checkpoint, where no load has."""
        return self._opened().source

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id can be a path of the local file system, or a URL of a store."""
        try:
            location(checkpoint_id)
        except UnsupportedError:
            return False
        return True

    def _open_own(self, rank: int) -> _core.Index:
        """Open what a rank saved alone, where there is nothing of all ranks."""
        try:
            self._source.open()
        except CheckpointNotFoundError:
            if is_of_all_ranks(self.path):  # a link that leads nowhere is one all the same
                raise
            return self._source.open(rank)
        msg = f"the checkpoint is one of all ranks, and none of rank {rank} alone: {self.path}"
        raise CheckpointNotFoundError(msg, path=self.path)

    def _opened(self) -> _core.Index:
        if self._index is None:
            self._index = self._source.open()
        return self._index

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_index", "_clock")
        source = dataclasses.replace(self._source, progress=None)
        return {key: value for key, value in self.__dict__.items() if key not in left_out} | {
            "_source": source
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._index = None
        self._clock = Phases()
