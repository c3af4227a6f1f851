"""What is converted: the entries of a checkpoint of any kind, and their bytes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from dcp_rs import _core
from dcp_rs._url import StorageOptions
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.checkpoint.mapping import safetensors_metadata
from dcp_rs.checkpoint.open import containers_of
from dcp_rs.checkpoint.views import Layout
from dcp_rs.errors import (
    CorruptDataError,
)
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.nesting import Container, TreePath
from dcp_rs.transfer.target import stored_dtype

__all__ = ["Chunk", "IndexSource", "Item", "Request", "Source", "open_source"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored piece of a tensor: ``sizes`` elements from ``offsets``; ``file`` is the number of its data file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """An entry of a source.

    Attributes:
        name: FQN.
        number: of the entry, in its source.
        dtype, shape: None and empty for a value.
        chunks: at least one, but for a tensor that is stored nowhere (an empty one may be).
        nbytes: of the tensor, or of the value as ``torch.save`` writes it.
        flags: section 3.3 of the format.
        path, position: in the state dict, where they are known.
        read_as: the type of the elements that the source delivers; None: ``dtype``.
    """

    name: str
    number: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    nbytes: int
    flags: int = 0
    path: TreePath | None = None
    position: int | None = None
    read_as: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A rectangle of a tensor (or, where ``chunk`` is given, of that chunk of it), and the contiguous memory it goes to."""

    item: Item
    chunk: int | None
    offsets: Sequence[int]
    into: torch.Tensor


class Source(Protocol):
    """A checkpoint to convert from."""

    kind: str
    #: Planner data that belongs to no entry.
    root: Any
    #: The containers that paths do not tell; None where it is not known which there were.
    containers: list[Container] | None
    #: The entries, in the order in which they are best read.
    items: list[Item]
    #: What it was opened from: an index, a folder without one, or a file.
    path: Path
    #: The files that hold the entries.
    files: list[Path]

    def check(self, items: Sequence[Item]) -> None:
        """Raises, before anything is read, unless all of the items is there."""

    def check_again(self) -> None:
        """Raises unless the files are as they were."""

    def read(self, requests: Sequence[Request]) -> None:
        """Fills every destination. Runs in any thread."""

    def value(self, item: Item) -> bytes:
        """A value, as ``torch.save`` writes it."""

    def metadata(self) -> dict[str, str]:
        """What files of safetensors say of themselves, where they are on the file system; nothing of others."""

    def tied(self, items: Sequence[Item]) -> dict[str, str]:
        """Names of tensors that are another one under a second name, and that other name."""


def open_source(
    path: str | os.PathLike[str],
    *,
    options: ReadOptions,
    allow_external: bool,
    storage_options: StorageOptions | None = None,
    layout: Layout | None = None,
) -> Source:
    """Opens a checkpoint of any kind, by its path or its URL. With ``layout``, its items are logical tensors."""
    index = open_index(
        path,
        rank=None,
        allow_external=allow_external,
        storage_options=storage_options,
        layout=layout,
    )
    return IndexSource(index, options)


class IndexSource:
    """Everything that has an index, or is given one when it is opened."""

    def __init__(self, index: _core.Index, options: ReadOptions) -> None:
        self.kind = index.source
        self.root = index.planner_root()
        self.containers = containers_of(index)
        self._positions = index.positions()
        self.index = index
        self.path, self.files = index.path, index.file_paths()
        self._options = options
        self.items = [self._item(number) for number in index.file_order()]

    def _item(self, number: int) -> Item:
        entry, stored = self.index.tensor(number), self.index.chunks(number)
        name, path = entry.name, self.index.planner_path(number)
        if entry.is_bytes:
            # Of a file of torch.save a value is a part of the pickle: how long it is by itself is
            # known once it was written.
            nbytes = len(self._bytes(number)) if self.kind == "torch" else stored[0].length
            chunk = Chunk((), (), stored[0].file)
            return Item(name, number, None, (), (chunk,), nbytes, 0, path, self._positions[number])
        dtype = stored_dtype(name, entry.dtype)
        nbytes = dtype.itemsize * math.prod(entry.shape)
        chunks = tuple(Chunk(chunk.offsets, chunk.sizes, chunk.file) for chunk in stored)
        return Item(
            name,
            number,
            dtype,
            entry.shape,
            chunks,
            nbytes,
            entry.flags,
            path,
            self._positions[number],
        )

    def check(self, items: Sequence[Item]) -> None:
        """Raises unless the files are there and as long as they should be, and the chunks of every tensor hold all of it."""
        tensors = [item for item in items if item.dtype is not None]
        holes = self.index.check_regions(
            [(item.number, [0] * len(item.shape), item.shape) for item in tensors],
            [item.number for item in items if item.dtype is None],
        )
        for region, offsets, sizes in holes:
            name = tensors[region].name
            msg = f"tensor {name!r} is not all there: nothing holds {list(sizes)} elements at {list(offsets)}"
            raise CorruptDataError(msg, path=self.index.path, tensor=name)

    @cached_property
    def _one_of_each_file(self) -> list[int]:
        chunks: dict[int, int] = {}
        for item in self.items:
            for number, chunk in enumerate(item.chunks):
                chunks.setdefault(chunk.file, self.index.first_chunk(item.number) + number)
        return list(chunks.values())

    def check_again(self) -> None:
        """Looks at every file."""
        self.index.check_files(self._one_of_each_file)

    def read(self, requests: Sequence[Request]) -> None:
        """Reads in one batch, whatever the requests are."""
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
        """The stored bytes, as they are; of a file of ``torch.save``, what that writes for the value alone."""
        return self._bytes(item.number)

    def _bytes(self, number: int) -> bytes:
        return self.index.read_bytes([self.index.first_chunk(number)], **self._options.engine())[0]

    def metadata(self) -> dict[str, str]:
        """The first file's word first."""
        has_some = self.kind == "safetensors" and not self.index.is_remote
        return safetensors_metadata(self.files) if has_some else {}

    def tied(self, items: Sequence[Item]) -> dict[str, str]:
        """Tensors that are the same bytes of a file. The first name in the order of the state dict stays, which is that of the modules, but none of a head.

        It is the name that ``transformers`` keeps: the weights of an output layer are those of an
        embedding there, not the other way round.
        """
        first: dict[Hashable, str] = {}
        tied: dict[str, str] = {}
        for item in sorted(items, key=_precedence):
            if item.dtype is None or item.nbytes == 0 or len(item.chunks) != 1:
                continue
            if self.index.coded_from(item.number) is not None:
                # What is decoded has no place of its own: parts of one tensor say that they are
                # where it begins.
                continue
            kept = first.setdefault(self._place(item), item.name)
            if kept != item.name:
                tied[item.name] = kept
        return tied

    def _place(self, item: Item) -> Hashable:
        chunk, stored = self.index.first_chunk(item.number), self.index.chunks(item.number)[0]
        return (
            stored.file,
            stored.offset,
            item.dtype,
            item.shape,
            self.index.chunk_strides(chunk),
            self.index.chunk_signs(chunk),
        )


#: What ``transformers`` calls output layers that are tied to an embedding, where a state dict is
#: not in the order of its modules.
_HEAD = re.compile(r"(?:^|\.)lm_head(?:\.|$)")


def _precedence(item: Item) -> tuple[bool, int]:
    """Which of several names of one tensor stays: the first in the order of the state dict, and no head."""
    return _HEAD.search(
        item.name
    ) is not None, item.number if item.position is None else item.position
