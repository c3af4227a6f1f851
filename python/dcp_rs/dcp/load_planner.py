"""``RsLoadPlanner``: torch's load planner with options."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeGuard, Unpack

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_rs import _core
from dcp_rs._arguments import suggest_option
from dcp_rs._reports import short_repr
from dcp_rs._url import StrPath, location
from dcp_rs.checkpoint.locate import LoadSource
from dcp_rs.checkpoint.names import LoadNames
from dcp_rs.checkpoint.open import Checkpoint
from dcp_rs.engine.load import Reads, check_something, plan_reads
from dcp_rs.engine.matching import LoadOptions, check_cast
from dcp_rs.engine.metadata import index_of
from dcp_rs.engine.reports import LoadReport
from dcp_rs.errors import EntryNotFoundError, PlanError
from dcp_rs.options import PlannerArguments, ReadOptions, given, take_options
from dcp_rs.tensors.flatten import Flat, flatten, set_at
from dcp_rs.tensors.memory import parse_device
from dcp_rs.tensors.shards import Piece, ShardCache, local_pieces
from dcp_rs.transfer.load import fill_tensor


class RsLoadPlanner(DefaultLoadPlanner):
    """Torch's ``DefaultLoadPlanner`` with the options of :func:`dcp_rs.load`.

    :func:`dcp_rs.load` and :func:`dcp_rs.load_state_dict` take its options and plan in Rust. Under
    torch's own ``dcp.load``, and if a subclass overrides a method, it plans item by item as torch
    does. With another reader, and with ``flatten_state_dict=False``, it is torch's planner, and
    refuses options that torch's planner lacks.

    Args:
        checkpoint: the checkpoint that :meth:`resolve_tensor` reads by name before a load.
        dtype: the dtype of new floating-point tensors, except the ``step`` of an optimizer's
            state. Tensors on ``meta`` are replaced by new ones in the state dict.
        device: the device of new tensors.
        assign: replace every tensor of another ``dtype`` or ``device``. By default tensors that
            have memory are filled.
        dtype_policy: what to do if a tensor's dtype differs from the stored one and ``dtype`` is
            not given: ``"warn"`` casts and warns, ``"error"`` raises, ``"cast"`` casts.
        rename: maps stored names to names of the state dict, as for :func:`dcp_rs.load`.
        include, exclude: globs over names of the state dict. Entries that are not included, or are
            excluded, stay as they are.
        allow_partial_load: leave entries alone that the checkpoint lacks, has in another shape, or
            has only a part of. ``report`` names them.
        flatten_state_dict: as in torch's ``DefaultLoadPlanner``.
        flatten_sharded_tensors: the same, with another reader than :class:`RsReader`.

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

    @suggest_option
    def __init__(
        self,
        *,
        checkpoint: StrPath | None = None,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        **options: Unpack[PlannerArguments],
    ) -> None:
        own = LoadOptions.of(take_options(RsLoadPlanner.__init__, options))
        super().__init__(flatten_state_dict, flatten_sharded_tensors, own.allow_partial_load)
        vars(self).update(vars(own))  # attributes that a user may set
        self.report = LoadReport()
        self.metadata: Metadata | None = None
        #: The source of reads by name, if torch did not call this planner for the last load.
        self._source = None if checkpoint is None else LoadSource(path=location(checkpoint))
        self._index: _core.Index | None = None
        self._flat = Flat({}, {}, [])
        self._reads: Reads | None = None

    def _options(self) -> LoadOptions:
        """Return the options of a load without a planner."""
        return LoadOptions.of({one.name: getattr(self, one.name) for one in fields(LoadOptions)})

    def __repr__(self) -> str:
        return short_repr(self, **given(self._options()))

    # --- DCP's protocol ---------------------------------------------------------------------------

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state dict. Nothing in it is replaced before every rank has planned.

        Raises:
            PlanError: an option needs an :class:`RsReader` or ``flatten_state_dict=True``.
        """
        self.report, self._reads, self._flat = LoadReport(), None, Flat({}, {}, [])
        self._source = None
        self._index = index_of(metadata) if self.flatten_state_dict else None
        if self._index is None:
            # torch's planner casts as well.
            own = {name: value for name, value in given(self._options()).items() if value != "cast"}
            if names := [f"{name}=" for name in own if name != "allow_partial_load"]:
                needed = "an RsReader" if self.flatten_state_dict else "flatten_state_dict=True"
                raise PlanError(f"{' and '.join(names)} of RsLoadPlanner need {needed}")
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self._set_flat(flatten(state_dict))

    def create_local_plan(self) -> LoadPlan:
        """Plan the reads, and check all that can be checked before the first of them."""
        if self.metadata is None:
            raise PlanError("the planner was not set up with metadata")
        if self._index is None:
            plan: LoadPlan = super().create_local_plan()
            return plan
        flat = replace(self._flat, values=dict(self.state_dict))
        self._reads = reads = plan_reads(
            self.original_state_dict, self._index, self._options(), flat
        )
        self.report = reads.report
        self._set_flat(reads.flat)
        items = _make_items(reads, self.metadata)
        return LoadPlan(items, planner_data=reads.nothing_to_load)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plan of each rank as it is.

        Raises:
            PlanError: no rank has anything to load, though there are entries.
        """
        data = (plan.planner_data for plan in global_plan)
        check_something(one if isinstance(one, str) else None for one in data)
        plans: list[LoadPlan] = super().create_global_plan(global_plan)
        return plans

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Put new tensors into the caller's state dict, as every rank has checked its plan."""
        if self._reads is not None:
            for fqn, tensor in self._reads.new.new.items():
                self._set_value(fqn, tensor)
        finished: LoadPlan = super().finish_plan(new_plan)
        return finished

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value as torch does, under keys that are no text, too."""
        if self._index is None and self.flatten_state_dict:
            super().load_bytes(read_item, value)
        else:  # torch's would not reach the caller's state dict without flattening
            fqn = read_item.dest_index.fqn
            loaded = torch.load(value, weights_only=False)
            if not fill_tensor(fqn, self.state_dict.get(fqn), loaded):
                self._set_value(fqn, loaded)

    def _set_value(self, fqn: str, value: Any) -> None:
        """Put a value or a new tensor into the caller's state dict."""
        set_at(self.original_state_dict, self._flat.paths.get(fqn, (fqn,)), value)

    def resolve_tensor(  # torch's signature, and a second use by name
        self,
        read_item: ReadItem | str,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return the tensor that ``read_item`` fills, narrowed to its lengths.

        Args:
            read_item: an item; or a name of the state dict, to read that whole tensor now from the
                checkpoint of this planner.
            device: with a name: where the tensor goes. Default: the planner's device, else the CPU.
            dtype: with a name: its dtype. Default: the planner's dtype, else the stored one.

        Raises:
            KeyError: the checkpoint has no such name.
            PlanError: the planner has no checkpoint yet, or the stored tensor cannot be cast.
        """
        if not isinstance(read_item, str):
            tensor: torch.Tensor = super().resolve_tensor(read_item)
            return tensor
        options = self._options()
        device = parse_device(options.device or "cpu" if device is None else device)
        with self._open(device) as checkpoint:
            names = LoadNames(options.rename, None, None, checkpoint.keys)
            if (name := names.stored_name(read_item)) is None:
                msg = f"there is no entry {read_item!r} in {checkpoint.path}"
                msg += names.explain([read_item], (), ())
                raise EntryNotFoundError(msg, path=checkpoint.path, tensor=read_item)
            value = checkpoint[name]
            if not isinstance(value, torch.Tensor):
                msg = f"{read_item!r} is not a tensor"
                raise TypeError(msg)
            wanted = dtype or (options.dtype if value.is_floating_point() else None)
            if wanted is not None and wanted != value.dtype:
                check_cast(read_item, wanted, value.dtype)
                return value.to(wanted)
            # A copy: the caller owns it, and may write to it.
            return value.clone() if device.type == "cpu" else value

    def _end_load(self, report: LoadReport, source: LoadSource) -> None:
        """Take the report and the source of a load with the options of this planner."""
        self.report, self._source, self.metadata = report, source, None

    def _open(self, device: torch.device) -> Checkpoint:
        """Open the checkpoint of this planner for reads by name."""
        if (index := index_of(self.metadata)) is not None:
            return Checkpoint(index, device=device, options=ReadOptions())
        if self._source is not None:
            return Checkpoint(self._source.open()[0], device=device, options=self._source.read)
        raise PlanError(
            "this planner has no checkpoint: "
            "pass RsLoadPlanner(checkpoint=path), or load with it first"
        )

    def _set_flat(self, flat: Flat) -> None:
        self._flat, self.state_dict, self.mappings = flat, flat.values, flat.text_paths()


def is_plain(planner: LoadPlanner) -> TypeGuard[RsLoadPlanner]:
    """Return true if no method of an ``RsLoadPlanner`` is overridden: its options say all."""
    return (
        type(planner) is RsLoadPlanner
        and planner.flatten_state_dict
        and vars(planner).keys().isdisjoint(dir(DefaultLoadPlanner))
    )


# --- items ----------------------------------------------------------------------------------------


def _make_items(reads: Reads, metadata: Metadata) -> list[ReadItem]:
    """Return a read item for each tensor and value, as torch's planner makes them."""
    layouts: ShardCache = {}
    items: list[ReadItem] = []
    plain = set(reads.plain)
    for place, (fqn, stored) in enumerate(zip(reads.names, reads.stored, strict=True)):
        if fqn in reads.values:
            items.append(_value_item(fqn, stored))
            continue
        if fqn in reads.found or place in plain:
            pieces = local_pieces(fqn, reads.flat.values[fqn], layouts)
            items += _tensor_items(fqn, stored, metadata.state_dict_metadata[stored], pieces)
    return items


def _value_item(fqn: str, stored: str) -> ReadItem:
    zero = torch.Size((0,))
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(fqn),
        dest_offsets=zero,
        storage_index=MetadataIndex(stored),
        storage_offsets=zero,
        lengths=zero,
    )


def _tensor_items(fqn: str, stored: str, entry: Any, pieces: Sequence[Piece]) -> list[ReadItem]:
    """Return read items for the pieces of a tensor that this rank holds.

    Args:
        fqn: the name in the state dict.
        stored: the name in the checkpoint.
        entry: the stored metadata of the tensor.
        pieces: the rectangles of this rank.
    """
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(p.offsets), sizes=torch.Size(p.tensor.shape))
        for p in pieces
    ]
    items: list[ReadItem] = create_read_items_for_chunk_list(stored, entry, chunks)
    if stored == fqn and all(piece.offsets == piece.shard for piece in pieces):
        return items

    def of_shard(item: ReadItem) -> ReadItem:
        """Return the item with its destination in the shard that its piece is a part of."""
        piece = pieces[item.dest_index.index or 0]
        offsets = torch.Size(a + b for a, b in zip(piece.at, item.dest_offsets, strict=True))
        shard = MetadataIndex(fqn, torch.Size(piece.shard), piece.number)
        return replace(item, dest_index=shard, dest_offsets=offsets)

    return list(map(of_shard, items))
