"""Sources of conversions and comparisons: the entries of a checkpoint of any kind."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from dcp_rs import _core
from dcp_rs.checkpoint.folders import checkpoint_path
from dcp_rs.checkpoint.metadata import planner_data, safetensors_metadata
from dcp_rs.checkpoint.names import every
from dcp_rs.errors import CorruptDataError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.nesting import Container, TreePath
from dcp_rs.transfer.target import stored_dtype


@dataclass(frozen=True, slots=True)
class Item:
    """An entry of a source.

    Attributes:
        name: its FQN.
        number: its number in the source.
        dtype, shape: those of a tensor; None and empty for a value.
        chunks: its chunks. An empty tensor may have none.
        nbytes: the bytes of the tensor, or of the value as it is stored.
        flags: its flags (section 3.3 of the format).
        path, position: its place in the state dict, if it is known.
        read_as: the dtype of the elements that the source delivers, if it is not ``dtype``.
    """

    name: str
    number: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    chunks: tuple[_core.ChunkEntry, ...]
    nbytes: int
    flags: int = 0
    path: TreePath | None = None
    position: int | None = None
    read_as: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A read of a rectangle of a tensor.

    Attributes:
        item: the tensor.
        chunk: the chunk that the rectangle is part of; None for the whole tensor.
        offsets: the offsets of the rectangle.
        into: the memory for it.
    """

    item: Item
    chunk: int | None
    offsets: Sequence[int]
    into: torch.Tensor


class CheckpointReader(Protocol):
    """A checkpoint to read entries from.

    Attributes:
        format: the format of its data files.
        root: planner data that belongs to no entry.
        containers: the containers that paths do not describe; None if the format lists none.
        items: the entries, in the order in which they are best read.
        path: its path: that of an index, of a folder without one, or of a file.
        files: its data files.
    """

    format: str
    root: Any
    containers: list[Container] | None
    items: list[Item]
    path: Path
    files: list[Path]

    def check(self, items: Sequence[Item]) -> None:
        """Raise if files are missing, or hold less than all of the items. Nothing is read."""

    def check_again(self) -> None:
        """Raise if a file has changed since the source was opened."""

    def read(self, requests: Sequence[Request]) -> None:
        """Read all requests. Any thread may call it."""

    def value(self, item: Item) -> bytes:
        """Return the ``torch.save`` bytes of a value."""

    def metadata(self) -> dict[str, str]:
        """Return the metadata of local safetensors files; nothing for other formats."""

    def tied(self, items: Sequence[Item]) -> dict[str, str]:
        """Return the names of tied tensors, each with the name that keeps the data."""


class IndexSource:
    """A source over an index. Foreign checkpoints get an index when they are opened.

    Args:
        index: the index.
        options: how to read.
        passes: a test of the names of the items.
    """

    def __init__(
        self,
        index: _core.Index,
        options: ReadOptions,
        passes: Callable[[str], bool] = every,
    ) -> None:
        self.format = index.source
        self.root, self.containers = planner_data(index)
        self._positions = index.positions()
        self.index = index
        self.path, self.files = index.path, index.file_paths()
        self._options = options
        self.items = [
            self._item(number) for number in index.file_order() if passes(index.name(number))
        ]

    def _item(self, number: int) -> Item:
        entry, stored = self.index.tensor(number), self.index.chunks(number)
        name, path = entry.name, self.index.planner_path(number)
        position, chunks = self._positions[number], tuple(stored)
        if entry.is_bytes:
            return Item(name, number, None, (), chunks[:1], stored[0].length, 0, path, position)
        dtype = stored_dtype(name, entry.dtype)
        nbytes = dtype.itemsize * math.prod(entry.shape)
        return Item(name, number, dtype, entry.shape, chunks, nbytes, entry.flags, path, position)

    def check(self, items: Sequence[Item]) -> None:
        """Raise if files are missing or of another length, or hold less than all of the items.

        Items that are much larger than the files are refused, too.
        """
        tensors = [item for item in items if item.dtype is not None]
        self.index.check_expanded([item.number for item in tensors])
        holes = self.index.check_regions(
            [(item.number, [0] * len(item.shape), item.shape) for item in tensors],
            [item.number for item in items if item.dtype is None],
        )
        for region, offsets, sizes in holes:
            name = tensors[region].name
            msg = (
                f"tensor {name!r} is not all there: nothing holds {list(sizes)} elements at "
                f"{list(offsets)}"
            )
            raise CorruptDataError(msg, path=checkpoint_path(self.index), tensor=name)

    @cached_property
    def _one_of_each_file(self) -> list[int]:
        chunks: dict[int, int] = {}
        for item in self.items:
            for number, chunk in enumerate(item.chunks):
                chunks.setdefault(chunk.file, self.index.first_chunk(item.number) + number)
        return list(chunks.values())

    def check_again(self) -> None:
        """Raise if a file has changed since the source was opened."""
        self.index.check_files(self._one_of_each_file)

    def read(self, requests: Sequence[Request]) -> None:
        """Read all requests in one batch for chunks, and one for whole tensors."""
        chunks: list[_core.Fill] = []
        regions: list[_core.Fill] = []
        for request in requests:
            into = request.into
            source, fills = request.item.number, regions
            if request.chunk is not None:
                source, fills = self.index.first_chunk(request.item.number) + request.chunk, chunks
            fills.append(
                _core.Fill(source, request.offsets, into.shape, into.data_ptr(), into.stride())
            )
        if chunks:
            self.index.read_chunks(chunks, **self._options.engine())
        if regions:
            self.index.read_regions(regions, **self._options.engine())

    def value(self, item: Item) -> bytes:
        """Return the ``torch.save`` bytes of a value."""
        chunk = self.index.first_chunk(item.number)
        return self.index.read_bytes([chunk], **self._options.engine())[0]

    def metadata(self) -> dict[str, str]:
        """Return the metadata of local safetensors files; nothing for other formats."""
        has_some = self.format == "safetensors" and not self.index.is_remote
        return safetensors_metadata(self.files) if has_some else {}

    def tied(self, items: Sequence[Item]) -> dict[str, str]:
        """Return the tensors that share their bytes in a file, each with the name that stays.

        The first name in the order of the state dict stays, but not that of a head: transformers
        keeps the name of the embedding that an output layer is tied to.
        """
        first: dict[Hashable, str] = {}
        tied: dict[str, str] = {}
        for item in sorted(items, key=_precedence):
            if item.dtype is None or item.nbytes == 0 or len(item.chunks) != 1:
                continue
            if self.index.coded_from(item.number) is not None:
                continue  # decoded tensors have no places of their own
            kept = first.setdefault(self._place(item), item.name)
            if kept != item.name:
                tied[item.name] = kept
        return tied

    def _place(self, item: Item) -> Hashable:
        chunk, stored = self.index.first_chunk(item.number), item.chunks[0]
        return (
            stored.file,
            stored.offset,
            item.dtype,
            item.shape,
            self.index.chunk_strides(chunk),
            self.index.chunk_signs(chunk),
        )


#: The names of output layers in transformers, which are tied to embeddings. A state dict need not
#: be in the order of the modules.
_HEAD = re.compile(r"(?:^|\.)lm_head(?:\.|$)")


def _precedence(item: Item) -> tuple[bool, int]:
    """Return a key to sort the names of one tensor by: the first one stays."""
    position = item.number if item.position is None else item.position
    return _HEAD.search(item.name) is not None, position
