"""Stores of steps: the protocol, and what a folder and an object store have in common.

A step is a folder ``step-N`` with a committed index whose data files are all there. No file lists
the steps or points to the latest. A store looks, each time.
"""

from __future__ import annotations

import os
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from dcp_rs import _core
from dcp_rs.checkpoint.folders import INDEX_NAME, STOCK_NAME
from dcp_rs.checkpoint.verify import VerifyReport, verify
from dcp_rs.errors import (
    CorruptDataError,
    DcpRsError,
    RunTakenOverError,
    SaveInProgressError,
    StorageError,
    StoragePreconditionError,
    UnsupportedError,
)
from dcp_rs.steps import notes
from dcp_rs.steps.notes import Owner, saved_name, saving_name, verified_name

__all__ = [
    "MAY_BE_WHOLE",
    "File",
    "Files",
    "Kind",
    "Listing",
    "SkippedStep",
    "Step",
    "StepNames",
    "StepStore",
]

#: A longer number is part of another thing's name.
_DIGITS = 18
#: The number of steps whose indexes are in memory together.
_AT_ONCE = 16
#: The number of looks at a step that seems damaged while it changes.
_LOOKS = 5
_TEMPORARY = re.compile(r"(.+)\.[0-9a-f]{16}\.tmp")

Kind = Literal["unfinished", "in use", "unknown", "no index", "foreign", "unreadable", "damaged"]
#: A step of these kinds may be whole, so no older step takes its place.
MAY_BE_WHOLE: tuple[Kind, ...] = ("no index", "foreign")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that is committed and whole.

    Its index opens, and every data file is there and has its length.

    Attributes:
        number: the number of the step.
        path: its folder, or the URL of it.
        save_id: 32 hexadecimal digits that identify the save.
        saved: the time at which the save began, in seconds since 1970.
        nbytes: the bytes of its files.
        reused: the bytes of tensors and values that the save reused from an earlier step.
        linked: the bytes of the files that it shares with the step that it reused.
        files: the bytes of its data files. Steps that share a file have the same key for it.
        metrics: the metrics of the save.
        verified: whether the whole step was read after the save, and matched its digests.
    """

    number: int
    path: Path
    save_id: str
    saved: float
    nbytes: int
    reused: int = 0
    linked: int = 0
    files: Mapping[Any, int] = field(default_factory=dict, repr=False, compare=False)
    metrics: Mapping[str, float] = field(default_factory=dict)
    verified: bool = False

    @property
    def written(self) -> int:
        """The bytes that the save wrote: all but the shared files."""
        return self.nbytes - self.linked


@dataclass(frozen=True, kw_only=True)
class SkippedStep:
    """A folder with the name of a step that cannot be resumed from.

    Attributes:
        number: the number of the step.
        path: the folder.
        why: the reason, in words.
        kind: ``"unfinished"``: a save was killed, or failed. ``"in use"``: a process is saving it.
            ``"unknown"``: a save was killed or goes on, and nothing tells which. ``"no index"``: it
            is complete, but its index is gone. ``"foreign"``: it holds something that this version
            of this package does not know. ``"unreadable"``: it cannot be read. ``"damaged"``: it
            lacks data, or is not what was saved.
        runs: the ids of the runs whose saves of this step did not finish, if they are noted.
    """

    number: int
    path: Path
    why: str
    kind: Kind
    runs: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.path.name}: {self.why}"


@dataclass(frozen=True)
class Listing:
    """Steps under a root, in order.

    Attributes:
        steps: the whole steps.
        passed_over: the other steps.
        problems: what a sweep could not remove, and why.
    """

    steps: list[Step]
    passed_over: list[SkippedStep]
    problems: list[str] = field(default_factory=list)

    @property
    def left(self) -> list[SkippedStep]:
        """The unfinished steps before the latest step. The save of a later one may just begin."""
        latest = self.steps[-1].number if self.steps else -1
        return [
            step for step in self.passed_over if step.kind == "unfinished" and step.number < latest
        ]


@dataclass(frozen=True)
class File:
    """A file in the folder of a step, or a folder in it.

    Attributes:
        nbytes: the length.
        id: identifies the file. Hard links to one file have the same id.
        version: changes when the content changes.
        changed: the time of the last change, in seconds since 1970.
        is_file: false for a folder, a pipe or a link that leads nowhere.
    """

    nbytes: int
    id: Hashable
    version: Hashable
    changed: float = field(compare=False)
    is_file: bool = True


#: The content of a folder, by name. Two listings are equal if nothing changed between them.
Files = Mapping[str, File]


class StepNames:
    """Names of the folders of steps.

    Args:
        pattern: a name with ``{}`` for the number.

    Raises:
        ValueError: the pattern is invalid.
    """

    def __init__(self, pattern: str) -> None:
        before, number, after = pattern.partition("{}")
        # Hidden names are those of folders under removal.
        if (
            not number
            or not re.fullmatch(r"[^/{}.\0][^/{}\0]*", before or "x")
            or re.search(r"[/{}\0]", after)
        ):
            msg = (
                f"step_name={pattern!r}: the name of a folder, with {{}} for the number, "
                "as 'step-{}'"
            )
            raise ValueError(msg)
        self._before, self._after = before, after
        self._pattern = re.compile(f"{re.escape(before)}([0-9]+){re.escape(after)}")

    def of(self, number: int) -> str:
        """Return the name of a step."""
        return f"{self._before}{number}{self._after}"

    def numbers(self, names: Iterable[str]) -> list[int]:
        """Return the numbers of the steps among these names, in order."""
        return sorted(
            number
            for name in names
            if (number := self.number(name)) is not None and name == self.of(number)
        )

    def number(self, name: str) -> int | None:
        """Return the number in the name of a step, in another form (``step-007``) too; or None."""
        found = self._pattern.fullmatch(name)
        return None if found is None or len(found[1]) > _DIGITS else int(found[1])


class StepStore(ABC):
    """The steps of one run, and the operations on them.

    A subclass lists, reads, stores and removes files. A removal differs between file systems and
    object stores, and so does the way to tell whether a save is under way.

    Args:
        names: the names of the folders of steps.

    Attributes:
        path: a folder, which need not exist yet, or a URL.
        access: the arguments with which a save or a load reaches a step.
        run: the id of this process's run, after it took over the root.
    """

    path: Path
    access: Mapping[str, Any]
    run: str | None = None

    def __init__(self, names: StepNames | None = None) -> None:
        self._step_names = StepNames("step-{}") if names is None else names
        # Whole steps as they were last seen. An equal listing means the same step.
        self._known: dict[int, tuple[Files, Step]] = {}

    def folder(self, number: int) -> Path:
        """Return the folder of a step, which need not exist."""
        return self.path / self._step_names.of(number)

    # --- files

    @abstractmethod
    def _names(self) -> list[str]:
        """Return the names of the files and folders in the root."""

    @abstractmethod
    def _list(self, folders: Sequence[Path]) -> list[Files | None]:
        """Return the content of each folder; None for a folder that does not exist."""

    @abstractmethod
    def _read(self, paths: Sequence[Path]) -> list[bytes | None]:
        """Return the bytes of each file; None for a file that does not exist."""

    @abstractmethod
    def _put(self, path: Path, data: bytes) -> None:
        """Store a file, durably and in one step, in place of an older one."""

    @abstractmethod
    def _remove_files(self, paths: Sequence[Path]) -> None:
        """Remove files. Ignore those that do not exist."""

    @abstractmethod
    def _data_files(self, index: _core.Index, files: Files) -> list[File | None]:
        """Return the data files of an index, given the content of its folder."""

    # --- looking

    def is_run(self) -> bool:
        """Return whether the root has steps, and is not a checkpoint itself."""
        try:
            names = self._names()
            if INDEX_NAME in names or STOCK_NAME in names:
                return False
            steps = [name for name in names if self._step_names.number(name) is not None]
            return any(self._list([self.path / name])[0] is not None for name in steps)
        except (UnsupportedError, NotADirectoryError):  # a web server lists nothing
            return False

    def is_there(self) -> bool:
        """Return whether the root exists, and is not empty."""
        return bool(self._names())

    def look(self) -> Listing:
        """Look at all steps.

        Raises:
            OSError: the root cannot be listed.
        """
        names = self._names()
        numbers = self._step_names.numbers(names)
        found = [step for step in self._look(numbers).values() if step is not None]
        skipped = [step for step in found if isinstance(step, SkippedStep)]
        skipped += self._misnamed(names)
        steps = [step for step in found if isinstance(step, Step)]
        # The thread of the saves looks as well: the dict must not change meanwhile.
        self._known = {n: known for n, known in list(self._known.items()) if n in numbers}
        return Listing(steps, sorted(skipped, key=lambda step: step.number))

    def look_at(self, number: int) -> Step | SkippedStep | None:
        """Look at one step.

        Returns:
            The step; None if there is nothing.

        Raises:
            OSError: the step cannot be read, after several tries. It may be whole.
        """
        return self._look_at_some([number], _LOOKS)[number]

    def newest(self) -> Iterator[Step | SkippedStep]:
        """Look at one step after the other, the newest first.

        Raises:
            OSError: as :meth:`look_at`.
        """
        for number in reversed(self._step_names.numbers(self._names())):
            found = self.look_at(number)
            if found is not None:
                yield found

    def latest(self) -> Step | None:
        """Return the newest whole step.

        Raises:
            OSError: a newer step cannot be read, and may be whole.
        """
        return next((step for step in self.newest() if isinstance(step, Step)), None)

    def misnamed(self) -> list[SkippedStep]:
        """Return checkpoints whose name has a number in another form, such as ``step-007``.

        Raises:
            OSError: one cannot be read.
        """
        found = self._misnamed(self._names())
        contents = self._list([step.path for step in found])
        return [
            step
            for step, files in zip(found, contents, strict=True)
            if files is not None and (INDEX_NAME in files or STOCK_NAME in files)
        ]

    def _misnamed(self, names: Iterable[str]) -> list[SkippedStep]:
        found = []
        for name in names:
            number = self._step_names.number(name)
            if number is not None and name != (right := self._step_names.of(number)):
                why = f"its name is not {right}"
                path = self.path / name
                found.append(SkippedStep(number=number, path=path, why=why, kind="foreign"))
        return found

    def _look(self, numbers: Sequence[int]) -> dict[int, Step | SkippedStep | None]:
        found: dict[int, Step | SkippedStep | None] = {}
        for begin in range(0, len(numbers), _AT_ONCE):
            found |= self._look_at_some(numbers[begin : begin + _AT_ONCE], _LOOKS)
        return found

    def _look_at_some(
        self, numbers: Sequence[int], looks: int
    ) -> dict[int, Step | SkippedStep | None]:
        """Look at steps. Look again at a step that changes and seems damaged meanwhile."""
        # The listing comes before the index, which names only what was stored before it.
        listed = dict(zip(numbers, self._list([*map(self.folder, numbers)]), strict=True))
        try:
            contents = self._read_contents(listed)
            found = {
                number: self._judge(number, files, contents.get(number, {}))
                for number, files in listed.items()
            }
        except (CorruptDataError, StoragePreconditionError):  # replaced while it was read
            if looks == 1:
                raise
            return self._look_at_some(numbers, looks - 1)
        damaged = [
            number
            for number, step in found.items()
            if isinstance(step, SkippedStep) and step.kind == "damaged"
        ]
        if damaged and looks > 1:
            now = self._list([*map(self.folder, damaged)])
            changed = [n for n, files in zip(damaged, now, strict=True) if files != listed[n]]
            if changed:
                found |= self._look_at_some(changed, looks - 1)
        return found

    def _read_contents(
        self, listed: Mapping[int, Files | None]
    ) -> dict[int, dict[str, bytes | None]]:
        """Read the index and the notes of each step that is not known as it is listed."""
        wanted = [
            (number, name)
            for number, files in listed.items()
            if files is not None and not self._is_known(number, files)
            for name, file in files.items()
            if file.is_file
            and (name == INDEX_NAME or (notes.is_note(name) and file.nbytes <= notes.MAX_BYTES))
        ]
        read = self._read([self.folder(number) / name for number, name in wanted]) if wanted else []
        contents: dict[int, dict[str, bytes | None]] = {}
        for (number, name), data in zip(wanted, read, strict=True):
            contents.setdefault(number, {})[name] = data
        return contents

    def _is_known(self, number: int, files: Files) -> bool:
        return number in self._known and self._known[number][0] == files

    def _judge(
        self, number: int, files: Files | None, data: Mapping[str, bytes | None]
    ) -> Step | SkippedStep | None:
        """Return the state of a step, given its listing and the bytes of its index and notes."""
        if files is None:
            return None
        if self._is_known(number, files):
            step = self._known[number][1]
            self._known[number] = files, step  # equal listings may differ in the times of changes
            return step
        kind: Kind = "damaged"
        try:
            if INDEX_NAME in files:
                return self._whole_step(number, files, data)
            return self._unfinished_step(number, files, data)
        except StorageError:
            raise
        except UnsupportedError as error:  # a later version
            why, kind = str(error), "foreign"
        except (FileNotFoundError, DcpRsError) as error:
            why = str(error)
        return SkippedStep(number=number, path=self.folder(number), why=why, kind=kind)

    def _whole_step(self, number: int, files: Files, data: Mapping[str, bytes | None]) -> Step:
        """Return the step of an index.

        Raises:
            DcpRsError: the index does not open, or a data file is missing or has another length.
        """
        path = self.folder(number)
        if (content := data.get(INDEX_NAME)) is None:
            raise CorruptDataError(f"its {INDEX_NAME} cannot be read", path=path)
        index = _core.Index.from_bytes(content, os.fspath(path / INDEX_NAME), False)
        entries = index.files()
        sizes: dict[Any, int] = {}
        reused, shared = 0, set()
        for entry, file, (used, is_linked) in zip(
            entries, self._data_files(index, files), index.use_of_files(), strict=True
        ):
            if file is None:
                raise CorruptDataError(f"its data file {entry.name} is gone", path=path)
            if file.nbytes != entry.size:
                msg = (
                    f"its data file {entry.name} has {file.nbytes:,} bytes, "
                    f"and should have {entry.size:,}"
                )
                raise CorruptDataError(msg, path=path)
            sizes[file.id] = file.nbytes
            if is_linked:
                reused += used
                shared.add(file.id)
        save_id = (index.save_id or "").replace("-", "")
        names = [name for name in (saved_name(save_id), saving_name(save_id)) if name in files]
        noted = data.get(names[0], b"") if names else None
        step = Step(
            number=number,
            path=path,
            save_id=save_id,
            saved=files[INDEX_NAME].changed,
            nbytes=len(content) + sum(sizes.values()),
            reused=reused,
            linked=sum(sizes[file] for file in shared) if self._shares_files else 0,
            files=sizes,
            verified=verified_name(save_id) in files,
        )
        if noted is not None:
            step = replace(step, **notes.time_and_metrics(path / names[0], noted))
        if all(entry.name in files for entry in entries):  # the listing tells of all its data
            self._known[number] = files, step
        return step

    #: Whether steps share the files that they reuse.
    _shares_files: bool

    def _unfinished_step(
        self,
        number: int,
        files: Files,
        data: Mapping[str, bytes | None],
        *,
        is_locked: bool = False,
    ) -> SkippedStep:
        """Return the state of a folder without an index.

        Args:
            number: the number of the step.
            files: the content of its folder.
            data: the bytes of its notes.
            is_locked: this process holds the lock of the folder.
        """
        path = self.folder(number)
        names = {(t[1] if (t := _TEMPORARY.fullmatch(name)) else name) for name in files}
        strange = {n for n in names if n != _core.LOCK_NAME and not notes.is_own(n)}
        strange.difference_update(*map(notes.files_of, data.values()))
        saving = [data.get(name) for name in files if name.startswith("saving-")]
        owners = [owner for note in saving if (owner := notes.owner_of(note)) is not None]
        runs = frozenset(owner.run for owner in owners if owner.run is not None)
        kind = self._kind_of_unfinished(path, files, runs, is_locked=is_locked)
        if strange and kind != "in use":
            kind = "foreign"
        why = {
            "in use": f"{_newest(owners) or 'a process'} is saving it",
            "foreign": (
                f"it has no {INDEX_NAME}, and holds {min(strange, default='')}: "
                "dcp_rs.index(path) may adopt it"
            ),
            "no index": (
                f"it is complete, but its {INDEX_NAME} is gone: dcp_rs.index(path) makes it"
            ),
            "unknown": "its save did not finish, or goes on: nothing here tells which",
            "unfinished": "its save did not finish",
        }[kind]
        return SkippedStep(number=number, path=path, why=why, kind=kind, runs=runs)

    @abstractmethod
    def _kind_of_unfinished(
        self, path: Path, files: Files, runs: frozenset[str], *, is_locked: bool
    ) -> Literal["in use", "no index", "unknown", "unfinished", "foreign"]:
        """Return what is known of a save without an index, begun by these runs."""

    # --- the run

    @abstractmethod
    def _lock(self) -> AbstractContextManager[object]:
        """Hold the lock of the root, if the store has locks."""

    def _read_run(self) -> bytes | None:
        return self._read([self.path / notes.RUN_NAME])[0]

    def take_over(self) -> None:
        """Begin a run here. After that, an earlier run can neither commit nor remove anything.

        Raises:
            SaveInProgressError: another process has kept the root locked for ten minutes.
            OSError: the note of the run cannot be written.
        """
        run = uuid.uuid4().hex
        try:
            with self._lock():
                self._put(self.path / notes.RUN_NAME, notes.note_of_run(run))
        except SaveInProgressError as error:
            owner = notes.owner_of(self._read_run())
            msg = f"{error}; the run is that of {owner or 'an unknown process'}"
            raise SaveInProgressError(msg, path=self.path) from error
        self.run = run

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold the root for this run. A process that has not taken it over may hold it too.

        Raises:
            RunTakenOverError: another run began here.
            SaveInProgressError: another process has kept the root locked for ten minutes.
        """
        if self.run is None:
            yield
            return
        with self._lock():
            data = self._read_run()
            owner = notes.owner_of(data)
            if data is not None and (owner is None or owner.run != self.run):
                msg = (
                    f"the run in {self.path} was taken over by {owner or 'an unknown process'}: "
                    "this process may not save or remove steps any more"
                )
                raise RunTakenOverError(msg, path=self.path)
            yield

    # --- a save

    def begin(
        self,
        number: int,
        save_id: str,
        metrics: Mapping[str, float],
        files: Mapping[str, bytes] = MappingProxyType({}),
        *,
        replaces: bool = False,
    ) -> None:
        """Create the folder of a step, with the note of the save and ``files``.

        If the save replaces a whole step, the files come later, by :meth:`put_files`.
        """
        note = self.folder(number) / saving_name(save_id)
        self._put(note, notes.note_of_save(number, metrics, self.run, files))
        self._claim(note)
        if not replaces:
            self.put_files(number, files)

    def put_files(self, number: int, files: Mapping[str, bytes]) -> None:
        """Put files of the user into the folder of a step."""
        for name, data in files.items():
            self._put(self.folder(number) / name, data)

    def extra_files(self, step: Step) -> set[str]:
        """Return the names of the user's files in a step, as its note has them."""
        names = [name_of(step.save_id) for name_of in (saved_name, saving_name)]
        data = self._read([step.path / name for name in names])
        return {file for note in data for file in notes.files_of(note)}

    @abstractmethod
    def files_in(self, number: int) -> set[str]:
        """Return the names of all files in the folder of a step that a save may replace."""

    def remove_files(self, number: int, names: Iterable[str]) -> None:
        """Remove files from the folder of a step."""
        folder = self.folder(number)
        self._remove_files([folder / name for name in names])

    def _claim(self, note: Path) -> None:  # noqa: B027  # object stores have no locks
        """Let other processes see that a save is under way."""

    def release(self) -> None:  # noqa: B027  # as above
        """Release the claim on the last save that began here: it is over."""

    def is_being_replaced(self, number: int) -> bool:
        """Return whether a save to a whole step is known to be under way. A store cannot tell."""
        return False

    @abstractmethod
    def settle(self, number: int, save_id: str) -> None:
        """Note that a save is committed. Remove the notes of saves that it replaced."""

    def verify(self, step: Step) -> VerifyReport:
        """Read all of a step, and note it if it matches its digests."""
        report = verify(step.path, **self.access)
        if report.ok and not report.bytes_without_digest:
            self._put(step.path / verified_name(step.save_id), b"{}")
        return report

    # --- removal

    @abstractmethod
    def remove(self, number: int) -> None:
        """Remove a step. A kill meanwhile leaves the whole step, or no step.

        Raises:
            RunTakenOverError: another run began here.
            OSError: it cannot be removed.
        """

    def sweep(self) -> Listing:
        """Remove the leftovers of killed removals and killed saves (:attr:`Listing.left`).

        Returns:
            The steps before the sweep, and what could not be removed.

        Raises:
            RunTakenOverError: another run began here.
        """
        found = self.look()
        problems = self._sweep_removals(found.steps)
        for left in found.left:
            try:
                self._remove_left(left.number)
            except OSError as error:
                problems.append(
                    f"{left.path}, of a save that did not finish, could not be removed: {error}"
                )
        return replace(found, problems=problems)

    @abstractmethod
    def _sweep_removals(self, steps: Sequence[Step]) -> list[str]:
        """Remove leftovers beside these steps. Return what could not be removed, and why."""

    @abstractmethod
    def _remove_left(self, number: int) -> None:
        """Remove what a killed save left of a step, unless it changed after the look."""


def _newest(owners: Iterable[Owner]) -> Owner | None:
    return max(owners, key=lambda owner: owner.since, default=None)
