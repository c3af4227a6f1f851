"""What lies in the folder of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from dcp_rs import _core


def files_in(folder: Path) -> list[Path]:
    """All but its lock, sorted."""
    return sorted(file for file in folder.iterdir() if file.name != _core.LOCK_NAME)


def data_files(path: Path) -> list[str]:
    """The names of its data files; none where there is no folder."""
    return sorted(file.name for file in path.glob("g*")) if path.exists() else []
