"""Signals, held while ranks talk: a handler that raises in the midst of what others take part in would leave them waiting."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["held"]

_STANDARD = [number for number in signal.valid_signals() if number < 32]  # beyond are those of real time


@contextmanager
def held() -> Iterator[Callable[[], None]]:
    """Holds the signals that have handlers of Python, which run in the main thread.

    Yields what runs the handlers of those that have come so far, which may raise. The end does so for the rest. Within itself it does nothing.
    """
    if threading.current_thread() is not threading.main_thread() or _Held.current is not None:
        yield lambda: None
        return
    current = _Held()
    try:
        current.begin()
        yield current.deliver
    finally:
        current.end()


class _Held:
    """The handlers whose place it takes, and the signals that came."""

    current: _Held | None = None

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: list[tuple[int, FrameType | None]] = []

    def begin(self) -> None:
        _Held.current = self
        for number in _STANDARD:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))

    def deliver(self) -> None:
        while self._came:
            number, frame = self._came.pop(0)
            self._handlers[number](number, frame)

    def end(self) -> None:
        for number, handler in self._handlers.items():
            # What set one meanwhile meant it.
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        _Held.current = None
        self.deliver()
