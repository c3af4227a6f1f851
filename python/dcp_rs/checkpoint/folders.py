"""Folders of checkpoints: the names of their files, and how they are created."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from dcp_rs import _core
from dcp_rs._reports import size
from dcp_rs._url import StrPath, Url, location
from dcp_rs._warnings import warn_caller
from dcp_rs.errors import CheckpointExistsError, UnsupportedError

INDEX_NAME = "index.dcprs"
#: The file that makes a folder a checkpoint of torch.
STOCK_NAME = ".metadata"

#: Names of data files (section 1.1 of the format).
_DATA_FILE = re.compile(r"g\d{8,}-[0-9a-f]{16}-r(\d{5,})-f\d{5,}\.safetensors")
#: Names of the indexes of rank-local saves, by this package and by torch.
_RANK_LOCAL = (f"__*.{INDEX_NAME}", "__*.metadata")

#: Where this process has opened or saved a checkpoint.
_known: set[str] = set()


def checkpoint_path(index: _core.Index) -> str:
    """Return the path of an open checkpoint: its folder or its file, or the URL of one."""
    path = os.fspath(index.path)
    return path if index.is_in_memory else os.path.dirname(path) or "."  # noqa: PTH120  # a URL?


def remember(path: Path) -> None:
    """Remember that this process has opened or saved the checkpoint at a path or URL."""
    _known.add(real_path(path))


def is_known(path: Path) -> bool:
    """Return whether this process has opened or saved a checkpoint at a path or URL."""
    return real_path(path) in _known


def real_path(path: Path) -> str:
    """Return a path without links, or a URL, to compare with others."""
    return str(path).rstrip("/") if isinstance(path, Url) else os.path.realpath(path)


def rank_index_name(rank: int) -> str:
    """Return the name of a rank's index in a rank-local save."""
    return f"__{rank}.{INDEX_NAME}"


def is_data_file(name: str) -> bool:
    """Return whether a file name is that of a data file of this package."""
    return _DATA_FILE.fullmatch(name) is not None


def rank_of(name: str) -> int | None:
    """Return the rank that wrote a data file of this package; None for another file."""
    found = _DATA_FILE.fullmatch(name)
    return None if found is None else int(found[1])


def local_path(path: StrPath) -> Path:
    """Return a path of the file system, which may be given as ``file://``.

    Raises:
        UnsupportedError: it is a URL of another scheme, as in ``s3://bucket/ckpt``.
    """
    found = location(path)
    if isinstance(found, Url):
        msg = (
            f"{found}: this needs a local path, not a URL. save, async_save, RsWriter and "
            "CheckpointManager write to stores; load, open, RsReader, verify and diff read them"
        )
        raise UnsupportedError(msg, path=found)
    return found


def make_folder(path: StrPath) -> None:
    """Create a folder and its parents durably, unless it exists.

    Raises:
        CheckpointExistsError: the path is a file or a broken link.
        NotADirectoryError: a parent is one.
        OSError: the system refuses.
    """
    try:
        _core.create_folder(path)
    except (FileExistsError, NotADirectoryError) as error:
        folder = Path(path)
        there = next(
            (above for above in (folder, *folder.parents) if os.path.lexists(above)), folder
        )
        kind, advice = _kind(there), "pass another path, or move it away"
        if isinstance(error, FileExistsError):
            msg = f"{there} is {kind}, not a folder: {advice}"
            raise CheckpointExistsError(msg, path=there) from error
        msg = f"there is {kind} where a folder has to be: {advice}"  # Python adds the path
        raise NotADirectoryError(error.errno, msg, os.fspath(there)) from error


def _kind(path: Path) -> str:
    if path.is_file():
        return f"a file ({size(path.stat().st_size)})"
    if path.is_symlink():
        return f"a dangling link to {path.readlink()}"
    return "something else"


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder, and need not.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def holds_index(folder: Path) -> bool:
    """Return whether a folder holds an index of all ranks, by this package or torch.

    A broken link counts as an index.

    Raises:
        OSError: the folder cannot be read.
    """
    return any(_exists(folder / name) for name in (INDEX_NAME, STOCK_NAME))


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_of_all_ranks(path: StrPath) -> bool:
    """Return whether a path is a folder with an index of all ranks. It is False for a store.

    Raises:
        OSError: the folder cannot be read.
    """
    folder = location(path)
    return not isinstance(folder, Url) and holds_index(folder)


def is_rank_local(path: StrPath) -> bool:
    """Return whether a folder holds a rank-local save, and no index of all ranks."""
    folder = location(path)
    if isinstance(folder, Url) or holds_index(folder):
        return False
    return any(next(folder.glob(pattern), None) is not None for pattern in _RANK_LOCAL)


def warn_of_foreign_model(folder: Path) -> None:
    """Warn if a save goes to a folder with a model of another library, which tools would open."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except OSError:  # the folder is new, or the save will raise
        return
    foreign = [name for name in names if is_foreign(name)]
    if foreign:
        rest = "" if len(foreign) == 1 else f" and {len(foreign) - 1} more"
        warn_caller(
            f"{folder} holds a model that dcp-rs did not write ({foreign[0]}{rest}), and the "
            "checkpoint is saved beside it: other tools go on to read that model, dcp-rs reads the "
            "checkpoint. Save it to a folder of its own"
        )


def is_foreign(name: str) -> bool:
    """Return whether a file name is that of a model or checkpoint of another library."""
    if name.endswith(".safetensors"):
        return _DATA_FILE.fullmatch(name) is None
    if name.startswith(("pytorch_model", "adapter_model")):
        return name.endswith((".bin", ".bin.index.json"))
    return name == STOCK_NAME or name.endswith(".safetensors.index.json")
