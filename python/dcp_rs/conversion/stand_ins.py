"""What torch is given to write in place of what is converted: it lays out the files, and the bytes go around it."""

from __future__ import annotations

import io
import mmap
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from dcp_rs import _core
from dcp_rs.checkpoint.blocks import Region
from dcp_rs.conversion.job import Job, Task
from dcp_rs.conversion.native import write_value
from dcp_rs.errors import UnsupportedError

__all__ = ["Content", "StandIns"]

#: A tensor, or a chunk of one; or a value.
Content = Region | Task
_ALIGNMENT = 64


class StandIns:
    """Tensors and values that have an address each, and no memory: torch hands them to a stream, which keeps their places."""

    def __init__(self, job: Job, contents: Sequence[Content]) -> None:
        self._job = job
        self._contents = contents
        self._places: list[int] = []
        at = 0
        for content in contents:
            self._places.append(at)
            at += (
                -(-content.nbytes // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT
            )  # none begins where another ends
        # Only to be read, so that the system sets nothing aside for it.
        self._memory = mmap.mmap(
            -1, max(at, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ
        )
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # torch has no tensors that cannot be written to
            self._nbytes, self._address = (
                at,
                torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr(),
            )
            self._tensors = [self._tensor(number) for number in range(len(contents))]
        self._streams: dict[str, _core.Template] = {}

    def _tensor(self, number: int) -> torch.Tensor | None:
        content = self._contents[number]
        if isinstance(content, Task):
            return None
        if content.nbytes == 0:
            return torch.empty(content.sizes, dtype=content.dtype, device="cpu")
        flat = torch.frombuffer(
            self._memory, dtype=torch.uint8, count=content.nbytes, offset=self._places[number]
        )  # each with a storage of its own
        return flat.view(content.dtype).view(content.sizes)

    def tensor(self, number: int) -> torch.Tensor:
        """What stands for a tensor, or for a chunk of one."""
        tensor = self._tensors[number]
        if tensor is None:
            raise TypeError(number)
        return tensor

    def value(self, number: int) -> io.BytesIO:
        """What stands for a value."""
        at = self._places[number]
        return _Value(memoryview(self._memory)[at : at + self._contents[number].nbytes])

    def stream(self, name: str) -> _core.Template:
        """What torch writes to, for the file ``name``."""
        self._streams[name] = _core.Template(self._address, self._nbytes)
        return self._streams[name]

    def write(self, folder: Path, archives: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Writes the files, with everything that was stood for.

        Args:
            folder: where.
            archives: for each file, where in it (first byte, length) zip archives get their
                checksums.

        Raises:
            UnsupportedError: torch did not hand on something as it was given.
            OSError: the disk is full, or fails.
        """
        items, values = self._placed()
        count = len(values)
        for file, stream in enumerate(self._streams.values()):
            values += [_core.PlacedValue("", file, at, length) for at, length in stream.pieces()]
        files = [(name, b"", stream.tell()) for name, stream in self._streams.items()]
        save = _core.Save.create_files(
            os.fspath(folder), files, values, crc32=True, **self._job.engine()
        )
        try:
            self._fill(save, items)
            filled: list[list[tuple[int, int, int]]] = [[] for _ in files]
            for value, crc in zip(values[:count], save.crc32s(), strict=False):
                filled[value.file].append((value.offset, value.length, crc))
            for (name, stream), of_file in zip(self._streams.items(), filled, strict=True):
                path = os.fspath(folder / name)
                stream.seal(path, archives.get(name, ()), of_file, self._job.options.threads or 0)
                save.write_template(stream, count)
                count += len(stream.pieces())
            save.finish()
        except BaseException:
            save.abort()
            raise

    def _placed(self) -> tuple[dict[int, int], list[_core.PlacedValue]]:
        """Which item of the save each content is, and the places of these items."""
        numbers = {place: i for i, place in enumerate(self._places) if self._contents[i].nbytes}
        items: dict[int, int] = {}
        values: list[_core.PlacedValue] = []
        for file, stream in enumerate(self._streams.values()):
            for at, place, length in stream.holes():
                number = numbers.pop(place, None)
                if number is None or length != self._contents[number].nbytes:
                    raise self._not_handed_on("something")
                items[number] = len(values)
                values.append(_core.PlacedValue(self._name(number), file, at, length))
        for number in numbers.values():
            raise self._not_handed_on(repr(self._name(number)))
        return items, values

    def _name(self, number: int) -> str:
        content = self._contents[number]
        return content.name if isinstance(content, Task) else content.item.name

    def _not_handed_on(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"torch {torch.__version__} does not write {what} as it lies in memory, once"
        )

    def _fill(self, save: _core.Save, items: Mapping[int, int]) -> None:
        regions: list[Region] = []
        order: list[int] = []
        for number in sorted(items):  # as it is best read
            content = self._contents[number]
            if isinstance(content, Task):
                write_value(self._job, save, items[number], content)
            else:
                regions.append(content)
                order.append(items[number])
        self._job.write(save, regions, order)


class _Value(io.BytesIO):
    """A value that says where it is to whoever writes it."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__()
        self._memory = memory

    def getbuffer(self) -> memoryview:
        """All of it."""
        return self._memory
