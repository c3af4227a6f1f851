"""Saves in the background: one thread that runs them in order, and a bound on their copies."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp_rs._arguments import no_attribute
from dcp_rs._log import log as _log
from dcp_rs.checkpoint.folders import real_path
from dcp_rs.engine.reports import SavedMetadata, SaveReport
from dcp_rs.errors import SaveInProgressError
from dcp_rs.options import check_positive
from dcp_rs.transfer.stage import Staging

#: Copies of state dicts at a time: one that is written, and one that is made meanwhile.
MAX_COPIES = 2


class SaveFuture(Future[SavedMetadata]):
    """Future of a save in the background, as :func:`async_save` returns it.

    It cannot be cancelled, as the other ranks take part in the save.

    Attributes:
        staged: a future of None, which is done when this rank has copied the state dict: training
            may change it then. With ``async_staging=True`` wait for it
            (``future.staged.result()``) before ``optimizer.step()``. Otherwise it is done from the
            beginning. It raises nothing: if a copy fails on one rank, the futures of all ranks
            raise that.
        report: the :class:`dcp_rs.SaveReport` of this rank, once the future is done; None if the
            save failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.staged: Future[None] = Future()
        self.staged.set_running_or_notify_cancel()
        self.report: SaveReport | None = None

    if not TYPE_CHECKING:  # where types are checked, an unknown name is an error

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name)

    def cancel(self) -> bool:
        """Do nothing: the other ranks take part in the save.

        Returns:
            False.
        """
        return False


@dataclass(eq=False)
class _Job:
    """A save in the background.

    Attributes:
        save: saves the copy that its argument returns or raises for.
        path: where it goes, without links.
        future: the future of the save.
        staging: the copy, once it has begun.
        copying: the thread that makes the copy; None if the caller does.
        error: the error of the call or of the copy.
        has_begun: the thread runs it, or did.
        is_over: set once nothing uses the copy.
        result: what the future gets.
    """

    save: Callable[[Callable[[], Staging]], SavedMetadata]
    path: str = ""
    future: SaveFuture = field(default_factory=SaveFuture)
    staging: Staging | None = None
    copying: threading.Thread | None = None
    error: BaseException | None = None
    has_begun: bool = False
    is_over: threading.Event = field(default_factory=threading.Event)
    result: SavedMetadata | BaseException = field(init=False)

    def copy(self) -> None:
        """Copy the bytes of the tensors. Keep the error for the save."""
        assert self.staging is not None  # noqa: S101  # it has begun
        try:
            self.staging.finish()
        except BaseException as error:  # noqa: BLE001  # all ranks raise it in the save
            self.error = error
        self.future.staged.set_result(None)

    def take(self) -> Staging:
        """Return the copy, or raise its error."""
        if self.copying is not None:
            self.copying.join()
        if self.error is not None:
            raise self.error
        assert self.staging is not None  # noqa: S101  # there was no error
        return self.staging

    def run(self) -> None:
        """Save the copy, and give its memory back. Keep the result for the future."""
        try:
            try:
                self.result = self.save(self.take)
            finally:
                self.release()
        except BaseException as error:  # noqa: BLE001  # the future raises it
            self.result = error

    def release(self) -> None:
        """Give the memory of the copy back, once nothing writes to it."""
        if self.copying is not None:
            self.copying.join()
        if self.staging is not None:
            self.staging.release()

    def tell(self) -> None:
        """Set the result of the future. Its callbacks run now."""
        if isinstance(self.result, BaseException):
            self.future.set_exception(self.result)
            with suppress(Exception):  # of a handler
                # Not the error itself: a log that keeps it would keep the copy, which its frames
                # hold.
                text = str(self.result)
                _log.error("the save in the background to %s failed: %s", self.path or "?", text)
        else:
            self.future.report = self.result.report
            self.future.set_result(self.result)


class SaveQueue:
    """The saves of this process in the background, in the order of the calls.

    It owns the thread that runs them, which ends when there is none left: the interpreter waits for
    it at its end. In a child of fork it begins anew.
    """

    def __init__(self) -> None:
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._jobs: list[_Job] = []  # that are not over
        self._queue: deque[_Job] = deque()  # that the thread will run
        self._thread: threading.Thread | None = None

    def submit(
        self,
        locate: Callable[[], Path],
        stage: Callable[[], Staging],
        save: Callable[[Callable[[], Staging]], SavedMetadata],
        *,
        max_copies: int,
        async_staging: bool,
        is_alone: bool,
    ) -> SaveFuture:
        """Copy a state dict, and queue its save. If the copy fails, nothing is saved.

        It waits until there may be one more copy. After Ctrl-C the save is queued, or nothing is
        left of it.

        Args:
            locate: returns where the save goes.
            stage: begins the copy.
            save: saves the copy that its argument returns or raises for.
            max_copies: the number of copies that there may be, this one included.
            async_staging: copy the bytes of tensors in a thread.
            is_alone: no other rank takes part. Otherwise ``save`` is called even if this raises.
                Its argument raises the same error then, for the other ranks.

        Raises:
            SaveInProgressError: another save to the path is not over.
            ValueError: ``max_copies`` is no positive number.
            BaseException: whatever ``locate``, ``stage`` and the copy raise.
        """
        job = _Job(save)
        try:
            check_positive("max_copies", max_copies)
            self._enter(job, locate(), max_copies)
            job.staging = stage()
            if async_staging:
                job.copying = threading.Thread(target=job.copy, name="dcp_rs.staging")
                job.copying.start()
            else:
                job.copy()
                job.take()
            self._put(job)
        except BaseException as error:
            if self._is_queued(job):
                raise
            job.error = error
            if is_alone:
                job.release()
                self._remove(job)
            else:
                self._put(job)
                if threading.current_thread() is not self._thread:
                    job.is_over.wait()
            raise
        return job.future

    def check_path(self, path: Path) -> None:
        """Raise a ``SaveInProgressError`` if a save to ``path`` is not over."""
        if self._process != os.getpid():
            self._begin_anew()
        if not self._jobs:
            return
        own = real_path(path)
        if any(job.path == own for job in self._jobs):
            msg = (
                f"a save to {path} is still under way in this process: "
                "wait for its future before saving there again"
            )
            raise SaveInProgressError(msg, path=path)

    def _enter(self, job: _Job, path: Path, max_copies: int) -> None:
        """Wait until there may be the copy of one more job."""
        job.path = real_path(path)
        self.check_path(path)
        with self._changed:
            # A callback of a save cannot wait for saves after it.
            while threading.current_thread() is not self._thread and len(self._jobs) >= max_copies:
                self._changed.wait()
                self.check_path(path)
            self._jobs.append(job)

    def _put(self, job: _Job) -> None:
        """Queue a job, and start the thread if none runs."""
        with self._changed:
            self._queue.append(job)
            self._start()

    def _is_queued(self, job: _Job) -> bool:
        """Return true if the thread runs a job, or will. Ctrl-C may come before that is certain."""
        with self._changed:
            self._start()
            return job.has_begun or job in self._queue

    def _start(self) -> None:
        if self._thread is None and self._queue:
            self._thread = threading.Thread(target=self._run, name="dcp_rs.async_save")
            self._thread.start()

    def _remove(self, job: _Job) -> None:
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
            self._changed.notify_all()
        job.is_over.set()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._thread = None
                    return
                job = self._queue.popleft()
                job.has_begun = True
            job.run()
            self._remove(job)
            job.tell()


#: The saves of this process.
saves = SaveQueue()
