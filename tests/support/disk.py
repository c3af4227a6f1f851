"""A disk on which files may not be long."""

import resource
import signal
from typing import Any, Self


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
