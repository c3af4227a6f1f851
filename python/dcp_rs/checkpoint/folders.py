"""Folders that checkpoints are written to."""

from __future__ import annotations

import os
from pathlib import Path

from dcp_rs import _core
from dcp_rs._reports import size
from dcp_rs.errors import CheckpointExistsError

__all__ = ["make_folder"]


def make_folder(path: str | os.PathLike[str]) -> None:
    """Makes a folder, and those above it, durably. One that is there is right as it is.

    Raises:
        CheckpointExistsError: something that is no folder is there. The message says what.
        NotADirectoryError: so it is where a folder above it is to be.
        OSError: the system refuses.
    """
    try:
        _core.create_folder(os.fspath(path))
    except (FileExistsError, NotADirectoryError) as error:
        folder = Path(path)
        there = next(
            (above for above in (folder, *folder.parents) if os.path.lexists(above)), folder
        )
        msg = f"a checkpoint is a folder, but {there} is {_what(there)}: pass another path, or move that away"
        if isinstance(error, FileExistsError):
            raise CheckpointExistsError(msg, path=there) from error
        raise NotADirectoryError(error.errno, msg, os.fspath(there)) from error


def _what(path: Path) -> str:
    if path.is_file():
        return f"a file ({size(path.stat().st_size)})"
    if path.is_symlink():
        return f"a link to {path.readlink()}, which is not there"
    return "none"
