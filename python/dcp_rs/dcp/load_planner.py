"""``RsLoadPlanner``: torch's planner with options."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeGuard

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_rs import _torch
from dcp_rs._shown import call
from dcp_rs.checkpoint.frameworks import open as open_checkpoint
from dcp_rs.checkpoint.open import Checkpoint
from dcp_rs.checkpoint.renaming import Rename
from dcp_rs.engine.matching import (
    CastRule,
    Entries,
    EntryInfo,
    IndexEntries,
    LoadNames,
    Matching,
    add_hollow,
    check_cast,
    why_nothing,
)
from dcp_rs.engine.metadata import index_of
from dcp_rs.engine.reads import LoadOptions
from dcp_rs.engine.reports import LoadReport
from dcp_rs.errors import PlanError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.flatten import Flat, WriteThrough, flatten, is_hollow, is_plain_state_dict, set_at
from dcp_rs.tensors.materialize import NewTensors
from dcp_rs.tensors.shards import Layouts, Piece, local_pieces

__all__ = ["RsLoadPlanner", "is_plain", "items_of", "missing_elements"]

#: Offsets and sizes.
_Box = tuple[tuple[int, ...], tuple[int, ...]]


def items_of(
    found: Mapping[str, EntryInfo], state_dict: Mapping[str, Any], stored: Mapping[str, Any]
) -> list[ReadItem]:
    """Return items for all that is read, as torch's planner makes them.

    Args:
        found: names of the state dict, and what the checkpoint has for each.
        state_dict: what is filled.
        stored: metadata by stored name.
    """
    layouts: Layouts = {}
    items: list[ReadItem] = []
    for fqn, entry in found.items():
        if entry.is_bytes:
            items.append(_bytes_item(fqn, entry.name))
        else:
            pieces = local_pieces(fqn, state_dict[fqn], layouts)
            items += _tensor_items(fqn, entry.name, stored[entry.name], pieces)
    return items


def _bytes_item(fqn: str, stored: str) -> ReadItem:
    """The item of a non-tensor value."""
    zero = torch.Size((0,))
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(fqn),
        dest_offsets=zero,
        storage_index=MetadataIndex(stored),
        storage_offsets=zero,
        lengths=zero,
    )


def _tensor_items(fqn: str, stored: str, entry: TensorStorageMetadata, pieces: Sequence[Piece]) -> list[ReadItem]:
    """The items of what this process holds of a tensor, which the checkpoint has under the name ``stored``."""
    chunks = [ChunkStorageMetadata(offsets=torch.Size(p.offsets), sizes=torch.Size(p.tensor.shape)) for p in pieces]
    items: list[ReadItem] = create_read_items_for_chunk_list(stored, entry, chunks)
    if stored == fqn and all(piece.offsets == piece.shard for piece in pieces):
        return items
    return [_of_shard(fqn, item, pieces[item.dest_index.index or 0]) for item in items]


def _of_shard(fqn: str, item: ReadItem, piece: Piece) -> ReadItem:
    return ReadItem(
        type=item.type,
        dest_index=MetadataIndex(fqn, torch.Size(piece.shard), piece.number),
        dest_offsets=torch.Size(a + b for a, b in zip(piece.at, item.dest_offsets, strict=True)),
        storage_index=item.storage_index,
        storage_offsets=item.storage_offsets,
        lengths=item.lengths,
    )


def missing_elements(piece: Piece, entry: TensorStorageMetadata) -> _Box | None:
    """Some elements of a piece, as offsets in the whole tensor and sizes, that no chunk of the checkpoint holds; None where all are held."""
    left = [(tuple(piece.offsets), tuple(piece.tensor.shape))] if piece.tensor.numel() else []
    for chunk in entry.chunks:
        if not left:
            break
        left = [rest for box in left for rest in _outside(box, (tuple(chunk.offsets), tuple(chunk.sizes)))]
    return left[0] if left else None


def _outside(box: _Box, other: _Box) -> Iterator[_Box]:
    """What of a box is not in the other, as boxes."""
    offsets, sizes = list(box[0]), list(box[1])
    inner = [(max(a, b), min(a + m, b + n)) for a, m, b, n in zip(offsets, sizes, other[0], other[1], strict=True)]
    if any(begin >= end for begin, end in inner):
        yield box
        return
    for dim, (begin, end) in enumerate(inner):
        first, last = offsets[dim], offsets[dim] + sizes[dim]
        for at, size in ((first, begin - first), (end, last - end)):
            if size:
                yield (*offsets[:dim], at, *offsets[dim + 1 :]), (*sizes[:dim], size, *sizes[dim + 1 :])
        offsets[dim], sizes[dim] = begin, end - begin


class RsLoadPlanner(DefaultLoadPlanner):
    """Torch's ``DefaultLoadPlanner`` with the options of :func:`dcp_rs.load`.

    :func:`dcp_rs.load` and :func:`dcp_rs.load_state_dict` take its options and plan in Rust. Under
    torch's own ``dcp.load``, and if a subclass overrides a method, it plans item by item as torch
    does.

    Args:
        checkpoint: the checkpoint that :meth:`resolve_tensor` reads by name before a load has set
            the planner up.
        dtype: cast floating-point tensors to it, except the ``step`` of an optimizer's state. A
            tensor of another dtype is replaced in the state dict.
        device: load tensors onto it. Tensors on another device, or on ``meta``, are replaced in
            the same way.
        dtype_policy: what to do if a tensor's dtype differs from the stored one and ``dtype`` is
            not given: ``"warn"`` casts and warns, ``"error"`` raises, ``"cast"`` casts.
        rename: maps stored names to names of the state dict, as for :func:`dcp_rs.load`.
        include, exclude: globs over names of the state dict. Entries that are not included, or are
            excluded, stay as they are.
        allow_partial_load: leave entries alone that the checkpoint lacks or has in another shape,
            and fill the parts that it has of the others. ``report`` names them.
        flatten_state_dict, flatten_sharded_tensors: as in torch's ``DefaultLoadPlanner``.

    Attributes:
        report: the :class:`LoadReport` of the last load.

    Raises:
        PlanError: no rank has anything to load; a key is missing; a shape differs; a cast is
            refused or impossible; or the checkpoint lacks a part of a tensor.

    Example:
        ```python
        state = {"model": model.state_dict()}
        planner = dcp_rs.RsLoadPlanner(dtype=torch.bfloat16)
        dcp.load(state, storage_reader=dcp_rs.RsReader("ckpt"), planner=planner)
        ```
    """

    def __init__(
        self,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype_policy: Literal["warn", "error", "cast"] = "warn",
        rename: Rename = None,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        allow_partial_load: bool = False,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self.device = None if device is None else torch.device(device)
        self.dtype, self.dtype_policy = dtype, dtype_policy
        self.report = LoadReport()
        self.metadata: Metadata | None = None
        self._rename, self._include, self._exclude = rename, include, exclude
        self.names = LoadNames(rename, include, exclude)
        CastRule(dtype, dtype_policy)  # a policy that is none is an error here
        self._checkpoint_path = checkpoint
        self._flat = Flat({}, {}, [])
        self._new = NewTensors(None, None)
        self._why_nothing: str | None = None

    def __repr__(self) -> str:
        given: dict[str, Any] = {
            "dtype": self.dtype,
            "device": self.device,
            "rename": self._rename,
            "include": self._include,
        }
        given |= {"exclude": self._exclude, "allow_partial_load": self.allow_partial_load or None}
        return call(type(self).__name__, given)

    def _options(self) -> LoadOptions:
        """Return the options of a load that this planner stands for."""
        return LoadOptions(
            rename=self._rename,
            include=self._include,
            exclude=self._exclude,
            allow_partial_load=self.allow_partial_load,
            dtype=self.dtype,
            device=self.device,
            dtype_policy=self.dtype_policy,
        )

    # --- the protocol ---------------------------------------------------------------------------------

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the state dict. Nothing in it is replaced before every rank has planned."""
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self.names = LoadNames(self._rename, self._include, self._exclude)
        if self.flatten_sharded_tensors and not is_plain_state_dict(state_dict):
            state_dict = _torch.flatten_sharded_tensors(state_dict)
        if self.flatten_state_dict:
            flat = flatten(state_dict)
            if metadata is not None:
                add_hollow(state_dict, flat, _entries(metadata), self.names)
            self._take(flat)
        else:
            self.state_dict, self._flat = state_dict, Flat(state_dict, {fqn: (fqn,) for fqn in state_dict}, [])

    @torch.no_grad()  # without it, a DTensor's local tensor costs an autograd node
    def create_local_plan(self) -> LoadPlan:
        """Check everything that can be known before the first byte is read."""
        if self.metadata is None:
            raise PlanError("the planner was not set up with metadata")
        self.report = report = LoadReport()
        entries = _entries(self.metadata)
        self._new = new = NewTensors(self.dtype, self.device)
        wanted, report.excluded = self.names.choose(self.state_dict, entries)
        casts = CastRule(self.dtype, self.dtype_policy)
        flat = Flat(self.state_dict, self._flat.paths, self._flat.containers, self._flat.is_text)
        matching = Matching(
            self.original_state_dict,
            flat,
            entries,
            self.names,
            casts,
            report,
            new,
            partial=self.allow_partial_load,
            is_flat=self.flatten_state_dict,
        )
        found = matching.match(wanted)
        if matching.flat is not flat:
            self._take(matching.flat)
        stored = {entry.name: self.metadata.state_dict_metadata[entry.name] for entry in found.values()}
        tensors = [fqn for fqn, entry in found.items() if not entry.is_bytes]
        self._hold(new.make_all(self.original_state_dict, self.state_dict, self._flat.paths, [*tensors, *report.tied]))
        for fqn, offsets, sizes in self._holes({fqn: stored[found[fqn].name] for fqn in tensors}):
            tied = [name for name, other in report.tied.items() if other == fqn]
            matching.note_hole(fqn, offsets, sizes)
            if fqn in new.new and new.old[fqn].is_meta:
                self._hold({name: new.give_up(name) for name in [fqn, *tied]})
                del found[fqn]
            elif fqn in new.new:
                new.copy_old(fqn)
        casts.warn(report)
        report.entries_loaded = len(found) + len(report.tied)
        report.entries = len(self.state_dict)
        if not self.flatten_state_dict:
            report.entries -= sum(is_hollow(value) for fqn, value in self.state_dict.items() if fqn not in found)
        self._why_nothing = None
        if len(entries) and self.state_dict and len(self.state_dict) == len(report.missing) + len(report.excluded):
            given = {"include": self._include, "exclude": self._exclude}
            self._why_nothing = why_nothing(report, self.state_dict, entries, self.names, given)
        items = items_of(found, self.state_dict, stored)
        return LoadPlan(items, planner_data=(not self.state_dict, self._why_nothing))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return torch's plan: that of each rank as it is.

        Raises:
            PlanError: there is nothing to load on any rank, and something was asked for.
        """
        told = [plan.planner_data for plan in global_plan]
        notes = [note if isinstance(note, tuple) and len(note) == 2 else (False, None) for note in told]
        reasons = [reason for _, reason in notes if reason is not None]
        if reasons and all(is_empty or reason is not None for is_empty, reason in notes):
            raise PlanError(reasons[0])
        plans: list[LoadPlan] = super().create_global_plan(global_plan)
        return plans

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Put new tensors into the caller's state dict: by now every rank has checked its plan."""
        for fqn, tensor in self._new.new.items():
            self._set_value(fqn, tensor)
        finished: LoadPlan = super().finish_plan(new_plan)
        return finished

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value as torch does, for keys that are no text, too."""
        self._set_value(read_item.dest_index.fqn, torch.load(value, weights_only=False))

    def _set_value(self, fqn: str, value: Any) -> None:
        """Put a value, or a tensor in place of another, into the caller's state dict."""
        set_at(self.original_state_dict, self._flat.paths[fqn], value)

    def resolve_tensor(  # torch's signature, and a second use by name
        self,
        read_item: ReadItem | str,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return the tensor that ``read_item`` fills, narrowed to its lengths.

        With a name of the state dict in place of an item: read that tensor now from this planner's checkpoint, whole, onto ``device`` and as
        ``dtype`` (defaults: the planner's, else the CPU and the stored dtype).

        Raises:
            KeyError: the checkpoint has no such name.
            PlanError: the planner has no checkpoint yet, or what is stored cannot be cast.
        """
        if not isinstance(read_item, str):
            tensor: torch.Tensor = super().resolve_tensor(read_item)
            return tensor
        device = torch.device(device) if device is not None else self.device or torch.device("cpu")
        with self._open(device) as checkpoint:
            value = checkpoint[self.names.stored_in(checkpoint, read_item)]
            if not isinstance(value, torch.Tensor):
                msg = f"{read_item!r} is not a tensor"
                raise TypeError(msg)
            wanted = dtype or (self.dtype if value.is_floating_point() else None)
            if wanted is not None and wanted != value.dtype:
                check_cast(read_item, wanted, value.dtype)
                return value.to(wanted)
            # Never a view of the file: the caller owns what it gets.
            return value.clone() if device.type == "cpu" else value

    def _end_load(self, report: LoadReport, path: os.PathLike[str]) -> None:
        """Take the report of a load that this planner's options were for, and the checkpoint that :meth:`resolve_tensor` reads."""
        self.report, self._checkpoint_path = report, path

    # --- what is read ---------------------------------------------------------------------------------

    def _open(self, device: torch.device) -> Checkpoint:
        index = index_of(self.metadata)
        if index is not None:
            return Checkpoint(index, device=device, options=ReadOptions())
        if self._checkpoint_path is None:
            msg = "this planner has no checkpoint: pass RsLoadPlanner(checkpoint=path), or load with it first"
            raise PlanError(msg)
        return open_checkpoint(self._checkpoint_path, device=device)

    def _take(self, flat: Flat) -> None:
        self._flat, self.state_dict, self.mappings = flat, flat.values, flat.text_paths()

    def _hold(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take tensors to be filled in place of the caller's, which the caller does not see yet."""
        if tensors and self.state_dict is self.original_state_dict:
            self.state_dict = WriteThrough(self.state_dict)
        for fqn, tensor in tensors.items():
            dict.__setitem__(self.state_dict, fqn, tensor)

    def _holes(self, stored: dict[str, Any]) -> Iterator[tuple[str, Sequence[int], Sequence[int]]]:
        """Yield names, and elements of them that no chunk of the checkpoint holds."""
        layouts: Layouts = {}
        for fqn, entry in stored.items():
            for piece in local_pieces(fqn, self.state_dict[fqn], layouts):
                if (hole := missing_elements(piece, entry)) is not None:
                    yield fqn, *hole
                    break


class _MetadataEntries(dict[str, Any]):
    """The entries of a reader's metadata, whichever reader it is."""

    def describe(self, names: Sequence[str]) -> list[EntryInfo | None]:
        """Return the entry under each name, or None."""
        found: list[EntryInfo | None] = []
        for name in names:
            entry = self.get(name)
            if entry is None or isinstance(entry, BytesStorageMetadata):
                found.append(None if entry is None else EntryInfo(name, None, ()))
            else:
                found.append(EntryInfo(name, entry.properties.dtype, tuple(entry.size)))
        return found


def _entries(metadata: Metadata) -> Entries:
    index = index_of(metadata)
    return _MetadataEntries(metadata.state_dict_metadata) if index is None else IndexEntries(index)


def is_plain(planner: LoadPlanner) -> TypeGuard[RsLoadPlanner]:
    """Return whether a planner is its options and nothing else: an ``RsLoadPlanner`` of which nothing is overridden."""
    return (
        type(planner) is RsLoadPlanner
        and planner.flatten_state_dict
        and planner.flatten_sharded_tensors
        and vars(planner).keys().isdisjoint(dir(DefaultLoadPlanner))
    )
