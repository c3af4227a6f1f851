"""What a rank wrote for a save, until it is known to be committed; and how its index travels."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass

from torch.distributed.checkpoint.storage import WriteResult

from dcp_rs.dcp.commits import Saving
from dcp_rs.dcp.destination import Destination

__all__ = ["Written", "packed", "unpacked"]

#: What every index begins with (section 3.1 of the format).
_INDEX_MAGIC = b"\x89DCPRS"


@dataclass(frozen=True)
class Written:
    """What this rank wrote, and where: the writer may be given another path, or another save, before it is known to be committed."""

    to: Destination
    rank: int | None
    generation: int
    index: bytes
    saving: Saving | None
    process: int

    @property
    def committed(self) -> bool:
        """Whether the checkpoint that it is of is there."""
        return self.saving is not None and self.saving.committed

    def discard(self) -> None:
        """Removes it, where that is known to have failed."""
        # In a fork of the process that wrote it, it is the other's to judge.
        if self.committed or self.process != os.getpid():
            return
        self.to.remove(self.rank, [self.index])
        if self.saving is not None:
            self.saving.let_go()

    def forget(self) -> None:
        """Nothing more will be heard of it. In a folder a lock and a look at the index keep what is, or will be, committed; the rest is removed.

        On a store the commit of another rank may still be on its way: there :func:`dcp_rs.clean` removes it.
        """
        if self.to.store is None:
            self.discard()

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
