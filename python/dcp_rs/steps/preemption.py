"""Preemption: a signal, or a function, that says that this process is to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

#: Signals by which a process is ended. Others reach forked processes, such as the workers of a
#: DataLoader, only because they are sent to the whole process group.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Preemption:
    """Source of preemption notices. A notice is remembered.

    Args:
        source: a signal, whose handler is replaced until :meth:`close`. An earlier handler in
            Python is called too. In a forked process the earlier handler alone is in force; if
            there was none, a signal such as ``SIGUSR1`` is ignored there. Or a function without
            arguments that returns whether to stop. Or None.

    Raises:
        ValueError: a signal outside of the main thread, or one that cannot be handled.
    """

    def __init__(self, source: int | Callable[[], bool] | None) -> None:
        self._is_noticed = False
        self._process = os.getpid()
        self._ask: Callable[[], bool] | None = None
        self._signal: signal.Signals | None = None
        self._before: Any = None
        if callable(source):
            self._ask = source
        elif source is not None:
            try:
                # True would count as 1, which is SIGHUP.
                self._signal = signal.Signals(0 if isinstance(source, bool) else source)
            except ValueError:
                msg = f"preemption={source!r}: pass a signal such as signal.SIGTERM, or a function"
                raise ValueError(msg) from None
            self._before = signal.getsignal(source)  # the signal may come at once
            try:
                signal.signal(source, self._handle)
            except OSError as error:
                msg = f"preemption={self._signal.name}: it cannot be handled"
                raise ValueError(msg) from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and os.getpid() == self._process:
            self._is_noticed = True
        elif signal.getsignal(number) == self._handle:  # closed, or in a forked process
            before = self.earlier_handler()
            is_forked = os.getpid() != self._process
            if is_forked and number not in _ENDING and not callable(before):
                return
            self._restore(number)
            os.kill(os.getpid(), number)
            return
        if callable(self._before):
            self._before(number, frame)

    def _restore(self, number: int) -> None:
        """Put the earlier handler back, unless another one replaced this one."""
        if signal.getsignal(number) == self._handle:
            signal.signal(number, self.earlier_handler() or signal.SIG_DFL)

    def earlier_handler(self) -> Any:
        """Return the handler before this one. Skip those of objects that were closed meanwhile."""
        owner = getattr(self._before, "__self__", None)
        if isinstance(owner, Preemption) and not owner.is_set_up:
            return owner.earlier_handler()
        return self._before

    @property
    def is_set_up(self) -> bool:
        """True if there is a signal or a function."""
        return self._ask is not None or self._signal is not None

    def noticed(self) -> bool:
        """Return whether this process was told to stop, now or earlier."""
        if not self._is_noticed and self._ask is not None:
            self._is_noticed = bool(self._ask())
        return self._is_noticed

    def close(self) -> None:
        """Put the earlier handler back, unless another one replaced this one.

        Raises:
            ValueError: outside of the main thread.
        """
        if self._signal is not None:
            self._restore(self._signal)
        self._signal = None
