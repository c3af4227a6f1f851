"""What a rank wrote for a save, until it is known to be committed: and its removal, where it never will be."""

from __future__ import annotations

from dataclasses import dataclass

from dcp_rs import _core
from dcp_rs._warnings import warn_caller
from dcp_rs.dcp.commits import Saving
from dcp_rs.errors import DcpRsError, SaveInProgressError

__all__ = ["Written", "remove_files"]


@dataclass(frozen=True)
class Written:
    """What this rank wrote, and where: the writer may be given another path, or another save, before it is known to be committed."""

    folder: str
    rank: int | None
    generation: int
    index: bytes
    saving: Saving | None
    process: int

    @property
    def committed(self) -> bool:
        """Whether the checkpoint that it is of is there."""
        return self.saving is not None and self.saving.committed

    @property
    def is_over(self) -> bool:
        """Whether no other thread is at this save."""
        return self.saving is None or self.saving.is_over()


def remove_files(folder: str, rank: int | None, index: bytes) -> bool:
    """Removes the files that an index names. Whether it is worth trying the next: not where the folder is locked."""
    try:
        _core.discard(folder, rank, index)
    except (OSError, DcpRsError) as error:
        warn_caller(f"files of a save that failed are still there, for dcp_rs.clean to remove: {error}")
        return not isinstance(error, SaveInProgressError)
    return True
