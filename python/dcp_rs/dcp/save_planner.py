"""``RsSavePlanner``: plans a save in Rust, from names and tensors, without an object for every item."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from dcp_rs import _core, _torch
from dcp_rs._shown import call
from dcp_rs.checkpoint.names import selector, some
from dcp_rs.dcp.hooks import Methods
from dcp_rs.dcp.local_items import LocalItems, check_own, note_of, planner_of
from dcp_rs.dcp.plan_cache import memory
from dcp_rs.dcp.resolved import Resolved
from dcp_rs.dcp.save_requests import Planned, kept_items, request_of
from dcp_rs.dcp.write_items import collect
from dcp_rs.engine.held_items import HeldItem, held_items
from dcp_rs.engine.writes import Nesting, Writes
from dcp_rs.errors import PlanError
from dcp_rs.tensors import objects
from dcp_rs.tensors.dtypes import NAMES, cast_to
from dcp_rs.tensors.shards import Layouts
from dcp_rs.tensors.trees import flatten

__all__ = ["PlannedEntries", "RsSavePlanner", "SavedMeta", "writes_of"]


@dataclass
class SavedMeta(StorageMeta):
    """The storage meta of an :class:`RsWriter`: planners know by it who will write."""


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
    """A rank's plan, and the objects behind it. ``plain``: the names of the plain tensors, in the plan's order."""

    plan: _core.SavePlan
    tensors: list[Any]
    plain: list[str]
    others: list[HeldItem] = field(default_factory=list)

    def planned(self) -> list[Planned]:
        """What the items of the plan are, in its order."""
        plain: list[Planned] = [(fqn, None) for fqn in self.plain]
        return plain + [(other.fqn, None if other.dtype is None else other.offsets) for other in self.others]


class RsSavePlanner(DefaultSavePlanner):
    """Plans a save with :class:`RsWriter` in Rust; with any other writer it plans as torch does.

    There is no object for every tensor, a few bytes of each cross the collectives, and the check of the whole plan takes time linear in it.
    What several ranks hold is saved by one of them, so that ranks write about the same number of bytes.

    Where a subclass, the object itself or a patch of the class overrides a method of torch's planner (but ``set_up_planner``), it plans with
    items, as torch does. A planner that wraps this one finds items in the plans of its own rank; those of all ranks it may pass on, and
    not look into.

    Args:
        flatten_state_dict, flatten_sharded_tensors, dedup_replicated_tensors: as in torch's ``DefaultSavePlanner``.
        dedup_save_to_lowest_rank: the lowest of the ranks that hold something saves it.
        enable_plan_caching: in saves by :func:`dcp_rs.save` and :func:`dcp_rs.async_save`, a rank whose plan is that of its last save through the
            same process group sends only a digest of it. In torch's own ``dcp.save`` it changes nothing: who the coordinator is cannot be known.
        dtype: what floating-point tensors of 16 bits and more are stored as. They are cast while they are written, in memory of bounded size. Those of
            8 bits and fewer stay as they are: their scales are elsewhere.
        include, exclude: globs over names; what is not included, or excluded, is not saved.

    Raises (while planning, on every rank):
        PlanError: ``include`` and ``exclude`` leave nothing to save, a chunk outside of its tensor, chunks that overlap, elements that no rank holds, a tensor that ranks describe in two ways.
        UnsupportedError: a tensor that the format cannot hold.
    """

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
        self.spared: frozenset[str] = frozenset()  # names that `dtype` is not for
        self.include = include
        self.exclude = exclude
        self._compact = False
        self._names: list[str] = []  # of the whole state dict, where not all of it may be saved
        self._local: _Local | None = None
        self._items = LocalItems()
        self._nesting: Nesting | None = None
        self._digest = b""
        self._request_bytes = 0

    # --- the protocol ---------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return call(type(self).__name__, self._given)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Flattens the state dict, and leaves out what is not to be saved."""
        self._compact = isinstance(storage_meta, SavedMeta) and not _METHODS.replaced(self, _PLANNING | _PER_ITEM)
        self._local, self._nesting = None, None
        self.mappings = {}
        if self.flatten_state_dict:
            flat = flatten(state_dict)
            state_dict, self.mappings = flat.values, flat.text_paths()
            self._nesting = Nesting.of(flat)
        if self.flatten_sharded_tensors and _has_nested(state_dict.values()):
            state_dict = _torch.flatten_sharded_tensors(state_dict)
        passes = selector(self.include, self.exclude)
        self._names = [] if passes is None else list(state_dict)
        if passes is not None:
            state_dict = {fqn: value for fqn, value in state_dict.items() if passes(fqn)}
            if self._nesting is not None:
                self._nesting = self._nesting.only(state_dict.keys() & self.mappings.keys(), passes)
            self.mappings = {fqn: path for fqn, path in self.mappings.items() if passes(fqn)}
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """What this rank holds: a few bytes for each item where an :class:`RsWriter` writes, else torch's items."""
        if not self._compact:
            self.plan = self._with_dtype(super().create_local_plan())
            return self.plan
        self._local = self._plan()
        data = self._local.plan.request()
        self._digest = hashlib.blake2b(data, digest_size=16).digest()
        past = memory() if self._enable_plan_caching else None
        # Forgotten until the coordinator has answered: a save that fails may have changed what it remembers.
        known = past is not None and past.sent.pop(self._cached_plans_key, None) == self._digest
        self._request_bytes = 0 if known else len(data)
        request = _Request(self._digest, None if known else data)
        self._items = LocalItems(planner=self, make=self._make_items, note=request)
        paths = self.mappings if self.flatten_state_dict else None
        self.plan = SavePlan(self._items, planner_data=paths)  # type: ignore[arg-type]  # it is as good as a list
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assigns what the ranks hold, after checking that it fits together."""
        if not self._compact:
            plans, metadata = super().create_global_plan(all_plans)
            self._refuse_nothing(len(metadata.state_dict_metadata))
            return plans, metadata
        shares, items = self._assign([_request(plan) for plan in all_plans])
        self._refuse_nothing(items)
        self.global_plan = [self._answer(plan, keep) for plan, keep in zip(all_plans, shares, strict=True)]
        self.metadata = Metadata(PlannedEntries(items), planner_data={} if self.flatten_state_dict else None)
        return self.global_plan, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Takes the coordinator's answer."""
        if not self._compact:
            return super().finish_plan(new_plan)
        check_own(new_plan, self._items.token)
        past = memory() if self._enable_plan_caching else None
        if past is not None and planner_of(new_plan) is self:
            past.sent[self._cached_plans_key] = self._digest
        self.plan = new_plan
        return self.plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # torch's name
        """Torch's, and the cast to ``dtype``. An error about a value names it."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(objects.dump_named(write_item.index.fqn, object))
        made = super().transform_object(write_item, object)
        if not isinstance(made, torch.Tensor) or write_item.index.fqn in self.spared:
            return made
        return made.to(self._becomes(made.dtype))

    def writes(self, plan: SavePlan, *, strict: bool) -> Writes:
        """What this rank writes of its own plan, without items. With ``strict``, values that would not load back are refused."""
        keep, local = _kept(note_of(plan)), self._local
        if local is None:
            raise PlanError("the planner was not set up")
        entries = [local.others[i].entry(strict=strict) for i in local.plan.kept_others(keep)]
        return Writes(local.plan, keep, local.tensors, entries, self._nesting)

    def nesting(self, paths: Any) -> Nesting | None:
        """The nesting of the state dict, if ``paths`` are still those that this planner gave it."""
        return self._nesting if paths == self.mappings else None

    def _refuse_nothing(self, count: int) -> None:
        """Raise where ``include`` and ``exclude`` leave nothing to save on any rank."""
        if count == 0 and self._names and not self.state_dict:
            msg = f"there is nothing to save: no name passes include={self.include!r}, exclude={self.exclude!r}; there are {some(self._names)}"
            raise PlanError(msg)

    # --- planning -------------------------------------------------------------------------------------

    def _becomes(self, dtype: torch.dtype) -> torch.dtype:
        return cast_to(dtype, self.dtype)

    def _plan(self) -> _Local:
        names = list(self.state_dict)
        if self.spared:  # they come last: the others are cast in one go
            names.sort(key=self.spared.__contains__)
        values = list(map(self.state_dict.__getitem__, names))
        end = sum(name not in self.spared for name in names) if self.spared else len(names)
        nested = self._nesting
        paths, positions = (None, None) if nested is None else nested.places(names)
        plan = _core.SavePlan()
        cast = None if self.dtype is None else NAMES[self.dtype]
        first = slice(end)
        rest = plan.add_plain(
            *(names[first], None if paths is None else paths[first], values[first], _torch.PLAIN_TYPES, NAMES),
            positions=None if positions is None else positions[first],
            cast=cast,
        )
        rest = [*rest, *range(end, len(names))]
        others = set(rest)
        local = _Local(plan, values, [name for i, name in enumerate(names) if i not in others])
        layouts: Layouts = {}
        for i in rest:
            path, position = paths[i] if paths else None, positions[i] if positions else None
            becomes = self._becomes if i < end else _as_it_is
            local.others += held_items(names[i], values[i], path, position, layouts, becomes)
        plan.add([other.item() for other in local.others])
        return local

    def _make_items(self, note: _Request | _Share) -> list[WriteItem]:
        """Items of what this rank holds, or of what of it it writes, as torch's planner has them."""
        if self._local is None:
            raise PlanError("the planner was not set up")
        with torch.no_grad():
            items = self._with_dtype(create_default_local_save_plan(self.state_dict, self.is_coordinator)).items
        return kept_items(items, self._local.planned(), _kept(note))

    def _assign(self, requests: list[_Request]) -> tuple[list[bytes], int]:
        key = self._cached_plans_key
        past = memory() if self._enable_plan_caching else None
        received = {} if past is None else past.received.get(key, {})
        data = []
        for rank, request in enumerate(requests):
            known = received.get(request.digest) if request.data is None else request.data
            if known is None:
                msg = f"rank {rank} sent the digest of a plan that the coordinator does not have: save with the same function on all ranks"
                raise PlanError(msg)
            data.append(known)
        asked = ([request.digest for request in requests], self.dedup_save_to_lowest_rank)
        answered = None if past is None else past.answered.get(key)
        if answered is not None and answered[0] == asked:
            shares, items = answered[1]
        else:
            shares, items, _ = _core.assign_saves(data, lowest_rank=self.dedup_save_to_lowest_rank)
        if past is not None:
            past.received[key] = {request.digest: known for request, known in zip(requests, data, strict=True)}
            past.answered[key] = (asked, (shares, items))
        return shares, items

    def _answer(self, plan: SavePlan, keep: bytes) -> SavePlan:
        """The plan of one rank, with what of it that rank writes."""
        items: Any = plan.items
        if note_of(plan) is None:
            items = [item for i, item in enumerate(items) if keep[i // 8] >> (i % 8) & 1]
        else:
            items = items.answered(_Share(keep))
        return dataclasses.replace(plan, items=items)

    def _with_dtype(self, plan: SavePlan) -> SavePlan:
        """The plan with the dtypes that tensors are cast to."""
        if self.dtype is None or not plan.items:
            return plan
        items = []
        for item in plan.items:
            data = item.tensor_data
            spared = item.type == WriteItemType.BYTE_IO or item.index.fqn in self.spared
            if not spared and data is not None:
                properties = dataclasses.replace(data.properties, dtype=self._becomes(data.properties.dtype))
                item = dataclasses.replace(item, tensor_data=dataclasses.replace(data, properties=properties))  # noqa: PLW2901
            items.append(item)
        return dataclasses.replace(plan, items=items)

    def __getstate__(self) -> Mapping[str, Any]:
        # For a save in another process: what this one has set up stays here.
        here: dict[str, Any] = {
            "_local": None,
            "_nesting": None,
            "state_dict": {},
            "plan": None,
            "_items": LocalItems(),
            "global_plan": None,
        }
        return {**self.__dict__, **here}


_METHODS = Methods(RsSavePlanner, DefaultSavePlanner)
_TORCHS = Methods(DefaultSavePlanner, DefaultSavePlanner)
#: What writers call for each item, and what that calls; the rest makes plans.
_PER_ITEM = frozenset({"resolve_data", "lookup_object", "transform_object"})
_PLANNING = _METHODS.names - _PER_ITEM - {"set_up_planner"}


def writes_of(plan: SavePlan, planner: SavePlanner, *, strict: bool) -> Writes:
    """What this rank writes for the plan: without items where none was changed, and nobody wants to be called for each. Warns of keys that come back as text.

    Raises:
        UnsupportedError, UnsafePickleError: what cannot be stored; with ``strict`` also what would not load back as it is.
        PlanError: the planner resolved something else than it planned.
    """
    own: RsSavePlanner | None = planner_of(plan)
    if own is not None and not _METHODS.replaced(own, _PER_ITEM) and (planner is own or _calls(planner, own)):
        writes = own.writes(plan, strict=strict)
    else:
        # Else somebody changed the plan's paths, or the planner does not know them.
        nesting = planner.nesting(plan.planner_data) if isinstance(planner, RsSavePlanner) else None
        resolved = None if _resolves_for_good(planner) else Resolved(planner)
        writes = collect(plan, planner, nesting, resolved, strict=strict)
    if writes.nesting is not None:
        writes.nesting.judge(strict=strict)
    return writes


def _calls(wrapper: SavePlanner, own: RsSavePlanner) -> bool:
    """Whether what a wrapper has for each item is its planner's."""
    return all(getattr(wrapper, name, None) == getattr(own, name) for name in _PER_ITEM)


def _resolves_for_good(planner: SavePlanner) -> bool:
    """Whether what it resolves is the state dict's, or a copy that nobody else has, as with torch's planner and this one."""
    if not isinstance(planner, DefaultSavePlanner):
        return False
    return not (_METHODS if isinstance(planner, RsSavePlanner) else _TORCHS).replaced(planner, _PER_ITEM)


def _kept(note: _Request | _Share | None) -> bytes | None:
    """Which items the coordinator gave to this rank; None, as long as it has not answered: all."""
    return note.keep if isinstance(note, _Share) else None


def _request(plan: SavePlan) -> _Request:
    note = note_of(plan)
    if isinstance(note, _Request):
        return note
    data = request_of(plan.items, plan.planner_data)
    return _Request(hashlib.blake2b(data, digest_size=16).digest(), data)


def _as_it_is(dtype: torch.dtype) -> torch.dtype:
    return dtype


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
