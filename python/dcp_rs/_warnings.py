"""Warnings that name the caller's line, and no line of this package or torch."""

from __future__ import annotations

import sys
import warnings

#: Packages whose frames are skipped.
_SKIPPED = ("dcp_rs", "torch", "contextlib", "functools")


def warn_caller(message: str) -> None:
    """Warn at the nearest line outside of this package and torch."""
    level, frame = 1, sys._getframe(0)  # noqa: SLF001  # the documented way to walk up
    while (
        frame.f_back is not None
        and frame.f_globals.get("__name__", "").partition(".")[0] in _SKIPPED
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
