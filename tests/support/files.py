"""Damage a file by a bit, and drop its pages from the page cache."""

from __future__ import annotations

import os
from pathlib import Path


def flip(file: Path, at: int | None = None, bit: int = 0) -> None:
    """Change a bit of a file; by default in its middle, below zero from its end."""
    size = file.stat().st_size
    at = size // 2 if at is None else at % size
    with file.open("r+b") as opened:
        byte = os.pread(opened.fileno(), 1, at)[0]
        os.pwrite(opened.fileno(), bytes([byte ^ 1 << bit]), at)


def drop_from_page_cache(folder: Path | str) -> None:
    """Take the files in a folder out of the page cache."""
    for file in filter(Path.is_file, Path(folder).iterdir()):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
