"""What a result may take the place of: never its own source, and of folders those that hold one checkpoint and no more."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dcp_rs import _core
from dcp_rs._url import Url
from dcp_rs.checkpoint.locate import INDEX_NAME, STOCK_NAME, is_data_file
from dcp_rs.errors import CheckpointExistsError, DcpRsError

__all__ = ["check_apart", "check_place"]

#: What a rank writes: its data under torch, and what it publishes alone.
_OF_A_RANK = re.compile(rf"__\d+(_\d+\.distcp|\.{re.escape(INDEX_NAME)}|\.metadata)")
#: What anybody gives such names: whether a file is one of a checkpoint is seen when that is opened.
_MODELS = (".safetensors", ".safetensors.index.json", ".distcp")
#: Links that are followed from one path: as many as Linux follows.
_LINKS = 40


def check_place(
    paths: Iterable[Path], dst: Path, *, overwrite: bool, is_part: Callable[[Path], bool] | None = None
) -> _core.Occupant | None:
    """What is at ``dst`` and may be replaced: for :func:`dcp_rs.conversion.place.new_place`. None where there is nothing.

    Args:
        paths: of the source: itself, what it was opened from, and its files.
        dst: where the result goes.
        overwrite: whether a checkpoint that is there gives way.
        is_part: whether this file or folder may be in a folder that gives way; default: a file that may be one of a checkpoint's own.

    Raises:
        ValueError: writing it would change the source.
        CheckpointExistsError: it exists and ``overwrite`` is not set, or it holds more than a checkpoint.
    """
    check_apart(paths, dst)
    before = _core.occupant(os.fspath(dst))
    if before is None or (dst.is_dir() and not dst.is_symlink() and all(_is_lock(entry) for entry in dst.iterdir())):
        return before
    if not overwrite:
        msg = f"{dst} exists; overwrite=True replaces it"
        raise CheckpointExistsError(msg, path=dst)
    if dst.is_symlink() or not (dst.is_dir() or dst.is_file()):
        msg = f"{dst} is neither a folder nor a file, and is not replaced"
        raise CheckpointExistsError(msg, path=dst)
    if dst.is_dir():
        _check_folder(dst, is_part or _is_of_a_checkpoint)
    return before


def check_apart(paths: Iterable[Path], dst: Path) -> None:
    """Checks that nothing of a source is at ``dst``, or in it.

    Args:
        paths: of the source: itself, what it was opened from, and its files.
        dst: what is to be replaced, on the file system or on a store.

    Raises:
        ValueError: something is.
    """
    if isinstance(dst, Url):  # where no folder below is touched
        lost: Path | None = next((path for path in paths if isinstance(path, Url) and dst in (path, path.parent)), None)
    else:
        lost = _lost_with(dst, (path for path in paths if not isinstance(path, Url)))
    if lost is not None:
        msg = f"the destination {dst} is the source, contains it, or lies in it: {lost} would be lost"
        raise ValueError(msg)


def _lost_with(dst: Path, paths: Iterable[Path]) -> Path | None:
    target = dst.resolve()
    here = _identity(target) if target.is_dir() else None
    seen: set[Path] = set()
    for path in paths:
        for place in _places(path):
            if place == target:
                return path
            folders = [folder for folder in (place, *place.parents) if folder not in seen]
            seen.update(folders)
            # One folder has several paths where a file system is mounted twice.
            if target in folders or (here is not None and any(_identity(folder) == here for folder in folders)):
                return path
            if place.name == target.name and _identity(place.parent) == _identity(target.parent) is not None:
                return path
    return None


def _places(path: Path) -> Iterator[Path]:
    """Where a path is, and where it leads, link by link."""
    for _ in range(_LINKS):
        path = path.parent.resolve() / path.name if path.name not in ("", "..") else path.resolve()
        yield path
        if not path.is_symlink():
            return
        path = path.parent / path.readlink()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _check_folder(folder: Path, is_part: Callable[[Path], bool]) -> None:
    """Raises unless what is there is one checkpoint. A damaged one need not open, if names tell that each file was written for one."""
    entries = {entry.name: entry for entry in sorted(folder.iterdir())}
    for name, entry in entries.items():
        if not is_part(entry):
            raise _holds_more(folder, name)
    models = [name for name in entries if name.endswith(_MODELS) and not _is_told_by_name(name)]
    is_two = INDEX_NAME in entries and STOCK_NAME in entries
    if not models and not is_two:
        return
    try:
        index = _open(folder)
    except (DcpRsError, OSError) as error:
        if not models:
            return
        msg = f"{folder} does not open as one checkpoint, and is not replaced ({error}); remove what is there, or choose another place"
        raise CheckpointExistsError(msg, path=folder) from error
    if is_two and index.source == "dcp-rs":
        raise _holds_more(folder, STOCK_NAME)
    own = _names(index)
    for name in models:
        if name not in own and not (name.endswith(".json") and _indexes(entries[name], own)):
            raise _holds_more(folder, name)


def _holds_more(folder: Path, name: str) -> CheckpointExistsError:
    msg = f"{folder} also holds {name!r}, which is no part of a checkpoint, or not of the one there: it is not replaced; move what is to stay, or choose another place"
    return CheckpointExistsError(msg, path=folder)


def _open(path: Path) -> _core.Index:
    return _core.Index.open(os.fspath(path), None, True, None)  # wherever its data is: nothing of it is read


def _names(index: _core.Index) -> set[str]:
    return {path.name for path in index.file_paths()}


def _indexes(path: Path, files: set[str]) -> bool:
    """Whether an index of Hugging Face is one of these files."""
    try:
        return _names(_open(path)) <= files
    except (DcpRsError, OSError):
        return False


def _is_of_a_checkpoint(entry: Path) -> bool:
    return not entry.is_dir() and (_is_told_by_name(entry.name) or entry.name.endswith(_MODELS))


def _is_told_by_name(name: str) -> bool:
    """Whether only this package, or torch, gives files such a name."""
    return (
        name in (INDEX_NAME, STOCK_NAME, _core.LOCK_NAME)
        or is_data_file(name)
        or _OF_A_RANK.fullmatch(name) is not None
    )


def _is_lock(entry: Path) -> bool:
    return entry.name == _core.LOCK_NAME
