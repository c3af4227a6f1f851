"""The output of a conversion: what it may replace, and how it gets its name in one step."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from dcp_rs import _core
from dcp_rs._url import Url, store_at
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.folders import INDEX_NAME, STOCK_NAME, is_data_file, make_folder, sync
from dcp_rs.conversion.request import WriteRequest
from dcp_rs.errors import CheckpointExistsError, DcpRsError, StorageError, StoragePreconditionError

#: Files of one rank: its data under torch, and what it publishes alone.
_OF_A_RANK = re.compile(rf"__\d+(_\d+\.distcp|\.{re.escape(INDEX_NAME)}|\.metadata)")
#: Other programs use these endings too, so the checkpoint is opened to see whether a file is its.
_MODELS = (".safetensors", ".safetensors.index.json", ".distcp")
#: Linux follows this number of links.
_LINKS = 40
#: Bytes of a name. File systems allow 255, and a temporary folder adds a dot, a token and `.tmp`.
_NAME_BYTES = 255 - len(".") - len(".0123456789abcdef.tmp")
#: The name of a result in its temporary folder. The final name need not be text.
_MADE = "made"


def _may_be_of_a_checkpoint(entry: Path) -> bool:
    return not entry.is_dir() and (_is_own_name(entry.name) or entry.name.endswith(_MODELS))


def _is_own_name(name: str) -> bool:
    """Return whether only this package, or torch, gives files such a name."""
    return (
        name in (INDEX_NAME, STOCK_NAME, _core.LOCK_NAME)
        or is_data_file(name)
        or _OF_A_RANK.fullmatch(name) is not None
    )


def check_output(
    paths: Iterable[Path],
    out: Path,
    *,
    overwrite: bool,
    as_file: bool = False,
) -> _core.Fingerprint | None:
    """Check that ``out`` can be written. Return what is there, for :func:`new_output`.

    Args:
        paths: the path of the source, its index and its files.
        out: the file or folder to write.
        overwrite: replace a checkpoint.
        as_file: the result is a file. Without ``overwrite``, it does not replace an empty folder.

    Raises:
        ValueError: writing ``out`` would change the source.
        CheckpointExistsError: ``out`` exists and ``overwrite`` is not set, or it holds more than
            one checkpoint.
    """
    check_not_source(paths, out)
    before = _core.fingerprint(out)
    is_folder = out.is_dir() and not out.is_symlink()
    if before is None or (
        is_folder and not as_file and all(entry.name == _core.LOCK_NAME for entry in out.iterdir())
    ):
        return before
    if not overwrite:
        msg = f"{out} exists; overwrite=True replaces it"
        raise CheckpointExistsError(msg, path=out)
    if out.is_symlink() or not (is_folder or out.is_file()):
        msg = f"{out} is neither a folder nor a file, and is not replaced"
        raise CheckpointExistsError(msg, path=out)
    if is_folder:
        _check_folder(out)
    return before


def check_not_source(paths: Iterable[Path], out: Path) -> None:
    """Check that no file of a source is at ``out``, or in it.

    Args:
        paths: the path of the source, its index and its files.
        out: the path to replace, on the file system or on a store.

    Raises:
        ValueError: a file of the source is there.
    """
    lost: Path | None
    if isinstance(out, Url):  # folders below it are not touched
        lost = next((p for p in paths if isinstance(p, Url) and out in (p, p.parent)), None)
    else:
        lost = _lost_with(out, (path for path in paths if not isinstance(path, Url)))
    if lost is not None:
        msg = (
            f"the destination {out} is the source, contains it, or lies in it: {lost} would be lost"
        )
        raise ValueError(msg)


def _lost_with(out: Path, paths: Iterable[Path]) -> Path | None:
    """Return a path that would be lost if ``out`` was replaced."""
    target = _identity(out.resolve())
    seen: set[Path] = set()
    for path in paths:
        for place in _places(path):
            for part in (place, *place.parents):
                if part in seen:
                    break
                seen.add(part)
                if _identity(part) == target:
                    return path
    return None


def _places(path: Path) -> Iterator[Path]:
    """Yield a path, and the targets of its links, one after the other."""
    for _ in range(_LINKS):
        path = path.parent.resolve() / path.name if path.name not in ("", "..") else path.resolve()
        yield path
        if not path.is_symlink():
            return
        path = path.parent / path.readlink()


def _identity(path: Path) -> Hashable:
    """Return the identity of a folder, or of a name in a folder.

    A folder has several paths if a file system is mounted twice.
    """
    folder, name = (path, "") if path.is_dir() else (path.parent, path.name)
    try:
        found = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    return found.st_dev, found.st_ino, name


def _check_folder(folder: Path) -> None:
    """Raise unless the folder holds one checkpoint, and nothing else.

    A damaged checkpoint need not open, if the names tell that each file is one of its files.
    """
    entries = sorted(folder.iterdir())
    names = [entry.name for entry in entries]
    others = [entry.name for entry in entries if not _may_be_of_a_checkpoint(entry)]
    found = _open(folder) if INDEX_NAME in names and STOCK_NAME in names else None
    is_ours = any(map(is_data_file, names)) or (found is not None and found.source == "dcp-rs")
    if STOCK_NAME in names and is_ours:
        others.append(STOCK_NAME)
    models = [name for name in names if name.endswith(_MODELS) and not _is_own_name(name)]
    if models and not others:
        try:
            index = _core.Index.open(folder, None, True, None)
        except (DcpRsError, OSError) as error:
            msg = (
                f"{folder} does not open as one checkpoint, and is not replaced ({error}); "
                "remove what is there, or choose another place"
            )
            raise CheckpointExistsError(msg, path=folder) from error
        own = _file_names(index)
        others = [
            name
            for name in models
            if name not in own and not (name.endswith(".json") and _indexes(folder / name, own))
        ]
    if others:
        msg = (
            f"{folder} also holds {others[0]!r}, which is not part of a checkpoint, or not of the "
            "one there: it is not replaced; move what is to stay, or choose another place"
        )
        raise CheckpointExistsError(msg, path=folder)


def _open(path: Path) -> _core.Index | None:
    """Return the index of what is there; None if it does not open."""
    try:
        return _core.Index.open(path, None, True, None)
    except (DcpRsError, OSError):
        return None


def _file_names(index: _core.Index) -> set[str]:
    return {path.name for path in index.file_paths()}


def _indexes(path: Path, files: set[str]) -> bool:
    """Return whether a Hugging Face index names only these files."""
    index = _open(path)
    return index is not None and _file_names(index) <= files


@contextmanager
def uploaded_output(request: WriteRequest, out: Url) -> Iterator[Path]:
    """Yield a path on this machine to write to, and upload what is there in the end.

    Other formats are not written from beginning to end, as an upload must be. The file that names
    the other files is the last one.

    Raises:
        CheckpointExistsError: ``out`` exists, and ``overwrite`` is not set; or it is a folder,
            which a store cannot replace in one step.
        StorageUnclearError: the store did not answer. Nothing of the result is removed.
        StorageError: see :mod:`dcp_rs.errors`.
    """
    store = store_at(out, request.storage_options)
    inflight = request.write_options.inflight_bytes(accelerator=False)
    limits = {"threads": request.threads or 0, "max_inflight_bytes": inflight}
    with tempfile.TemporaryDirectory(prefix="dcp-rs-convert-") as scratch:
        made = Path(scratch, _MADE)
        if request.as_file:
            _check_new(store, out, overwrite=request.overwrite)
            yield made
            store.upload_file(made, out, overwrite=request.overwrite, **limits)
            return
        with _claimed_folder(store, out) as claim:
            yield made
            files = sorted(made.iterdir())
            last = next((p for p in files if p.name.endswith((".metadata", ".index.json"))), None)
            store.upload_folder(
                [(path, out / path.name) for path in files if path != last],
                None if last is None else (last, out / last.name),
                claim=claim,
                **limits,
            )


def _check_new(store: _core.Store, out: Url, *, overwrite: bool) -> None:
    """Raise if the file exists, before any work. The upload checks it again."""
    ((files, _),) = store.list([out.parent])
    if not overwrite and any(name == out.name for name, *_ in files):
        msg = f"{out} exists; overwrite=True replaces it"
        raise CheckpointExistsError(msg, path=out)


@contextmanager
def _claimed_folder(store: _core.Store, out: Url) -> Iterator[tuple[Path, bytes]]:
    """Claim a new folder by an object with random bytes.

    Two conversions that write files of the same names there would mix their data.
    """
    if not store.asks_conditions(out):
        warn_caller(
            f"the store of {out} ignores conditions: two conversions to this place that begin "
            "at the same moment may mix their files"
        )
    claim, token = out / ".dcp-rs-converting", secrets.token_hex(16).encode()
    try:
        try:
            store.put_new(claim, token)
        except StoragePreconditionError:
            msg = (
                f"another conversion to {out} is under way, or was killed: "
                "then remove what is there"
            )
            raise CheckpointExistsError(msg, path=out) from None
        ((files, folders),) = store.list([out])
        if folders or any(name != claim.name for name, *_ in files):
            msg = (
                f"{out} exists, and a store cannot replace a folder of this format in one step: "
                "remove it, or convert to another one"
            )
            raise CheckpointExistsError(msg, path=out)
        yield claim, token
    finally:
        with suppress(StorageError):  # the result is whole, or another error is raised
            if store.has(claim, token):
                store.remove_seen(claim)


@contextmanager
def new_output(out: Path, before: _core.Fingerprint | Literal["anything"] | None) -> Iterator[Path]:
    """Yield a path in a temporary folder beside ``out``, to create a file or a folder at.

    It gets its name at the end, in one step. After an error or Ctrl-C it is removed. Meanwhile the
    temporary folder is locked, so that ``dcp_rs.clean`` leaves it alone.

    Args:
        out: the file or folder to write.
        before: what is there now, and is replaced. A file can replace "anything".

    Raises:
        CheckpointExistsError: ``out`` changed meanwhile.
        OSError: with a ``filename2``, the earlier checkpoint is at that path, and could not be put
            back.
    """
    make_folder(out.parent)
    # `dcp_rs.clean` finds the folder by the first 200 characters of the name.
    name = os.fsencode(out.name[:200])[:_NAME_BYTES].decode(errors="ignore")
    beside = out.parent / f".{name}.{secrets.token_hex(8)}.tmp"
    beside.mkdir()
    is_ours, lock = True, None
    try:
        lock = _core.FolderLock(beside)
        made = beside / _MADE
        yield made
        if before == "anything":
            made.replace(out)
            sync(out.parent)
            return
        is_ours = False  # the earlier checkpoint passes through this folder
        try:
            _core.put_in_place(made, out, before)
        except (OSError, DcpRsError) as error:
            is_ours = getattr(error, "filename2", None) is None
            raise
        is_ours = True
    finally:
        del lock  # network file systems rename the file of an open lock instead of deleting it
        if is_ours:
            shutil.rmtree(beside, ignore_errors=True)
