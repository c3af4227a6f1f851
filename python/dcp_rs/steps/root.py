"""What steps a folder holds: found out by looking, each time, and from nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dcp_rs import _core
from dcp_rs.checkpoint.clean import leftovers
from dcp_rs.checkpoint.locate import INDEX_NAME, is_data_file, local_path
from dcp_rs.checkpoint.verify import VerifyReport, verify
from dcp_rs.errors import CorruptDataError, DcpRsError

__all__ = ["Listing", "PassedOver", "Root", "Step"]

_STEP = re.compile(r"step-(\d+)")
#: What is being removed is renamed first, so that no half of it has the name of a step.
_REMOVING = ".removing-"
#: What is noted beside the data files of a save, by its id: while it is under way, and once it is committed.
_NOTES = re.compile(r"(saving|saved)-[0-9a-f]{32}\.json|verified-[0-9a-f]{32}")
_TEMPORARY = re.compile(r"(.+)\.[0-9a-f]{16}\.tmp")

Why = Literal["unfinished", "in use", "no index", "foreign", "damaged"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that is committed and whole: its index opens, and every data file is there and has its length.

    Attributes:
        number: of the step.
        path: its folder.
        save_id: 32 hexadecimal digits that identify the save.
        saved: when the save began, in seconds since 1970.
        nbytes: bytes of its files.
        reused: of those, bytes of tensors and values that the save took over from an earlier step and did not write.
        linked: bytes of the files that it shares with the step that it took them from: what it reused, and what else is in them.
        files: its data files, by what identifies them on the disk (the same in all steps that share one), and their bytes.
        metrics: as they were given to the save.
        verified: whether all of it was read since, and matched its digests.
    """

    number: int
    path: Path
    save_id: str
    saved: float
    nbytes: int
    reused: int = 0
    linked: int = 0
    files: Mapping[tuple[int, int], int] = field(default_factory=dict, repr=False, compare=False)
    metrics: Mapping[str, float] = field(default_factory=dict)
    verified: bool = False

    @property
    def written(self) -> int:
        """Bytes that the save wrote: all but the files that it shares with an earlier step."""
        return self.nbytes - self.linked


@dataclass(frozen=True, kw_only=True)
class PassedOver:
    """A folder with the name of a step that cannot be resumed from.

    Attributes:
        number: of the step.
        path: the folder.
        why: what is wrong with it, in words.
        kind: ``"unfinished"``: of a save that was killed, or failed. ``"in use"``: a process is saving it, or may be. ``"no index"``: complete, but its
            index is gone. ``"foreign"``: it holds something else than this package's. ``"damaged"``: it cannot be opened, or lacks data.
    """

    number: int
    path: Path
    why: str
    kind: Why

    def __str__(self) -> str:
        return f"{self.path.name}: {self.why}"


@dataclass(frozen=True)
class Listing:
    """What was found under a root; both in the order of the steps."""

    steps: list[Step]
    passed_over: list[PassedOver]

    @property
    def left(self) -> list[PassedOver]:
        """What killed saves left of steps before the latest: of one after it, the save may just begin."""
        latest = self.steps[-1].number if self.steps else -1
        return [found for found in self.passed_over if found.kind == "unfinished" and found.number < latest]


class Root:
    """The folder of a run: a step is a folder ``step-N`` in it with a committed index.

    Nothing else says what steps there are: no file that points to the latest, no list.

    Args:
        path: need not be there yet.

    Raises:
        UnsupportedError: a path with a scheme.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(local_path(path)))  # noqa: PTH100  # Path.resolve would follow links

    def folder(self, number: int) -> Path:
        """Where a step is, or would be."""
        return self.path / f"step-{number}"

    # --- looking ---------------------------------------------------------------------------------------

    def look(self) -> Listing:
        """All that is there."""
        found = [self.look_at(number) for number in self._numbers()]
        strangers = [self._misnamed(name) for name in self._names() if _is_misnamed(name)]
        passed = [step for step in found if isinstance(step, PassedOver)] + strangers
        return Listing([step for step in found if isinstance(step, Step)], sorted(passed, key=lambda step: step.number))

    def newest(self) -> Iterator[Step | PassedOver]:
        """The newest first, each looked at when it is asked for."""
        for number in reversed(self._numbers()):
            found = self.look_at(number)
            if found is not None:
                yield found

    def latest(self) -> Step | None:
        """The newest that is whole."""
        return next((step for step in self.newest() if isinstance(step, Step)), None)

    def look_at(self, number: int) -> Step | PassedOver | None:
        """What is at a step; None where nothing is."""
        path = self.folder(number)
        try:
            changed = (path / INDEX_NAME).stat().st_mtime
        except OSError:
            return self._without_index(number, path) if path.is_dir() else None
        try:
            index = _core.Index.open(os.fspath(path), None, False)
            data = _data_files(index)
            files = dict(data)
            nbytes = index.path.stat().st_size + sum(files.values())
        except (DcpRsError, OSError) as error:
            if not path.exists():  # removed meanwhile
                return None
            return PassedOver(number=number, path=path, why=str(error), kind="damaged")
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
            verified=_verified(path, save_id).exists(),
        )

    def _without_index(self, number: int, path: Path) -> PassedOver | None:
        try:
            names = _names_in(path)
            left = {leftover.verdict for leftover in leftovers(path)}
        except FileNotFoundError:  # removed meanwhile
            return None
        except (DcpRsError, OSError) as error:
            return PassedOver(number=number, path=path, why=str(error), kind="damaged")
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

    def _misnamed(self, name: str) -> PassedOver:
        number = int(name.removeprefix("step-"))
        why = f"its name is not step-{number}"
        return PassedOver(number=number, path=self.path / name, why=why, kind="foreign")

    def _names(self) -> list[str]:
        try:
            return _names_in(self.path)
        except FileNotFoundError:
            return []

    def _numbers(self) -> list[int]:
        names = (name for name in self._names() if _STEP.fullmatch(name) and not _is_misnamed(name))
        return sorted(int(name.removeprefix("step-")) for name in names)

    # --- a save ----------------------------------------------------------------------------------------

    def begin(self, number: int, save_id: str, metrics: Mapping[str, float]) -> None:
        """Makes the folder of a step, and notes in it what is being saved."""
        path = self.folder(number)
        _core.create_folder(os.fspath(path))
        notes = json.dumps({"step": number, "saved": time.time(), "metrics": dict(metrics)}).encode()
        _core.publish(os.fspath(path), f"saving-{save_id}.json", notes, True)

    def settle(self, number: int, save_id: str) -> None:
        """Notes that a save is committed, and forgets what was noted of others that it replaced."""
        path = self.folder(number)
        (path / f"saving-{save_id}.json").rename(path / f"saved-{save_id}.json")
        for name in _names_in(path):
            if _NOTES.fullmatch(name) and save_id not in name:
                (path / name).unlink(missing_ok=True)

    def verify(self, step: Step) -> VerifyReport:
        """Reads all of a step, and notes it where it is as its digests say."""
        report = verify(step.path)
        if report.ok and not report.bytes_without_digest:
            _core.publish(os.fspath(step.path), _verified(step.path, step.save_id).name, b"", True)
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
        return [
            self.path / name
            for name in self._names()
            if name.startswith(_REMOVING) and _STEP.fullmatch(name.removeprefix(_REMOVING))
        ]

    def sweep(self) -> Listing:
        """Removes what killed removals left, and what killed saves left (:attr:`Listing.left`). Returns what there was."""
        for path in self.set_aside_before():
            _delete(path)
        found = self.look()
        for left in found.left:
            self.remove(left.number)
        return found


def _names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def _is_misnamed(name: str) -> bool:
    return _STEP.fullmatch(name) is not None and name != f"step-{int(name.removeprefix('step-'))}"


def _is_own(name: str) -> bool:
    """Whether a file in the folder of a step is of a save of this package."""
    temporary = _TEMPORARY.fullmatch(name)
    name = temporary[1] if temporary else name
    return name in (INDEX_NAME, _core.LOCK_NAME) or is_data_file(name) or _NOTES.fullmatch(name) is not None


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
    """What was noted of a save. It is believed in nothing but what it tells of the save itself, and need not be there."""
    for when in ("saved", "saving"):
        try:
            notes = json.loads((path / f"{when}-{save_id}.json").read_bytes())
            metrics = {str(name): float(value) for name, value in notes["metrics"].items()}
            return {"saved": float(notes["saved"]), "metrics": metrics}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
    return {}


def _verified(path: Path, save_id: str) -> Path:
    return path / f"verified-{save_id}"


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
