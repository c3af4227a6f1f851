"""``io="gds"``: from storage to the memory of a CUDA device by ``torch.cuda.gds``, with nothing in between."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from dcp_rs import _core, _torch
from dcp_rs.errors import UnsupportedError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.memory import space_of
from dcp_rs.transfer.lanes import HostLane, is_accelerator, synchronize
from dcp_rs.transfer.target import Target
from dcp_rs.transfer.upload import make_transfer

__all__ = ["fill"]

#: Device memory that files are read into, next to the destinations. A read is whole pages, and a destination need not begin at one.
SCRATCH_BYTES = 64 << 20
PAGE = 4096
#: torch holds the GIL during a read: other threads get their turn between reads of this many bytes.
READ_BYTES = 8 << 20
#: Put into the last byte of a read, one after the other, to see whether it came so far: torch 2.15 does not say how many bytes it brought.
_MARKS = 0xA1, 0x5E


def fill(batch: _core.Batch, wants: Sequence[int], targets: Sequence[Target], options: ReadOptions) -> list[int]:
    """Fills what lies in its file in one run of pages, and is wanted on a CUDA device. Returns the other wants.

    Raises:
        UnsupportedError: this torch, this system, or the file system of the data cannot do it.
    """
    reached = {space_of(device): device for device in {target.tensor.device for target in targets} if _reaches(device)}
    by_device: dict[int, list[int]] = {}
    for want in wants:
        by_device.setdefault(batch.device_of(want), []).append(want)
    rest: list[int] = []
    for number, on_device in by_device.items():
        device = reached.get(number)
        rest += on_device if device is None else _fill_device(batch, device, on_device, targets, options)
    return rest


def _fill_device(
    batch: _core.Batch, device: torch.device, wants: list[int], targets: Sequence[Target], options: ReadOptions
) -> list[int]:
    files = _Files(device)
    reader = _core.SlabReader.create(batch, wants, SCRATCH_BYTES, sort=True, **options.slabs())
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
    lane = HostLane(device)  # copies on the caller's stream: a read by cuFile is over when it returns
    rest: dict[int, None] = {}
    with ExitStack() as stack:
        stack.callback(files.close)
        for number in range(reader.batch_count):
            _, copies = reader.batch(number)
            reads: list[_Read] = []
            direct: list[_core.Copy] = []
            left: list[_core.Copy] = []
            end = 0
            for image in reader.images(number):
                left += copies[end : image.first]
                reads += _reads(image.path, image.start - image.start % PAGE, image.end, image.at - image.start % PAGE)
                direct += copies[image.first : image.last]
                end = image.last
            left += copies[end:]
            files.read(reads, scratch)
            lane.upload(scratch, make_transfer(scratch, lane, targets, direct))
            # All of it: what is on no image in part is on none.
            rest.update((wants[copy.want], None) for copy in left)
        synchronize(device)
    return list(rest)


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
