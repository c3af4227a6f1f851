"""The steps of a run on an object store, which has no renames and no locks.

A step ends with its index. Only age tells a killed save from one that goes on: files without an
index are swept after a day.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

from dcp_rs import _core
from dcp_rs._url import StorageOptions, Url, location, options_for
from dcp_rs.checkpoint.folders import INDEX_NAME, is_data_file
from dcp_rs.errors import (
    CorruptDataError,
    CorruptIndexError,
    StoragePreconditionError,
    UnsupportedError,
)
from dcp_rs.steps import notes
from dcp_rs.steps.folder_store import FolderStepStore
from dcp_rs.steps.notes import saved_name, saving_name
from dcp_rs.steps.step_store import File, Files, Step, StepNames, StepStore

__all__ = ["ObjectStepStore", "step_store_at"]

#: Seconds. A save may still be under way if it stored something after that.
_DAY = 24 * 60 * 60


class ObjectStepStore(StepStore):
    """The prefix of a run on an object store.

    Args:
        path: the URL.
        options: how to reach the store.
        names: the names of the prefixes of steps.
    """

    _shares_files = False

    def __init__(
        self, path: Url, options: StorageOptions | None, names: StepNames | None = None
    ) -> None:
        super().__init__(names)
        self.path = path
        self.access: Mapping[str, Any] = {"storage_options": options}

    def _store(self) -> _core.Store:
        """Return a store for one operation: it refuses objects that change after it saw them."""
        # A secret must not be in a variable: tools show those of a traceback.
        return _core.Store(
            os.fspath(self.path), options_for(self.path, self.access["storage_options"]) or {}
        )

    # --- files

    def _names(self) -> list[str]:
        return sorted(self._list([self.path])[0] or {})

    def _list(self, folders: Sequence[Path]) -> list[Files | None]:
        now, listed = time.time(), self._store().list(folders)
        return [
            {
                **{name: File(0, name, None, -_DAY, is_file=False) for name in inner},
                **{name: File(n, folder / name, tag, now - age) for name, n, age, tag in files},
            }
            or None
            for folder, (files, inner) in zip(folders, listed, strict=True)
        ]

    def _walk(self, folder: Path) -> Files:
        """Return all files below a folder, by their path from there."""
        found: dict[str, File] = {}
        below = [""]
        while below:
            deeper = []
            for prefix, files in zip(below, self._list([folder / p for p in below]), strict=True):
                for name, file in (files or {}).items():
                    if file.is_file:
                        found[prefix + name] = file
                    else:
                        deeper.append(f"{prefix}{name}/")
            below = deeper
        return found

    def _read(self, paths: Sequence[Path]) -> list[bytes | None]:
        return self._store().read(paths)

    def _put(self, path: Path, data: bytes) -> None:
        self._store().put(path, data)

    def _remove_files(self, paths: Sequence[Path]) -> None:
        if paths:
            self._store().remove(paths)

    def files_in(self, number: int) -> set[str]:
        """Return the names of all files of a step. See :meth:`StepStore.files_in`.

        Young files of this package are not among them: another save may be under way.
        """
        files = self._walk(self.folder(number))
        ours = {name for name, file in files.items() if notes.is_own(name) and _is_young(file)}
        return files.keys() - ours - {INDEX_NAME}

    def _data_files(self, index: _core.Index, files: Files) -> list[File | None]:
        entries = index.files()
        outside = next((entry.name for entry in entries if entry.external), None)
        if outside is not None:
            msg = f"its index names data outside of its folder, as {outside}"
            raise CorruptDataError(msg, path=index.path)
        if any("/" in entry.name for entry in entries):
            files = self._walk(index.path.parent)
        return [files.get(entry.name) for entry in entries]

    def _kind_of_unfinished(
        self, path: Path, files: Files, runs: frozenset[str], *, is_locked: bool
    ) -> Literal["unknown", "unfinished"]:
        return "unknown" if any(map(_is_young, files.values())) else "unfinished"

    # --- the run and its saves

    def _lock(self) -> AbstractContextManager[object]:
        return nullcontext()

    def settle(self, number: int, save_id: str) -> None:
        """Note that a save is committed. See :meth:`StepStore.settle`."""
        path = self.folder(number)
        (note,) = self._read([path / saving_name(save_id)])
        if note is not None:
            self._put(path / saved_name(save_id), note)
        # The note of another save that may go on stays for a day: see `_sweep_removals`.
        replaced = [
            name
            for name in self._list([path])[0] or {}
            if notes.id_of(name) not in (None, save_id) and not name.startswith("saving-")
        ]
        doomed = [*replaced, saving_name(save_id)] if note is not None else replaced
        self._remove_files([path / name for name in doomed])

    # --- removal

    def remove(self, number: int) -> None:
        """Remove a step: first its index, then the rest. See :meth:`StepStore.remove`.

        Young files of other saves stay: such a save may be under way.

        Raises:
            RunTakenOverError: another run began here.
            StoragePreconditionError: the step was replaced meanwhile, and not touched.
            StorageError: the first object that could not be removed, after all were tried.
        """
        store, path = self._store(), self.folder(number)
        files = self._walk(path)
        others = list(files)  # without an index, all of it may be of a save under way
        if INDEX_NAME in files:
            others = []
            (data,) = store.read([path / INDEX_NAME])
            with suppress(CorruptIndexError, UnsupportedError):
                index = _core.Index.from_bytes(data or b"", os.fspath(path / INDEX_NAME), False)
                own = {entry.name for entry in index.files()}
                others = _of_other_saves(files, own, (index.save_id or "").replace("-", ""))
            try:
                with self.holding():
                    store.remove_seen(path / INDEX_NAME)
            except StoragePreconditionError:
                msg = f"step {number} was saved anew while it was to be removed; it was not touched"
                raise StoragePreconditionError(
                    msg, path=path, operation="remove", attempts=1
                ) from None
        young = {name for name in others if _is_young(files[name])}
        self._delete(path, files.keys() - young - {INDEX_NAME})

    def _delete(self, path: Path, names: Collection[str]) -> None:
        """Delete data before notes, which tell what the data is."""
        for are_notes in (False, True):
            some = sorted(name for name in names if notes.is_note(name) == are_notes)
            self._remove_files([path / name for name in some])

    def _remove_left(self, number: int) -> None:
        path = self.folder(number)
        files = self._walk(path)
        if INDEX_NAME not in files:
            self._delete(path, {name for name, file in files.items() if not _is_young(file)})

    def _sweep_removals(self, steps: Sequence[Step]) -> list[str]:
        """Remove what other saves left beside whole steps more than a day ago."""
        for step in steps:
            files = self._known[step.number][0] if step.number in self._known else {}
            own = {name for name, file in files.items() if file.id in step.files}
            left = {n for n in _of_other_saves(files, own, step.save_id) if not _is_young(files[n])}
            if saved_name(step.save_id) in files:  # a kill may have come before its removal
                left |= {saving_name(step.save_id)} & files.keys()
            self._delete(step.path, left)
        return []


def _is_young(file: File) -> bool:
    """Return whether the file may be of a save that is under way."""
    return time.time() - file.changed < _DAY


def _of_other_saves(files: Files, own: Collection[str], save_id: str) -> list[str]:
    """Return the data files and notes that are not of this save, whose data files are ``own``."""
    return [
        name
        for name in files
        if (is_data_file(name) and name not in own) or notes.id_of(name) not in (None, save_id)
    ]


def step_store_at(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | Any | None = None,
    names: StepNames | None = None,
) -> StepStore:
    """Return the steps at a path, or at a URL. Nothing is read yet.

    Raises:
        UnsupportedError: an unknown scheme, or options for a path of the file system.
    """
    where = location(path)
    # A secret must not be in a variable: tools show those of a traceback.
    if isinstance(where, Url):
        return ObjectStepStore(where, StorageOptions.of(storage_options), names)
    options_for(where, StorageOptions.of(storage_options))
    return FolderStepStore(where, names)
