"""Where a result is made, what it may take the place of, and how it gets its name: in one step, when it is complete."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dcp_rs import _core
from dcp_rs._url import StorageOptions, Url, options_for
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.folders import make_folder
from dcp_rs.checkpoint.locate import INDEX_NAME, STOCK_NAME, is_data_file
from dcp_rs.engine.destination import Destination
from dcp_rs.errors import CheckpointExistsError, DcpRsError, StorageError, StoragePreconditionError
from dcp_rs.options import WriteOptions

__all__ = [
    "Place",
    "check_apart",
    "check_place",
    "new_place",
    "place_before_store",
    "place_on_store",
]

#: What a rank writes: its data under torch, and what it publishes alone.
_OF_A_RANK = re.compile(rf"__\d+(_\d+\.distcp|\.{re.escape(INDEX_NAME)}|\.metadata)")
#: What anybody gives such names: whether a file is one of a checkpoint is seen when that is opened.
_MODELS = (".safetensors", ".safetensors.index.json", ".distcp")
#: Links that are followed from one path: as many as Linux follows.
_LINKS = 40


def check_place(
    paths: Iterable[Path],
    dst: Path,
    *,
    overwrite: bool,
    is_part: Callable[[Path], bool] | None = None,
) -> _core.Fingerprint | None:
    """What is at ``dst`` and may be replaced: for :func:`dcp_rs.conversion.place.new_place`. None where there is nothing.

    Args:
        paths: of the source: itself, what it was opened from, and its files.
        dst: where the result goes.
        overwrite: whether a checkpoint that is there gives way.
        is_part: whether this file or folder may be in a folder that gives way; default: a file that
            may be one of a checkpoint's own.

    Raises:
        ValueError: writing it would change the source.
        CheckpointExistsError: it exists and ``overwrite`` is not set, or it holds more than a
            checkpoint.
    """
    check_apart(paths, dst)
    before = _core.fingerprint(os.fspath(dst))
    if before is None or (
        dst.is_dir() and not dst.is_symlink() and all(_is_lock(entry) for entry in dst.iterdir())
    ):
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
        lost: Path | None = next(
            (path for path in paths if isinstance(path, Url) and dst in (path, path.parent)), None
        )
    else:
        lost = _lost_with(dst, (path for path in paths if not isinstance(path, Url)))
    if lost is not None:
        msg = (
            f"the destination {dst} is the source, contains it, or lies in it: {lost} would be lost"
        )
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
            if target in folders or (
                here is not None and any(_identity(folder) == here for folder in folders)
            ):
                return path
            if (
                place.name == target.name
                and _identity(place.parent) == _identity(target.parent) is not None
            ):
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
    except (FileNotFoundError, NotADirectoryError):
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
            if any(
                map(is_data_file, entries)
            ):  # the index is damaged, but there are files of two checkpoints
                raise _holds_more(folder, STOCK_NAME) from error
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
    return _core.Index.open(
        os.fspath(path), None, True, None
    )  # wherever its data is: nothing of it is read


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


#: Of a name: 255 bytes are one to file systems, and those of a temporary folder have a dot, a token
#: of 16 digits, and `.tmp` around it.
_NAME_BYTES = 255 - len(".") - len(".0123456789abcdef.tmp")


@dataclass(frozen=True)
class Place:
    """A folder of its own beside the destination, and what in it becomes the destination: all of it, or one file. On a store, the destination.

    Attributes:
        folder, result: these.
        to: the folder, for saves to it.
        generation: the number of such a save.
    """

    folder: Path
    result: Path
    to: Destination
    generation: int = 1


def place_on_store(dst: Url, options: StorageOptions | None, *, overwrite: bool) -> Place:
    """A destination on a store, as it is now: the commit replaces that, and nothing else.

    Raises:
        CheckpointExistsError: there is a checkpoint, and ``overwrite`` is not set.
        StorageError: see :mod:`dcp_rs.errors`.
    """
    to = Destination(dst, options)
    to.prepare(None, overwrite=overwrite)
    return Place(dst, dst, to, to.begin(None, overwrite=overwrite))


@contextmanager
def place_before_store(
    dst: Url,
    options: StorageOptions | None,
    write: WriteOptions,
    *,
    as_file: bool,
    overwrite: bool,
) -> Iterator[Place]:
    """A temporary folder of this machine, from where the result goes to the store when it is complete.

    Files of other formats are not written from their beginning to their end. The one that names the
    others is sent last.

    Raises:
        CheckpointExistsError: something is there, and ``overwrite`` is not set; or it is a folder,
            which a store cannot replace in one step.
        StorageUnclearError: it cannot be told whether the result is there, or will be in a moment.
            Nothing of it is removed.
        StorageError: see :mod:`dcp_rs.errors`.
    """
    store = _core.Store(os.fspath(dst), options_for(dst, options) or {})
    limits = {
        "threads": write.threads or 0,
        "max_inflight_bytes": write.inflight_bytes(accelerator=False),
    }
    with tempfile.TemporaryDirectory(prefix="dcp-rs-convert-") as scratch:
        folder = Path(scratch, "made")
        folder.mkdir()
        to = Destination(folder, None)
        if as_file:
            _check_new(store, dst, overwrite=overwrite)
            yield Place(folder, folder / dst.name, to)
            store.upload_file(folder / dst.name, dst, overwrite=overwrite, **limits)
            return
        with _new_folder(store, dst) as claim:
            yield Place(folder, folder, to)
            made = sorted(folder.iterdir())
            last = next((path for path in made if _names_others(path)), None)
            store.upload_folder(
                [(path, dst / path.name) for path in made if path != last],
                None if last is None else (last, dst / last.name),
                claim=claim,
                **limits,
            )


def _check_new(store: _core.Store, dst: Url, *, overwrite: bool) -> None:
    """Before anything is made; that there is none is looked at once more when it is stored."""
    ((files, _),) = store.list([dst.parent])
    if not overwrite and any(name == dst.name for name, *_ in files):
        msg = f"{dst} exists; overwrite=True replaces it"
        raise CheckpointExistsError(msg, path=dst)


@contextmanager
def _new_folder(store: _core.Store, dst: Url) -> Iterator[tuple[Path, bytes]]:
    """A folder that is nobody else's while this lasts: of two who put files of the same names there, one would be read with data of the other.

    It is claimed by an object, with bytes at random: what tells it from another's.
    """
    if not store.asks_conditions(dst):
        warn_caller(
            f"the store of {dst} ignores conditions: two conversions to this place that begin at the same moment may mix their files"
        )
    claim, token = dst / ".dcp-rs-converting", secrets.token_hex(16).encode()
    try:
        try:
            store.put_new(claim, token)
        except StoragePreconditionError:
            msg = f"another conversion to {dst} is under way, or was killed: then remove what is there"
            raise CheckpointExistsError(msg, path=dst) from None
        ((files, folders),) = store.list([dst])
        if folders or any(name != claim.name for name, *_ in files):
            msg = f"{dst} exists, and a store cannot replace a folder of this format in one step: remove it, or convert to another one"
            raise CheckpointExistsError(msg, path=dst)
        yield claim, token
    finally:
        with suppress(StorageError):  # of what went before, or nothing: the result is whole
            if store.has(claim, token):
                store.remove_seen(claim)


def _names_others(path: Path) -> bool:
    return path.name == ".metadata" or path.name.endswith(".index.json")


def _short(name: str) -> str:
    """A name that still is one with what comes around it: the first 200 characters, by which :func:`dcp_rs.clean` finds it, or as many as fit."""
    name = name[:200]
    while len(os.fsencode(name)) > _NAME_BYTES:
        name = name[:-1]
    return name


@contextmanager
def new_place(
    dst: Path, before: _core.Fingerprint | Literal["anything"] | None, *, as_file: bool
) -> Iterator[Place]:
    """A place to make ``dst`` in. It takes its name at the end; after an error, or Ctrl-C, nothing is left of it.

    What was at ``dst`` ``before`` is replaced, and removed when that is done; what has come there
    since is not, unless ``before`` is "anything", for files. While this lasts its folder is locked:
    ``dcp_rs.clean`` removes one that is not, as what a killed process left.

    Raises:
        CheckpointExistsError: something came to ``dst`` meanwhile.
        OSError: with a ``filename2``, what was at ``dst`` is there now, and could not be put back.
    """
    make_folder(dst.parent)
    name = _short(dst.name)
    beside = dst.parent / f".{name}.{secrets.token_hex(8)}.tmp"
    beside.mkdir()
    is_ours = True
    try:
        _lock = _core.FolderLock(os.fspath(beside))
        result = beside / name
        if not as_file:
            result.mkdir()
        folder = beside if as_file else result
        yield Place(folder, result, Destination(folder, None))
        if before == "anything":
            _replace_file(result, dst)
            return
        is_ours = False  # what is replaced passes through here
        try:
            _core.put_in_place(os.fspath(result), os.fspath(dst), before)
        except (OSError, DcpRsError) as error:
            is_ours = getattr(error, "filename2", None) is None
            raise
        is_ours = True
    finally:
        if is_ours:
            shutil.rmtree(beside, ignore_errors=True)


def _replace_file(made: Path, dst: Path) -> None:
    made.replace(dst)
    folder = os.open(dst.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(folder)
