"""Progress: a callable hears of it, or a bar shows it where somebody watches: on a terminal, in a notebook, on the first rank. Without torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dcp_rs import _core
from dcp_rs._shown import size

__all__ = ["Counts", "Progress", "Watch", "watching"]

#: Called with the bytes done, and all of them: None where that is not known.
Watch = Callable[[int, int | None], Any]
#: What a caller asks for: to be told, a bar (``True``), or nothing.
Progress = bool | Watch | None

#: A bar is drawn no more often, in seconds.
_PERIOD = 0.1
_WIDTH = 24


@contextmanager
def watching(progress: Progress, what: str, *, total: int | None = None) -> Iterator[Watch | None]:
    """Who is to hear of the progress of ``what``, while it goes on; None where nobody is. ``total``: of a work that does not tell."""
    if not isinstance(progress, bool):
        yield progress
        return
    bar = _Bar.where_it_is_seen(what, total) if progress else None
    if bar is None:
        yield None
        return
    try:
        yield bar.show
    finally:
        bar.end()


class _Bar:
    """``what``, how much of it, how fast, and what is left, in a line that is drawn over."""

    def __init__(self, what: str, total: int | None) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._begin = time.monotonic()
        self._drawn = float("-inf")
        self.draw()

    @staticmethod
    def where_it_is_seen(what: str, total: int | None) -> _Bar | None:
        """A bar for whoever watches this process; None where nobody does, or another rank has it."""
        dist = sys.modules.get(
            "torch.distributed"
        )  # where nobody imported it, there is no process group
        if (
            dist is not None
            and dist.is_available()
            and dist.is_initialized()
            and dist.get_rank() != 0
        ):
            return None
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if hasattr(shell, "kernel"):
            return _NotebookBar(what, total)
        stream = sys.stderr
        return _TerminalBar(what, total) if stream is not None and stream.isatty() else None

    def show(self, done: int, total: int | None = None) -> None:
        """So many bytes are done."""
        self._done = done
        self._total = self._total if total is None else total
        if time.monotonic() - self._drawn >= _PERIOD:
            self.draw()

    def end(self) -> None:
        """The work is over, well or not."""

    def draw(self) -> None:
        """Shows what is known now."""
        self._drawn = time.monotonic()

    def text(self) -> str:
        """Bytes, speed, seconds that are left."""
        seconds = time.monotonic() - self._begin
        speed = self._done / seconds if seconds > 0 else 0.0
        amount = (
            size(self._done) if not self._total else f"{size(self._done)} of {size(self._total)}"
        )
        left = (
            f", {max(0.0, (self._total - self._done) / speed):.0f} s left"
            if self._total and speed
            else ""
        )
        return f"{amount}, {size(speed)}/s{left}"

    def share(self) -> float:
        """How much of it is done, from 0 to 1."""
        return min(1.0, self._done / self._total) if self._total else 0.0


class _TerminalBar(_Bar):
    """On stderr, which is a terminal. It leaves nothing behind."""

    def draw(self) -> None:
        super().draw()
        full, empty = ("█", "·") if "utf" in (sys.stderr.encoding or "").lower() else ("#", ".")
        filled = round(self.share() * _WIDTH)
        line = f"{self._what} {full * filled}{empty * (_WIDTH - filled)} {self.text()}"
        import shutil  # with all that it can compress

        columns = shutil.get_terminal_size().columns
        sys.stderr.write("\r" + line[: columns - 1] + "\x1b[K")
        sys.stderr.flush()

    def end(self) -> None:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


class _NotebookBar(_Bar):
    """In the output of a cell, where the last state stays."""

    def __init__(self, what: str, total: int | None) -> None:
        self._handle: Any = None
        super().__init__(what, total)

    def draw(self) -> None:
        super().draw()
        text = f"{self._what}: {self.text()}"
        most = f" max='1' value='{self.share():.4f}'" if self._total else ""
        shown = {"text/plain": text, "text/html": f"<progress{most}></progress> {text}"}
        if self._handle is None:
            self._handle = sys.modules["IPython"].display.display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def end(self) -> None:
        self.draw()


@dataclass
class Counts:
    """Bytes of loads so far: that were asked for, that were read for it, of those past the page cache, and from mappings; and the pieces of files that were read.

    Attributes:
        expected: what is going to be asked for in all, if anybody watches.
        watch: hears of what is there, and of what is expected.
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
        """Adds a part of a load."""
        self.wanted += part.wanted
        self.read += part.read
        self.direct += part.direct
        self.mapped += part.mapped
        self.verified += part.verified
        self.requests += part.requests
        if self.watch is not None:
            self.tell(0)

    def tell(self, more: int) -> None:
        """Says how far the load is: so many bytes further than what was added."""
        if self.watch is not None and self.wanted + more:
            self.watch(self.wanted + more, self.expected)
