"""Files that ranks send to each other, in blocks, over a gloo group."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcp_rs.checkpoint.folders import make_folder
from dcp_rs.engine.ranks import RankGroup

__all__ = ["Transfer", "exchange"]

#: Bytes of the blocks of one file, and of the blocks of all files of a rank.
_BLOCK, _BLOCKS = 8 << 20, 128 << 20
#: Added to the name of a file that is not complete yet.
_PART = f".{0:016x}.tmp"


@dataclass(frozen=True)
class Transfer:
    """A file that one rank sends to another.

    Attributes:
        name: its name, in the folders of both.
        nbytes: its length.
        source, target: the ranks.
    """

    name: str
    nbytes: int
    source: int
    target: int


def exchange(
    ranks: RankGroup, transfers: Sequence[Transfer], folder: Path, *, fsync: bool
) -> set[int]:
    """Send files from the folders of some ranks to those of others. Every rank calls it.

    A rank that cannot read or write a file goes on with what it has, so that no rank waits for it.
    Such a file does not arrive. A file gets its name once all files were sent.

    Args:
        ranks: the ranks.
        transfers: all transfers, the same on all ranks. Files get their names in this order.
        folder: the folder of this rank.
        fsync: make the files durable before they get their names.

    Returns:
        The places in ``transfers`` of the files that did not arrive, the same on all ranks.

    Raises:
        RankLostError: a rank is gone.
        OSError: on all ranks: a file could not get its name.
    """
    failed: set[int] = set()
    with ExitStack() as stack:

        def prepare() -> list[_File]:
            own = [
                n for n, each in enumerate(transfers) if ranks.rank in (each.source, each.target)
            ]
            size = min(_BLOCK, _BLOCKS // max(1, len(own)))
            files = [_File(n, transfers[n], ranks.rank, folder, size, failed) for n in own]
            for file in files:
                stack.callback(file.close)
                file.open()
            return files

        files = ranks.run(prepare)
        rounds = max((file.blocks for file in files), default=0)
        for number in range(rounds):
            _send_blocks(ranks, [file for file in files if number < file.blocks], number)
        for file in files:
            file.finish(fsync=fsync)
        failed.update(*ranks.all_gather(partial(set, failed)))

    def keep() -> None:
        for file in files:
            file.keep()

    ranks.run(keep)
    return failed


def _send_blocks(ranks: RankGroup, files: Sequence[_File], number: int) -> None:
    """Send and receive one block of each file."""
    with ranks.talking():
        works = []
        for file in files:  # every receive has begun before anything waits
            file.load(number)
            peer = ranks.global_rank(file.peer)
            call = dist.irecv if file.is_target else dist.isend
            works.append(call(file.block(number), peer, ranks.process_group, tag=file.number))
        for work in works:
            if work is not None:
                work.wait()
        for file in files:
            file.store(number)


class _File:
    """An open file of a transfer, and memory for a block of it. An error ends all work on it."""

    def __init__(
        self, number: int, of: Transfer, rank: int, folder: Path, size: int, failed: set[int]
    ) -> None:
        self.number, self._of, self._size, self._failed = number, of, size, failed
        self.is_target = of.target == rank
        self.peer = of.source if self.is_target else of.target
        self.blocks = -(-of.nbytes // size)
        self._path = folder / (of.name + (_PART if self.is_target else ""))
        self._memory = torch.empty(min(size, of.nbytes), dtype=torch.uint8, device="cpu")
        self._descriptor = -1

    def block(self, number: int) -> torch.Tensor:
        """Return the memory of a block."""
        return self._memory[: min(self._size, self._of.nbytes - number * self._size)]

    def open(self) -> None:
        def work() -> None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if self.is_target else os.O_RDONLY
            if self.is_target:
                make_folder(self._path.parent)
            self._descriptor = os.open(self._path, flags, 0o644)
            if not self.is_target and os.fstat(self._descriptor).st_size != self._of.nbytes:
                raise OSError(f"{self._path} has another length")

        self._attempt(work)

    def load(self, number: int) -> None:
        """Read a block of a file that is sent."""
        view = _bytes_of(self.block(number))
        if not self.is_target:
            self._attempt(lambda: self._read(view, number * self._size))

    def _read(self, view: memoryview, at: int) -> None:
        while view:
            done = os.preadv(self._descriptor, [view], at)
            if done == 0:
                raise OSError(f"{self._path} is shorter than it was")
            view, at = view[done:], at + done

    def store(self, number: int) -> None:
        """Write a block of a file that is received."""
        view = _bytes_of(self.block(number))
        if self.is_target:
            self._attempt(lambda: self._write(view, number * self._size))

    def _write(self, view: memoryview, at: int) -> None:
        while view:
            done = os.pwrite(self._descriptor, view, at)
            view, at = view[done:], at + done

    def finish(self, *, fsync: bool) -> None:
        """Make a received file durable."""
        if self.is_target and fsync:
            self._attempt(lambda: os.fsync(self._descriptor))

    def keep(self) -> None:
        """Give a received file its name, if it arrived."""
        if self.is_target and self.number in self._failed:
            self._path.unlink(missing_ok=True)
        elif self.is_target:
            self._path.replace(self._path.with_name(self._of.name))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _attempt(self, work: Callable[[], None]) -> None:
        if self.number not in self._failed:
            try:
                work()
            except OSError:
                self._failed.add(self.number)


def _bytes_of(block: torch.Tensor) -> memoryview:
    array: Any = block.numpy()
    return memoryview(array)
