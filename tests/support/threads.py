"""The threads of this process, as the system names them."""

import contextlib
import time
from pathlib import Path


def names() -> list[str]:
    """Their names in order."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # one that has just ended
            found.append((task / "comm").read_text().strip())
    return sorted(found)


def none_of(prefix: str) -> bool:
    """Whether no thread of such a name is left. One that was joined may be listed for a moment more."""
    end = time.monotonic() + 5
    while any(name.startswith(prefix) for name in names()):
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
