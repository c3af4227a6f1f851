"""What people give for a state dict, a path or an option, and did not mean."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer

from dcp_rs.tensors.flatten import is_stateful
from dcp_rs.transfer.stage import HostStager

__all__ = ["check_planner", "check_reader", "check_stager", "check_state_dict"]


def check_state_dict(state_dict: Any, path: Any = None) -> None:
    """Raises a TypeError that says what to give, unless this is a state dict; ``path``: what was given for one."""
    if isinstance(state_dict, Mapping):
        return
    kind = type(state_dict).__name__
    if isinstance(state_dict, str | os.PathLike):
        swapped = isinstance(path, Mapping)
        msg = "the state dict comes first, then the path" + (
            "" if swapped else f"; {state_dict!r} is no state dict"
        )
    elif is_stateful(state_dict):
        name = "optim" if isinstance(state_dict, Optimizer) else "model"
        msg = f"{kind} is not a state dict: pass {{{name!r}: {name}}}, or {name}.state_dict()"
    else:
        msg = (
            f"{kind} is not a state dict: pass a dict of names to tensors, to values, "
            "or to objects with state_dict() and load_state_dict()"
        )
    raise TypeError(msg)


def check_planner(called: Literal["load", "save"], planner: Any) -> None:
    """Raise a TypeError that says what to pass, unless this is None or a planner for that."""
    takes, example = (
        (LoadPlanner, "RsLoadPlanner") if called == "load" else (SavePlanner, "RsSavePlanner")
    )
    if planner is None or isinstance(planner, takes):
        return
    # torch takes a wrapper that hands every method on, whatever its class.
    needed = (
        "set_up_planner",
        "create_local_plan",
        "resolve_tensor" if called == "load" else "resolve_data",
    )
    if not isinstance(planner, type) and all(hasattr(planner, name) for name in needed):
        return
    is_other = isinstance(planner, LoadPlanner | SavePlanner)
    why = f", which plans a {'save' if called == 'load' else 'load'}" if is_other else ""
    msg = (
        f"planner= of a {called} takes a planner such as {example}(...), not {_kind(planner)}{why}"
    )
    raise TypeError(msg)


def check_reader(reader: Any) -> None:
    """Raise a TypeError that says what to pass, unless this is a storage reader."""
    if isinstance(reader, StorageReader):
        return
    if isinstance(reader, str | os.PathLike):
        msg = f"storage_reader= is a path: pass RsReader({os.fspath(reader)!r}), or call dcp_rs.load(state_dict, path)"
    else:
        msg = f"storage_reader= takes a reader such as RsReader(path), not {_kind(reader)}"
    raise TypeError(msg)


def check_stager(stager: Any) -> None:
    """Raise a TypeError that says what to pass, unless this is None or a HostStager."""
    if stager is not None and not isinstance(stager, HostStager):
        msg = f"stager= takes an instance such as HostStager(cache=True), not {_kind(stager)}"
        raise TypeError(msg)


def _kind(value: Any) -> str:
    """Return what a message calls a wrong argument."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
