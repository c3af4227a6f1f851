"""What a run's saves have in common, and what is for each of them to say."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from dcp_rs.checkpoint.names import nearest
from dcp_rs.options import WriteArguments, WriteOptions
from dcp_rs.steps.objects import is_own

__all__ = ["ExtraFiles", "check_write_options", "read_extra_files"]

#: Files of the user's for the folder of a step, by name: their bytes, or where they are.
ExtraFiles = Mapping[str, bytes | str | os.PathLike[str]]

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


def read_extra_files(files: ExtraFiles) -> dict[str, bytes]:
    """Return the bytes of files that are to be put into the folder of a step.

    Raises:
        ValueError: a name that is a path, hidden, or one of this package's own.
        OSError: one cannot be read.
    """
    for name in files:
        if not name or name.startswith(".") or "/" in name or "\0" in name or is_own(name):
            msg = f"extra_files has {name!r}: a plain name is needed, not hidden, and none that a checkpoint has itself"
            raise ValueError(msg)
    return {name: bytes(file) if isinstance(file, bytes) else Path(file).read_bytes() for name, file in files.items()}
