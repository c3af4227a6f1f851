"""The steps of a run in a folder of the file system."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dcp_rs import _core
from dcp_rs.checkpoint.clean import leftovers
from dcp_rs.checkpoint.folders import make_folder
from dcp_rs.checkpoint.locate import INDEX_NAME, holds_index, is_data_file, local_path
from dcp_rs.checkpoint.verify import VerifyReport, verify
from dcp_rs.errors import CorruptDataError, DcpRsError, UnsupportedError
from dcp_rs.steps import notes
from dcp_rs.steps.notes import saved_name, saving_name, verified_name
from dcp_rs.steps.root import Listing, PassedOver, Root, Step, Why

__all__ = ["FolderRoot"]

#: What is being removed is renamed first, so that no half of it has the name of a step.
_REMOVING = ".removing-"
_ASIDE = re.compile(r"\.removing-step-\d+")
_TEMPORARY = re.compile(r"(.+)\.[0-9a-f]{16}\.tmp")


class FolderRoot(Root):
    """The folder of a run on the file system.

    Args:
        path: need not be there yet.

    Raises:
        UnsupportedError: a path with a scheme.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(local_path(path)))  # noqa: PTH100  # Path.resolve would follow links
        self.access: Mapping[str, Any] = {}

    # --- looking ---------------------------------------------------------------------------------------

    def is_run(self) -> bool:
        """Whether it has steps, and is no checkpoint itself."""
        if not self.path.is_dir() or holds_index(self.path):
            return False
        found = self.look()
        return bool(found.steps or found.passed_over)

    def _names(self) -> list[str]:
        try:
            return _names_in(self.path)
        except FileNotFoundError:
            return []

    def _look_at(self, numbers: Sequence[int]) -> list[Step | PassedOver | None]:
        return [self._look_at_one(number) for number in numbers]

    def _look_at_one(self, number: int) -> Step | PassedOver | None:
        path = self.folder(number)
        try:
            changed = (path / INDEX_NAME).stat().st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return self._without_index(number, path) if path.is_dir() else None
        except OSError as error:
            return _passed_over(number, path, error)
        try:
            index = _core.Index.open(os.fspath(path), None, False)
            data = _data_files(index)
            files = dict(data)
            nbytes = index.path.stat().st_size + sum(files.values())
        except (DcpRsError, OSError) as error:
            if not path.exists():  # removed meanwhile
                return None
            return _passed_over(number, path, error)
        uses = index.use_of_files()
        shared = {file for (file, _), (_, linked) in zip(data, uses, strict=True) if linked}
        save_id = (index.save_id or "").replace("-", "")  # of others there may be none
        noted = _noted(path, save_id)
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

    def _without_index(self, number: int, path: Path) -> PassedOver | None:
        try:
            names = _names_in(path)
            left = {leftover.verdict for leftover in leftovers(path)}
        except FileNotFoundError:  # removed meanwhile
            return None
        except (DcpRsError, OSError) as error:
            return _passed_over(number, path, error)
        strange = [name for name in names if not _is_own(name)]
        kind: Why
        if "in use" in left:
            kind, why = "in use", "a process is saving it"
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
        elif "young" in left:
            kind, why = "in use", "its save did not finish, or goes on: this file system does not tell"
        else:
            kind, why = "unfinished", "its save did not finish"
        return PassedOver(number=number, path=path, why=why, kind=kind)

    # --- a save ----------------------------------------------------------------------------------------

    def begin(self, number: int, save_id: str, metrics: Mapping[str, float]) -> None:
        """Makes the folder of a step, and notes in it what is being saved."""
        path = self.folder(number)
        make_folder(path)
        _core.publish(os.fspath(path), saving_name(save_id), notes.of_save(number, metrics), True)

    def settle(self, number: int, save_id: str) -> None:
        """Notes that a save is committed, and forgets what was noted of others that it replaced."""
        path = self.folder(number)
        (path / saving_name(save_id)).rename(path / saved_name(save_id))
        for name in _names_in(path):
            if notes.is_note(name) and save_id not in name:
                (path / name).unlink(missing_ok=True)

    def verify(self, step: Step) -> VerifyReport:
        """Reads all of a step, and notes it where it is as its digests say."""
        report = verify(step.path)
        if report.ok and not report.bytes_without_digest:
            _core.publish(os.fspath(step.path), verified_name(step.save_id), b"", True)
        return report

    # --- removal ---------------------------------------------------------------------------------------

    def remove(self, number: int) -> None:
        """Removes the folder of a step. A kill leaves all of it, or what no one takes for a step."""
        doomed = self.set_aside(number)
        if doomed is not None:
            _delete(doomed)

    def set_aside(self, number: int) -> Path | None:
        """Gives the folder of a step another name, under which it is no step any more, to be deleted. None: it is not there."""
        doomed = self.path / f"{_REMOVING}step-{number}"
        _delete(doomed)  # that a kill left
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
        """Removes what killed removals left, and what killed saves left (:attr:`Listing.left`). Returns what there was."""
        for path in self.set_aside_before():
            _delete(path)
        found = self.look()
        for left in found.left:
            self._remove_left(left.number)
        return found

    def _remove_left(self, number: int) -> None:
        """Removes what a killed save left of a step, unless it was not killed: what the look before found may have changed."""
        path = self.folder(number)
        try:
            _lock = _core.FolderLock(os.fspath(path))  # as long as it is held, no save commits
            has_index = (path / INDEX_NAME).is_symlink() or (path / INDEX_NAME).exists()
            at_work = any(left.kind == "data" and left.verdict in ("in use", "young") for left in leftovers(path))
        except (FileNotFoundError, DcpRsError):  # gone, in use, or not known
            return
        if not has_index and not at_work:
            self.remove(number)


def _names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def _passed_over(number: int, path: Path, error: Exception) -> PassedOver:
    """A step that this error keeps shut."""
    kind: Why = "unreadable"
    if isinstance(error, DcpRsError):
        kind = "foreign" if isinstance(error, UnsupportedError) else "damaged"
    return PassedOver(number=number, path=path, why=str(error), kind=kind)


def _is_own(name: str) -> bool:
    """Whether a file in the folder of a step is of a save of this package."""
    temporary = _TEMPORARY.fullmatch(name)
    name = temporary[1] if temporary else name
    return name in (INDEX_NAME, _core.LOCK_NAME) or is_data_file(name) or notes.is_note(name)


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
    """What was noted of a save."""
    for name in (saved_name(save_id), saving_name(save_id)):
        with suppress(OSError):
            if noted := notes.of((path / name).read_bytes()):
                return noted
    return {}


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
