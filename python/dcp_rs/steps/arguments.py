"""What a run's saves have in common, and what is for each of them to say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from dcp_rs.checkpoint.names import nearest
from dcp_rs.options import WriteArguments, WriteOptions

__all__ = ["check_write_options"]

#: Options of one save, and what takes their place in a run.
_OF_ONE_SAVE = {
    "overwrite": "no step replaces another by accident; save(step, state_dict, force=True) replaces one",
    "save_id": "each step gets one of its own",
    "guard": "each commit is held to be of the run that was taken over last",
    "parent": "reuse= takes over from the step before what is the same",
}


def check_write_options(options: Mapping[str, Any], manager: Callable[..., Any]) -> None:
    """Find a bad option of a manager before the first save does.

    Raises:
        ValueError: a value that does not make sense, or an option that a run does not take.
        TypeError: no option of that name.
    """
    for name, instead in _OF_ONE_SAVE.items():
        if name in options:
            msg = f"CheckpointManager takes no {name}=: {instead}"
            raise ValueError(msg)
    known = WriteArguments.__annotations__
    for name in options:
        if name not in known:
            near = nearest(name, [*signature(manager).parameters, *known])
            msg = f"CheckpointManager has no option {name!r}" + (f": did you mean {near!r}?" if near else "")
            raise TypeError(msg)
    WriteOptions(**options)
