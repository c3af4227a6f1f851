"""``RsLoadPlanner``: planning over the mapped index, and a say in what tensors become."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_rs import _core, _torch
from dcp_rs._dtypes import BY_NAME
from dcp_rs._dtypes import NAMES as DTYPE_NAMES
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs.checkpoint import Checkpoint, open_checkpoint
from dcp_rs.errors import PlanError, UnsupportedError
from dcp_rs.fill import Fill, Target
from dcp_rs.local import Piece, global_shape, local_pieces
from dcp_rs.names import globs
from dcp_rs.options import ReadOptions
from dcp_rs.tree import flatten, holds_only_tensors, is_plain_state_dict, set_at

__all__ = ["LoadReport", "LocalReads", "Mismatch", "RsLoadPlanner"]

#: Marks a plan whose items stay on their rank: it crosses the collectives at the same size whatever the model's.
LOCAL_PLAN = "dcp_rs.local_plan/1"

#: A subclass that overrides one of these sees every item, as with torch's planner.
_ITEM_HOOKS = ("resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor", "load_bytes", "finish_plan")
#: A subclass that overrides this one wants every rank's items.
_GLOBAL_HOOKS = ("create_global_plan",)


@dataclass(frozen=True)
class Mismatch:
    """A name where state dict and checkpoint differ: ``expected`` in the state dict, ``got`` in the checkpoint."""

    name: str
    expected: Any
    got: Any


@dataclass
class LoadReport:
    """What a load found besides what it loaded. Names are those of the state dict, but for ``unexpected``.

    Attributes:
        missing: in the state dict, not in the checkpoint.
        unexpected: in the checkpoint, not in the state dict.
        dtype_mismatched: tensors that were cast.
        shape_mismatched: tensors of another shape, which were left alone.
        partly_filled: tensors of which the checkpoint does not hold all.
        excluded: in the state dict, but not wanted by ``include`` and ``exclude``.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    dtype_mismatched: list[Mismatch] = field(default_factory=list)
    shape_mismatched: list[Mismatch] = field(default_factory=list)
    partly_filled: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)


@dataclass
class LocalReads:
    """What one rank reads, without items: whole tensors, regions of tensors, parts of chunks, and values (index, name).

    ``plain`` is what ``whole`` was made of: stored names, tensors, and the places of those that are not in it.
    """

    whole: _core.Batch | None = None
    plain: tuple[list[str], list[torch.Tensor], list[int]] = field(default_factory=lambda: ([], [], []))
    targets: list[Target] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    values: list[tuple[int, str]] = field(default_factory=list)


@dataclass(slots=True)
class _Stored:
    """What the checkpoint has under a name."""

    name: str
    is_bytes: bool
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    index: int  # in the mapped index; -1 for another reader's metadata


class RsLoadPlanner(DefaultLoadPlanner):
    """Plans a load in Rust, over the mapped index, without an object for every item; with any other reader it plans as torch does.

    The plan that crosses the collectives has a constant size. A subclass that overrides ``create_global_plan`` gets all items of all
    ranks; one that overrides ``resolve_tensor``, ``commit_tensor`` and the like gets its own rank's.

    Args:
        checkpoint: for :meth:`resolve_tensor` by name before a load has set the planner up.
        dtype: what floating-point tensors become; those of another dtype are replaced in the state dict.
        device: where tensors come into being; those elsewhere (on ``meta`` above all) are replaced in the state dict.
        dtype_policy: what it means that state dict and checkpoint differ in dtype, where ``dtype`` was not given: ``"warn"`` casts and says so,
            ``"error"`` refuses, ``"cast"`` casts.
        rename: from names of the state dict to names of the checkpoint. A mapping is of whole names (that of :func:`dcp_rs.convert` is of
            prefixes, from old to new); what it lacks keeps its name.
        include, exclude: globs over names of the state dict; what is not included, or excluded, is left alone.
        allow_partial_load: leave alone what the checkpoint lacks or has in another shape, and fill what it holds of the rest. See ``report``.
        flatten_state_dict, flatten_sharded_tensors: as in torch's ``DefaultLoadPlanner``.

    Attributes:
        report: what the last load found (:class:`LoadReport`).

    Raises (when planning, before anything is read):
        PlanError: a missing key, another shape, a refused or impossible cast, a tensor that the checkpoint does not wholly hold.
    """

    def __init__(
        self,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype_policy: Literal["warn", "error", "cast"] = "warn",
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        allow_partial_load: bool = False,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        if dtype_policy not in ("warn", "error", "cast"):
            msg = f"dtype_policy={dtype_policy!r}: one of 'warn', 'error', 'cast'"
            raise ValueError(msg)
        self.dtype = dtype
        self.device = None if device is None else torch.device(device)
        self.dtype_policy = dtype_policy
        self.report = LoadReport()
        self._rename = rename
        self._include = globs(include)
        self._exclude = globs(exclude)
        self._checkpoint_path = checkpoint
        self._reads = LocalReads()
        self.metadata: Metadata | None = None

    # --- the protocol ---------------------------------------------------------------------------------

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Flattens the state dict, and puts tensors where ``device`` and ``dtype`` say."""
        self.report = LoadReport()
        self._reads = LocalReads()
        if self.flatten_state_dict and is_plain_state_dict(state_dict):
            self.original_state_dict = state_dict
            self.state_dict, self.mappings = flatten(state_dict)
            self.metadata = metadata
            self.is_coordinator = is_coordinator
        else:
            # Nested ShardedTensors, or no flattening: torch's own way.
            super().set_up_planner(state_dict, metadata, is_coordinator)
        self._materialize()

    @torch.no_grad()  # without it, a DTensor's local tensor costs an autograd node
    def create_local_plan(self) -> LoadPlan:
        """Checks everything that can be known before the first byte is read; the plan it returns says nothing but that."""
        index = self._index
        reads, items = LocalReads(), []
        explicit = index is None or self._overrides(*_ITEM_HOOKS, *_GLOBAL_HOOKS)
        wanted = self._wanted_names()
        if index is not None and not explicit:
            fqns = list(wanted)
            tensors = [self.state_dict[fqn] for fqn in fqns]
            names = list(wanted.values())
            reads.whole, others = index.plan_plain(names, tensors, PLAIN_TYPES, DTYPE_NAMES)
            reads.plain = (names, tensors, others)
            wanted = {fqns[i]: wanted[fqns[i]] for i in others}
        stored = self._match(wanted)
        for fqn, found in stored.items():
            if found.is_bytes:
                reads.values.append((found.index, fqn))
                items.append(_bytes_item(fqn, found.name))
                continue
            pieces = local_pieces(fqn, self.state_dict[fqn])
            if explicit:
                items += self._tensor_items(fqn, found, pieces)
            elif found.dtype is not None:
                dtype = found.dtype
                reads.targets += [Target(found.index, p.offsets, p.tensor, found.name, dtype) for p in pieces]
        if index is not None:
            self._check_coverage(index, reads, stored)
        self._warn_of_casts()
        if explicit:
            self._reads = LocalReads()
            return LoadPlan(items)
        self._reads = reads
        return LoadPlan([], planner_data=LOCAL_PLAN)

    def local_reads(self, plan: LoadPlan) -> LocalReads | None:
        """What this rank reads, where ``plan`` leaves it to this planner."""
        return self._reads if plan.planner_data == LOCAL_PLAN else None

    def set_value(self, fqn: str, value: Any) -> None:
        """Puts a non-tensor value into the state dict."""
        if self.flatten_state_dict:
            set_at(self.original_state_dict, self.mappings[fqn], value)
        else:
            self.state_dict[fqn] = value

    def resolve_tensor(  # torch's signature, and a second use by name
        self,
        read_item: ReadItem | str,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The protocol's: the tensor that ``read_item`` fills, narrowed to its lengths.

        With a name of the state dict in place of an item: that tensor, read now from this planner's checkpoint, whole, onto ``device`` and as
        ``dtype`` (defaults: the planner's, else the CPU and the stored dtype).

        Raises:
            KeyError: the checkpoint has no such name.
            PlanError: the planner has no checkpoint yet.
        """
        if not isinstance(read_item, str):
            tensor: torch.Tensor = super().resolve_tensor(read_item)
            return tensor
        device = torch.device(device) if device is not None else self.device or torch.device("cpu")
        with self._open(device) as checkpoint:
            value = checkpoint[self._stored_name(read_item)]
            if not isinstance(value, torch.Tensor):
                msg = f"{read_item!r} is not a tensor"
                raise TypeError(msg)
            tensor = value
            wanted = dtype or (self.dtype if tensor.is_floating_point() else None)
            if wanted is not None and wanted != tensor.dtype:
                return tensor.to(wanted)
            # Never a view of the file: the caller owns what it gets.
            return tensor.clone() if device.type == "cpu" else tensor

    # --- state dict and checkpoint --------------------------------------------------------------------

    @property
    def _index(self) -> _core.Index | None:
        entries = None if self.metadata is None else self.metadata.state_dict_metadata
        return getattr(entries, "index", None)

    def _overrides(self, *names: str) -> bool:
        return any(getattr(type(self), name) is not getattr(RsLoadPlanner, name) for name in names)

    def _open(self, device: torch.device) -> Checkpoint:
        index = self._index
        if index is not None:
            return Checkpoint(index, device=device, options=ReadOptions())
        if self._checkpoint_path is None:
            raise PlanError(
                "this planner has no checkpoint: pass RsLoadPlanner(checkpoint=path), or load with it first"
            )
        return open_checkpoint(self._checkpoint_path, device=device)

    def _stored_name(self, fqn: str) -> str:
        if self._rename is None:
            return fqn
        return self._rename.get(fqn, fqn) if isinstance(self._rename, Mapping) else self._rename(fqn)

    def _wanted(self, fqn: str) -> bool:
        included = self._include is None or self._include.match(fqn) is not None
        return included and (self._exclude is None or self._exclude.match(fqn) is None)

    def _wanted_names(self) -> dict[str, str]:
        """The names of the state dict that are to be loaded, and what the checkpoint calls them."""
        wanted = list(self.state_dict)
        if self._include is not None or self._exclude is not None:
            wanted = [fqn for fqn in wanted if self._wanted(fqn)]
            self.report.excluded = [fqn for fqn in self.state_dict if not self._wanted(fqn)]
        return (
            {fqn: self._stored_name(fqn) for fqn in wanted}
            if self._rename is not None
            else dict(zip(wanted, wanted, strict=True))
        )

    def _match(self, wanted: dict[str, str]) -> dict[str, _Stored]:
        """What the checkpoint has for some names of the state dict; what it lacks goes into the report."""
        if self.metadata is None:
            raise PlanError("the planner was not set up with metadata")
        found = self._look_up(wanted)
        missing = [fqn for fqn, stored in found.items() if stored is None]
        if missing and self.flatten_state_dict:
            older = _torch.flatten_as_2_3(self.original_state_dict)
            entries = self.metadata.state_dict_metadata
            extra = [fqn for fqn in older[0] if fqn not in self.state_dict and self._stored_name(fqn) in entries]
            if extra:
                # Saved before torch 2.4, which flattened less.
                self.state_dict, self.mappings = older
                renamed = {fqn: self._stored_name(fqn) for fqn in [*wanted, *extra] if fqn in older[0]}
                found = self._look_up(renamed)
                missing = [fqn for fqn, stored in found.items() if stored is None]
        self.report.missing = missing
        if self.allow_partial_load:
            known = {self._stored_name(fqn) for fqn in self.state_dict}
            self.report.unexpected = [name for name in self.metadata.state_dict_metadata if name not in known]
        elif missing:
            more = f" (and {len(missing) - 1} more: {', '.join(map(repr, missing[1:6]))})" if missing[1:] else ""
            msg = f"the checkpoint has no {missing[0]!r}{more}"
            raise PlanError(msg, tensor=missing[0])
        return {fqn: stored for fqn, stored in found.items() if stored is not None and self._fits(fqn, stored)}

    def _look_up(self, wanted: dict[str, str]) -> dict[str, _Stored | None]:
        return dict(zip(wanted, self._describe(list(wanted.values())), strict=True))

    def _describe(self, names: list[str]) -> list[_Stored | None]:
        index = self._index
        if index is not None:
            return [
                None if row is None else _Stored(name, row[1] is None, _dtype(name, row[1]), row[2], row[0])
                for name, row in zip(names, index.describe(names), strict=True)
            ]
        described: list[_Stored | None] = []
        entries = self.metadata.state_dict_metadata if self.metadata is not None else {}
        for name in names:
            entry = entries.get(name)
            if entry is None:
                described.append(None)
            elif isinstance(entry, BytesStorageMetadata):
                described.append(_Stored(name, True, None, (), -1))
            else:
                described.append(_Stored(name, False, entry.properties.dtype, tuple(entry.size), -1))
        return described

    def _fits(self, fqn: str, stored: _Stored) -> bool:
        """Whether what is stored can go to the state dict's entry; raises where that is an error."""
        value = self.state_dict[fqn]
        if stored.is_bytes:
            return True
        if not isinstance(value, torch.Tensor):
            msg = f"{fqn!r} is a tensor in the checkpoint, and a {type(value).__name__} in the state dict"
            if self.allow_partial_load:
                self.report.shape_mismatched.append(Mismatch(fqn, type(value).__name__, stored.shape))
                return False
            raise PlanError(msg, tensor=fqn)
        shape = global_shape(value)
        if shape != stored.shape:
            if self.allow_partial_load:
                self.report.shape_mismatched.append(Mismatch(fqn, tuple(shape), stored.shape))
                return False
            msg = f"tensor {fqn!r} has shape {tuple(shape)} in the state dict, and {stored.shape} in the checkpoint"
            raise PlanError(msg, tensor=fqn)
        if value.dtype != stored.dtype:
            self._check_cast(fqn, value.dtype, stored.dtype)
        return True

    def _check_cast(self, fqn: str, wanted: torch.dtype, stored: torch.dtype | None) -> None:
        if stored is None or not _can_copy(stored, wanted):
            msg = f"tensor {fqn!r} is stored as {stored}, which cannot be cast to {wanted}"
            raise PlanError(msg, tensor=fqn)
        is_wish = self.dtype is not None and wanted == self.dtype
        if self.dtype_policy == "error" and not is_wish:
            msg = f"tensor {fqn!r} is {wanted} in the state dict, and {stored} in the checkpoint (dtype_policy='error')"
            raise PlanError(msg, tensor=fqn)
        if not is_wish:
            self.report.dtype_mismatched.append(Mismatch(fqn, wanted, stored))

    def _warn_of_casts(self) -> None:
        cast = self.report.dtype_mismatched
        if cast and self.dtype_policy == "warn":
            first = cast[0]
            others = f" and {len(cast) - 1} other tensors" if cast[1:] else ""
            warnings.warn(
                f"{first.name!r}{others} are cast on loading ({first.got} in the checkpoint, {first.expected} in the state dict); "
                "say dtype_policy='cast', or dtype=..., if that is meant",
                stacklevel=2,
            )

    def _check_coverage(self, index: _core.Index, reads: LocalReads, stored: dict[str, _Stored]) -> None:
        """Finds what no chunk holds, and data files that are missing or of another length."""
        by_index = {found.index: fqn for fqn, found in stored.items()}
        regions = [(t.index, t.offsets, t.tensor.shape) for t in reads.targets]
        holes = index.check_regions(regions, [value for value, _ in reads.values])
        for at, offsets, sizes in reversed(holes):
            target = reads.targets[at]
            fqn = by_index[target.index]
            if not self.allow_partial_load:
                msg = f"tensor {fqn!r}: the checkpoint does not hold {list(sizes)} elements at {list(offsets)}"
                raise PlanError(msg, tensor=fqn)
            self.report.partly_filled.insert(0, fqn)
            del reads.targets[at]
            for chunk, chunk_offsets, region_offsets, part in index.touching(
                target.index, target.offsets, target.tensor.shape
            ):
                view = target.tensor
                for dim, (offset, size) in enumerate(zip(region_offsets, part, strict=True)):
                    view = view.narrow(dim, offset, size)
                reads.fills.append(Fill(chunk, chunk_offsets, view, target.name, target.dtype))

    # --- items, for readers and subclasses that want them ---------------------------------------------

    def _tensor_items(self, fqn: str, stored: _Stored, pieces: list[Piece]) -> list[ReadItem]:
        if self.metadata is None:
            raise PlanError("the planner was not set up with metadata")
        chunks = [
            ChunkStorageMetadata(offsets=torch.Size(p.chunk_offsets), sizes=torch.Size(p.chunk_sizes)) for p in pieces
        ]
        entry = self.metadata.state_dict_metadata[stored.name]
        items = create_read_items_for_chunk_list(stored.name, entry, chunks)  # type: ignore[arg-type]  # a tensor's
        if stored.name == fqn:
            return items
        return [
            ReadItem(
                type=item.type,
                dest_index=MetadataIndex(fqn, item.dest_index.offset, item.dest_index.index),
                dest_offsets=item.dest_offsets,
                storage_index=item.storage_index,
                storage_offsets=item.storage_offsets,
                lengths=item.lengths,
            )
            for item in items
        ]

    # --- device and dtype -----------------------------------------------------------------------------

    def _tensors(self) -> Iterable[torch.Tensor]:
        values = self.state_dict.values()
        return values if holds_only_tensors(self.state_dict) else (v for v in values if isinstance(v, torch.Tensor))

    def _materialize(self) -> None:
        if self.dtype is None and self.device is None and not any(map(_IS_META, self._tensors())):
            return
        for fqn, value in self.state_dict.items():
            if not isinstance(value, torch.Tensor):
                continue
            dtype = self.dtype if self.dtype is not None and value.is_floating_point() else value.dtype
            device = self.device if self.device is not None else value.device
            if device.type == "meta":
                device = _torch.default_device()
            is_there = value.device.type == device.type and device.index in (None, value.device.index)
            if (is_there and value.dtype == dtype) or not self._wanted(fqn):
                continue
            made = _torch.empty_like(value, dtype=dtype, device=device)
            self.state_dict[fqn] = made
            if self.flatten_state_dict:
                set_at(self.original_state_dict, self.mappings[fqn], made)


_IS_META = attrgetter("is_meta")


def _dtype(name: str, dtype: str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    found = BY_NAME.get(dtype)
    if found is None:
        msg = f"tensor {name!r} is of dtype {dtype}, which torch {torch.__version__} does not have"
        raise UnsupportedError(msg, tensor=name)
    return found


_COPIES: dict[tuple[torch.dtype, torch.dtype], bool] = {}


def _can_copy(source: torch.dtype, destination: torch.dtype) -> bool:
    """Whether torch converts the one into the other without losing what kind of number it is."""
    known = _COPIES.get((source, destination))
    if known is None:
        known = not (source.is_complex and not destination.is_complex)  # torch drops the imaginary part
        try:
            if known:
                torch.zeros(1, dtype=torch.uint8).expand(16).clone().view(source)[:1].to(destination)
        except (RuntimeError, NotImplementedError, TypeError):
            known = False
        _COPIES[source, destination] = known
    return known


def _bytes_item(fqn: str, stored: str) -> ReadItem:
    zero = torch.Size((0,))
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(fqn),
        dest_offsets=zero,
        storage_index=MetadataIndex(stored),
        storage_offsets=zero,
        lengths=zero,
    )
