"""Saves in the background: their futures, the threads that copy and save, and how many copies there are at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from dcp_rs._url import location
from dcp_rs.engine.reports import SaveReport
from dcp_rs.errors import SaveInProgressError

__all__ = [
    "STAGED_AT_ONCE",
    "SaveFuture",
    "Worker",
    "check_free",
    "copying",
    "enter",
    "leave",
    "no_room",
    "saving",
    "take_room",
]

#: Copies of state dicts that are being made or written: one to write, and one to make meanwhile.
STAGED_AT_ONCE = 2


class SaveFuture(Future[Metadata]):
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

    def cancel(self) -> bool:
        """Do nothing: a save that has begun goes on, as the other ranks take part in it.

        Returns:
            False.
        """
        return False


class Worker:
    """A thread that does one thing after another. What it was given is finished before the interpreter ends."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._make()
        os.register_at_fork(after_in_child=self._make)

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Does it after what was submitted before."""
        return self._executor.submit(work, *arguments)

    @property
    def is_current(self) -> bool:
        """Whether this is its thread."""
        return self._thread is threading.current_thread()

    def _begin(self) -> None:
        self._thread = threading.current_thread()

    def _make(self) -> None:
        self._thread = None
        self._executor = ThreadPoolExecutor(
            1, self._name, initializer=self._begin
        )  # which starts none yet


#: Saves follow each other, so that their collectives do not mix. Copies have a thread of their own:
#: one is made while another is being written.
saving = Worker("dcp_rs.async_save")
copying = Worker("dcp_rs.staging")


class _Room:
    """For so many copies."""

    def __init__(self) -> None:
        self._make()
        os.register_at_fork(after_in_child=self._make)  # a child has no saves

    def _make(self) -> None:
        self._free = threading.Semaphore(STAGED_AT_ONCE)

    def take(self) -> Callable[[], None]:
        """Waits until there is room for one more. Returns what gives it back, to be called once."""
        if saving.is_current:  # in a callback of a save: what it would wait for comes after it
            return no_room
        free = self._free
        free.acquire()
        return free.release


def no_room() -> None:
    """Gives nothing back, of a copy that is not counted."""


take_room = _Room().take


#: The last save in the background to each path.
_saves: dict[str, SaveFuture] = {}
os.register_at_fork(after_in_child=_saves.clear)


def enter(path: str | os.PathLike[str], future: SaveFuture) -> None:
    """Note that a save in the background to ``path`` begins.

    Raises:
        SaveInProgressError: another save to ``path`` is not over.
    """
    other = _saves.setdefault(_key(path), future)
    if other is not future:
        check_free(path)
        _saves[_key(path)] = future


def leave(future: SaveFuture) -> None:
    """Forget a save that is over, or did not begin."""
    for key, known in list(_saves.items()):
        if known is future:
            _saves.pop(key, None)


def check_free(path: str | os.PathLike[str]) -> None:
    """Raise a ``SaveInProgressError`` where a save in the background to ``path`` is not over."""
    other = _saves.get(_key(path))
    if other is not None and not other.done():
        msg = f"a save to {path} is still under way in this process: wait for its future before saving there again"
        raise SaveInProgressError(msg, path=path)


def _key(path: str | os.PathLike[str]) -> str:
    text = os.fspath(location(path))
    return text if "://" in text else os.path.realpath(text)
