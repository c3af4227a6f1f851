"""The threads of this process: their names, and saves in the background that wait."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_rs.engine import background
from dcp_rs.engine.reports import SavedMetadata
from dcp_rs.transfer.stage import Staging


@contextlib.contextmanager
def saves_held_up() -> Iterator[threading.Event]:
    """Let no save in the background begin, as if an earlier one still wrote."""
    go = threading.Event()

    def wait(_: object) -> SavedMetadata:
        go.wait(60)
        return SavedMetadata({})

    background.saves._put(background._Job("held up", wait))
    try:
        yield go
    finally:
        go.set()


@contextlib.contextmanager
def copies_held_up() -> Iterator[threading.Event]:
    """Let no copy of a state dict be made."""
    go, finish = threading.Event(), Staging.finish

    def wait(staging: Staging) -> None:
        go.wait(60)
        finish(staging)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "finish", wait)
        try:
            yield go
        finally:
            go.set()


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
