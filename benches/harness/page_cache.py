"""The page cache: filled, dropped, and looked at. A figure called cold was checked to be so."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PAGE = mmap.PAGESIZE
#: The share of a file that may stay resident: a tail page here and there, under load.
TOLERANCE = 0.01
_ATTEMPTS = 3


def files_of(*paths: Path) -> list[Path]:
    """The files at and below some paths, sorted."""
    found = []
    for path in paths:
        found += [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sorted(found)


def sync(*paths: Path) -> None:
    """Makes files durable, so that their pages are clean and can be dropped."""
    for path in files_of(*paths):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def resident_bytes(path: Path) -> int:
    """How much of a file is in the page cache, by `mincore`."""
    size = path.stat().st_size
    if size == 0:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE) as memory:
        pages = ctypes.create_string_buffer(-(-size // _PAGE))
        view = (ctypes.c_char * size).from_buffer(memory)
        status = _LIBC.mincore(
            ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), pages
        )
        del view
        if status:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        return min(size, sum(byte & 1 for byte in pages.raw) * _PAGE)


def warm(*paths: Path) -> None:
    """Reads the files into the page cache; raises where they do not stay there, as when memory is short."""
    files = files_of(*paths)
    buffer = bytearray(4 << 20)
    for _ in range(_ATTEMPTS):
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        if _resident(files) >= (1 - TOLERANCE) * _size(files):
            return
    _check(files, at_least=1 - TOLERANCE)


def drop(*paths: Path) -> None:
    """Drops the files from the page cache; raises where they stay."""
    files = files_of(*paths)
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    if _resident(files) > TOLERANCE * _size(files) and os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    _check(files, at_most=TOLERANCE)


def _size(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _resident(files: Iterable[Path]) -> int:
    return sum(resident_bytes(path) for path in files)


def _check(files: list[Path], *, at_least: float = 0.0, at_most: float = 1.0) -> None:
    share = _resident(files) / max(1, _size(files))
    if not at_least <= share <= at_most:
        msg = f"{share:.1%} of {files[0].parent} is in the page cache, not {at_least:.0%} to {at_most:.0%}"
        raise RuntimeError(msg)
