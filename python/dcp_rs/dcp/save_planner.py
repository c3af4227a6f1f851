"""``RsSavePlanner``: plans a save in Rust, from names and tensors, without an object for every item."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from dcp_rs import _core, _torch
from dcp_rs._shown import call
from dcp_rs.checkpoint.names import selector
from dcp_rs.dcp.commits import SavedMeta
from dcp_rs.dcp.write_items import Writes
from dcp_rs.errors import PlanError, UnsupportedError
from dcp_rs.tensors import objects
from dcp_rs.tensors.dtypes import NAMES
from dcp_rs.tensors.shards import Layouts, global_shape, local_pieces
from dcp_rs.tensors.trees import flatten
from dcp_rs.transfer.entry import Entry
from dcp_rs.transfer.save import dump, refuse_meta, why_not_raw

__all__ = ["PlannedEntries", "RsSavePlanner"]

#: A subclass that overrides one of these works on items, as with torch's planner.
_HOOKS = (
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "resolve_data",
    "lookup_object",
    "transform_object",
    "_create_global_plan",
    "_dedup_save_plans",
)


@dataclass(frozen=True)
class _Request:
    """What a rank holds, as the coordinator gets it; only the digest where the coordinator knows the rest."""

    digest: bytes
    data: bytes | None


@dataclass(frozen=True)
class _Share:
    """What the coordinator answers: a bit for each item of the rank's request."""

    keep: bytes


class PlannedEntries(dict[str, Any]):
    """In place of ``state_dict_metadata`` until the save is committed: only how many chunks and values there will be."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.planned_items = items


@dataclass
class _Local:
    """A rank's plan, and the objects behind it."""

    plan: _core.SavePlan
    tensors: list[Any]
    others: list[_Other] = field(default_factory=list)


@dataclass(slots=True)
class _Other:
    """An item that is no plain tensor: a tensor of another kind, or a value."""

    fqn: str
    value: Any
    path: tuple[Any, ...] | None
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    dtype: torch.dtype | None = None  # what it is stored as; None for values

    def item(self) -> tuple[Any, ...]:
        if self.dtype is None:
            return self.fqn, None, (), 0, self.path, (), (), 0
        flags = 1 if self.value.requires_grad else 0
        nbytes = self.value.numel() * self.dtype.itemsize
        return self.fqn, NAMES[self.dtype], self.shape, flags, self.path, self.offsets, tuple(self.value.shape), nbytes

    def entry(self) -> Entry:
        if self.dtype is not None:
            return Entry(self.fqn, self.value.detach(), dtype=self.dtype)
        return Entry(self.fqn, dump(self.fqn, self.value))


class RsSavePlanner(DefaultSavePlanner):
    """Plans a save with :class:`RsWriter` in Rust; with any other writer it plans as torch does.

    There is no object for every tensor, a few bytes of each cross the collectives, and the check of the whole plan takes time linear in it.
    What several ranks hold is saved by one of them, so that ranks write about the same number of bytes. A subclass that overrides
    ``create_local_plan``, ``create_global_plan``, ``finish_plan``, ``resolve_data``, ``lookup_object`` or ``transform_object`` gets items,
    as with torch's planner.

    Args:
        flatten_state_dict, flatten_sharded_tensors, dedup_replicated_tensors: as in torch's ``DefaultSavePlanner``.
        dedup_save_to_lowest_rank: the lowest of the ranks that hold something saves it.
        enable_plan_caching: a rank whose plan is that of its last save sends only a digest of it.
        dtype: what floating-point tensors are stored as. They are cast while they are written, in memory of bounded size.
        include, exclude: globs over names; what is not included, or excluded, is not saved.

    Raises (while planning, on every rank):
        PlanError: a chunk outside of its tensor, chunks that overlap, elements that no rank holds, a tensor that ranks describe in two ways.
        UnsupportedError: a tensor that the format cannot hold.
    """

    #: By planner class: digest of the plan that the coordinator got last from this rank.
    _sent: ClassVar[dict[str, bytes]] = {}
    #: On the coordinator, by planner class: the requests of the last save by their digests, and the answer to all of them.
    _received: ClassVar[dict[str, dict[bytes, bytes]]] = {}
    _answered: ClassVar[dict[str, tuple[Any, Any]]] = {}

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
        *,
        dtype: torch.dtype | None = None,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
    ) -> None:
        super().__init__(
            flatten_state_dict,
            flatten_sharded_tensors,
            dedup_replicated_tensors,
            dedup_save_to_lowest_rank,
            enable_plan_caching,
        )
        if dtype is not None and not (dtype.is_floating_point and dtype in NAMES):
            msg = f"dtype={dtype!r}: a floating-point dtype"
            raise ValueError(msg)
        self._given = {
            "dtype": dtype,
            "include": include,
            "exclude": exclude,
            "enable_plan_caching": enable_plan_caching or None,
        }
        self.dtype = dtype
        self.include = include
        self.exclude = exclude
        self._compact = False
        self._local: _Local | None = None
        self._digest = b""
        self._request_bytes = 0

    # --- the protocol ---------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return call(type(self).__name__, self._given)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Flattens the state dict, and leaves out what is not to be saved."""
        self._compact = isinstance(storage_meta, SavedMeta) and not self._overrides(*_HOOKS)
        self._local = None
        self.mappings = {}
        if self.flatten_state_dict:
            state_dict, self.mappings = flatten(state_dict)
        if self.flatten_sharded_tensors and _has_nested(state_dict.values()):
            state_dict = _torch.flatten_sharded_tensors(state_dict)
        passes = selector(self.include, self.exclude)
        if passes is not None:
            state_dict = {fqn: value for fqn, value in state_dict.items() if passes(fqn)}
            self.mappings = {fqn: path for fqn, path in self.mappings.items() if passes(fqn)}
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """What this rank holds: a few bytes for each item where an :class:`RsWriter` writes, else torch's items."""
        if not self._compact:
            return self._with_dtype(super().create_local_plan())
        self._local = self._plan()
        data = self._local.plan.request()
        self._digest = hashlib.blake2b(data, digest_size=16).digest()
        known = self._enable_plan_caching and self._sent.get(self._cached_plans_key) == self._digest
        self._request_bytes = 0 if known else len(data)
        self.plan = SavePlan([], planner_data=_Request(self._digest, None if known else data))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assigns what the ranks hold, after checking that it fits together."""
        requests = [plan.planner_data for plan in all_plans if isinstance(plan.planner_data, _Request)]
        if len(requests) != len(all_plans):
            if requests:
                raise PlanError("some ranks plan with RsSavePlanner and RsWriter, and some do not: use the same on all")
            return super().create_global_plan(all_plans)
        shares, items = self._assign(requests)
        self.global_plan = [
            dataclasses.replace(plan, planner_data=_Share(keep)) for plan, keep in zip(all_plans, shares, strict=True)
        ]
        self.metadata = Metadata(PlannedEntries(items), planner_data={} if self.flatten_state_dict else None)
        return self.global_plan, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Takes the coordinator's answer."""
        if not isinstance(new_plan.planner_data, _Share):
            return super().finish_plan(new_plan)
        if self._enable_plan_caching:
            self._sent[self._cached_plans_key] = self._digest
        self.plan = new_plan
        return new_plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # torch's name
        """Torch's, and the cast to ``dtype``. An error about a value names it."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(objects.dump_named(write_item.index.fqn, object))
        made = super().transform_object(write_item, object)
        if isinstance(made, torch.Tensor) and self._is_cast(made.dtype):
            return made.to(self.dtype)
        return made

    def local_writes(self, plan: SavePlan) -> Writes | None:
        """What this rank writes, where ``plan`` is one of this planner without items."""
        share, local = plan.planner_data, self._local
        if not isinstance(share, _Share) or local is None:
            return None
        entries = [local.others[i].entry() for i in local.plan.kept_others(share.keep)]
        return Writes(local.plan, share.keep, local.tensors, entries)

    # --- planning -------------------------------------------------------------------------------------

    def _overrides(self, *names: str) -> bool:
        return any(getattr(type(self), name) is not getattr(RsSavePlanner, name) for name in names)

    def _is_cast(self, dtype: torch.dtype) -> bool:
        return self.dtype is not None and dtype.is_floating_point and dtype != self.dtype

    def _plan(self) -> _Local:
        names, values = list(self.state_dict), list(self.state_dict.values())
        paths = list(map(self.mappings.get, names)) if self.mappings else None
        plan = _core.SavePlan()
        cast = None if self.dtype is None else NAMES[self.dtype]
        rest = plan.add_plain(names, paths, values, _torch.PLAIN_TYPES, NAMES, cast=cast)
        local = _Local(plan, values)
        layouts: Layouts = {}
        for i in rest:
            local.others += self._others(names[i], values[i], paths[i] if paths else None, layouts)
        plan.add([other.item() for other in local.others])
        return local

    def _others(self, fqn: str, value: Any, path: tuple[Any, ...] | None, layouts: Layouts) -> list[_Other]:
        if not isinstance(value, torch.Tensor):
            return [_Other(fqn, value, path)]
        is_sharded = isinstance(value, (DTensor, ShardedTensor)) or hasattr(value, "global_shape")
        if not is_sharded:
            value = _torch.wait_tensor(value)
            refuse_meta(fqn, value)
            if why_not_raw(value) is not None:
                return [_Other(fqn, value, path)]
        try:
            pieces = local_pieces(fqn, value, layouts)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            msg = f"tensor {fqn!r} cannot be saved: {error}"
            raise PlanError(msg, tensor=fqn) from error
        shape = tuple(global_shape(value))
        others = []
        for piece in pieces:
            tensor = _torch.wait_tensor(piece.tensor)
            refuse_meta(fqn, tensor)
            refusal = why_not_raw(tensor)
            if refusal is not None:
                msg = f"tensor {fqn!r}: a shard of it cannot be saved: {refusal}"
                raise UnsupportedError(msg, tensor=fqn)
            dtype = tensor.dtype
            if self.dtype is not None and self._is_cast(dtype):
                dtype = self.dtype
            if value.requires_grad and not tensor.requires_grad and tensor.is_floating_point():
                tensor = tensor.detach().requires_grad_()
            others.append(_Other(fqn, tensor, path, shape, tuple(piece.offsets), dtype))
        return others

    def _assign(self, requests: list[_Request]) -> tuple[list[bytes], int]:
        key = self._cached_plans_key
        received = self._received.get(key, {})
        data = []
        for rank, request in enumerate(requests):
            known = received.get(request.digest) if request.data is None else request.data
            if known is None:
                msg = f"rank {rank} sent the digest of a plan that the coordinator does not have; save once with enable_plan_caching=False"
                raise PlanError(msg)
            data.append(known)
        asked = ([request.digest for request in requests], self.dedup_save_to_lowest_rank)
        answered = self._answered.get(key)
        if answered is not None and answered[0] == asked:
            shares, items = answered[1]
        else:
            shares, items, _ = _core.assign_saves(data, lowest_rank=self.dedup_save_to_lowest_rank)
        if self._enable_plan_caching:
            self._received[key] = {request.digest: known for request, known in zip(requests, data, strict=True)}
            self._answered[key] = (asked, (shares, items))
        return shares, items

    def _with_dtype(self, plan: SavePlan) -> SavePlan:
        """The plan with the dtypes that tensors are cast to."""
        if self.dtype is None or not plan.items:
            return plan
        items = []
        for item in plan.items:
            data = item.tensor_data
            if item.type != WriteItemType.BYTE_IO and data is not None and self._is_cast(data.properties.dtype):
                properties = dataclasses.replace(data.properties, dtype=self.dtype)
                item = dataclasses.replace(item, tensor_data=dataclasses.replace(data, properties=properties))  # noqa: PLW2901
            items.append(item)
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def __getstate__(self) -> Mapping[str, Any]:
        # For a save in another process: what this one has set up stays here.
        return {**self.__dict__, "_local": None, "state_dict": {}, "plan": None}


def _has_nested(values: Collection[Any]) -> bool:
    """Whether a ShardedTensor is within another, as torch's FSDP over tensor parallelism once made them."""
    if not any(issubclass(kind, ShardedTensor) for kind in set(map(type, values))):
        return False
    return any(
        isinstance(shard.tensor, ShardedTensor)
        for value in values
        if isinstance(value, ShardedTensor)
        for shard in value.local_shards()
    )
