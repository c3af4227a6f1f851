"""The steps of a run in a folder of the file system."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dcp_rs import _core
from dcp_rs._url import StrPath, absolute
from dcp_rs.checkpoint.clean import leftovers
from dcp_rs.checkpoint.folders import INDEX_NAME, local_path, make_folder, sync
from dcp_rs.errors import CheckpointNotFoundError, SaveInProgressError
from dcp_rs.steps import notes
from dcp_rs.steps.step_store import (
    File,
    Files,
    Listing,
    SkipKind,
    SkippedStep,
    Step,
    StepStore,
    is_old,
)

T = TypeVar("T")

#: A folder gets such a name before it is deleted, so that no half of a step has its name.
_REMOVING = ".removing-step-"
#: Seconds to wait before each retry.
_WAITS = (0.1, 0.4, 1.5, 3.0)


class FolderStepStore(StepStore):
    """The folder of a run on the file system.

    Args:
        path: the folder, which need not exist yet.
        step_name, fsync: as for :class:`StepStore`.

    Raises:
        UnsupportedError: a path with a scheme.
    """

    _shares_files = True

    def __init__(self, path: StrPath, step_name: str = "step-{}", *, fsync: bool = True) -> None:
        super().__init__(step_name, fsync=fsync)
        self.path = absolute(local_path(path))
        self.access: Mapping[str, Any] = {}

    # --- files

    def names(self) -> list[str]:
        """Return the names in the root. See :class:`StepStore`."""
        try:
            return _retry(lambda: os.listdir(self.path))  # noqa: PTH208  # names alone
        except FileNotFoundError:
            if self.path.is_symlink():
                msg = f"{self.path} is a dangling link"
                raise CheckpointNotFoundError(msg, path=self.path) from None
            return []

    def _list(self, folders: Sequence[Path]) -> list[Files | None]:
        return [_files_in(folder) for folder in folders]

    def _read(self, paths: Sequence[Path]) -> list[bytes | None]:
        return [_read_file(path) for path in paths]

    def _put(self, path: Path, data: bytes) -> None:
        try:
            make_folder(path.parent)
            _core.publish(path.parent, path.name, data, self.fsync)
        except FileNotFoundError:
            # A killed process may have asked another program or machine, which serves the files, to
            # set this folder aside. That request comes only now.
            make_folder(path.parent)
            _core.publish(path.parent, path.name, data, self.fsync)

    def put_file(self, path: Path, to: Path) -> None:
        """Copy a local file. See :meth:`StepStore.put_file`."""
        make_folder(to.parent)
        part = to.with_name(f"{to.name}.{secrets.token_hex(8)}.tmp")
        try:
            shutil.copyfile(path, part)
            if self.fsync:
                sync(part)
            part.replace(to)
            if self.fsync:
                sync(to.parent)
        finally:
            part.unlink(missing_ok=True)

    def _rename(self, path: Path, to: Path) -> None:
        path.rename(to)

    def remove_files(self, paths: Sequence[Path]) -> None:
        """Remove files. See :meth:`StepStore.remove_files`."""
        for path in paths:
            path.unlink(missing_ok=True)

    def _data_files(self, index: _core.Index, files: Files) -> list[File | None]:
        return [
            files.get(entry.name) or _file_at(path)
            for entry, path in zip(index.files(), index.file_paths(), strict=True)
        ]

    # --- looking

    def look_at(self, number: int) -> Step | SkippedStep | None:
        """Look at one step. See :meth:`StepStore.look_at`."""
        look = super().look_at
        try:
            return _retry(lambda: look(number))
        except OSError as error:
            error.add_note(
                f"{self.folder(number)} may be whole, so no other step takes its place. "
                "Remove it if you do not need it."
            )
            raise

    def _look(self, numbers: Sequence[int]) -> dict[int, Step | SkippedStep | None]:
        found: dict[int, Step | SkippedStep | None] = {}
        for number in numbers:
            try:
                found |= super()._look([number])
            except OSError as error:
                path = self.folder(number)
                found[number] = SkippedStep(
                    number=number, path=path, why=str(error), kind="unreadable"
                )
        return found

    def _kind_of_unfinished(self, number: int, files: Files, *, is_over: bool) -> SkipKind:
        # An index without its final name is claimed by the lock of the folder, which may be ours.
        verdicts = {left.verdict for left in leftovers(self.folder(number)) if left.kind == "data"}
        if "in use" in verdicts:
            return "in use"
        if "whole" in verdicts and not any(name.startswith("saving-") for name in files):
            return "no index"
        # Before a save writes data, only the age of its note tells.
        has_young_note = any(notes.id_of(name) and not is_old(files[name]) for name in files)
        is_young = "young" in verdicts or (not verdicts and has_young_note)
        return "unknown" if is_young and not is_over else "unfinished"

    # --- the run and its saves

    def _lock(self) -> _core.FolderLock:
        make_folder(self.path)
        return _core.FolderLock(self.path)

    def _now(self) -> float:
        return (self.path / _core.LOCK_NAME).stat().st_mtime

    def point_to(self, number: int) -> None:
        """Let the link ``latest`` in the root lead to a step. See :meth:`StepStore.point_to`."""
        new = self.path / f"latest.{secrets.token_hex(8)}.tmp"
        new.symlink_to(self.folder(number).name)
        new.replace(self.path / "latest")

    # --- removal

    def remove(self, number: int) -> None:
        """Remove a step. See :meth:`StepStore.remove`."""
        doomed = self.set_aside(number)
        if doomed is not None:
            self._delete_aside(doomed)

    def set_aside(self, number: int) -> Path | None:
        """Rename the folder of a step, to be deleted. After that it is not a step any more.

        Returns:
            The new path; None if there is no such step.
        """
        with self.holding():
            return self._hide(number)

    def _hide(self, number: int) -> Path | None:
        # The token avoids the name of an earlier removal that could not delete its folder.
        doomed = self.path / f"{_REMOVING}{number}.{secrets.token_hex(8)}"
        try:
            self.folder(number).rename(doomed)
        except FileNotFoundError:  # another process was faster
            return None
        if self.fsync:
            sync(self.path)  # a power failure must not undo the rename after files were deleted
        return doomed

    def aside(self, names: Iterable[str]) -> list[Path]:
        """Return the folders that were set aside. See :meth:`StepStore.aside`."""
        return [self.path / name for name in names if name.startswith(_REMOVING)]

    def sweep(self, *, since: int = 0) -> Listing:
        """Remove leftovers. See :meth:`StepStore.sweep`."""
        found = super().sweep(since=since)
        for path in self.aside(found.names):
            self._delete_aside(path)
        return found

    def remove_left(self, left: SkippedStep) -> None:
        """Remove what a killed save left. See :meth:`StepStore.remove_left`."""
        with self.holding():
            doomed = self._hide_left(left)
        if doomed is not None:
            self._delete_aside(doomed)

    def _hide_left(self, left: SkippedStep) -> Path | None:
        """Set aside what a killed save left, unless a process saves there. Release its lock."""
        lock = None
        # The lock of the root comes before that of the step, as in a commit.
        try:
            lock = _core.FolderLock(left.path)  # while this is held, no save commits
            found = self.look_at(left.number)
            if isinstance(found, SkippedStep) and found.is_left:
                return self._hide(left.number)
        except (FileNotFoundError, SaveInProgressError):
            pass
        finally:
            # Network file systems rename the file of an open lock instead of deleting it.
            del lock
        return None

    def _delete_aside(self, path: Path) -> None:
        """Delete a folder that was set aside. If that fails, the next sweep tries again."""
        try:
            _delete(path)
        except OSError as error:
            self.problems.append(f"{path}, which was removed, is still there: {error}")


def _retry(look: Callable[[], T]) -> T:
    """Call ``look`` again after an error: on network file systems, errors may pass."""
    for seconds in _WAITS:
        try:
            return look()
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError:
            time.sleep(seconds)
    return look()


def _files_in(folder: Path) -> dict[str, File] | None:
    try:
        with os.scandir(folder) as entries:
            return {entry.name: _file_at(entry) or _GONE for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return None


#: A file that went after it was listed, or a link that leads nowhere. It cannot be read, so its
#: step is looked at again.
_GONE = File(0, None, None, 0.0)


def _file_at(path: Path | os.DirEntry[str]) -> File | None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return File(
        found.st_size,
        (found.st_dev, found.st_ino),
        found.st_mtime_ns,
        found.st_mtime,
        stat.S_ISREG(found.st_mode),
    )


def _read_file(path: Path) -> bytes | None:
    """Return the bytes of a file; nothing of a pipe, which would block, or of what is no note."""
    try:
        about = path.stat()
        is_short = path.name == INDEX_NAME or about.st_size <= notes.MAX_BYTES
        return path.read_bytes() if is_short and stat.S_ISREG(about.st_mode) else b""
    except (FileNotFoundError, NotADirectoryError):
        return None


def _delete(path: Path) -> None:
    """Delete a folder, or a link. On NFS, a file that a process has open keeps its folder."""
    if path.is_symlink():
        path.unlink()
        return
    shutil.rmtree(path, ignore_errors=True)  # free the space of all other files
    if path.exists():
        shutil.rmtree(path)  # raise what was ignored
