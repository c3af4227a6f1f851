"""Anonymous memory of this process: what was allocated, not what is mapped."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self


def anonymous() -> int:
    """Return its bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


class Growth:
    """By how much it grows at most within a ``with`` block.

    Attributes:
        nbytes: the bytes.
    """

    nbytes = 0

    def __enter__(self) -> Self:
        self._before, self._done = anonymous(), False
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._done:
            self.nbytes = max(self.nbytes, anonymous() - self._before)
            time.sleep(0.002)

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done = True
        self._watcher.join()
