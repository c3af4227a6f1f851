"""The saves under way in this process: that no two of them go to one path, and whether one was committed."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_rs import _core
from dcp_rs.errors import PlanError, SaveInProgressError

__all__ = ["Place", "SavedMeta", "Saving", "arrived", "await_place", "begin", "reported", "start", "writing"]

#: A save whose bytes are written, and which only waits for the other ranks, is waited for this long.
_PATIENCE = 5.0  # seconds
_MOMENT = 1.0  # seconds
_SLICE = 0.01  # seconds
#: A staged save that no thread took up by then never will be: ``async_save`` failed after staging.
_TAKEN_UP = 60.0  # seconds

_active: dict[str, Saving] = {}
_current = threading.local()


_lock = threading.Lock()


def _after_fork() -> None:
    """Whoever held the lock is not there."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


@dataclass
class SavedMeta(StorageMeta):
    """The storage meta of an :class:`RsWriter`: planners know by it who will write.

    It comes back to every rank with the metadata of a committed save, and only then: that is how a rank learns of the commit.

    Attributes:
        report: what the save took on the rank from whose process this came: how a rank learns of a save that another process did for it.
    """

    report: Any = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "report": getattr(_current, "report", None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        saving: Saving | None = getattr(_current, "saving", None)
        if saving is not None and saving.path == _key(self.checkpoint_id):
            saving.committed = True
            saving.let_go()


@dataclass(frozen=True)
class Place:
    """What the coordinator of a save tells each rank, in its plan: which one it is, and of which save.

    A planner that keeps plans from one save to the next (``enable_plan_caching``) has the writer write by an older one. What counts is what arrived
    on this rank since its part of the save began: :func:`arrived`.

    Attributes:
        rank: which one this is.
        world_size: of how many; 0: it saves for itself alone.
        save_id: of all ranks.
        generation: section 1.1 of the format.
    """

    rank: int
    world_size: int
    save_id: bytes
    generation: int

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _current.place = self


def await_place() -> None:
    """This thread's part of a save begins: no place has arrived, nothing is reported."""
    _current.place = _current.report = None


def reported(report: Any) -> None:
    """This thread's part of a save ended with this report."""
    _current.report = report


def arrived() -> Place | None:
    """The place that arrived in this thread since then, from another process or by way of a collective."""
    place: Place | None = getattr(_current, "place", None)
    return place


@dataclass(eq=False)
class Saving:
    """One save of this process.

    Attributes:
        path: where to, resolved.
        ranks: how many there were when it was staged; 0 without a process group.
        begun_by: the thread that staged it, or that saves.
        taken_up_by: the one that was given what was staged, once it has said so.
        thread: the one that saves, once that has begun.
        driver: the call of torch's own ``save`` that the thread is in: a planner may fail there, of which nobody tells the writer, and the thread live on.
            None where somebody else saves.
        written: this rank's bytes are on their way; what is left is the commit.
        committed: it is the checkpoint now.
        ended: it is over, well or not.
        frozen: names of what was frozen when it was staged; None: it was not, or nobody looked.
        is_sent: another process saves.
    """

    path: str
    writer: weakref.ref[Any]
    begun_by: threading.Thread = field(default_factory=threading.current_thread)
    taken_up_by: threading.Thread | None = None
    thread: threading.Thread | None = None
    driver: int | None = None
    begun: float = field(default_factory=time.monotonic)
    queued: bool = False  # its end will be told
    ranks: int = 0
    written: bool = False
    committed: bool = False
    ended: bool = False
    frozen: frozenset[str] | None = None
    is_sent: bool = False
    claim: _core.Save | None = None  # says to other processes that its files are not those of a save that was killed

    def let_go(self) -> None:
        """Ends the claim on what it wrote: an index names it, or nobody needs it."""
        claim, self.claim = self.claim, None
        if claim is not None:
            claim.let_go()

    @property
    def is_staged(self) -> bool:
        """Whether it has not begun yet."""
        return self.thread is None and not self.ended

    def is_over(self) -> bool:
        """Whether another save to the path may begin."""
        if self.ended or self.committed or self.writer() is None:
            return True
        thread = self.thread or self.taken_up_by
        if thread is None:
            return not self.queued and time.monotonic() - self.begun > _TAKEN_UP
        if thread is threading.current_thread() or not thread.is_alive():
            return True
        return self.driver is not None and _driver_of(thread) != self.driver

    def is_under_way(self) -> bool:
        """The contrary."""
        return not self.is_over()


def begin(path: Any, writer: Any, *, queued: bool = False) -> Saving:
    """Begins a save to ``path``.

    Raises:
        SaveInProgressError: another one to this path is not over.
    """
    saving = Saving(_key(path), weakref.ref(writer), queued=queued, ranks=_ranks())
    with _lock:
        other = _active.get(saving.path)
    if other is not None and other.written:
        _await(other, _PATIENCE)
    _enter(saving, saving.path, path)
    return saving


def start(saving: Saving) -> None:
    """Says that this thread saves now.

    Raises:
        PlanError: the process group that was there when it was staged is gone, and torch takes that for a save of one rank: each would commit what it has.
    """
    if saving.ranks > 1 and _ranks() == 0:
        saving.ended = True
        msg = f"the process group of {saving.ranks} ranks was destroyed before the save that was staged under it began: wait for its future first"
        raise PlanError(msg, path=saving.path)
    saving.thread = _here(saving)


def _here(saving: Saving) -> threading.Thread:
    """This thread, which is at the save now."""
    thread = threading.current_thread()
    saving.driver = _driver_of(thread)
    return thread


def _driver_of(thread: threading.Thread) -> int | None:
    """Which call of torch's ``save`` a thread is in, the outermost: of two that are under way, each has a number of its own."""
    frame, found = _frame_of(thread), None
    while frame is not None:
        if frame.f_globals is vars(state_dict_saver):
            found = id(frame)
        frame = frame.f_back
    return found


def _frame_of(thread: threading.Thread) -> FrameType | None:
    """Where a thread is."""
    if thread is threading.current_thread():
        return sys._getframe()  # noqa: SLF001  # it is documented
    # Python 3.11 holds a lock of the interpreter meanwhile: were garbage collected, and did that let another thread run, both might wait for ever.
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread.ident or 0)  # noqa: SLF001  # it is documented
    finally:
        if collects:
            gc.enable()


def _await(saving: Saving, patience: float) -> None:
    """Returns when a save is over, or after so many seconds."""
    until = time.monotonic() + patience
    while not saving.is_over() and (thread := saving.thread or saving.taken_up_by) and time.monotonic() < until:
        thread.join(_SLICE)


def _ranks() -> int:
    """How many there are; 0 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0


def _enter(saving: Saving, key: str, path: Any) -> None:
    with _lock:
        other = _active.get(key)
        if other is not None and other is not saving and not other.is_over():
            msg = f"a save to {path} is still under way in this process: wait for its future before saving there again"
            raise SaveInProgressError(msg, path=path)
        if _active.get(saving.path) is saving:
            del _active[saving.path]
        saving.path = key
        _active[key] = saving


def await_end(saving: Saving) -> None:
    """Returns when a save is over, or nearly: the thread of one that failed lives on for a moment.

    Raises:
        SaveInProgressError: it goes on.
    """
    _await(saving, _PATIENCE if saving.written else _MOMENT)
    if not saving.is_over():
        msg = f"this writer still saves to {saving.path}: wait for its future, or save with another one"
        raise SaveInProgressError(msg, path=saving.path)


def take_up(saving: Saving, path: Any) -> None:
    """Notes that this thread saves what another one staged, and where to: it may have been staged before its writer was told.

    Raises:
        SaveInProgressError: a third one does, which is not over. torch 2.8 names the next path to a writer as soon as it is asked for the next save.
            Or another save to the path is not over.
    """
    if saving.written:  # it is committed where it was written, whatever the writer's next path is
        return
    here = threading.current_thread()
    if saving.thread is not None or saving.taken_up_by is not None:
        await_end(saving)
        if saving.is_staged and (saving.taken_up_by is not here or saving.driver != _driver_of(here)):
            saving.ended = True  # it failed before it had begun, and this is another one
    elif here is not saving.begun_by:
        saving.taken_up_by = _here(saving)
    if saving.is_staged and (key := _key(path)) != saving.path:
        _enter(saving, key, path)


def sent(saving: Saving) -> frozenset[str] | None:
    """If it has not begun, another process saves, and this thread waits for it: with the metadata of the checkpoint it learns of the commit.

    Returns what was frozen when it was staged, for that process.
    """
    here = threading.current_thread()
    if saving.is_staged and saving.taken_up_by in (None, here):
        saving.thread = here
        saving.driver = None  # it is torch's executor that waits
        saving.written = saving.is_sent = True  # not here: what is left to do here is to wait
        _current.saving = saving
    return saving.frozen if saving.is_sent else None


def writing(saving: Saving, claim: _core.Save) -> None:
    """Makes it the one whose commit this thread will learn of. Until then it claims what it wrote."""
    saving.claim = claim
    saving.thread = _here(saving)
    saving.written = True
    _current.saving = saving


def _key(path: Any) -> str:
    return os.fspath(path) if "://" in os.fspath(path) else str(os.path.realpath(path))
