"""The steps of a run in a folder of the file system."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from dcp_rs import _core
from dcp_rs.checkpoint.clean import leftovers
from dcp_rs.checkpoint.folders import make_folder
from dcp_rs.checkpoint.locate import INDEX_NAME, holds_index, local_path
from dcp_rs.errors import (
    CheckpointNotFoundError,
    CorruptDataError,
    DcpRsError,
    SaveInProgressError,
    UnsupportedError,
)
from dcp_rs.steps import notes
from dcp_rs.steps.notes import Owner, saved_name, saving_name, verified_name
from dcp_rs.steps.root import Listing, Root, SkippedStep, Step, StepNames, Why

__all__ = ["FolderRoot"]

T = TypeVar("T")

#: What is being removed is renamed first, so that no half of it has the name of a step.
_REMOVING = ".removing-"
_ASIDE = re.compile(r"\.removing-step-\d+(\.[0-9a-f]{16})?")
#: How often a step is looked at that seems damaged, and whose index changes meanwhile.
_LOOKS = 5
#: Seconds to wait before each retry of a look that failed.
_AGAIN = (0.1, 0.4, 1.5, 3.0)
_TEMPORARY = re.compile(r"(.+)\.[0-9a-f]{16}\.tmp")


class FolderRoot(Root):
    """The folder of a run on the file system.

    Args:
        path: need not be there yet.
        names: of the folders of steps.

    Raises:
        UnsupportedError: a path with a scheme.
    """

    def __init__(self, path: str | os.PathLike[str], names: StepNames | None = None) -> None:
        super().__init__(names)
        self.path = Path(os.path.abspath(local_path(path)))  # noqa: PTH100  # Path.resolve would follow links
        self.access: Mapping[str, Any] = {}
        self._known: dict[
            int, tuple[object, Step]
        ] = {}  # by what they looked like to the last sweep

    # --- looking
    # ---------------------------------------------------------------------------------------

    def is_run(self) -> bool:
        """Whether it has steps, and is no checkpoint itself."""
        if not self.path.is_dir() or holds_index(self.path):
            return False
        found = self.look()
        return bool(found.steps or found.passed_over)

    def _names(self) -> list[str]:
        try:
            return _again(lambda: _names_in(self.path))
        except FileNotFoundError:
            return []

    def _holds_index(self, path: Path) -> bool:
        return _again(lambda: holds_index(path))

    def look_at(self, number: int) -> Step | SkippedStep | None:
        """Return the state of a step; None if there is nothing.

        Raises:
            OSError: it cannot be looked at, and was asked for several times. It may be whole.
        """
        try:
            return _again(lambda: self._look_at_one(number, needs_note=False))
        except OSError as error:
            path = self.folder(number)
            error.add_note(
                f"{path} may be whole, so no other step takes its place. Remove it if it is not wanted."
            )
            raise

    def _look_at(self, numbers: Sequence[int]) -> list[Step | SkippedStep | None]:
        return [self._look_once(number) for number in numbers]

    def _look_once(self, number: int) -> Step | SkippedStep | None:
        try:
            return self._look_at_one(number)
        except OSError as error:
            return SkippedStep(
                number=number, path=self.folder(number), why=str(error), kind="unreadable"
            )

    def _look_if_changed(self, number: int) -> Step | SkippedStep | None:
        """Return the state of a step, from an earlier sweep if its folder and index are unchanged."""
        path = self.folder(number)
        try:
            stats = path.stat(), (path / INDEX_NAME).stat()
        except OSError:
            return self._look_once(number)
        key = tuple(
            (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size) for found in stats
        )
        known = self._known.get(number)
        if known is not None and known[0] == key:
            return known[1]
        found = self._look_once(number)
        if isinstance(found, Step):
            self._known[number] = key, found
        return found

    def _look_at_one(self, number: int, *, needs_note: bool = True) -> Step | SkippedStep | None:
        """Return the state of a step; None if there is nothing.

        Args:
            number: of the step.
            needs_note: fail where its note cannot be read. A step without its metrics could be
                removed though it is the best; to resume from it they are not needed.
        """
        for _ in range(_LOOKS):
            index = self.folder(number) / INDEX_NAME
            before = _identity(index)
            found = self._look_at_files(number, needs_note=needs_note)
            # The index was read first, and its files looked for afterwards: a save that came in
            # between removed those of the old one.
            if (
                not (isinstance(found, SkippedStep) and found.kind == "damaged")
                or _identity(index) == before
            ):
                break
        return found

    def _look_at_files(self, number: int, *, needs_note: bool) -> Step | SkippedStep | None:
        path = self.folder(number)
        try:
            changed = (path / INDEX_NAME).stat().st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return self._without_index(number, path) if _is_folder(path) else None
        try:
            index = _core.Index.open(os.fspath(path), None, False)
            data = _data_files(index)
            files = dict(data)
            nbytes = index.path.stat().st_size + sum(files.values())
        except (CheckpointNotFoundError, FileNotFoundError) as error:
            if not _is_folder(path):  # removed meanwhile
                return None
            return _damaged(number, path, error)
        except UnsupportedError as error:
            return SkippedStep(number=number, path=path, why=str(error), kind="foreign")
        except DcpRsError as error:
            return _damaged(number, path, error)
        uses = index.use_of_files()
        shared = {file for (file, _), (_, linked) in zip(data, uses, strict=True) if linked}
        save_id = (index.save_id or "").replace("-", "")  # of others there may be none
        try:
            noted = _noted(path, save_id)
        except OSError:
            if needs_note:
                raise
            noted = {}
        return Step(
            number=number,
            path=path,
            save_id=save_id,
            saved=noted.get("saved", changed),
            nbytes=nbytes,
            reused=sum(used for used, linked in uses if linked),
            linked=sum(files[file] for file in shared),
            files=files,
            metrics=noted.get("metrics", {}),
            verified=(path / verified_name(save_id)).exists(),
        )

    def _without_index(
        self, number: int, path: Path, *, locked: bool = False
    ) -> SkippedStep | None:
        """Return the state of a folder without an index. ``locked``: this process holds its lock."""
        try:
            names = _names_in(path)
            found = leftovers(path)
        except FileNotFoundError:  # removed meanwhile
            return None
        except UnsupportedError as error:
            return SkippedStep(number=number, path=path, why=str(error), kind="foreign")
        except DcpRsError as error:
            return _damaged(number, path, error)
        # Only that lock claims an index that did not get its name.
        left = {leftover.verdict for leftover in found if leftover.kind == "data" or not locked}
        strange = [
            name
            for name in names
            if name != _core.LOCK_NAME and not notes.is_own(_without_token(name))
        ]
        if strange:
            noted = _files_noted(path, names)
            strange = [name for name in strange if _without_token(name) not in noted]
        owners = _owners(path, names)
        runs = frozenset(owner.run for owner in owners if owner.run is not None)
        kind: Why
        if "in use" in left:
            newest = max(owners, key=lambda owner: owner.since, default=None)
            kind, why = "in use", f"{newest or 'a process'} is saving it"
        elif strange:
            kind, why = (
                "foreign",
                f"it has no {INDEX_NAME}, and holds {strange[0]}: dcp_rs.index(path) may adopt it",
            )
        elif "whole" in left and not any(name.startswith("saving-") for name in names):
            kind, why = (
                "no index",
                f"it is complete, but its {INDEX_NAME} is gone: dcp_rs.index(path) makes it",
            )
        elif "young" in left and not (runs and self.run is not None and self.run not in runs):
            kind, why = (
                "unknown",
                "its save did not finish, or goes on: this file system does not tell",
            )
        else:
            # It failed, or it is of an earlier run, which cannot commit any more.
            kind, why = "unfinished", "its save did not finish"
        return SkippedStep(number=number, path=path, why=why, kind=kind, runs=runs)

    # --- whose run it is
    # ---------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        make_folder(self.path)
        lock = _core.FolderLock(os.fspath(self.path))
        try:
            yield
        finally:
            del lock

    def _read_run(self) -> bytes | None:
        return _read_note(self.path / notes.RUN_NAME)

    def _write_run(self, data: bytes) -> None:
        _core.publish(os.fspath(self.path), notes.RUN_NAME, data, True)

    # --- a save
    # ----------------------------------------------------------------------------------------

    def begin(
        self,
        number: int,
        save_id: str,
        metrics: Mapping[str, float],
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Make the folder of a step, note in it what is being saved, and put ``files`` there."""
        path = self.folder(number)
        make_folder(path)
        note = notes.of_save(number, metrics, self.run, files)
        for name, data in {saving_name(save_id): note, **files}.items():
            _core.publish(os.fspath(path), name, data, True)

    def settle(self, number: int, save_id: str) -> None:
        """Notes that a save is committed, and forgets what was noted of others that it replaced."""
        path = self.folder(number)
        (path / saving_name(save_id)).rename(path / saved_name(save_id))
        for name in _names_in(path):
            if notes.is_note(name) and save_id not in name:
                (path / name).unlink(missing_ok=True)

    def _note_verified(self, step: Step) -> None:
        _core.publish(os.fspath(step.path), verified_name(step.save_id), b"", True)

    # --- removal
    # ---------------------------------------------------------------------------------------

    def remove(self, number: int) -> None:
        """Removes the folder of a step. A kill leaves all of it, or what no one takes for a step."""
        doomed = self.set_aside(number)
        if doomed is not None:
            _delete(doomed)

    def set_aside(self, number: int) -> Path | None:
        """Gives the folder of a step another name, under which it is no step any more, to be deleted. None: it is not there."""
        with self.holding():
            return self._rename(number)

    def _rename(self, number: int) -> Path | None:
        # A name of its own: what an earlier removal could not delete is not in the way.
        doomed = self.path / f"{_REMOVING}step-{number}.{secrets.token_hex(8)}"
        try:
            self.folder(number).rename(doomed)
        except FileNotFoundError:  # another process was faster
            return None
        _sync(self.path)  # or a loss of power could undo the name, and not what is deleted now
        return doomed

    def set_aside_before(self) -> list[Path]:
        """What was set aside, and is not deleted."""
        return [self.path / name for name in self._names() if _ASIDE.fullmatch(name)]

    def sweep(self) -> Listing:
        """Removes what killed removals left, and what killed saves left (:attr:`Listing.left`). Returns what there was, and what could not be removed."""
        problems = []
        for path in self.set_aside_before():
            try:
                _delete(path)
            except OSError as error:  # a file that a process of another machine has open, say
                problems.append(f"{path}, which was removed, is still there: {error}")
        found = self._listing_of(
            map(self._look_if_changed, self._step_names.numbers(names := self._names())), names
        )
        there = {step.number for step in found.steps}
        self._known = {number: known for number, known in self._known.items() if number in there}
        for left in found.left:
            try:
                self._remove_left(left.number)
            except OSError as error:
                problems.append(
                    f"{left.path}, of a save that did not finish, could not be removed: {error}"
                )
        return replace(found, problems=problems)

    def _remove_left(self, number: int) -> None:
        """Removes what a killed save left of a step, unless it was not killed: what the look before found may have changed."""
        path, doomed = self.folder(number), None
        # First the lock of the root, then that of the step, as a commit takes them.
        with self.holding(), suppress(FileNotFoundError, SaveInProgressError):  # gone, or in use
            _lock = _core.FolderLock(os.fspath(path))  # as long as it is held, no save commits
            has_index = (path / INDEX_NAME).is_symlink() or (path / INDEX_NAME).exists()
            left = None if has_index else self._without_index(number, path, locked=True)
            if left is not None and left.kind == "unfinished":
                doomed = self._rename(number)
        if doomed is not None:
            _delete(doomed)


def _again(look: Callable[[], T]) -> T:
    """Return what ``look`` returns, retried: errors of network file systems may pass."""
    for seconds in _AGAIN:
        try:
            return look()
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError:
            time.sleep(seconds)
    return look()


def _names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def _damaged(number: int, path: Path, error: Exception) -> SkippedStep:
    return SkippedStep(number=number, path=path, why=str(error), kind="damaged")


def _without_token(name: str) -> str:
    """Return the name that a temporary file was to get; any other as it is."""
    temporary = _TEMPORARY.fullmatch(name)
    return temporary[1] if temporary else name


def _data_files(index: _core.Index) -> list[tuple[tuple[int, int], int]]:
    """The data files, by what identifies them on the disk, and their bytes.

    Raises:
        CorruptDataError: one is not there, or has another length.
    """
    files: list[tuple[tuple[int, int], int]] = []
    for path, file in zip(index.file_paths(), index.files(), strict=True):
        try:
            found = path.stat()
        except FileNotFoundError:
            msg = f"its data file {file.name} is gone"
            raise CorruptDataError(msg, path=path) from None
        if found.st_size != file.size:
            msg = f"its data file {file.name} has {found.st_size:,} bytes, and should have {file.size:,}"
            raise CorruptDataError(msg, path=path)
        files.append(((found.st_dev, found.st_ino), file.size))
    return files


def _noted(path: Path, save_id: str) -> dict[str, Any]:
    """Return what was noted of a save.

    Raises:
        OSError: a note is there and cannot be read.
    """
    for name in (saved_name(save_id), saving_name(save_id)):
        if (data := _read_note(path / name)) is not None:
            return notes.of(path / name, data)
    return {}


def _identity(path: Path) -> tuple[int, ...] | None:
    """Return what changes where another file gets this name; None if there is none."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _is_folder(path: Path) -> bool:
    """Return whether there is a folder. From Python 3.13 on, ``Path.is_dir()`` also says no where nobody can tell.

    Raises:
        OSError: it cannot be looked at.
    """
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _owners(path: Path, names: Sequence[str]) -> list[Owner]:
    """Return the writers of saves that began at a step and are not known to be committed."""
    found = [
        notes.owner_of(_read_note(path / name)) for name in names if name.startswith("saving-")
    ]
    return [owner for owner in found if owner is not None]


def _files_noted(path: Path, names: Sequence[str]) -> set[str]:
    """Return the names of the user's files that saves noted that they put there."""
    return {
        file
        for name in names
        if notes.is_note(name)
        for file in notes.files_of(_read_note(path / name))
    }


def _read_note(path: Path) -> bytes | None:
    """Return the bytes of a note, or a few of one that is too long; none of what is no regular file. None if nothing is there."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe is to wait for who writes to it
            return b""
        with path.open("rb") as file:
            return file.read(notes.MOST + 1)
    except FileNotFoundError:
        return None


def _delete(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
