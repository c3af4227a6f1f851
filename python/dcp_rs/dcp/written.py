"""The uncommitted files of a rank's save, and the index that travels to the coordinator."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass

from torch.distributed.checkpoint.storage import WriteResult

from dcp_rs import _core
from dcp_rs.dcp.place import Place
from dcp_rs.engine.destination import Destination

__all__ = ["Written", "packed", "unpacked"]

#: What every index begins with (section 3.1 of the format).
_INDEX_MAGIC = b"\x89DCPRS"


@dataclass(frozen=True)
class Written:
    """The files of one rank and one save, and the claim on them.

    A writer may be given another path, or another save, before it hears whether this one was
    committed.

    Attributes:
        to: where the files are.
        rank: whose rank-local save it is; None: it is one of all ranks.
        place: which save it is.
        index: names the files.
        save: claims the files, so that ``dcp_rs.clean`` in another process leaves them alone.
        thread: the thread that wrote.
        process: the process that wrote.
    """

    to: Destination
    rank: int | None
    place: Place
    index: bytes
    save: _core.Save
    thread: int
    process: int

    def let_go(self) -> None:
        """End the claim: an index names the files, or nobody needs them."""
        self.save.let_go()

    def discard(self) -> None:
        """Remove the files, unless the index of this save is there."""
        if self.process != os.getpid():  # a fork: the parent decides
            return
        self.to.remove(self.rank, [self.index])
        self.let_go()

    def forget(self) -> None:
        """Give up on hearing whether the save was committed.

        In a folder the index tells. On a store the commit of another rank may still be on its way:
        there :func:`dcp_rs.clean` removes files that no index names.
        """
        if self.to.store is None:
            self.discard()
        elif self.process == os.getpid():
            self.let_go()


def packed(index: bytes, ranks: int) -> bytes:
    """An index as it travels to the coordinator: it repeats itself, and is a sixth of its size then."""
    return index if ranks <= 1 else zlib.compress(index, 1)


def unpacked(result: WriteResult) -> bytes:
    """The index that a rank's result carries."""
    data: bytes = result.storage_data
    return data if data.startswith(_INDEX_MAGIC) else zlib.decompress(data)
