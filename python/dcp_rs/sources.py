"""What is at a path: found out by looking, never by a flag."""

from __future__ import annotations

import os
from pathlib import Path

from dcp_rs import _core
from dcp_rs.errors import CheckpointNotFoundError

__all__ = ["INDEX_NAME", "is_rank_local", "open_index", "rank_index_name"]

INDEX_NAME = "index.dcprs"


def rank_index_name(rank: int) -> str:
    """The index of one rank of a rank-local save."""
    return f"__{rank}.{INDEX_NAME}"


def open_index(path: str | os.PathLike[str], *, rank: int | None, allow_external: bool) -> _core.Index:
    """Opens the index of the checkpoint at ``path``; with ``rank``, that rank's index of a rank-local save.

    Raises:
        CheckpointNotFoundError: there is nothing at ``path`` that is a checkpoint.
        CorruptIndexError, UnsupportedError: see :mod:`dcp_rs.errors`.
    """
    folder = Path(path)
    name = INDEX_NAME if rank is None else rank_index_name(rank)
    index = folder / name
    if index.is_file():
        return _core.Index.open(str(index), allow_external)
    raise CheckpointNotFoundError(f"no checkpoint at {folder}: {_why_not(folder, name)}", path=folder)


def is_rank_local(path: str | os.PathLike[str]) -> bool:
    """Whether the folder holds a rank-local save, and none of all ranks."""
    folder = Path(path)
    return not (folder / INDEX_NAME).exists() and next(folder.glob(f"__*.{INDEX_NAME}"), None) is not None


def _why_not(folder: Path, name: str) -> str:
    if not folder.exists():
        return "no such folder"
    if not folder.is_dir():
        return "it is not a folder"
    if is_rank_local(folder):
        return f"it holds a rank-local save (use_collectives=False), and no {name}"
    if next(folder.iterdir(), None) is None:
        return "the folder is empty"
    return f"the folder holds no {name}"
