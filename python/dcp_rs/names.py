"""Names of entries: choosing some of them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

__all__ = ["globs"]


def globs(patterns: str | Iterable[str] | None) -> re.Pattern[str] | None:
    """One pattern that matches what any of the globs does; None for None."""
    if patterns is None:
        return None
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns) or r"(?!)")
