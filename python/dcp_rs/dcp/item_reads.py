"""Reads for planners that want to be called for each item: resolved, filled and committed."""

from __future__ import annotations

import io
import sys
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_rs import _core
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs.dcp.load_planner import RsLoadPlanner
from dcp_rs.errors import PlanError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors import objects
from dcp_rs.tensors.memory import changing
from dcp_rs.transfer.counts import Counts
from dcp_rs.transfer.load import fill
from dcp_rs.transfer.target import Target, stored_dtype

__all__ = ["ItemReads"]

#: So many bytes of destinations are resolved and filled together, where a planner may make a new tensor for each.
BATCH_BYTES = 256 << 20


class ItemReads:
    """What one rank reads, item by item.

    Args:
        index: of the checkpoint.
        options: how to read.
        counts: what is read is added here.
        planner: resolves items, and hears when they are filled.
        weights_only: check that every value loads under ``torch.load(weights_only=True)`` before the planner gets it.
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
            [(item.storage_index.fqn, item.storage_index.offset, item.storage_index.index) for item in plan.items]
        )
        index.check_files(chunks)
        if self._counts.watch is not None:
            self._counts.expected = sum(
                item.lengths.numel() * stored_dtype("", index.dtype_of(chunk)).itemsize
                for chunk, item in zip(chunks, plan.items, strict=True)
                if item.type != LoadItemType.BYTE_IO
            )
        tensors = [(c, item) for c, item in zip(chunks, plan.items, strict=True) if item.type != LoadItemType.BYTE_IO]
        values = [(c, item) for c, item in zip(chunks, plan.items, strict=True) if item.type == LoadItemType.BYTE_IO]
        self._read_values(values)
        self._read_tensors(tensors)

    def _read_tensors(self, items: list[tuple[int, ReadItem]]) -> None:
        index, planner = self._index, self._planner
        resolve, limit = planner.resolve_tensor, BATCH_BYTES
        if isinstance(planner, DefaultLoadPlanner) and _resolves_in_place(planner):
            resolve, limit = partial(_resolve, planner), sys.maxsize
        if _commits(planner):
            limit = 0  # as torch's readers: one is committed before the next is resolved, and may be resolved to the same memory
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
            targets.append(Target(chunk, item.storage_offsets, values, fqn, dtype, len(batch), of_chunk=True))
            batch.append((item, tensor))
            batch_bytes += values.nbytes
            if batch_bytes >= limit:
                self._fill(batch, targets)
                batch, targets, batch_bytes = [], [], 0
        self._fill(batch, targets)

    def _fill(self, batch: list[tuple[ReadItem, torch.Tensor]], targets: list[Target]) -> None:
        with changing([target.tensor for target in targets]):
            fill(self._index, targets, self._options, self._counts)
        if _commits(self._planner):
            with torch.no_grad():  # a resolved tensor may require grad, and a planner may copy from it
                for item, tensor in batch:
                    self._planner.commit_tensor(item, tensor)

    def _read_values(self, items: list[tuple[int, ReadItem]]) -> None:
        stored = self._index.read_bytes([c for c, _ in items], **self._options.engine())
        self._counts.expected += sum(map(len, stored))
        self._counts.add_values(sum(map(len, stored)))
        for (_, item), data in zip(items, stored, strict=True):
            if self._weights_only:
                objects.check_loadable(item.storage_index.fqn, data)
            self._planner.load_bytes(item, io.BytesIO(data))


#: What torch's planner resolves and commits an item by, as they are before anybody patches them.
_RESOLVING = {
    name: getattr(DefaultLoadPlanner, name) for name in ("resolve_tensor", "lookup_tensor", "transform_tensor")
}
_OWN = RsLoadPlanner.resolve_tensor
_COMMIT = DefaultLoadPlanner.commit_tensor


def _resolves_in_place(planner: DefaultLoadPlanner) -> bool:
    """Return whether the planner resolves memory of the state dict, so that no load has to be cut to bound what is new."""
    return all(
        getattr(getattr(planner, name), "__func__", None) in (method, _OWN) for name, method in _RESOLVING.items()
    )


def _commits(planner: LoadPlanner) -> bool:
    """Return whether the planner wants to hear of each item that is filled."""
    return getattr(planner.commit_tensor, "__func__", None) is not _COMMIT


def _file_by_file(index: _core.Index, items: list[tuple[int, ReadItem]]) -> list[tuple[int, ReadItem]]:
    """The items in the order in which stock DCP's readers come to them."""
    files = index.files_of([chunk for chunk, _ in items])
    order = {file: number for number, file in enumerate(dict.fromkeys(files))}
    if len(order) == 1:
        return items
    return [item for _, item in sorted(zip(files, items, strict=True), key=lambda pair: order[pair[0]])]


def _resolve(planner: DefaultLoadPlanner, item: ReadItem) -> torch.Tensor:
    """What torch's own ``resolve_tensor`` gives, without its 20 microseconds where that is all of a plain tensor."""
    held: Any = planner.state_dict.get(item.dest_index.fqn)
    whole = type(held) in PLAIN_TYPES and held.shape == item.lengths and "global_shape" not in held.__dict__
    tensor: torch.Tensor = held if whole else planner.resolve_tensor(item)
    return tensor
