"""Background saves: futures, threads, and a bound on the copies that exist."""

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
    "MAX_COPIES",
    "SaveFuture",
    "Worker",
    "acquire_copy",
    "add_save",
    "check_no_save",
    "remove_save",
    "save_thread",
    "staging_thread",
]

#: Copies of state dicts at a time: one that is written, and one that is made meanwhile.
MAX_COPIES = 2


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
        """Do nothing: the other ranks take part in the save.

        Returns:
            False.
        """
        return False


class Worker:
    """Thread that runs calls one after another. The interpreter waits for them at its end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call ``work`` after all calls that were submitted before."""
        return self._executor.submit(work, *arguments)

    @property
    def is_current(self) -> bool:
        """True in this worker's thread."""
        return self._thread is threading.current_thread()

    def _set_thread(self) -> None:
        self._thread = threading.current_thread()

    def _reset(self) -> None:
        self._thread = None
        self._executor = ThreadPoolExecutor(1, self._name, initializer=self._set_thread)


#: Runs saves one after another, so that their collectives do not mix.
save_thread = Worker("dcp_rs.async_save")
#: Copies a state dict while another one is written.
staging_thread = Worker("dcp_rs.staging")

_copies = threading.Semaphore(MAX_COPIES)
#: The last background save to each path.
_saves: dict[str, SaveFuture] = {}


def _reset() -> None:
    """Forget the saves of the parent process, after a fork."""
    global _copies  # noqa: PLW0603
    _copies = threading.Semaphore(MAX_COPIES)
    _saves.clear()


os.register_at_fork(after_in_child=_reset)


def acquire_copy() -> Callable[[], None]:
    """Wait until one more copy may be made. Return a function that releases it, to call once."""
    if save_thread.is_current:  # a callback of a save cannot wait for saves after it
        return lambda: None
    copies = _copies
    copies.acquire()
    return copies.release


def add_save(path: str | os.PathLike[str], future: SaveFuture) -> None:
    """Register a background save to ``path``.

    Raises:
        SaveInProgressError: another save to ``path`` is not over.
    """
    key = _key(path)
    if _saves.setdefault(key, future) is not future:
        check_no_save(path)
        _saves[key] = future


def remove_save(future: SaveFuture) -> None:
    """Remove a save that is over, or did not begin."""
    for key, known in list(_saves.items()):
        if known is future:
            _saves.pop(key, None)


def check_no_save(path: str | os.PathLike[str]) -> None:
    """Raise a ``SaveInProgressError`` if a background save to ``path`` is not over."""
    other = _saves.get(_key(path)) if _saves else None
    if other is not None and not other.done():
        msg = (
            f"a save to {path} is still under way in this process: "
            "wait for its future before saving there again"
        )
        raise SaveInProgressError(msg, path=path)


def _key(path: str | os.PathLike[str]) -> str:
    text = os.fspath(location(path))
    return text if "://" in text else os.path.realpath(text)
