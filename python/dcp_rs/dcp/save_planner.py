"""``RsSavePlanner``: torch's save planner with options."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from dcp_rs.checkpoint.names import repeatable
from dcp_rs.engine.local_plan import Nesting, PlanOptions, Selected, select
from dcp_rs.errors import PlanError
from dcp_rs.tensors import pickles
from dcp_rs.tensors.dtypes import NAMES, cast_to, is_counter

__all__ = ["RsSavePlanner", "is_plain"]


class RsSavePlanner(DefaultSavePlanner):
    """Torch's ``DefaultSavePlanner`` with options.

    :func:`dcp_rs.save` and :func:`dcp_rs.async_save` take its options and plan in Rust. Under
    torch's own ``dcp.save``, and if a subclass overrides a method, it plans item by item as torch
    does.

    Args:
        flatten_state_dict, flatten_sharded_tensors, dedup_replicated_tensors: as in torch's
            ``DefaultSavePlanner``.
        dedup_save_to_lowest_rank: the lowest of the ranks that hold an entry saves it.
        enable_plan_caching: accepted, and without effect: planning costs little.
        dtype: store floating-point tensors of 16 bits and more in this dtype. :func:`dcp_rs.save`
            casts them while it writes, in bounded memory. Tensors of 8 bits and fewer keep their
            dtype, as their scales are elsewhere. So does the ``step`` of an optimizer's state.
        include, exclude: globs over names. Entries that are not included, or are excluded, are not
            saved.

    Raises:
        PlanError: ``include`` and ``exclude`` leave nothing to save; chunks overlap or lie outside
            of their tensor; no rank holds an element; or ranks describe a tensor differently.
        UnsupportedError: the format cannot hold a tensor.

    Example:
        ```python
        dcp_rs.save({"model": model}, "ckpt", planner=dcp_rs.RsSavePlanner(exclude="*.bias"))
        ```
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
        )
        if dtype is not None and not (dtype.is_floating_point and dtype in NAMES):
            msg = f"dtype={dtype!r}: a floating-point dtype"
            raise ValueError(msg)
        self.dtype = dtype
        self.include, self.exclude = repeatable(include), repeatable(exclude)
        self._selected: Selected | None = None

    def _options(self) -> PlanOptions:
        """Return the options of a save without a planner."""
        return PlanOptions(
            flatten=self.flatten_state_dict,
            flatten_sharded=self.flatten_sharded_tensors,
            lowest_rank=self.dedup_save_to_lowest_rank,
            dtype=self.dtype,
            include=self.include,
            exclude=self.exclude,
        )

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state dict, and apply ``include`` and ``exclude``."""
        self._selected = select(state_dict, self._options())
        self.state_dict, self.mappings = self._selected.values, self._selected.paths
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return torch's plan, with the dtypes that tensors are stored in."""
        self.plan = self._with_dtype(super().create_local_plan())
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return torch's plan.

        Raises:
            PlanError: ``include`` and ``exclude`` leave nothing to save.
        """
        plans, metadata = super().create_global_plan(all_plans)
        nothing = None if self._selected is None else self._selected.nothing_to_save
        if nothing is not None and not metadata.state_dict_metadata:
            raise PlanError(nothing)
        return plans, metadata

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        """Transform as torch does, and cast to ``dtype``. An error about a value names it."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(pickles.dump_named(write_item.index.fqn, object))
        made = super().transform_object(write_item, object)
        if not isinstance(made, torch.Tensor) or is_counter(write_item.index.fqn, made.shape):
            return made
        return made.to(cast_to(made.dtype, self.dtype))

    def _nesting(self, paths: Any) -> Nesting | None:
        """Return the nesting of the state dict, unless the caller changed ``paths``."""
        return (
            self._selected.nesting
            if self._selected is not None and paths == self.mappings
            else None
        )

    def _with_dtype(self, plan: SavePlan) -> SavePlan:
        if self.dtype is None:
            return plan
        return replace(plan, items=list(map(self._item_with_dtype, plan.items)))

    def _item_with_dtype(self, item: WriteItem) -> WriteItem:
        data = item.tensor_data
        if data is None or is_counter(item.index.fqn, data.size):
            return item
        properties = replace(data.properties, dtype=cast_to(data.properties.dtype, self.dtype))
        return replace(item, tensor_data=replace(data, properties=properties))

    def __getstate__(self) -> Mapping[str, Any]:
        # A save in another process sets the planner up again.
        return {
            **self.__dict__,
            "_selected": None,
            "state_dict": {},
            "plan": None,
            "global_plan": None,
        }


def is_plain(planner: SavePlanner) -> TypeGuard[RsSavePlanner]:
    """Return true if no method of an ``RsSavePlanner`` is overridden: its options say all."""
    return type(planner) is RsSavePlanner and vars(planner).keys().isdisjoint(
        dir(DefaultSavePlanner)
    )
