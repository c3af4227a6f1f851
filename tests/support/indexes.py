"""Checkpoints put together by hand, from what `_core.Save` writes."""

from pathlib import Path
from typing import Any

from dcp_rs import _core


def commit_ranks(path: Path, indexes: list[bytes], *, generation: int = 1, planner_data: Any = None) -> None:
    """Commits the indexes of all ranks, as the coordinator of a save does."""
    _core.commit_indexes(
        str(path),
        None,
        indexes,
        save_id=bytes(range(16)),
        generation=generation,
        planner_data={} if planner_data is None else planner_data,
        items=None,
        names=(),
        fsync=False,
    )
