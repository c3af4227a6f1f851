"""Progress of loads and saves: a callable, or a bar in a line of stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dcp_rs import _core
from dcp_rs._log import current_rank
from dcp_rs._reports import size

#: Callable for the bytes that are done, and for all bytes, or None if that is unknown.
Watch = Callable[[int, int | None], Any]
#: Argument of a load or save: a callable, True for a bar, or nothing.
Progress = bool | Watch | None

#: Seconds between two drawings of a bar.
_PERIOD = 0.1
_WIDTH = 24


@contextmanager
def watching(progress: Progress, what: str) -> Iterator[Watch | None]:
    """Yield the callable to call with the progress of a work; None if there is none.

    Args:
        progress: the argument of the caller.
        what: a word for the work.
    """
    if not isinstance(progress, bool):
        if progress is not None and not callable(progress):
            raise TypeError(f"progress={progress!r}: pass True, or a function of two numbers")
        yield progress
        return
    bar = _make_bar(what) if progress else None
    if bar is None:
        yield None
        return
    try:
        yield bar.update
    finally:
        bar.end()


def _make_bar(what: str) -> _Bar | None:
    """Return a bar on rank 0, if there is a terminal or a notebook to draw on."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    is_notebook = hasattr(shell, "kernel")
    is_shown = sys.stderr is not None and (is_notebook or sys.stderr.isatty())
    return _Bar(what, stays=is_notebook) if is_shown and not current_rank() else None


class _Bar:
    """Bar in a line of stderr with bytes, speed and the time that is left.

    Args:
        what: a word for the work.
        stays: leave the bar there at the end, as a notebook knows no escapes that remove it.
    """

    def __init__(self, what: str, *, stays: bool) -> None:
        self._what = what
        self._stays = stays
        self._total: int | None = None
        self._done = 0
        self._begin = time.monotonic()
        self._drawn = float("-inf")
        self.update(0)

    def update(self, done: int, total: int | None = None) -> None:
        """Set the bytes that are done. Draw the bar if it is time."""
        self._done = done
        self._total = self._total if total is None else total
        if time.monotonic() - self._drawn >= _PERIOD:
            self._drawn = time.monotonic()
            self._draw()

    def end(self) -> None:
        """End the bar: the work is over, or failed."""
        self._draw()
        sys.stderr.write("\n" if self._stays else "\r\x1b[K")
        sys.stderr.flush()

    def _draw(self) -> None:
        full, empty = ("█", "·") if "utf" in (sys.stderr.encoding or "").lower() else ("#", ".")
        share = min(1.0, self._done / self._total) if self._total else 0.0
        filled = round(share * _WIDTH)
        line = f"{self._what} {full * filled}{empty * (_WIDTH - filled)} {self._text()}"
        import shutil  # slow to import

        columns = shutil.get_terminal_size().columns - 1
        sys.stderr.write("\r" + line[:columns].ljust(columns))
        sys.stderr.flush()

    def _text(self) -> str:
        """Return bytes, speed and the seconds that are left."""
        seconds = time.monotonic() - self._begin
        speed = self._done / seconds if seconds > 0 else 0.0
        amount = size(self._done)
        if not self._total:
            return f"{amount}, {size(speed)}/s"
        left = f", {max(0.0, (self._total - self._done) / speed):.0f} s left" if speed else ""
        return f"{amount} of {size(self._total)}, {size(speed)}/s{left}"


@dataclass
class Counts:
    """Counts of one load.

    Attributes:
        wanted: bytes of tensors and values that were loaded.
        read: bytes of files that were read for them.
        direct: of these, bytes read past the page cache.
        mapped: of these, bytes copied from mappings.
        verified: bytes that were compared with digests.
        requests: contiguous reads of files.
        expected: bytes that the whole load wants, if there is a ``watch``.
        watch: callable for the progress.
    """

    wanted: int = 0
    read: int = 0
    direct: int = 0
    mapped: int = 0
    verified: int = 0
    requests: int = 0
    expected: int = 0
    watch: Watch | None = None

    def add(self, part: _core.ReadStats | Counts) -> None:
        """Add the counts of a part of the load."""
        self.wanted += part.wanted
        self.read += part.read
        self.direct += part.direct
        self.mapped += part.mapped
        self.verified += part.verified
        self.requests += part.requests
        if self.watch is not None:
            self.tell(0)

    def tell(self, more: int) -> None:
        """Report the progress: ``more`` bytes beyond those that were added."""
        if self.watch is not None and self.wanted + more:
            self.watch(self.wanted + more, self.expected)
