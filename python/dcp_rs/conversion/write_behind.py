"""Writing to the disk while more is being written, so that the sync at the end finds little to do."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["WriteBehind"]

#: Bytes written between two looks.
_STEP = 16 << 20


class WriteBehind:
    """Asks the system to begin writing what others put into the files of a folder. By itself it would wait for the sync."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._since = 0
        self._begun: dict[Path, int] = {}

    def wrote(self, nbytes: int) -> None:
        """Counts bytes that were written, and looks at the files now and then."""
        self._since += nbytes
        if self._since < _STEP or not hasattr(os, "posix_fadvise"):
            return
        self._since = 0
        for path in self._folder.iterdir():
            begun = self._begun.get(path, 0)
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > begun:
                    # Pages that are not on the disk yet are not dropped: their writing begins.
                    os.posix_fadvise(file.fileno(), begun, size - begun, os.POSIX_FADV_DONTNEED)
            self._begun[path] = size
