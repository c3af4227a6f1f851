"""A file system that passes calls on to a folder, and refuses or fails some: `SOURCE MOUNT RULES`.

RULES is a JSON file, read again whenever it changes:

- ``refuse``: error names by call, such as ``{"truncate": "EOPNOTSUPP"}``;
- ``fail``: ``{"errno": "EIO", "at": 17, "times": 1, "calls": ["write"]}`` fails the 17th of these
  calls since the rules were set, and those after it, up to ``times`` (default: all). Without
  ``calls``, any call counts;
- ``sequential``: a write must begin where the file ends;
- ``stale_names``: for so many seconds, a name leads to the file that it led to before, as in a
  network client that caches names;
- ``direct_io``: when true, files cannot be mapped (``ENODEV``).

An open file that is deleted is renamed, as with every program of libfuse.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fuse

_UNCOUNTED = ("statfs", "access", "release", "releasedir", "init", "destroy")


class FuseProgram(fuse.Operations):
    """The calls. libfuse passes paths that begin with a slash."""

    use_ns = True

    def __init__(self, source: str, rules: str) -> None:
        self._source, self._rules = source, Path(rules)
        self._lock = threading.Lock()
        self._of: tuple[int, int] | None = None
        self._now: dict[str, Any] = {}
        self._count = 0
        self._names: dict[str, tuple[float, int]] = {}  # a descriptor of what a name led to

    def __call__(self, op: str, path: str, *arguments: Any) -> Any:
        with self._lock:
            rules = self._current()
            if path.endswith(".fuse-program-calls"):
                self._rules.with_suffix(".calls").write_text(str(self._count))
                raise fuse.FuseOSError(errno.ENOENT)
            self._check(op, rules)
        if not hasattr(self, op):
            raise fuse.FuseOSError(errno.ENOSYS)
        try:
            return getattr(self, op)(path, *arguments)
        except OSError as error:
            raise fuse.FuseOSError(error.errno) from error

    def _current(self) -> dict[str, Any]:
        found = self._rules.stat()
        of = (found.st_ino, found.st_mtime_ns)
        if of != self._of:
            self._of, self._now, self._count = of, json.loads(self._rules.read_text()), 0
        return self._now

    def _check(self, op: str, rules: dict[str, Any]) -> None:
        if op in rules.get("refuse", {}):
            raise fuse.FuseOSError(getattr(errno, rules["refuse"][op]))
        fail = rules.get("fail", {})
        if op in _UNCOUNTED or op not in fail.get("calls", [op]):
            return
        self._count += 1
        if fail and fail["at"] <= self._count < fail["at"] + fail.get("times", 1 << 60):
            raise fuse.FuseOSError(getattr(errno, fail["errno"]))

    def _at(self, path: str) -> str:
        return self._source + path

    def _cached(self, path: str) -> str:
        """Return the path of the file that a cached name leads to."""
        seconds = self._now.get("stale_names")
        real = self._at(path)
        if not seconds or not os.path.isfile(real):
            return real
        until, descriptor = self._names.get(path, (0.0, -1))
        if time.monotonic() > until:
            descriptor = os.open(real, os.O_RDONLY)
            self._names[path] = time.monotonic() + seconds, descriptor
        return f"/proc/self/fd/{descriptor}"

    # --- names

    def getattr(self, path: str, handle: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._cached(path)) if handle is None else os.fstat(handle)
        if handle is None and self._cached(path) != self._at(path):
            found = os.stat(self._cached(path))
        names = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_ino")
        times = {
            name: getattr(found, f"{name}_ns") for name in ("st_atime", "st_mtime", "st_ctime")
        }
        return {name: getattr(found, name) for name in names} | times

    def readdir(self, path: str, _handle: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at(path))
        names = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_files", "f_ffree", "f_frsize")
        return {name: getattr(found, name) for name in (*names, "f_namemax")}

    def access(self, path: str, _mode: int) -> None:
        pass

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._at(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._at(path))

    def unlink(self, path: str) -> None:
        os.unlink(self._at(path))

    def symlink(self, path: str, target: str) -> None:
        os.symlink(target, self._at(path))

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def rename(self, path: str, to: str) -> None:
        os.rename(self._at(path), self._at(to))

    def link(self, path: str, existing: str) -> None:
        os.link(self._at(existing), self._at(path))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._at(path), mode)

    def chown(self, path: str, user: int, group: int) -> None:
        os.chown(self._at(path), user, group)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        os.utime(self._at(path), ns=times)

    # --- bytes

    def open(self, path: str, flags: int) -> int:
        is_read = flags & os.O_ACCMODE == os.O_RDONLY
        return os.open(self._cached(path) if is_read else self._at(path), flags & ~os.O_NOFOLLOW)

    def create(self, path: str, mode: int) -> int:
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)

    def read(self, _path: str, size: int, offset: int, handle: int) -> bytes:
        return os.pread(handle, size, offset)

    def write(self, _path: str, data: bytes, offset: int, handle: int) -> int:
        if self._now.get("sequential") and offset != os.fstat(handle).st_size:
            raise fuse.FuseOSError(errno.EOPNOTSUPP)
        return os.pwrite(handle, data, offset)

    def truncate(self, path: str, length: int, handle: int | None = None) -> None:
        os.truncate(self._at(path) if handle is None else handle, length)

    def flush(self, _path: str, _handle: int) -> None:
        pass

    def fsync(self, _path: str, _data: int, handle: int) -> None:
        os.fsync(handle)

    def fsyncdir(self, path: str, _data: int, _handle: int) -> None:
        pass

    def release(self, _path: str, handle: int) -> None:
        os.close(handle)


def _direct(rules: str) -> bool:
    return bool(json.loads(Path(rules).read_text()).get("direct_io"))


if __name__ == "__main__":
    source, at, rules = sys.argv[1:]
    program: Any = FuseProgram(source, rules)
    # Operations are looked up by name; `__call__` sees each.
    fuse.FUSE(program, at, foreground=True, nothreads=False, direct_io=_direct(rules))
