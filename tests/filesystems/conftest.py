"""Mounts as fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from filesystems.mounts import Mounted, bindfs, mounted


@pytest.fixture
def renaming(tmp_path: Path) -> Iterator[Path]:
    """A mount on which an open file that is deleted is renamed, as on NFS."""
    with bindfs(tmp_path / "source", tmp_path / "mount") as at:
        yield at


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Mounted]:
    """A mount that a test lets fail."""
    with mounted(tmp_path / "source", tmp_path / "mount") as mount:
        yield mount
