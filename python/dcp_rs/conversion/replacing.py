"""What a result may take the place of: never its own source, and of folders those that hold one checkpoint and no more."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from dcp_rs import _core
from dcp_rs._url import Url
from dcp_rs.errors import CheckpointExistsError

__all__ = ["check_apart", "check_place"]

#: Links that are followed from one path: as many as Linux follows.
_LINKS = 40


def check_place(paths: Iterable[Path], dst: Path, *, overwrite: bool) -> _core.Occupant | None:
    """What is at ``dst`` and may be replaced: for :func:`dcp_rs.conversion.place.new_place`. None where there is nothing.

    Args:
        paths: of the source: itself, what it was opened from, and its files.
        dst: where the result goes.
        overwrite: whether a checkpoint that is there gives way.

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
        other = next((entry for entry in sorted(dst.iterdir()) if not _is_of_a_checkpoint(entry)), None)
        if other is not None:
            msg = f"{dst} also holds {other.name!r}, which is no part of a checkpoint: it is not replaced"
            raise CheckpointExistsError(msg, path=dst)
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
        msg = f"the destination {dst} is the source, or part of it, or holds it: {lost} would be lost"
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


def _is_of_a_checkpoint(entry: Path) -> bool:
    endings = ("index.dcprs", ".metadata", ".distcp", ".safetensors", ".safetensors.index.json", _core.LOCK_NAME)
    return entry.name.endswith(endings) and not entry.is_dir()


def _is_lock(entry: Path) -> bool:
    return entry.name == _core.LOCK_NAME
