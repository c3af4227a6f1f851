"""Whether a save that failed may be committed all the same: then nobody removes what it wrote."""

from __future__ import annotations

from dcp_rs.errors import StorageUnclearError

__all__ = ["unclear"]


def unclear(error: BaseException | None, handled: BaseException | None = None) -> StorageUnclearError | None:
    """Return the ``StorageUnclearError`` in the chain of an error, if there is one.

    Args:
        error: what was raised. A second Ctrl-C, say, comes while the first error is dealt with, and is what the caller sees.
        handled: what the caller was handling when the save began (``sys.exception()``): Python puts it into the chain, and it is of another save.
    """
    waiting, seen = [error], {id(handled)}
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        if isinstance(error, StorageUnclearError):
            return error
        seen.add(id(error))
        waiting += [error.__context__, error.__cause__]
    return None
