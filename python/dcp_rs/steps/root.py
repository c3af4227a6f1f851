"""What steps a run has: found out by looking, each time, and from nothing else. Where it looks is for the kinds of roots to know."""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from dcp_rs.checkpoint.verify import VerifyReport, verify
from dcp_rs.errors import RunTakenOverError, SaveInProgressError
from dcp_rs.steps import notes

__all__ = ["NOT_KNOWN", "Listing", "Root", "SkippedStep", "Step", "StepNames"]

#: Digits of a number at most: more would be another thing's name.
_DIGITS = 18

Why = Literal["unfinished", "in use", "unknown", "no index", "foreign", "unreadable", "damaged"]
#: What may be a whole step, for all that is known: no older one takes its place.
NOT_KNOWN: tuple[Why, ...] = ("no index", "foreign")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that is committed and whole: its index opens, and every data file is there and has its length.

    Attributes:
        number: of the step.
        path: its folder, or the URL of it.
        save_id: 32 hexadecimal digits that identify the save.
        saved: when the save began, in seconds since 1970.
        nbytes: bytes of its files.
        reused: of those, bytes of tensors and values that the save took over from an earlier step
            and did not write.
        linked: bytes of the files that it shares with the step that it took them from: what it
            reused, and what else is in them.
        files: its data files, by what identifies them where they are (the same in all steps that
            share one), and their bytes.
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
    files: Mapping[Any, int] = field(default_factory=dict, repr=False, compare=False)
    metrics: Mapping[str, float] = field(default_factory=dict)
    verified: bool = False

    @property
    def written(self) -> int:
        """Bytes that the save wrote: all but the files that it shares with an earlier step."""
        return self.nbytes - self.linked


@dataclass(frozen=True, kw_only=True)
class SkippedStep:
    """A folder with the name of a step that cannot be resumed from.

    Attributes:
        number: of the step.
        path: the folder.
        why: what is wrong with it, in words.
        kind: ``"unfinished"``: a save was killed, or failed. ``"in use"``: a process is saving it.
            ``"unknown"``: a save was killed or goes on, and nothing tells which. ``"no index"``: it
            is complete, but its index is gone. ``"foreign"``: it holds something that this version
            of this package does not know. ``"unreadable"``: it cannot be looked at. ``"damaged"``:
            it is not what was saved, or lacks data.
        runs: ids of the runs whose saves of this step did not finish, as far as they are noted.
    """

    number: int
    path: Path
    why: str
    kind: Why
    runs: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.path.name}: {self.why}"


@dataclass(frozen=True)
class Listing:
    """Steps found under a root, in order.

    Attributes:
        steps: those that are whole.
        passed_over: the others.
        problems: what a sweep could not remove, and why.
    """

    steps: list[Step]
    passed_over: list[SkippedStep]
    problems: list[str] = field(default_factory=list)

    @property
    def left(self) -> list[SkippedStep]:
        """What killed saves left of steps before the latest: of one after it, the save may just begin."""
        latest = self.steps[-1].number if self.steps else -1
        return [
            found
            for found in self.passed_over
            if found.kind == "unfinished" and found.number < latest
        ]


class StepNames:
    """The names of the folders of steps.

    Args:
        pattern: a name with ``{}`` for the number.

    Raises:
        ValueError: it is no such name.
    """

    def __init__(self, pattern: str) -> None:
        before, number, after = pattern.partition("{}")
        # A hidden name would be taken for what is being removed, and a brace for another field.
        if (
            not number
            or not re.fullmatch(r"[^/{}.\0][^/{}\0]*", before or "x")
            or re.search(r"[/{}\0]", after)
        ):
            msg = f"step_name={pattern!r}: the name of a folder, with {{}} for the number, as 'step-{{}}'"
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
        """Return the number in a name that is that of a step, be it in another form (``step-007``); else None."""
        found = self._pattern.fullmatch(name)
        return None if found is None or len(found[1]) > _DIGITS else int(found[1])


class Root(ABC):
    """Where a run is: a step is a folder ``step-N`` in it with a committed index.

    Nothing else says what steps there are: no file that points to the latest, no list.

    Args:
        names: of the folders of steps.

    Attributes:
        path: a folder, which need not be there yet, or a URL.
        access: the arguments of a save to a step, or of a load.
        run: the id of this process's run, once it has taken the root over.
    """

    path: Path
    access: Mapping[str, Any]
    run: str | None = None

    def __init__(self, names: StepNames | None = None) -> None:
        self._step_names = StepNames("step-{}") if names is None else names

    def folder(self, number: int) -> Path:
        """Where a step is, or would be."""
        return self.path / self._step_names.of(number)

    # --- looking
    # ---------------------------------------------------------------------------------------

    @abstractmethod
    def is_run(self) -> bool:
        """Whether it has steps, and is no checkpoint itself."""

    def is_there(self) -> bool:
        """Return whether anything was found."""
        return bool(self._names())

    @abstractmethod
    def _names(self) -> list[str]:
        """The names of what is right in it."""

    @abstractmethod
    def _look_at(self, numbers: Sequence[int]) -> list[Step | SkippedStep | None]:
        """What is at these steps; None where nothing is."""

    def look_at(self, number: int) -> Step | SkippedStep | None:
        """Return the state of a step; None if there is nothing.

        Raises:
            OSError: it cannot be looked at, and was asked for several times. It may be whole.
        """
        return self._look_at([number])[0]

    def look(self) -> Listing:
        """All that is there."""
        names = self._names()
        return self._listing_of(self._look_at(self._step_names.numbers(names)), names)

    def _listing_of(
        self, found: Iterable[Step | SkippedStep | None], names: Iterable[str]
    ) -> Listing:
        """Return the states of the steps among these names, in order."""
        found = list(found)
        strangers = list(filter(None, map(self._misnamed, names)))
        passed = [step for step in found if isinstance(step, SkippedStep)] + strangers
        return Listing(
            [step for step in found if isinstance(step, Step)],
            sorted(passed, key=lambda step: step.number),
        )

    def newest(self) -> Iterator[Step | SkippedStep]:
        """The newest first, each looked at when it is asked for.

        Raises:
            OSError: as :meth:`look_at`.
        """
        for number in reversed(self._step_names.numbers(self._names())):
            found = self.look_at(number)
            if found is not None:
                yield found

    def latest(self) -> Step | None:
        """The newest that is whole.

        Raises:
            OSError: a newer one cannot be looked at, and may be whole.
        """
        return next((step for step in self.newest() if isinstance(step, Step)), None)

    def misnamed(self) -> list[SkippedStep]:
        """List checkpoints whose names have the number of a step in another form, such as ``step-007``.

        Raises:
            OSError: one cannot be looked at.
        """
        found = filter(None, map(self._misnamed, self._names()))
        return [step for step in found if self._holds_index(step.path)]

    @abstractmethod
    def _holds_index(self, path: Path) -> bool:
        """Return whether there is the index of a checkpoint."""

    def _misnamed(self, name: str) -> SkippedStep | None:
        number = self._step_names.number(name)
        if number is None or name == self._step_names.of(number):
            return None
        why = f"its name is not {self._step_names.of(number)}"
        return SkippedStep(number=number, path=self.path / name, why=why, kind="foreign")

    # --- whose run it is
    # ---------------------------------------------------------------------------------

    @abstractmethod
    def _alone(self) -> AbstractContextManager[object]:
        """The lock of the root, where it has one."""

    @abstractmethod
    def _read_run(self) -> bytes | None:
        """The note of the run; None where there is none."""

    @abstractmethod
    def _write_run(self, data: bytes) -> None:
        """Replaces that note."""

    def take_over(self) -> None:
        """Begins a run here. An earlier run can neither commit nor remove anything any more.

        Raises:
            SaveInProgressError: another process has kept the root locked for ten minutes.
            OSError: the note of the run cannot be written.
        """
        run = uuid.uuid4().hex
        try:
            with self._alone():
                self._write_run(notes.of_run(run))
        except SaveInProgressError as error:
            owner = notes.owner_of(self._read_run())
            msg = f"{error}; the run is that of {owner or 'an unknown process'}"
            raise SaveInProgressError(msg, path=self.path) from error
        self.run = run

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keeps the root for this run meanwhile. A process that has not taken it over may hold it too.

        Raises:
            RunTakenOverError: another run began here.
            SaveInProgressError: another process has kept the root locked for ten minutes.
        """
        if self.run is None:
            yield
            return
        with self._alone():
            data = self._read_run()
            owner = notes.owner_of(data)
            if data is not None and (owner is None or owner.run != self.run):
                msg = f"the run in {self.path} was taken over by {owner or 'an unknown process'}: this process may not save or remove steps any more"
                raise RunTakenOverError(msg, path=self.path)
            yield

    # --- a save
    # ----------------------------------------------------------------------------------------

    @abstractmethod
    def begin(
        self,
        number: int,
        save_id: str,
        metrics: Mapping[str, float],
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Make the folder of a step, note in it what is being saved, and put ``files`` there."""

    @abstractmethod
    def settle(self, number: int, save_id: str) -> None:
        """Notes that a save is committed, and forgets what was noted of others that it replaced."""

    def verify(self, step: Step) -> VerifyReport:
        """Reads all of a step, and notes it where it is as its digests say."""
        report = verify(step.path, **self.access)
        if report.ok and not report.bytes_without_digest:
            self._note_verified(step)
        return report

    @abstractmethod
    def _note_verified(self, step: Step) -> None: ...

    # --- removal
    # ---------------------------------------------------------------------------------------

    @abstractmethod
    def remove(self, number: int) -> None:
        """Removes a step. A kill leaves all of it, or what no one takes for a step.

        Raises:
            RunTakenOverError: another run began here.
            OSError: it cannot be removed.
        """

    @abstractmethod
    def sweep(self) -> Listing:
        """Removes what killed removals left, and what killed saves left (:attr:`Listing.left`). Returns what there was, and what could not be removed.

        Raises:
            RunTakenOverError: another run began here.
        """
