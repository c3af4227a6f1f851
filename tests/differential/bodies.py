"""What users' planners do, for any state dict. A body gets what it stands before, the planner, and the arguments."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from support.hooks import overridable


def _chosen(fqn: str) -> bool:
    return zlib.crc32(fqn.encode()) % 3 != 0


def _count(own: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    vars(self)["count"] = vars(self).get("count", 0) + 1
    return own(*args, **kwargs)


def _look(own: Any, self: Any, *args: Any) -> Any:
    plan = own(*args)
    vars(self)["seen"] = len(plan.items)
    return plan


def _plan_some(own: Any, self: Any) -> Any:
    plan = own()
    return dataclasses.replace(
        plan, items=[item for item in plan.items if _chosen(item.dest_index.fqn)]
    )


def _finish_some(own: Any, self: Any, plan: Any) -> Any:
    plan = own(plan)
    return dataclasses.replace(
        plan, items=[item for item in plan.items if _chosen(item.dest_index.fqn)]
    )


def _plan_backwards(own: Any, self: Any) -> Any:
    plan = own()
    return dataclasses.replace(plan, items=list(reversed(plan.items)))


def _commit_and_turn(own: Any, self: Any, item: Any, tensor: torch.Tensor) -> None:
    if tensor.dtype in (torch.float32, torch.float64, torch.int64):
        tensor.neg_()
    own(item, tensor)


def _bytes_and_more(own: Any, self: Any, item: Any, value: Any) -> None:
    own(item, value)
    vars(self).setdefault("values", []).append(item.dest_index.fqn)


#: Methods of load planners, and bodies for them.
LOADS = {
    **{f"count {name}": (name, _count) for name in sorted(overridable(DefaultLoadPlanner))},
    "look at the plan": ("create_local_plan", _look),
    "look at the finished plan": ("finish_plan", _look),
    "plan some": ("create_local_plan", _plan_some),
    "finish some": ("finish_plan", _finish_some),
    "plan backwards": ("create_local_plan", _plan_backwards),
    "commit and turn": ("commit_tensor", _commit_and_turn),
    "bytes and more": ("load_bytes", _bytes_and_more),
}


def _save_some(own: Any, self: Any) -> Any:
    plan = own()
    return dataclasses.replace(plan, items=[item for item in plan.items if _chosen(item.index.fqn)])


def _turn(own: Any, self: Any, item: Any, *rest: Any) -> Any:
    made = own(item, *rest)
    return (
        -made
        if isinstance(made, torch.Tensor) and made.dtype in (torch.float32, torch.int64)
        else made
    )


#: Methods of save planners, and bodies for them.
SAVES = {
    **{f"count {name}": (name, _count) for name in sorted(overridable(DefaultSavePlanner))},
    "look at the plan": ("create_local_plan", _look),
    "look at the finished plan": ("finish_plan", _look),
    "save some": ("create_local_plan", _save_some),
    "resolve and turn": ("resolve_data", _turn),
    "transform and turn": ("transform_object", _turn),
}
