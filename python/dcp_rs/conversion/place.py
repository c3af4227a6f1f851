"""Where a result is made, and how it gets its name: in one step, when it is complete."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dcp_rs import _core
from dcp_rs._url import StorageOptions, Url, options_for
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.folders import make_folder
from dcp_rs.engine.destination import Destination
from dcp_rs.errors import CheckpointExistsError, DcpRsError, StorageError, StoragePreconditionError
from dcp_rs.options import WriteOptions

__all__ = ["Place", "new_place", "place_before_store", "place_on_store"]


#: Of a name: 255 bytes are one to file systems, and those of a temporary folder have a dot, a token of 16 digits, and `.tmp` around it.
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

    Files of other formats are not written from their beginning to their end. The one that names the others is sent last.

    Raises:
        CheckpointExistsError: something is there, and ``overwrite`` is not set; or it is a folder, which a store cannot replace in one step.
        StorageUnclearError: it cannot be told whether the result is there, or will be in a moment. Nothing of it is removed.
        StorageError: see :mod:`dcp_rs.errors`.
    """
    store = _core.Store(os.fspath(dst), options_for(dst, options) or {})
    limits = {"threads": write.threads or 0, "max_inflight_bytes": write.inflight_bytes(accelerator=False)}
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
def new_place(dst: Path, before: _core.Occupant | Literal["anything"] | None, *, as_file: bool) -> Iterator[Place]:
    """A place to make ``dst`` in. It takes its name at the end; after an error, or Ctrl-C, nothing is left of it.

    What was at ``dst`` ``before`` is replaced, and removed when that is done; what has come there since is not, unless ``before`` is "anything", for files.
    While this lasts its folder is locked: ``dcp_rs.clean`` removes one that is not, as what a killed process left.

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
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(folder)
