"""The files that one rank writes in a save, and the index that describes them to the coordinator."""

from __future__ import annotations

import os
import secrets
import zlib
from dataclasses import dataclass

from dcp_rs import _core
from dcp_rs._progress import Progress, watching
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs._warnings import warn_caller
from dcp_rs.engine.destination import Destination
from dcp_rs.engine.reports import SaveReport
from dcp_rs.engine.writes import Writes
from dcp_rs.options import WriteOptions
from dcp_rs.tensors.dtypes import NAMES
from dcp_rs.transfer.save import turns, write_entries

__all__ = ["Place", "Written", "packed", "unpacked", "write_files"]

#: What every index begins with (section 3.1 of the format).
_INDEX_MAGIC = b"\x89DCPRS"


@dataclass(frozen=True)
class Place:
    """Which part of which save a rank writes. The coordinator chooses the save.

    Attributes:
        rank: the number of this rank.
        world_size: the number of ranks; 0 in a rank-local save.
        save_id: the id of the save, the same on all ranks.
        generation: section 1.1 of the format.
    """

    rank: int
    world_size: int
    save_id: bytes
    generation: int

    @property
    def own_rank(self) -> int | None:
        """The rank whose index it becomes, in a rank-local save; None: all ranks share one."""
        return self.rank if self.world_size == 0 else None


@dataclass(frozen=True)
class Written:
    """The complete files of one rank, and the claim on them.

    Attributes:
        to: where the files are.
        place: which save it is.
        index: names the files.
        save: claims the files, so that ``dcp_rs.clean`` in another process leaves them alone.
        process: the process that wrote.
    """

    to: Destination
    place: Place
    index: bytes
    save: _core.Save
    process: int

    def report(self) -> SaveReport:
        """Return how much this rank wrote."""
        save = self.save
        return SaveReport(
            os.fspath(self.to.path),
            bytes_written=save.bytes,
            bytes_reused=save.bytes_reused,
            requests=save.requests,
        )

    def let_go(self) -> None:
        """End the claim: an index names the files, or nobody needs them."""
        self.save.let_go()

    def discard(self) -> None:
        """Remove the files, unless the index of this save is there."""
        if self.process != os.getpid():  # a fork: the parent decides
            return
        self.to.remove(self.place.own_rank, [self.index])
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


def write_files(
    writes: Writes,
    to: Destination,
    place: Place,
    options: WriteOptions,
    *,
    reuse: _core.Reuse | None,
    progress: Progress,
) -> Written:
    """Write the data files of one rank. If that fails, remove them.

    Args:
        writes: what the rank writes.
        to: where it goes.
        place: which save it is.
        options: how bytes are written.
        reuse: what of it a parent holds.
        progress: who hears of the bytes.
    """
    save = writes.plan.create(
        to.folder,
        writes.keep,
        [entry.nbytes for entry in writes.entries],
        save_id=place.save_id,
        generation=place.generation,
        token=secrets.randbits(64),
        rank=place.rank,
        world_size=place.world_size,
        turns=turns(writes.entries),
        reuse=reuse,
        store=to.store,
        **options.engine(remote=to.store is not None),
    )
    try:
        with watching(progress, "saving") as watch:
            if watch is not None:
                save.watch(lambda done: watch(done, save.bytes))
            save.write_plain(writes.tensors, PLAIN_TYPES, NAMES)
            to_write = [not reused for reused in save.reused()]
            write_entries(save, writes.entries, options, save.plain_count, only=to_write)
        index = save.finish(None if writes.nesting is None else writes.nesting.to_core())
    except BaseException:
        for reason in save.abort():
            warn_caller(f"the failed save left something on the store: {reason}")
        raise
    return Written(to, place, index, save, os.getpid())


def packed(index: bytes, ranks: int) -> bytes:
    """Return an index as it travels to the coordinator: it repeats itself, and is a sixth of its size then."""
    return index if ranks <= 1 else zlib.compress(index, 1)


def unpacked(data: bytes) -> bytes:
    """Return the index that a rank sent."""
    return data if data.startswith(_INDEX_MAGIC) else zlib.decompress(data)
