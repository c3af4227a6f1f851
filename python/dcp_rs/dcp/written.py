"""What a rank wrote for a save, until it is known to be committed: and its removal, where it never will be."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from torch.distributed.checkpoint.storage import WriteResult

from dcp_rs import _core
from dcp_rs._warnings import warn_caller
from dcp_rs.dcp.commits import Saving
from dcp_rs.errors import DcpRsError, SaveInProgressError

__all__ = ["Written", "packed", "remove_files", "unpacked"]

#: What every index begins with (section 3.1 of the format).
_INDEX_MAGIC = b"\x89DCPRS"


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


def packed(index: bytes, ranks: int) -> bytes:
    """An index as it travels to the coordinator: it repeats itself, and is a sixth of its size then."""
    return index if ranks <= 1 else zlib.compress(index, 1)


def unpacked(result: WriteResult) -> bytes:
    """The index that a rank's result carries."""
    data: bytes = result.storage_data
    return data if data.startswith(_INDEX_MAGIC) else zlib.decompress(data)


def remove_files(folder: str, rank: int | None, index: bytes) -> bool:
    """Removes the files that an index names. Whether it is worth trying the next: not where the folder is locked."""
    try:
        _core.discard(folder, rank, index)
    except (OSError, DcpRsError) as error:
        warn_caller(f"files of a save that failed are still there, for dcp_rs.clean to remove: {error}")
        return not isinstance(error, SaveInProgressError)
    return True
