"""Mounts for tests: bindfs, and `fuse_program`. Each needs FUSE; a test is skipped where it is not.

A mount is a child process. Leaving the context ends the process and removes the mount.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_PROGRAM = Path(__file__).with_name("fuse_program.py")
_PATIENCE = 30.0  # seconds


def why_missing(*, program: bool = False) -> str | None:
    """Return what the machine lacks for a mount; None if it has everything.

    Args:
        program: for `mounted`; else for `bindfs`.
    """
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no access to /dev/fuse"
    if shutil.which("fusermount3") is None and shutil.which("fusermount") is None:
        return "fuse3 is not installed"
    if program:
        return None if importlib.util.find_spec("fuse") else "fusepy is not installed"
    return None if shutil.which("bindfs") else "bindfs is not installed"


@contextmanager
def bindfs(source: Path, at: Path, *options: str) -> Iterator[Path]:
    """Mount a folder a second time. An open file that is deleted is renamed to ``.fuse_hidden…``.

    Args:
        source: the folder.
        at: where it is mounted.
        options: of bindfs.
    """
    if why := why_missing():
        pytest.skip(why)
    command = ["bindfs", "-f", "--multithreaded", *options, str(source), str(at)]
    with _running(command, source, at):
        yield at


class Mounted:
    """A mount of `fuse_program`, whose rules can change at any time.

    Attributes:
        path: where it is mounted.
    """

    def __init__(self, path: Path, rules: Path) -> None:
        self.path = path
        self._rules = rules

    def set(self, **rules: Any) -> None:
        """Replace the rules. They are in force when this returns."""
        new = self._rules.with_suffix(".new")
        new.write_text(json.dumps(rules))
        new.replace(self._rules)

    def calls(self) -> int:
        """Return the number of calls since the rules were set."""
        self.path.joinpath(".fuse-program-calls").exists()  # any call reads new rules first
        return int(self._rules.with_suffix(".calls").read_text())


@contextmanager
def mounted(source: Path, at: Path, **rules: Any) -> Iterator[Mounted]:
    """Mount a folder through `fuse_program`. See there for the rules."""
    if why := why_missing(program=True):
        pytest.skip(why)
    mount = Mounted(at, at.with_suffix(".rules"))
    mount.set(**rules)
    command = [sys.executable, str(_PROGRAM), str(source), str(at), str(at.with_suffix(".rules"))]
    with _running(command, source, at):
        yield mount


@contextmanager
def _running(command: list[str], source: Path, at: Path) -> Iterator[None]:
    source.mkdir(parents=True, exist_ok=True)
    at.mkdir(parents=True, exist_ok=True)
    child = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        end = time.monotonic() + _PATIENCE
        while not os.path.ismount(at):
            if child.poll() is not None or time.monotonic() > end:
                child.kill()
                said = child.communicate()[1].decode(errors="replace")
                pytest.fail(f"{command[0]} did not mount {at}: {said}")
            time.sleep(0.01)
        yield
    finally:
        unmount = shutil.which("fusermount3") or shutil.which("fusermount") or "fusermount3"
        # Lazily: a process that a test left has files open.
        subprocess.run([unmount, "-u", "-z", str(at)], check=False, capture_output=True)
        try:
            child.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        assert child.stderr is not None
        child.stderr.close()
