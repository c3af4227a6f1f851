"""Whether this process is about to be stopped: a signal, or a function that tells."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Preemption"]


class Preemption:
    """Notices once that the process is to stop, and remembers it.

    Args:
        source: a signal, whose handler is replaced until :meth:`close`: what it did before is done
            no more, but a handler in Python is called too; a process that was forked goes by that
            alone. Or a function without arguments that returns whether to stop. Or None: nothing
            tells.

    Raises:
        ValueError: a signal, and this is not the main thread; or one that cannot be handled.
    """

    def __init__(self, source: signal.Signals | Callable[[], bool] | None) -> None:
        self._told = False
        self._process = os.getpid()
        self._ask: Callable[[], bool] | None = None
        self._signal: signal.Signals | None = None
        self._before: Any = None
        if callable(source):
            self._ask = source
        elif source is not None:
            if threading.current_thread() is not threading.main_thread():
                msg = "preemption= takes a signal in the main thread only; elsewhere, give it a function"
                raise ValueError(msg)
            self._signal = signal.Signals(source)
            try:
                self._before = signal.signal(self._signal, self._handle)
            except OSError as error:
                msg = f"preemption={self._signal.name}: it cannot be handled"
                raise ValueError(msg) from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._handle_in_child(number, frame)
            return
        self._told = True
        if callable(self._before):
            self._before(number, frame)

    def _handle_in_child(self, number: int, frame: FrameType | None) -> None:
        """Stops a process that was forked as it would be stopped without this: nobody there asks whether it was told to."""
        if signal.getsignal(number) == self._handle:
            self.close()
            os.kill(os.getpid(), number)
        elif callable(self._before):  # by a handler that was put over this one
            self._before(number, frame)

    @property
    def is_set_up(self) -> bool:
        """Whether anything can tell."""
        return self._ask is not None or self._signal is not None

    def noticed(self) -> bool:
        """Whether this process was told to stop, now or before."""
        if not self._told and self._ask is not None:
            self._told = bool(self._ask())
        return self._told

    def close(self) -> None:
        """Puts the handler back that was there before, unless somebody put another one in its place."""
        if self._signal is not None and signal.getsignal(self._signal) == self._handle:
            signal.signal(self._signal, signal.SIG_DFL if self._before is None else self._before)
        self._signal = None
