"""``io="gds"``: from storage to the memory of a CUDA device by ``torch.cuda.gds``, with nothing in between."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from dcp_rs import _core, _torch
from dcp_rs.errors import UnsupportedError
from dcp_rs.staging import HostLane
from dcp_rs.upload import Piece, make_goal, make_transfer

if TYPE_CHECKING:
    from dcp_rs.fill import Fill
    from dcp_rs.options import ReadOptions

__all__ = ["fill"]

#: Device memory that files are read into, next to the destinations. A read is whole pages, and a destination need not begin at one.
SCRATCH_BYTES = 64 << 20
PAGE = 4096


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
    module = _gds()
    goals = [make_goal(item.tensor, item.dtype) for item in fills]
    wants = [
        (item.chunk, item.offsets, item.tensor.shape, goal.flat, 0) for item, goal in zip(fills, goals, strict=True)
    ]
    reader = _core.SlabReader.create(index, wants, SCRATCH_BYTES, sort=True, **options.slabs())
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
    lane, files = HostLane(), _Files(module)  # copies on the caller's stream: a read by cuFile is over when it returns
    rest: list[Fill] = []
    with ExitStack() as stack:
        stack.callback(files.close)
        for batch in range(reader.batch_count):
            _, pieces = reader.batch(batch)
            _synchronize(device)  # copies out of the scratch memory, and the caller's work on what is filled
            direct: list[Piece] = []
            left: list[Piece] = []
            end = 0
            for path, start, stop, at, first, last in reader.images(batch):
                left += pieces[end:first]
                files.read(path, start - start % PAGE, stop, scratch, at - start % PAGE)
                direct += pieces[first:last]
                end = last
            left += pieces[end:]
            lane.upload(scratch, make_transfer(scratch, lane, goals, direct))
            # A run of bytes that is on no image has none of its bytes on one.
            rest += [_part(fills[piece[0]], piece) for piece in left if len(piece) == 5 or piece[3] == 0]
        _synchronize(device)
    return rest


def _part(item: Fill, piece: Piece) -> Fill:
    """The fill of a rectangle, or of all of a run."""
    from dcp_rs.fill import Fill

    if len(piece) == 4:
        return item
    offsets, sizes = piece[3:]
    tensor = item.tensor
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return Fill(item.chunk, [a + b for a, b in zip(item.offsets, offsets, strict=True)], tensor, item.name, item.dtype)


class _Files:
    """The one file that is open, with the driver."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._path: str | None = None
        self._file: Any = None

    def read(self, path: str, start: int, stop: int, memory: torch.Tensor, at: int) -> None:
        """Reads bytes ``start`` to ``stop`` of the file to byte ``at`` of device memory."""
        if path != self._path:
            self.close()
            try:
                self._file = self._module.GdsFile(path, os.O_RDONLY)
            except (RuntimeError, OSError) as error:
                raise _refused(f"{path} cannot be opened for it: {error}", path) from error
            self._path = path
        storage = memory.untyped_storage()
        begin = memory.storage_offset() + at
        try:
            self._file.load_storage(storage[begin : begin + stop - start], start)
        except RuntimeError as error:
            raise _refused(f"reading {path}: {error}", path) from error

    def close(self) -> None:
        self._path = self._file = None


def _gds() -> Any:
    module = getattr(torch.cuda, "gds", None)
    if module is None or not hasattr(module, "GdsFile"):
        raise _refused(f"torch {torch.__version__} has no torch.cuda.gds (2.7 and later do)")
    if not _torch.has_gds():
        raise _refused("this torch was built without cuFile")
    return module


def _refused(why: str, path: str | None = None) -> UnsupportedError:
    return UnsupportedError(f"io='gds' does not work here: {why}. io='auto' does without it.", path=path)


def _reaches(device: torch.device) -> bool:
    return device.type == "cuda"


def _synchronize(device: torch.device) -> None:
    torch.get_device_module(device).current_stream(device).synchronize()
