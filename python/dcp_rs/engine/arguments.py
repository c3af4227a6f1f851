"""What people give for a state dict, a path or an option, and did not mean."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any

from dcp_rs.checkpoint.names import nearest
from dcp_rs.tensors.trees import is_stateful

__all__ = ["check_options", "check_state_dict"]


def check_state_dict(state_dict: Any, path: Any = None) -> None:
    """Raises a TypeError that says what to give, unless this is a state dict; ``path``: what was given for one."""
    if isinstance(state_dict, Mapping):
        return
    kind = type(state_dict).__name__
    if isinstance(state_dict, str | os.PathLike):
        swapped = isinstance(path, Mapping)
        msg = "the state dict comes first, then the path" + ("" if swapped else f"; {state_dict!r} is no state dict")
    elif is_stateful(state_dict):
        msg = (
            f"a {kind} is not a state dict: give {{'model': it}}, whose state is taken and set, under names that begin with 'model.'; "
            "or its state_dict()"
        )
    else:
        msg = f"a {kind} is not a state dict: give a dict from names to tensors, values, or objects with a state_dict(), as in {{'items': it}}"
    raise TypeError(msg)


def check_options(called: str, options: Mapping[str, Any], takes: Callable[..., Any]) -> None:
    """Raises a TypeError that names what was meant, where one of the options is none of those that ``takes`` takes by keyword."""
    known = [
        name
        for name, parameter in signature(takes).parameters.items()
        if parameter.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD) and not name.startswith("_")
    ]
    for name in options:
        if name not in known and not name.startswith("_"):
            near = nearest(name, known)
            msg = f"dcp_rs.{called}() has no option {name!r}" + (f": did you mean {near!r}?" if near else "")
            raise TypeError(msg)
