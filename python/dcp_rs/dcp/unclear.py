"""Whether a save that failed may be committed all the same: then nobody removes what it wrote."""

from __future__ import annotations

from dcp_rs.errors import StorageUnclearError

__all__ = ["unclear"]


def unclear(error: BaseException | None) -> StorageUnclearError | None:
    """What says so, be it the error or what it followed: a second Ctrl-C, say, comes while the first is dealt with."""
    waiting, seen = [error], set[int]()
    while waiting:
        error = waiting.pop()
        if isinstance(error, StorageUnclearError):
            return error
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            waiting += [error.__context__, error.__cause__]
    return None
