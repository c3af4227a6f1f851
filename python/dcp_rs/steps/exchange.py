"""Files that ranks send to each other, in blocks, over a gloo group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcp_rs.checkpoint.folders import make_folder, sync
from dcp_rs.engine.ranks import RankGroup

#: Bytes of a block, and the number of files that a rank sends and receives at the same time.
_BLOCK, _AT_ONCE = 8 << 20, 8
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


def send_files(
    ranks: RankGroup, transfers: Sequence[Transfer], folder: Path, *, fsync: bool
) -> set[int]:
    """Send files from the folders of some ranks to those of others.

    Every rank calls it, within the work of a step. A rank that cannot read or write a file goes on
    sending or receiving, so that no rank waits for it.

    Args:
        ranks: the ranks.
        transfers: all transfers, the same on all ranks.
        folder: the folder of this rank.
        fsync: make the files durable before they get their names.

    Returns:
        The places in ``transfers`` of the files that this rank was to send, and cannot read.

    Raises:
        OSError: this rank cannot store a file.
        RankLostError: a rank is gone.
    """

    def move(number: int) -> list[OSError]:
        each = transfers[number]
        if each.source == ranks.rank:
            return _send(ranks, number, each, folder / each.name)
        return _receive(ranks, number, each, folder / each.name, fsync=fsync)

    own = [n for n, each in enumerate(transfers) if ranks.rank in (each.source, each.target)]
    if not own:
        return set()
    # All ranks take the transfers in the same order, so that none waits for another in a circle.
    with ThreadPoolExecutor(_AT_ONCE) as pool, ranks.talking():
        errors = dict(zip(own, pool.map(move, own), strict=True))
    for number, found in errors.items():
        if found and transfers[number].target == ranks.rank:
            raise found[0]
    return {number for number, found in errors.items() if found}


def _blocks(nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Return the place of each block of a file, and memory for it.

    The last byte of the memory is not of the file. It is 1 once the source cannot read.
    """
    memory = torch.zeros(min(_BLOCK, nbytes) + 1, dtype=torch.uint8, device="cpu")
    for at in range(0, max(1, nbytes), _BLOCK):
        yield at, memory[: min(_BLOCK, nbytes - at) + 1]


def _data(block: torch.Tensor) -> memoryview:
    array: Any = block[:-1].numpy()
    return memoryview(array)


def _send(ranks: RankGroup, number: int, of: Transfer, path: Path) -> list[OSError]:
    """Send a file. Return the error if it cannot be read."""
    errors: list[OSError] = []
    with ExitStack() as stack:
        with _noting(errors):
            # Opened once: only reads in sequence bring a file into the page cache in large folios,
            # and a load from small ones takes twice as long.
            file = stack.enter_context(path.open("rb"))
            if os.fstat(file.fileno()).st_size != of.nbytes:
                raise OSError(f"{path} has another length")
        for _, block in _blocks(of.nbytes):
            data = _data(block)
            if not errors:
                with _noting(errors):
                    if file.readinto(data) != len(data):
                        raise OSError(f"{path} became shorter")
            block[-1] = bool(errors)
            dist.send(block, ranks.global_rank(of.target), ranks.process_group, tag=number)
    return errors


def _receive(
    ranks: RankGroup, number: int, of: Transfer, path: Path, *, fsync: bool
) -> list[OSError]:
    """Receive a file. Return the error if it cannot be stored."""
    part, errors, is_unread = path.with_name(path.name + _PART), list[OSError](), False
    with _noting(errors):
        make_folder(path.parent)
    for at, block in _blocks(of.nbytes):
        dist.recv(block, ranks.global_rank(of.source), ranks.process_group, tag=number)
        is_unread = is_unread or bool(block[-1])
        if not errors:
            with _noting(errors), part.open("ab" if at else "wb") as file:
                file.write(_data(block))
    with _noting(errors):
        if errors or is_unread:
            part.unlink(missing_ok=True)
        else:
            if fsync:
                sync(part)
            part.replace(path)
    return errors


@contextmanager
def _noting(errors: list[OSError]) -> Iterator[None]:
    """Note an error in place of raising it."""
    try:
        yield
    except OSError as error:
        errors.append(error)
