"""The threads of this process: their names, and saves in the background that wait."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_rs.engine import background
from dcp_rs.transfer.stage import Staging


class HeldSaves:
    """Saves in the background that wait, as if an earlier one still wrote.

    Attributes:
        begun: set once the thread of the saves has taken one.
        go: set it to let them all go on.
    """

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()


@contextlib.contextmanager
def saves_held_up() -> Iterator[HeldSaves]:
    """Let no save in the background begin."""
    held, run = HeldSaves(), background._Job.run

    def wait(job: background._Job) -> None:
        held.begun.set()
        held.go.wait(60)
        run(job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background._Job, "run", wait)
        try:
            yield held
        finally:
            held.go.set()


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
