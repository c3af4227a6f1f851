"""``io="gds"``: from storage to the memory of a CUDA device by ``torch.cuda.gds``, with nothing in between."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dcp_rs import _core, _torch
from dcp_rs.errors import UnsupportedError
from dcp_rs.transfer.lanes import HostLane, is_accelerator, synchronize
from dcp_rs.transfer.upload import Piece, make_goal, make_transfer

if TYPE_CHECKING:
    from dcp_rs.options import ReadOptions
    from dcp_rs.transfer.load import Fill

__all__ = ["fill"]

#: Device memory that files are read into, next to the destinations. A read is whole pages, and a destination need not begin at one.
SCRATCH_BYTES = 64 << 20
PAGE = 4096
#: torch holds the GIL during a read: other threads get their turn between reads of this many bytes.
READ_BYTES = 8 << 20
#: Put into the last byte of a read, one after the other, to see whether it came so far: torch 2.15 does not say how many bytes it brought.
_MARKS = 0xA1, 0x5E


def fill(index: _core.Index, fills: Sequence[Fill], options: ReadOptions) -> list[Fill]:
    """Fills what lies in its file in one run of pages, and is wanted on a CUDA device. Returns the others.

    Raises:
        UnsupportedError: this torch, this system, or the file system of the data cannot do it.
    """
    by_device: dict[torch.device, list[Fill]] = {}
    rest: list[Fill] = []
    for item in fills:
        if _reaches(item.tensor.device):
            by_device.setdefault(item.tensor.device, []).append(item)
        else:
            rest.append(item)
    for device, items in by_device.items():
        rest += _fill_device(index, device, items, options)
    return rest


def _fill_device(index: _core.Index, device: torch.device, fills: list[Fill], options: ReadOptions) -> list[Fill]:
    files = _Files(device)
    goals = [make_goal(item.tensor, item.dtype) for item in fills]
    wants = [
        (item.chunk, item.offsets, item.tensor.shape, goal.flat, 0) for item, goal in zip(fills, goals, strict=True)
    ]
    reader = _core.SlabReader.create(index, wants, SCRATCH_BYTES, sort=True, **options.slabs())
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
    lane = HostLane(device)  # copies on the caller's stream: a read by cuFile is over when it returns
    rest: list[Fill] = []
    with ExitStack() as stack:
        stack.callback(files.close)
        for batch in range(reader.batch_count):
            _, pieces = reader.batch(batch)
            reads: list[_Read] = []
            direct: list[Piece] = []
            left: list[Piece] = []
            end = 0
            for path, start, stop, at, first, last in reader.images(batch):
                left += pieces[end:first]
                reads += _reads(path, start - start % PAGE, stop, at - start % PAGE)
                direct += pieces[first:last]
                end = last
            left += pieces[end:]
            files.read(reads, scratch)
            lane.upload(scratch, make_transfer(scratch, lane, goals, direct))
            # A run of bytes that is on no image has none of its bytes on one.
            rest += [_part(fills[piece[0]], piece) for piece in left if len(piece) == 5 or piece[3] == 0]
        synchronize(device)
    return rest


def _part(item: Fill, piece: Piece) -> Fill:
    """The fill of a rectangle, or of all of a run."""
    from dcp_rs.transfer.load import Fill

    if len(piece) == 4:
        return item
    offsets, sizes = piece[3:]
    tensor = item.tensor
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return Fill(item.chunk, [a + b for a, b in zip(item.offsets, offsets, strict=True)], tensor, item.name, item.dtype)


@dataclass(frozen=True, slots=True)
class _Read:
    """Bytes ``start`` to ``stop`` of a file, for byte ``at`` of the scratch memory."""

    path: str
    start: int
    stop: int
    at: int


def _reads(path: str, start: int, stop: int, at: int) -> Iterator[_Read]:
    for begin in range(start, stop, READ_BYTES):
        yield _Read(path, begin, min(stop, begin + READ_BYTES), at + begin - start)


def _last(read: _Read, memory: torch.Tensor) -> torch.Tensor:
    """Its last byte."""
    end = read.at + read.stop - read.start
    return memory[end - 1 : end]


class _Files:
    """The one file that is open, with the driver."""

    def __init__(self, device: torch.device) -> None:
        self._module = _gds(device)
        self._device = device
        self._path: str | None = None
        self._file: Any = None

    def read(self, reads: Sequence[_Read], memory: torch.Tensor) -> None:
        """Reads to device memory, when the work of the caller's stream on it is over.

        Raises:
            UnsupportedError: the driver refuses, or brings fewer bytes than it was asked for.
        """
        # A byte that is one mark in the file is not the other; such a read is done twice.
        for mark in _MARKS:
            for read in reads:
                _last(read, memory).fill_(mark)
            synchronize(self._device)
            for read in reads:
                self._load(read, memory)
            found = torch.cat([_last(read, memory) for read in reads]).tolist() if reads else []
            reads = [read for read, last in zip(reads, found, strict=True) if last == mark]
        if reads:
            path = reads[0].path
            raise _refused(f"reading {path}: fewer bytes came than it was asked for", path)

    def _load(self, read: _Read, memory: torch.Tensor) -> None:
        if read.path != self._path:
            self.close()
            try:
                self._file = self._module.GdsFile(read.path, os.O_RDONLY)
            except (RuntimeError, OSError) as error:
                raise _refused(f"{read.path} cannot be opened for it: {error}", read.path) from error
            self._path = read.path
        storage = memory.untyped_storage()
        begin = memory.storage_offset() + read.at
        try:
            self._file.load_storage(storage[begin : begin + read.stop - read.start], read.start)
        except RuntimeError as error:
            raise _refused(f"reading {read.path}: {error}", read.path) from error

    def close(self) -> None:
        self._path = self._file = None


def _gds(device: torch.device) -> Any:
    module = getattr(torch.get_device_module(device), "gds", None)
    if module is None or not hasattr(module, "GdsFile"):
        raise _refused(f"torch {torch.__version__} has no torch.{device.type}.gds (2.7 and later do)")
    if device.type == "cuda" and not _torch.has_gds():
        raise _refused("this torch was built without cuFile")
    return module


def _refused(why: str, path: str | None = None) -> UnsupportedError:
    return UnsupportedError(f"io='gds' does not work here: {why}. io='auto' does without it.", path=path)


def _reaches(device: torch.device) -> bool:
    return device.type == "cuda" or (is_accelerator(device) and hasattr(torch.get_device_module(device), "gds"))
