"""The steps of a run on an object store, which has no renames and no locks.

A step ends with its index. Only age tells a killed save of this run, or of none, from one that goes
on: files without an index are swept after a day.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_rs import _core
from dcp_rs._url import (
    StorageOptions,
    StoreArguments,
    StrPath,
    Url,
    location,
    options_for,
    store_at,
)
from dcp_rs.checkpoint.folders import INDEX_NAME
from dcp_rs.steps import notes
from dcp_rs.steps.folder_store import FolderStepStore
from dcp_rs.steps.step_store import File, Files, SkipKind, SkippedStep, StepStore, is_old

#: Bound on the memory of an upload of a file.
_UPLOAD_BYTES = 64 << 20


class ObjectStepStore(StepStore):
    """The prefix of a run on an object store.

    Args:
        path: the URL.
        options: how to reach the store.
        step_name: as for :class:`StepStore`.
    """

    _shares_files = False

    def __init__(self, path: Url, options: StorageOptions | None, step_name: str) -> None:
        super().__init__(step_name)
        self.path = path
        self.access: Mapping[str, Any] = {"storage_options": options}

    def _store(self) -> _core.Store:
        return store_at(self.path, self.access["storage_options"])

    # --- files

    def names(self) -> list[str]:
        """Return the names in the root. See :class:`StepStore`."""
        return list(self._list([self.path])[0] or {})

    def _list(self, folders: Sequence[Path]) -> list[Files | None]:
        now, listed = time.time(), self._store().list(folders)
        return [
            {
                **{name: File(0, name, None, 0.0, is_file=False) for name in inner},
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

    def put_file(self, path: Path, to: Path) -> None:
        """Upload a local file. See :meth:`StepStore.put_file`."""
        self._store().upload_file(
            path, to, overwrite=True, threads=0, max_inflight_bytes=_UPLOAD_BYTES
        )

    def _rename(self, path: Path, to: Path) -> None:
        (data,) = self._read([path])
        if data is None:
            raise FileNotFoundError(f"{path} is gone")
        self._put(to, data)
        self.remove_files([path])

    def remove_files(self, paths: Sequence[Path]) -> None:
        """Remove files. See :meth:`StepStore.remove_files`."""
        if paths:
            self._store().remove(paths)

    def _data_files(self, index: _core.Index, files: Files) -> list[File | None]:
        entries = index.files()
        if any("/" in entry.name for entry in entries):
            files = self._walk(index.path.parent)
        return [files.get(entry.name) for entry in entries]

    def _kind_of_unfinished(self, number: int, files: Files, *, is_over: bool) -> SkipKind:
        return "unknown" if not is_over and not all(map(is_old, files.values())) else "unfinished"

    # --- the run

    def _lock(self) -> _StoredNote:
        return _StoredNote(self.path / notes.RUN_NAME, self._store)

    def _now(self) -> float:
        return time.time()

    # --- removal

    def remove(self, number: int) -> None:
        """Remove a step: first its index, then the rest. See :meth:`StepStore.remove`.

        Raises:
            RunTakenOverError: another run began here.
            StoragePreconditionError: the step was saved anew meanwhile. It is not touched.
            StorageError: the first object that could not be removed, after all were tried.
        """
        self._known.pop(number, None)
        store, path = self._store(), self.folder(number)
        files = self._walk(path)
        # A removal is of what was read. Another process may have removed it since the walk.
        is_whole = INDEX_NAME in files and store.read([path / INDEX_NAME]) != [None]
        with self.holding():
            if is_whole:
                store.remove_seen(path / INDEX_NAME)
        self._delete(path, files.keys() - {INDEX_NAME})

    def _delete(self, path: Path, names: Collection[str]) -> None:
        """Delete data before notes, which tell what the data is."""
        for are_notes in (False, True):
            some = sorted(n for n in names if (notes.id_of(n) is not None) == are_notes)
            self.remove_files([path / name for name in some])

    def remove_left(self, left: SkippedStep) -> None:
        """Remove what a killed save left, if it is of an earlier run or older than a day.

        See :meth:`StepStore.remove_left`.
        """
        files = self._walk(left.path)
        if INDEX_NAME not in files:
            self.check_run()  # after the walk, which has nothing of a run that begins later
            old = {name for name, file in files.items() if left.is_over or is_old(file)}
            self._delete(left.path, old)


@dataclass
class _StoredNote:
    """The note of the run, an object of its own. A store has no locks."""

    path: Path
    store: Callable[[], _core.Store]

    def read(self) -> bytes:
        return self.store().read([self.path])[0] or b""

    def write(self, data: bytes, fsync: bool) -> None:
        self.store().put(self.path, data)


def step_store_at(
    path: StrPath,
    storage_options: StoreArguments = None,
    step_name: str = "step-{}",
    *,
    fsync: bool = True,
) -> StepStore:
    """Return the steps at a path, or at a URL. Nothing is read yet.

    Raises:
        UnsupportedError: an unknown scheme, or options for a path of the file system.
    """
    where = location(path)
    # A secret must not be in a variable: tools show those of a traceback.
    if isinstance(where, Url):
        return ObjectStepStore(where, StorageOptions.of(storage_options), step_name)
    options_for(where, StorageOptions.of(storage_options))
    return FolderStepStore(where, step_name, fsync=fsync)
