"""Whether a save that failed may be committed all the same: then nobody removes what it wrote."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dcp_rs.errors import StorageUnclearError

__all__ = ["apart", "unclear"]

#: What was being handled when the save of this thread began.
_before: ContextVar[BaseException | None] = ContextVar("dcp_rs.unclear", default=None)


@contextmanager
def apart() -> Iterator[None]:
    """Tells errors of a save that begins within from what is being handled here: that is another save's, for all that Python makes of it."""
    token = _before.set(sys.exception())
    try:
        yield
    finally:
        _before.reset(token)


def unclear(error: BaseException | None) -> StorageUnclearError | None:
    """What says so, be it the error or what it followed: a second Ctrl-C, say, comes while the first is dealt with."""
    before = _before.get()
    waiting, seen = [error], {id(before)}
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        if isinstance(error, StorageUnclearError):
            return error
        seen.add(id(error))
        waiting += [error.__context__, error.__cause__]
    return None
