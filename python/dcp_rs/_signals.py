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
        self._came: dict[int, FrameType | None] = {}  # once each, as Python itself keeps them

    def begin(self) -> None:
        _Held.current = self
        for number in _STANDARD:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.setdefault(number, frame)

    def deliver(self) -> None:
        """All of them, though one raises."""
        if not self._came:
            return
        number = next(iter(self._came))
        try:
            self._handlers[number](number, self._came.pop(number))
        finally:
            self.deliver()

    def end(self) -> None:
        _Held.current = None
        try:
            self._put_back()
        finally:
            self.deliver()

    def _put_back(self) -> None:
        """A handler that is back may raise before the others are."""
        left = [number for number in self._handlers if signal.getsignal(number) == self._note]
        try:
            for number in left:
                signal.signal(number, self._handlers[number])
        finally:
            if any(signal.getsignal(number) == self._note for number in left):
                self._put_back()
