"""What one rank does for all: it makes the folder of a step, removes what is not kept, and chooses what to resume from."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_rs.checkpoint.verify import index
from dcp_rs.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptDataError,
    DcpRsError,
    SaveInProgressError,
    UnsupportedError,
)
from dcp_rs.steps.notes import is_own
from dcp_rs.steps.retention import Policies, expendable, prune
from dcp_rs.steps.root import NOT_KNOWN, Root, SkippedStep, Step

__all__ = ["ExtraFiles", "Keeper", "Prepared"]

#: Files of the user's for the folder of a step, by name: their bytes, or where they are.
ExtraFiles = Mapping[str, bytes | str | os.PathLike[str]]

#: What is passed over without further ado: there never was a checkpoint.
_NEVER_WHOLE = ("unfinished", "in use", "unknown")
#: Of what is passed over, what is known to be of no use.
_OF_NO_USE = ("unfinished", "damaged")


@dataclass(frozen=True)
class Prepared:
    """What a save that is about to begin has to know.

    Attributes:
        save_id: the id that it is to have.
        parent: the step that it may take over from, if there is one.
        overwrite: whether it may replace a step that is there by then.
    """

    save_id: str
    parent: Step | None
    overwrite: bool


class Keeper:
    """The steps under a root, for the rank that keeps them in order.

    Args:
        root: where.
        policies: what to keep.
        verify: remove nothing unless a step that stays is verified.

    Attributes:
        resumed: a step that stays, since this run began with it.
    """

    def __init__(self, root: Root, policies: Policies, *, verify: bool) -> None:
        self.resumed: int | None = None
        self._root = root
        self._policies = policies
        self._verify = verify
        self._problems: list[str] = []
        self._told: set[str] = set()
        self._begun: set[str] = set()  # ids of this run's saves
        self._damaged: set[str] = set()  # and of those that could not be loaded

    def prepare(
        self,
        step: int,
        metrics: Mapping[str, float],
        files: ExtraFiles,
        *,
        force: bool,
        reuse: bool,
    ) -> Prepared:
        """Makes the folder of a step that is about to be saved. With ``reuse``, it may take over what the latest holds.

        Raises:
            TypeError: a state dict in place of the step.
            ValueError: no number of a step, metrics that are no numbers, or names of files that
                cannot be.
            CheckpointExistsError, SaveInProgressError: the step is there, and ``force`` is not set.
            RunTakenOverError: another run began here.
            OSError: the folder cannot be made, or what is there cannot be looked at.
        """
        if isinstance(step, Mapping):
            raise TypeError("the step comes first, then the state dict")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            msg = f"step {step!r}: an integer from 0 on"
            raise ValueError(msg)
        numbers = {str(name): _number(name, value) for name, value in metrics.items()}
        contents = _read_extra_files(files)
        if self._root.run is None:
            self._root.take_over()
        with self._root.holding():
            pass  # an error before anything is written, and not after
        overwrite = self._make_way(step, force=force)
        latest = self._newest() if reuse or self._policies.max_bytes is not None else None
        if latest is not None and self._policies.max_bytes is not None:
            # The first save of a run may be of other ranks, and find nothing to take over.
            alike = reuse and latest.save_id in self._begun
            self._prune(step, room=latest.written if alike else latest.nbytes)
        save_id = uuid.uuid4().hex
        self._root.begin(step, save_id, numbers, contents)
        self._begun.add(save_id)
        return Prepared(save_id, self._newest() if reuse else None, overwrite)

    def _newest(self) -> Step | None:
        """The newest step that nobody found damaged. A save can do without: None where a newer one cannot be looked at."""
        try:
            whole = (found for found in self._root.newest() if isinstance(found, Step))
            return next((found for found in whole if found.save_id not in self._damaged), None)
        except OSError as error:
            self._tell(f"a step cannot be looked at, so nothing of it is reused: {error}")
            return None

    def _make_way(self, step: int, *, force: bool) -> bool:
        """Removes what is in the way of a save. Returns whether the save may replace a step that is there.

        What is whole stays. What is damaged or abandoned is replaced. Beside what may be under way,
        the save begins: of the two, the first that commits wins, and a save of an earlier run
        cannot.
        """
        found = self._root.look_at(step)
        if found is None:
            return force
        if isinstance(found, Step):
            # It is replaced by the save, and stays until then.
            if not force and found.save_id not in self._damaged:
                msg = f"there is a step {step} in {self._root.path} already: force=True replaces it"
                raise CheckpointExistsError(msg, path=found.path)
            return True
        if found.kind in _OF_NO_USE or force:
            self._root.remove(step)
        elif found.kind == "in use" and (not found.runs or self._root.run in found.runs):
            msg = f"step {step} cannot be saved to {found.path}: {found.why} (force=True removes what is there)"
            raise SaveInProgressError(msg, path=found.path)
        elif found.kind not in ("in use", "unknown"):
            msg = f"step {step} cannot be saved to {found.path}: {found.why} (force=True removes what is there)"
            raise CheckpointExistsError(msg, path=found.path)
        return force

    def take_over(self) -> None:
        """Begins a run at the root, if there is one, and it can be written to: an earlier run can neither commit nor remove anything any more."""
        if not self._root.is_there():
            return  # the first save does
        try:
            self._root.take_over()
        except OSError as error:
            # A reader without write access can still load; the first save tries again.
            if not isinstance(error, PermissionError) and error.errno not in (
                errno.EROFS,
                errno.ENOSPC,
                errno.EDQUOT,
            ):
                raise
        except UnsupportedError:  # a server that stores nothing
            pass

    def holding(self) -> AbstractContextManager[None]:
        """Keeps the root for this run, for a commit."""
        return self._root.holding()

    def committed(self, step: int, save_id: str) -> None:
        """Removes, once a step is durable, what is not kept. It never fails: what cannot be removed is a problem to be told."""
        try:
            self._root.settle(step, save_id)
        except OSError as error:
            self._tell(f"what was noted of step {step} could not be renamed: {error}")
        self._prune(step)

    def _prune(self, step: int, room: int | None = None) -> None:
        try:
            done = prune(
                self._root,
                self._policies,
                protected=self._protected(step),
                room=room,
                verify=self._verify,
            )
        except (DcpRsError, OSError) as error:
            self._tell(f"what the policies do not keep is still there: {error}")
        else:
            for problem in done.problems:
                self._tell(problem)

    def _tell(self, problem: str) -> None:
        """Notes a problem to be told, once."""
        if problem not in self._told:
            self._told.add(problem)
            self._problems.append(problem)

    def _protected(self, *steps: int) -> set[int]:
        """What stays, besides the latest and the best."""
        return {*steps} if self.resumed is None else {*steps, self.resumed}

    def take_problems(self) -> list[str]:
        """What could not be removed since this was last called, in words."""
        problems, self._problems = self._problems, []
        return problems

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Adds to the error of a full disk what could be removed."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                error.add_note(self._what_could_go())
            raise

    def _what_could_go(self) -> str:
        try:
            steps = expendable(self._root.look().steps, self._policies, self._protected())
        except OSError as error:
            return f"{self._root.path} cannot be looked at: {error}"
        if not steps:
            return f"{self._root.path} has no step that could be removed"
        sizes = ", ".join(f"{step.number} ({step.nbytes:,} bytes)" for step in steps)
        return f"of {self._root.path} these steps could be removed: {sizes}"

    def choose(
        self, step: int | None, damaged: Mapping[int, str]
    ) -> tuple[int | None, list[SkippedStep]]:
        """Return the step to load, and what was passed over for it.

        Args:
            step: default: the newest that is whole. One that only lost its index gets it back.
            damaged: steps that turned out not to be, and why.

        Raises:
            CheckpointNotFoundError: there is no such step; or there are some, and all are damaged.
            UnsupportedError: nothing tells whether a newer step is whole; or the newest checkpoint
                has the name of no step.
            OSError: a step cannot be looked at, and may be the one.
        """
        if step is not None:
            found = self._root.look_at(step)
            if not isinstance(found, Step):
                raise self._none(step, found)
            return step, []
        passed: list[SkippedStep] = []
        for found in self._root.newest():
            if isinstance(found, SkippedStep) and found.kind == "no index":
                found = self._with_its_index(found)  # noqa: PLW2901
            if isinstance(found, SkippedStep):
                if found.kind in NOT_KNOWN:
                    raise self._not_known(found)
                passed.append(found)
            elif found.number in damaged:
                why = damaged[found.number]
                self._damaged.add(found.save_id)
                passed.append(
                    SkippedStep(number=found.number, path=found.path, why=why, kind="damaged")
                )
            else:
                self._refuse_misnamed(found.number)
                return found.number, passed
        self._refuse_misnamed(-1)
        lost = [found for found in passed if found.kind not in _NEVER_WHOLE]
        if lost:
            msg = f"{self._root.path} has steps, and none can be resumed from: {'; '.join(map(str, lost))}"
            raise CheckpointNotFoundError(msg, path=self._root.path)
        return None, passed

    def _refuse_misnamed(self, chosen: int) -> None:
        """Raise if a checkpoint newer than the chosen step has a name such as ``step-007``: nothing finds it by its number."""
        newest = max(self._root.misnamed(), key=lambda step: step.number, default=None)
        if newest is not None and newest.number > chosen:
            path = newest.path
            msg = (
                f"{self._root.path} cannot be resumed: {newest}. Rename {path.name} to {self._root.folder(newest.number).name}, move it "
                "away, or make the manager with the step_name= of its folders"
            )
            raise UnsupportedError(msg, path=path)

    def _with_its_index(self, found: SkippedStep) -> Step | SkippedStep:
        """Make the index of a step again whose data is complete. Only the process that took the run over may."""
        if self._root.run is None:
            return found
        try:
            with self._root.holding():
                index(found.path)
        except CheckpointExistsError:  # another process was faster
            pass
        except CorruptDataError as error:
            return SkippedStep(number=found.number, path=found.path, why=str(error), kind="damaged")
        else:
            self._tell(f"{found.path.name} lost its index, which was made again from its data")
        return self._root.look_at(found.number) or found

    def _not_known(self, found: SkippedStep) -> UnsupportedError:
        n = found.number
        msg = (
            f"{self._root.path} cannot be resumed: {found}. Nothing tells whether {found.path.name} is whole, so no older step takes its "
            f"place. To go on from step N, say load(state, N); to give it up, say delete({n})"
        )
        return UnsupportedError(msg, path=found.path)

    def delete(self, step: int) -> None:
        """Removes a step.

        Raises:
            CheckpointNotFoundError: there is none.
        """
        if self._root.look_at(step) is None:
            raise self._none(step)
        self._root.remove(step)

    def _none(self, step: int, found: SkippedStep | None = None) -> CheckpointNotFoundError:
        numbers = [str(each.number) for each in self._root.look().steps]
        there = f"it has {', '.join(numbers)}" if numbers else "it has none"
        why = "" if found is None else f" ({found.why})"
        msg = f"there is no step {step} in {self._root.path}{why}: {there}"
        return CheckpointNotFoundError(msg, path=self._root.folder(step))


def _read_extra_files(files: ExtraFiles) -> dict[str, bytes]:
    """Return the bytes of files that are to be put into the folder of a step.

    Raises:
        ValueError: a name that is a path, hidden, or one of this package's own.
        OSError: one cannot be read.
    """
    for name in files:
        if not name or name.startswith(".") or "/" in name or "\0" in name or is_own(name):
            msg = f"extra_files has {name!r}: a plain name is needed, not hidden, and none that a checkpoint has itself"
            raise ValueError(msg)
    return {
        name: bytes(file) if isinstance(file, bytes) else Path(file).read_bytes()
        for name, file in files.items()
    }


def _number(name: str, value: Any) -> float:
    if not isinstance(value, str):
        with suppress(TypeError, ValueError, OverflowError):
            return float(value)
    msg = f"metrics[{name!r}] is {value!r}: a number"
    raise ValueError(msg)
