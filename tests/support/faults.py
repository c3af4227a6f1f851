"""Failures of one rank, step by step, and a watch over ranks that wait."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dcp_rs import RsSavePlanner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

#: Nobody may wait longer for a rank that has failed.
PATIENCE = 20  # seconds


class MishapError(Exception):
    """The user's own error, which does not unpickle."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


def fail(kind: str, where: str) -> None:
    """Fails in a way: an error of the user's, or a death."""
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise MishapError("a mishap", where)


def die_in(function: Callable[..., Any], call: int) -> None:
    """Kills this process at the beginning of the given call of a Python function, counted from 1.

    In this thread, and in those that begin later.
    """
    calls = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        if event == "call" and frame.f_code is function.__code__:
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(profile)
    sys.setprofile(profile)


class Breaks:
    """A ``Stateful`` that fails in one of its methods."""

    def __init__(self, where: str | None, kind: str = "exception") -> None:
        self.where, self.kind, self.value = where, kind, torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        if self.where == "state_dict":
            fail(self.kind, "state_dict")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.where == "load_state_dict":
            fail(self.kind, "load_state_dict")
        self.value = state["value"]


class FailingSavePlanner(RsSavePlanner):
    """Fails in any one of its methods, which is the object's own."""

    def __init__(self, method: str) -> None:
        super().__init__()
        setattr(self, method, self._fail)

    def _fail(self, *args: Any, storage_meta: Any = None, **kwargs: Any) -> None:
        raise ArithmeticError("as meant")


@contextmanager
def _watch() -> Iterator[None]:
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def watched(cells: dict[str, Callable[[], Any]]) -> dict[str, BaseException | None]:
    """What each cell ended with, one after another on all ranks. A rank that waits too long shows its stacks and ends.

    After every cell the process group has to be of use: no rank is ahead of the others.
    """
    ended: dict[str, BaseException | None] = {}
    for name, cell in cells.items():
        with _watch():
            try:
                cell()
            except BaseException as error:  # noqa: BLE001 - CheckpointException is not an Exception
                ended[name] = error
            else:
                ended[name] = None
            names: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(names, name)
            assert names == [name] * len(names), names
    return ended
