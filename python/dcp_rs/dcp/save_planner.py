"""``RsSavePlanner``: torch's save planner with options."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from dcp_rs._arguments import suggest_option
from dcp_rs._reports import short_repr
from dcp_rs.checkpoint.names import every, nothing_passes, selector
from dcp_rs.errors import PlanError
from dcp_rs.options import Globs, repeatable
from dcp_rs.tensors import pickles
from dcp_rs.tensors.dtypes import cast_to, is_counter, parse_dtype


class RsSavePlanner(DefaultSavePlanner):
    """Torch's ``DefaultSavePlanner`` with options.

    It plans item by item, as torch does. :func:`dcp_rs.save` and :func:`dcp_rs.async_save` take
    ``dtype``, ``include`` and ``exclude`` themselves, and are faster without a planner.

    Args:
        flatten_state_dict, flatten_sharded_tensors, dedup_replicated_tensors: as in torch's
            ``DefaultSavePlanner``.
        dedup_save_to_lowest_rank: the lowest of the ranks that hold an entry saves it.
        enable_plan_caching: accepted, and without effect: planning costs little.
        dtype: store floating-point tensors of 16 bits and more in this dtype. Tensors of 8 bits
            and fewer keep their dtype, as their scales are elsewhere. So does the ``step`` of an
            optimizer's state.
        include, exclude: globs over names. Entries that are not included, or are excluded, are not
            saved.

    Raises:
        PlanError: ``include`` and ``exclude`` leave nothing to save; chunks overlap or lie outside
            of their tensor; no rank holds an element; or ranks describe a tensor differently.
        UnsupportedError: the format cannot hold a tensor.

    Example:
        ```python
        state, planner = {"model": model.state_dict()}, dcp_rs.RsSavePlanner(exclude="*.bias")
        dcp.save(state, storage_writer=dcp_rs.RsWriter("ckpt"), planner=planner)
        ```
    """

    #: A message, if ``include`` and ``exclude`` leave nothing of this rank.
    _nothing_to_save: str | None = None

    @suggest_option
    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
        *,
        dtype: torch.dtype | str | None = None,
        include: Globs = None,
        exclude: Globs = None,
    ) -> None:
        super().__init__(
            flatten_state_dict,
            flatten_sharded_tensors,
            dedup_replicated_tensors,
            dedup_save_to_lowest_rank,
        )
        self.dtype = parse_dtype(dtype)
        self.include, self.exclude = repeatable(include), repeatable(exclude)
        selector(self.include, self.exclude)  # raise for an invalid argument now

    def __repr__(self) -> str:
        own = {name: getattr(self, name) for name in ("dtype", "include", "exclude")}
        return short_repr(self, **{name: one for name, one in own.items() if one is not None})

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state dict as torch does, and apply ``include`` and ``exclude``."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._nothing_to_save = None
        passes = selector(self.include, self.exclude)
        if passes is every:
            return
        values = self.state_dict
        self.state_dict = {name: value for name, value in values.items() if passes(name)}
        if self.flatten_state_dict:
            self.mappings = {name: path for name, path in self.mappings.items() if passes(name)}
        if values and not self.state_dict:
            self._nothing_to_save = nothing_passes("save", self.include, self.exclude, values)

    def create_local_plan(self) -> SavePlan:
        """Return torch's plan, with the dtypes that tensors are stored in."""
        self.plan = super().create_local_plan()
        if self.dtype is not None:
            self.plan = replace(self.plan, items=list(map(self._item_with_dtype, self.plan.items)))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return torch's plan.

        Raises:
            PlanError: ``include`` and ``exclude`` leave nothing to save.
        """
        plans, metadata = super().create_global_plan(all_plans)
        if self._nothing_to_save is not None and not metadata.state_dict_metadata:
            raise PlanError(self._nothing_to_save)
        return plans, metadata

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        """Transform as torch does, and cast to ``dtype``. An error about a value names it."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(pickles.dump(write_item.index.fqn, object))
        made = super().transform_object(write_item, object)
        if not isinstance(made, torch.Tensor) or is_counter(write_item.index.fqn, made.shape):
            return made
        return made.to(cast_to(made.dtype, self.dtype))

    def _item_with_dtype(self, item: WriteItem) -> WriteItem:
        data = item.tensor_data
        if data is None or is_counter(item.index.fqn, data.size):
            return item
        properties = replace(data.properties, dtype=cast_to(data.properties.dtype, self.dtype))
        return replace(item, tensor_data=replace(data, properties=properties))
