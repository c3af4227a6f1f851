"""What is at a path: found out by looking, never by a flag."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

from dcp_rs import _core
from dcp_rs.errors import UnsupportedError

__all__ = ["INDEX_NAME", "is_rank_local", "is_torch_file", "local_path", "open_index", "rank_index_name"]

INDEX_NAME = "index.dcprs"

#: The names under which a rank publishes what it wrote alone: of this package, and of torch.
_RANK_LOCAL = (f"__*.{INDEX_NAME}", "__*.metadata")


def rank_index_name(rank: int) -> str:
    """The index of one rank of a rank-local save."""
    return f"__{rank}.{INDEX_NAME}"


def open_index(path: str | os.PathLike[str], *, rank: int | None, allow_external: bool) -> _core.Index:
    """Opens the checkpoint at ``path``; with ``rank``, what that rank wrote in a rank-local save.

    Raises:
        CheckpointNotFoundError: there is nothing at ``path`` that is a checkpoint.
        CorruptIndexError, UnsafePickleError, UnsupportedError: see :mod:`dcp_rs.errors`.
    """
    return _core.Index.open(os.fspath(path), rank, allow_external)


def is_rank_local(path: str | os.PathLike[str]) -> bool:
    """Whether the folder holds a rank-local save, and none of all ranks."""
    folder = Path(path)
    if (folder / INDEX_NAME).exists() or (folder / ".metadata").exists():
        return False
    return any(next(folder.glob(pattern), None) is not None for pattern in _RANK_LOCAL)


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a file that may be ``torch.save``'s: any but a ``.safetensors`` file, that is a zip archive or is named so."""
    file = local_path(path)
    if not file.is_file() or file.suffix == ".safetensors":
        return False
    with file.open("rb") as stream:
        return stream.read(4) == b"PK\x03\x04" or file.suffix in (".pt", ".pth", ".bin", ".ckpt")
