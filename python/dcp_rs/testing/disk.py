"""Disks that fail on demand."""

from __future__ import annotations

import errno
import os
import resource
import signal
from types import TracebackType
from typing import Any, ClassVar, Self

from dcp_rs import _core

__all__ = ["FailingDisk", "SmallDisk"]


class FailingDisk:
    """Lets one call fail of those by which this process changes a folder.

    A program is stopped by a full disk, and what it had saved before is looked at: ::

        with pytest.raises(OSError), FailingDisk(path, at=3, error=errno.ENOSPC):
            my_training_loop(path)
        assert dcp_rs.verify(path)  # what was there is there

    Counted are the calls of dcp-rs (create, open, allocate, write, sync, rename, remove, lock), in
    this process and below the folder. Calls of torch or of anything else are not. One disk at a
    time.

    Args:
        folder: the folder, or one above it; it need not be there.
        at: which call fails, counted from 0.
        error: what it fails with, a number of :mod:`errno`.

    Attributes:
        calls: how many calls there were, once it was left.
        failed: the call that failed, ``"write"`` or ``"rename"`` for example; None where there were
            fewer calls than ``at``.

    Raises:
        ValueError: ``at`` is negative.
        RuntimeError: one is entered, and another one is already.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        FailingDisk._is_entered = False
        self.calls, self.failed = _core.disarm_fault() or (0, None)


class SmallDisk:
    """Files of this process cannot grow beyond some bytes while it is entered (``RLIMIT_FSIZE``), whoever writes them: ``OSError`` with ``EFBIG``.

    Enter it in the main thread.

    Args:
        nbytes: the bound, in bytes; None: there is none.
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
