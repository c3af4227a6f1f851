"""Disks that fail on demand."""

from __future__ import annotations

import errno
import os
import resource
import signal
from typing import Any, ClassVar, Self

from dcp_rs import _core

__all__ = ["FailingDisk", "SmallDisk"]


class FailingDisk:
    """A disk on which one call fails, of those by which this process changes a folder.

    This stops a program by a full disk, and checks the earlier save: ::

        with pytest.raises(OSError), FailingDisk(path, at=3, error=errno.ENOSPC):
            my_training_loop(path)
        assert dcp_rs.verify(path)  # the earlier save is intact

    It counts the calls of dcp-rs (create, open, allocate, write, sync, rename, remove, lock) in
    this process and below the folder. Calls of torch and of others do not count. There is one disk
    at a time.

    Args:
        folder: the folder, or one above it. It need not exist.
        at: the number of the call that fails, from 0.
        error: the error, a number of :mod:`errno`.

    Attributes:
        calls: the number of calls, after the block.
        failed: the call that failed, such as ``"write"`` or ``"rename"``, or None.

    Raises:
        ValueError: ``at`` is negative.
        RuntimeError: another disk is entered already.
    """

    _is_entered: ClassVar[bool] = False

    def __init__(
        self, folder: str | os.PathLike[str], *, at: int = 0, error: int = errno.EIO
    ) -> None:
        if at < 0:
            msg = f"at={at!r}: calls are counted from 0"
            raise ValueError(msg)
        self.calls = 0
        self.failed: str | None = None
        self._arguments = os.fspath(folder), at, error

    def __enter__(self) -> Self:
        if FailingDisk._is_entered:
            raise RuntimeError("a FailingDisk is entered already: there is one at a time")
        _core.arm_fault(*self._arguments)
        FailingDisk._is_entered = True
        return self

    def __exit__(self, *_: object) -> None:
        FailingDisk._is_entered = False
        self.calls, self.failed = _core.disarm_fault() or (0, None)


class SmallDisk:
    """A limit on the size of files that this process writes (``RLIMIT_FSIZE``).

    A write beyond it is an ``OSError`` with ``EFBIG``, in dcp-rs and in all other code. Enter it in
    the main thread.

    Args:
        nbytes: the limit in bytes, or None.
    """

    def __init__(self, nbytes: int | None) -> None:
        self.nbytes = nbytes

    def __enter__(self) -> Self:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        self._handler: Any = None
        if self.nbytes is not None:
            self._handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.nbytes, self._before[1]))
        return self

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)
        if self._handler is not None:
            signal.signal(signal.SIGXFSZ, self._handler)
