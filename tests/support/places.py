"""Paths in the source tree, and in the folder of a checkpoint."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
#: Checkpoints that stock torch made: a folder for each release.
STOCK = TESTS / "fixtures" / "stock"

#: The lock of a checkpoint's folder, as docs/format.md names it.
LOCK = ".dcprs.lock"


def files_in(folder: Path) -> list[Path]:
    """Return all files of a checkpoint but its lock, sorted."""
    return sorted(file for file in folder.iterdir() if file.name != LOCK)


def data_files(path: Path) -> list[str]:
    """Return the names of a checkpoint's data files; none where there is no folder."""
    return sorted(file.name for file in path.glob("g*")) if path.exists() else []
