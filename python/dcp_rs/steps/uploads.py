"""Uploads of one node: its files of some steps go to the root, in a thread, behind the saves."""

from __future__ import annotations

import os
import threading
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dcp_rs import _core
from dcp_rs.errors import CheckpointExistsError, CheckpointNotFoundError, RunTakenOverError
from dcp_rs.steps.coordinator import Coordinator
from dcp_rs.steps.notes import annotated_name
from dcp_rs.steps.step_store import Step, StepStore

#: Seconds between two attempts, at first and at most.
_PAUSE, _LONGEST_PAUSE = 0.05, 10.0
#: Seconds after which a thread that waits looks whether the program ends.
_TICK = 0.5
#: Errors of an upload that stay.
_REFUSED = (RunTakenOverError, CheckpointExistsError, CheckpointNotFoundError)


@dataclass
class _Upload:
    """A step that this node uploads.

    Attributes:
        number, save_id: the step.
        files: the data files that this node is still to send.
        is_new: none of them is at the root. Otherwise it is asked which are.
        has_begun: the root has the note of the save.
        is_told: there was a warning of it.
        is_refused: no further attempt can succeed.
    """

    number: int
    save_id: str
    files: list[str]
    is_new: bool
    has_begun: bool = False
    is_told: bool = False
    is_refused: bool = False


class Uploads:
    """The steps that one node uploads, and its thread.

    Each node sends its own files. The coordinator then waits until those of all nodes are at the
    root, and stores the index, which makes them a step. It looks at the root for that, so that no
    rank waits for another. Steps get there in order. A file that is at the root in its full length
    is not sent again.

    Args:
        node: the steps of the node.
        root: the steps at the root.
        coordinator: what commits steps at the root; None on all nodes but the first.
    """

    def __init__(self, node: StepStore, root: StepStore, coordinator: Coordinator | None) -> None:
        self._node, self._root, self._coordinator = node, root, coordinator
        self._changed = threading.Condition()  # its lock may be taken again
        self._queue: list[_Upload] = []
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self._taken_over: RunTakenOverError | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the thread from changing the root within this context. It goes on with its file."""
        with self._lock:
            yield

    def check(self) -> None:
        """Raise a ``RunTakenOverError`` if another run began at the root."""
        if self._taken_over is not None:
            raise self._taken_over

    def add(self, step: int, save_id: str, files: Iterable[str], *, is_new: bool) -> None:
        """Upload files of a step, after those of the steps that were added before.

        Args:
            step, save_id: the step.
            files: the names of the files.
            is_new: none of them can be at the root.
        """
        with self._changed:
            if any(each.save_id == save_id for each in self._queue):
                return
            self.drop({step})  # a save that was replaced goes nowhere
            self._queue.append(_Upload(step, save_id, sorted(files), is_new))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dcp_rs.upload")
                self._thread.start()

    def pending(self) -> set[int]:
        """Return the steps that are not at the root, as far as this node has to do with it."""
        with self._changed:
            return {each.number for each in self._queue}

    def _is_queued(self, step: _Upload) -> bool:
        with self._changed:
            return step in self._queue

    def drop(self, steps: Container[int]) -> None:
        """Upload these steps no more."""
        with self._changed:
            self._queue = [each for each in self._queue if each.number not in steps]

    def end(self) -> None:
        """Let the thread end after one more attempt for each step, or after its file."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()

    def has_ended(self, seconds: float) -> bool:
        """Wait for the end of the thread. Return whether it ended."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, seconds)

    def run_once(self) -> None:
        """Try to upload each step, in order, until one fails."""
        with self._changed:
            steps = [each for each in self._queue if not each.is_refused]
        for each in steps:
            try:
                is_done = self._upload(each)
            except Exception as error:  # noqa: BLE001  # the step stays in the queue
                each.is_refused = isinstance(error, _REFUSED)
                self._note(error, [each] if each.is_refused else steps)
                if each.is_refused:
                    continue
                return  # the root cannot be reached: do not try it with others
            if not is_done:
                return
            with self._changed:
                self._queue = [other for other in self._queue if other is not each]

    def _note(self, error: Exception, steps: list[_Upload]) -> None:
        """Note in the problems of the node why steps are not at the root, once for each."""
        if isinstance(error, RunTakenOverError):
            self._taken_over = error
        with self._changed:
            for step in steps:
                if not step.is_told and step in self._queue:
                    step.is_told = True
                    where = f"step {step.number} is on the nodes, and not at {self._root.path}"
                    self._node.problems.append(f"{where}: {error}")

    def _run(self) -> None:
        pause = _PAUSE
        while True:
            with self._changed:
                before, is_last = len(self._queue), self._is_ending or _program_ends()
            self.run_once()
            with self._changed:
                left = [each for each in self._queue if not each.is_refused]
                if is_last or not left:
                    self._thread = None
                    self._changed.notify_all()
                    return
                pause = _PAUSE if len(self._queue) != before else min(2 * pause, _LONGEST_PAUSE)
                waited = 0.0
                while waited < pause and not (self._is_ending or _program_ends()):
                    self._changed.wait(min(pause, _TICK))
                    waited += _TICK

    def _upload(self, step: _Upload) -> bool:
        """Upload what is missing of a step. Return whether this node has no more to do for it."""
        found = self._node.look_at(step.number)
        if not isinstance(found, Step) or found.save_id != step.save_id:
            msg = f"{self._node.folder(step.number)} has another save, or none"
            raise CheckpointNotFoundError(msg, path=self._node.folder(step.number))
        folder, to = found.path, self._root.folder(step.number)
        index = _core.Index.open(os.fspath(folder), None, False)
        if not step.is_new:
            sizes = {entry.name: entry.size for entry in index.files()}
            there = self._root.lengths(step.number)
            step.files = [name for name in step.files if there.get(name) != sizes[name]]
            step.is_new = True
        if self._coordinator is not None and not step.has_begun:
            note = found.note
            extra = {name: (folder / name).read_bytes() for name in (note.files if note else ())}
            with self._lock:
                if not self._is_queued(step):
                    return True
                force = note is not None and note.replaces
                self._coordinator.begin_upload(found, extra, force=force)
            step.has_begun = True
        own = [to / name for name in step.files]
        while step.files and self._is_queued(step):
            self._root.put_file(folder / step.files[0], to / step.files[0])
            del step.files[0]
        with self._lock:
            if not self._is_queued(step):  # it was dropped meanwhile: nothing will name its data
                self._root.remove_files(own)
                return True
            if self._coordinator is None:
                return True
            later = folder / annotated_name(step.save_id)
            metrics = {later.name: later.read_bytes()} if later.exists() else {}
            return self._coordinator.commit_upload(found, index, metrics)


def _program_ends() -> bool:
    return not threading.main_thread().is_alive()
