"""The part of a manager that one rank does for all: make room, remove old steps, choose a step."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, SupportsIndex, cast
from uuid import UUID, uuid4

from dcp_rs import _core
from dcp_rs._url import StrPath
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.folders import remember
from dcp_rs.engine.destination import Destination
from dcp_rs.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptDataError,
    RunTakenOverError,
    SaveInProgressError,
    UnsupportedError,
)
from dcp_rs.options import as_integer
from dcp_rs.steps.notes import is_extra
from dcp_rs.steps.retention import Policies, prune
from dcp_rs.steps.step_store import MAY_BE_WHOLE, SkippedStep, Step, StepStore

#: The user's files for the folder of a step, by name: bytes, or a path.
ExtraFiles = Mapping[str, bytes | StrPath]

#: There never was a checkpoint.
_NEVER_WHOLE = ("unfinished", "in use", "unknown")
#: The disk is full.
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Prepared:
    """Arguments of a save that is about to begin.

    Attributes:
        save_id: its id.
        run: the id of its run.
        since: the time at which the run began.
        parent: the folder of the step that it may reuse, if there is one.
        is_trusted: this manager saved the parent, and loaded nothing since.
        overwrite: whether it may replace a checkpoint.
    """

    save_id: str
    run: str | None
    since: float
    parent: Path | None
    is_trusted: bool
    overwrite: bool


class Coordinator:
    """The coordinator's part of a manager.

    Args:
        store: the steps.
        policies: the steps to keep.
        verify: remove nothing unless a step that stays is verified.
        latest: let ``latest`` in the root name the newest step.
        on_saved: called after each commit with the path of the step.

    Attributes:
        needed: returns the steps on nodes that are still to go to the root. They may not be removed
            at either place. A save on a node begins by removing those that may.
        resumed: the step that this run resumed from. It is never removed.
        went_back: whether the caller named that step.
        problems: what went wrong, and is no error of a save or a load.
    """

    def __init__(
        self,
        store: StepStore,
        policies: Policies,
        *,
        verify: bool,
        latest: bool = False,
        on_saved: Callable[[Path], object] | None = None,
    ) -> None:
        self.resumed: int | None = None
        self._store = store
        self._policies = policies
        self._verify = verify
        self._latest = latest
        self._on_saved = on_saved
        self.needed: Callable[[], Collection[int]] | None = None
        self.problems = store.problems
        self._told: set[str] = set()  # problems that were told
        self._late_files: Mapping[str, bytes] = {}  # to put into the step, once it is committed
        self._begun: set[str] = set()  # ids of the saves since the last load
        self.went_back = False
        self._superseded_from: int | None = None
        self._damaged: set[str] = set()  # ids of the saves that could not be loaded

    # --- saves

    def prepare(
        self,
        step: int,
        metrics: Mapping[str, float],
        files: ExtraFiles,
        *,
        force: bool,
        reuse: bool,
        save_id: str | None = None,
        **more: bool,
    ) -> Prepared:
        """Create the folder of a step that is about to be saved, and make room for it.

        Args:
            step, metrics, files, force, reuse: as for a save of the manager.
            save_id: the id of the save. Default: a new one.
            more: for the note of the save.

        Raises:
            Exception: as :func:`check_save`.
            CheckpointExistsError, SaveInProgressError: the step exists, and ``force`` is not set.
            RunTakenOverError: another run began here.
            OSError: the folder cannot be created, or what is there cannot be read.
        """
        numbers, contents = check_save(step, metrics, files)
        self._enter_run(partial(self._look_before_save, step, force=force))
        replaces = self._make_way(step, force=force)
        if self.needed is not None:  # else saves on a full disk would fail for ever
            self._prune(step)
        parent, is_trusted, limited = None, False, self._policies.max_bytes is not None
        if (reuse or limited) and (newest := self._newest()) is not None:
            if reuse and not newest.is_stock:
                parent, is_trusted = newest.path, newest.save_id in self._begun
            if limited:
                # The first save of a run may have other ranks, and reuse nothing. The policies
                # keep the newest step, which may be a damaged one.
                room = newest.written if is_trusted else newest.nbytes
                self._prune(step, newest.number, room=room)
        save_id = save_id or uuid4().hex
        self._supersede(step)
        self._store.begin(step, save_id, numbers, contents, **more)
        if not replaces:
            self._store.put_files(step, contents)
        self._late_files = contents if replaces else {}
        self._begun.add(save_id)
        if replaces:
            remember(self._store.folder(step))  # which the caller said, or the load that failed
        run, since = self._store.run, self._store.since
        return Prepared(save_id, run, since, parent, is_trusted, overwrite=force or replaces)

    def begin_upload(self, step: Step, files: Mapping[str, bytes], *, force: bool) -> None:
        """Prepare the root for a step that is uploaded from nodes.

        Raises:
            CheckpointExistsError: there is another save of this step, which may not be replaced.
            RunTakenOverError: another run began here.
            OSError: the root cannot be reached.
        """

        def check() -> None:
            found = self._store.look_at(step.number)
            if isinstance(found, Step) and found.save_id != step.save_id:
                self._check_may_replace(found, force=force)

        self._enter_run(check)
        check()
        self._supersede(step.number)
        self._store.begin(step.number, step.save_id, step.metrics, files, saved=step.saved)
        self._begun.add(step.save_id)
        self._late_files = files

    def commit_upload(self, step: Step, index: _core.Index, notes: Mapping[str, bytes]) -> bool:
        """Commit a step if all of its data files were uploaded. Return whether they were.

        Args:
            step: the step on the nodes.
            index: its index.
            notes: further notes of it, by name.

        Raises:
            RunTakenOverError: another run began here.
            OSError: the root cannot be reached.
        """
        there = self._store.lengths(step.number)
        if any(there.get(entry.name) != entry.size for entry in index.files()):
            return False
        self._store.put_files(step.number, notes)
        folder = self._store.folder(step.number)
        remember(folder)  # a save that may be replaced
        to = Destination(folder, self._store.access.get("storage_options"))
        generation = to.begin()
        with self._store.holding():
            to.commit(
                [index.to_bytes()],
                save_id=UUID(step.save_id).bytes,
                generation=generation,
                planner_data={},
            )
        self.committed(step.number, step.save_id)
        return True

    def _enter_run(self, check: Callable[[], object]) -> None:
        """Take the root over, unless this run has. Raise if another run did since then.

        Args:
            check: raises if the save is refused. Such a save must not end the run of another job.
        """
        if self._store.run is None:
            check()
            self._store.take_over()
        self._store.check_run()

    def _newest(self) -> Step | None:
        """Return the newest step that no load found damaged; None if one cannot be read."""
        try:
            for found in self._store.newest():
                if isinstance(found, Step) and found.save_id not in self._damaged:
                    return found
        except OSError as error:
            self.problems.append(
                f"a step cannot be looked at, so none is reused or makes room: {error}"
            )
        return None

    def _make_way(self, step: int, *, force: bool) -> bool:
        """Remove what is in the way of a save. Return whether the save replaces a whole step.

        That step stays until the save is committed. Beside a save that may be under way, the new
        save begins: the first of the two to commit wins, and a save of an earlier run cannot.
        """
        found = self._look_before_save(step, force=force)
        if found is None:
            return False
        if isinstance(found, Step):
            return True
        if found.is_left:
            self._store.remove_left(found)
        elif found.kind == "damaged" or (found.kind == "in use" and force):
            self._store.remove(step)
        elif found.kind == "in use" and not found.is_over:
            msg = f"{_in_the_way(found)} (force=True removes what it wrote)"
            raise SaveInProgressError(msg, path=found.path)
        return False

    def _look_before_save(self, step: int, *, force: bool) -> Step | SkippedStep | None:
        """Return what a save would replace. Raise a ``CheckpointExistsError`` if it may not."""
        found = self._store.look_at(step)
        if isinstance(found, Step):
            self._check_may_replace(found, force=force)
        elif found is not None and found.kind in MAY_BE_WHOLE:
            msg = f"{_in_the_way(found)}; delete({step}) removes it"
            raise CheckpointExistsError(msg, path=found.path)
        return found

    def _check_may_replace(self, found: Step, *, force: bool) -> None:
        """Raise a ``CheckpointExistsError`` unless a save may replace a whole step."""
        step = found.number
        if found.is_stock:
            msg = f"{found.path} holds a checkpoint of torch: delete({step}) removes it"
            raise CheckpointExistsError(msg, path=found.path)
        is_over = self._is_rolled_back(found) or self._is_late(found)
        if force or found.save_id in self._damaged or is_over:
            return
        msg = f"there is a step {step} in {self._store.path} already: force=True replaces it"
        raise CheckpointExistsError(msg, path=found.path)

    def _is_rolled_back(self, found: Step) -> bool:
        """Return whether the run went back to a step before this one, which it did not save."""
        if self._is_own(found):
            return False
        if self.went_back and self.resumed is not None and found.number > self.resumed:
            return True
        return found.key in self._store.superseded()

    def _is_own(self, found: Step) -> bool:
        run = self._store.run
        return found.save_id in self._begun or (run is not None and found.run == run)

    def _supersede(self, step: int) -> None:
        """Let this run's steps count as the newest, if others saved later ones.

        They do from the beginning of its first save on, whatever comes of that.
        """
        base = self.resumed if self.went_back and self.resumed is not None else step
        if self._superseded_from is not None and self._superseded_from <= base:
            return
        listing = self._store.look(since=base + 1, recall=True)
        later = [f for f in listing.steps if f.number > base and not self._is_own(f)]
        if not any(f.number > base and f.kind == "unreadable" for f in listing.passed_over):
            self._superseded_from = base  # else the next save looks again
        new = [found for found in later if not found.is_superseded]
        if new:
            self._store.supersede(found.key for found in new)
            names = ", ".join(str(found.number) for found in new[:6])
            self.problems.append(
                f"there are later steps, which this run did not save ({names}"
                f"{', …' if len(new) > 6 else ''}): from now on step {step} and those after it "
                "count as newer. Delete the later ones if you do not need them"
            )

    def _is_late(self, found: Step) -> bool:
        """Return whether another run committed a step after this run took over: without locks."""
        is_other = found.run is not None and not self._is_own(found)
        has_begun = self._store.run is not None
        return has_begun and is_other and found.committed > self._store.since

    def committed(self, step: int, save_id: str) -> None:
        """Remove what a commit replaced, and unneeded steps. A failure becomes a problem."""
        try:
            try:
                self._store.put_files(step, self._late_files)
            finally:
                self._store.settle(step, save_id)
        except (OSError, RunTakenOverError) as error:
            self.problems.append(
                f"step {step} is saved, but its notes or extra_files are not all in place: {error}"
            )
        self._update_latest()
        self._prune(step)
        if self._on_saved is not None:
            try:
                self._on_saved(self._store.folder(step))
            except Exception as error:  # noqa: BLE001  # the step is saved
                self.problems.append(f"step {step} is saved, but on_saved failed: {error!r}")

    def _update_latest(self) -> None:
        """Let ``latest`` lead to the newest step, if the caller wants it."""
        if not self._latest:
            return
        try:
            if (newest := self._store.latest()) is not None:
                self._store.point_to(newest.number)
        except OSError as error:
            self.problems.append(f"latest may not lead to the newest step: {error}")

    def _prune(self, *protected: int, room: int | None = None) -> None:
        needed = self.needed() if self.needed is not None else ()
        try:
            done = prune(
                self._store,
                self._policies,
                protected={*protected, *needed, self.resumed},
                room=room,
                verify=self._verify,
                # Where nothing can go, only what killed saves of this run left is looked for.
                since=(self.resumed or 0) if self._policies.keep_all else 0,
            )
            self.problems += done.problems
        except Exception as error:  # noqa: BLE001  # the step is saved. keep= may raise anything
            self.problems.append(f"what the policies do not keep is still there: {error!r}")

    def warn(self) -> None:
        """Warn of each problem once in this process: a stuck file comes back in each save."""
        while self.problems:
            problem = self.problems.pop(0)
            if problem not in self._told:
                self._told.add(problem)
                warn_caller(f"{self._store.path}: {problem}")

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise a ``RunTakenOverError`` if an operation fails because another run began here."""
        try:
            yield
        except (OSError, CorruptDataError):
            with suppress(OSError, SaveInProgressError):
                self._store.check_run()
            raise

    # --- loads

    def take_over(self) -> None:
        """Begin a run at the root, if it exists and can be written to."""
        if not self._store.names():
            return  # the first save takes over
        try:
            self._store.take_over()
        except OSError as error:
            # A reader without write access can load. The first save tries again.
            if not isinstance(error, PermissionError) and error.errno not in (errno.EROFS, *_FULL):
                raise
        except UnsupportedError:  # a web server stores nothing
            pass

    def choose(
        self, step: int | None, damaged: Mapping[int, str]
    ) -> tuple[Step | None, list[SkippedStep]]:
        """Return the step to load, and the newer steps that were skipped for it.

        Args:
            step: default: the newest whole step.
            damaged: steps that a load found damaged, and why.

        Raises:
            CheckpointNotFoundError: there is no such step; or all steps are damaged.
            UnsupportedError: a newer step may be whole.
            ValueError: ``step`` is not a number from 0 on.
            OSError: a step cannot be read, and may be whole.
        """
        self.forget_saves()
        if step is not None:
            check_step(step)
            named = self._store.look_at(step)
            if not isinstance(named, Step):
                raise self._not_found(step, named)
            return named, []
        names = self._store.names()
        if strangers := self._store.strangers(names):
            self.problems.append(strangers)
        skipped: list[SkippedStep] = []
        for found in self._store.newest(names):
            if isinstance(found, Step):
                if found.number not in damaged:
                    return found, skipped
                self._damaged.add(found.save_id)
                skipped.append(
                    SkippedStep(
                        number=found.number,
                        path=found.path,
                        why=damaged[found.number],
                        kind="damaged",
                    )
                )
            elif found.kind in MAY_BE_WHOLE:
                msg = (
                    f"{self._store.path} cannot be resumed: {found}. It may be whole, so no older "
                    "step takes its place. To go on from step N, say load(state, N); to give "
                    f"{found.path.name} up, remove it"
                )
                raise UnsupportedError(msg, path=found.path)
            else:
                skipped.append(found)
        lost = [found for found in skipped if found.kind not in _NEVER_WHOLE]
        if lost:
            why = "; ".join(map(str, lost))
            msg = f"{self._store.path} has steps, and none can be resumed from: {why}"
            raise CheckpointNotFoundError(msg, path=self._store.path)
        return None, skipped

    def forget_saves(self) -> None:
        """Forget the saves before a load: it may change what was frozen, or go back."""
        self._begun.clear()
        self._superseded_from = None

    def annotate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store metrics of a step beside it.

        Raises:
            CheckpointNotFoundError: there is no such step, or torch saved it.
            ValueError: an invalid step or metric.
        """
        numbers = _numbers(metrics)
        found = self._store.look_at(step)
        if not isinstance(found, Step) or found.is_stock:
            raise self._not_found(step, None if isinstance(found, Step) else found)
        self._store.annotate(found, numbers)

    def delete(self, step: int) -> None:
        """Remove a step.

        Raises:
            CheckpointNotFoundError: there is no such step.
        """
        if self._store.look_at(step) is None:
            raise self._not_found(step)
        self._store.remove(step)
        self._update_latest()

    def _not_found(self, step: int, found: SkippedStep | None = None) -> CheckpointNotFoundError:
        numbers = [str(each.number) for each in self._store.look().steps]
        msg = f"there is no step {step} in {self._store.path}"
        msg += "" if found is None else f" ({found.why})"
        msg += f": it has {', '.join(numbers) or 'none'}"
        return CheckpointNotFoundError(msg, path=self._store.folder(step))


def check_save(
    step: Any, metrics: Any, files: ExtraFiles
) -> tuple[dict[str, float], dict[str, bytes]]:
    """Check the arguments of a save. Return the metrics, and the bytes of the user's files.

    Raises:
        TypeError: a state dict in place of the step.
        ValueError: an invalid step, metric or name of a file.
        OSError: a file cannot be read.
    """
    if isinstance(step, Mapping):
        raise TypeError("the step comes first, then the state dict")
    check_step(step)
    return _numbers(metrics), _read_extra_files(files)


def _in_the_way(found: SkippedStep) -> str:
    return f"step {found.number} cannot be saved to {found.path}: {found.why}"


def _read_extra_files(files: Any) -> dict[str, bytes]:
    """Return the bytes of the user's files for the folder of a step.

    Raises:
        TypeError: they are not given by name.
        ValueError: a name that is a path, hidden, or one of this package's own.
        OSError: a file cannot be read.
    """
    if not isinstance(files, Mapping):
        msg = (
            f"extra_files={files!r}: pass a dict of bytes or paths by name, such as "
            "{'tokenizer.json': 'base/tokenizer.json'}"
        )
        raise TypeError(msg)
    for name in files:
        if not is_extra(name):
            msg = (
                f"extra_files has {name!r}: a plain name is needed, not hidden, "
                "and none that a checkpoint has itself"
            )
            raise ValueError(msg)
    return {
        name: bytes(file) if isinstance(file, bytes) else Path(file).read_bytes()
        for name, file in files.items()
    }


def step_number(step: SupportsIndex) -> int:
    """Return the number of a step, which may be an integer of NumPy, as an int.

    What is no integer is returned as it is: :func:`check_step` refuses it, on all ranks.
    """
    number = as_integer(step)
    return cast(int, step) if number is None else number


def check_step(step: Any) -> None:
    """Raise a ``ValueError`` unless this is the number of a step."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        msg = f"step={step!r}: must be an integer from 0 on"
        raise ValueError(msg)


def _numbers(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        msg = f"metrics={metrics!r}: pass a dict of numbers by name, such as {{'loss': 0.5}}"
        raise TypeError(msg)
    return {str(name): _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: Any) -> float:
    if not isinstance(value, str):
        with suppress(TypeError, ValueError, OverflowError):
            return float(value)
    msg = f"metrics[{name!r}]={value!r}: must be a number"
    raise ValueError(msg)
