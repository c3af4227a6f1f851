"""List the contents of a checkpoint for commands. Only values import torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_rs._url import location
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.checkpoint.metadata import merged_from
from dcp_rs.checkpoint.views import Layout
from dcp_rs.cli.output import for_command_line, printable
from dcp_rs.errors import DcpRsError, UnsupportedError
from dcp_rs.tensors.elements import ITEMSIZES

__all__ = ["UNSHOWN", "Contents", "Entry", "Piece", "open_contents", "value_text"]

#: Why a value is not shown. ``ValueError``: an integer of thousands of digits. ``RecursionError``:
#: nested too deep for ``repr``.
UNSHOWN = (DcpRsError, ValueError, RecursionError)


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored piece of an entry: where in the tensor, and where on the disk."""

    file: int
    offset: int
    nbytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor, or (``dtype`` None) another value."""

    name: str
    number: int
    dtype: str | None
    shape: tuple[int, ...]
    chunks: int
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "name": self.name,
            "kind": "value" if self.dtype is None else "tensor",
            "dtype": self.dtype,
            "shape": None if self.dtype is None else list(self.shape),
            "chunks": self.chunks,
            "bytes": self.nbytes,
        }


class Contents:
    """What is at a path.

    Attributes:
        path: as it was given.
        format: ``dcp-rs``, ``dcp``, ``safetensors`` or ``torch``.
        facts: more about it, by name.
        files: (name, size in bytes).
        merged_from: the inputs of :func:`dcp_rs.merge`, if it wrote this.
        entries: sorted by name.
    """

    def __init__(
        self, path: Path, *, allow_external: bool, rank: int | None, layout: Layout | None = None
    ) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}
        index = self._index = open_index(
            path, rank=rank, allow_external=allow_external, layout=layout
        )
        self.format = index.source
        self.indexed = not index.is_in_memory
        self.files = [(file.name, file.size) for file in index.files()]
        if self.indexed:
            self.facts = {
                "index": str(index.path),
                "version": index.version,
                "writer": index.writer,
                "generation": index.generation,
                "save_id": index.save_id,
            }
        self.merged_from = merged_from(index)
        self.chunk_count = index.chunk_count
        self.entries = [self._entry(number) for number in range(index.tensor_count)]

    def _entry(self, number: int) -> Entry:
        tensor = self._index.tensor(number)
        if tensor.dtype is None:
            nbytes = self._index.chunks(number)[0].length
        else:
            nbytes = math.prod(tensor.shape) * ITEMSIZES.get(tensor.dtype, 1)
        return Entry(tensor.name, number, tensor.dtype, tensor.shape, tensor.chunk_count, nbytes)

    @property
    def nbytes(self) -> int:
        """Of all entries."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def tensors(self) -> int:
        """How many entries are tensors."""
        return sum(1 for entry in self.entries if entry.dtype is not None)

    def find(self, name: str) -> Entry | None:
        """The entry of that name."""
        return next((entry for entry in self.entries if entry.name == name), None)

    def pieces(self, entry: Entry) -> list[Piece]:
        """The stored pieces of an entry."""
        return [
            Piece(chunk.file, chunk.offset, chunk.length, chunk.offsets, chunk.sizes)
            for chunk in self._index.chunks(entry.number)
        ]

    def state_path(self, entry: Entry) -> tuple[Any, ...] | None:
        """Where in the state dict an entry was."""
        return self._index.planner_path(entry.number)

    def decoded_from(self, entry: Entry) -> tuple[str, list[str]] | None:
        """The format and the stored tensors of a quantized weight; None of what is stored as it is."""
        return None if entry.dtype is None else self._index.coded_from(entry.number)

    def decoded(self) -> tuple[int, int]:
        """How many tensors are decoded, and the bytes that are stored of them."""
        entries = self.entries if self._index.is_view else []
        stored = [self.pieces(entry) for entry in entries if self.decoded_from(entry) is not None]
        return len(stored), sum(piece.nbytes for pieces in stored for piece in pieces)

    def sharing(self, entry: Entry) -> list[str]:
        """The other tensors that have bytes of this one: in files of ``torch.save`` they are views of storages."""
        if self.format != "torch" or entry.dtype is None:
            return []
        (own,) = self.pieces(entry)
        others = (
            (other, piece)
            for other in self.entries
            if other is not entry
            for piece in self.pieces(other)
        )
        return [
            other.name
            for other, piece in others
            if other.dtype is not None
            and piece.file == own.file
            and piece.offset < own.offset + own.nbytes
            and own.offset < piece.offset + piece.nbytes
        ]

    def value(self, entry: Entry) -> Any:
        """Load a non-tensor value with torch.

        Raises:
            UnsafePickleError: it needs more than ``torch.load(weights_only=True)`` allows.
            UnsupportedError: its text would be many times longer than what is stored.
        """
        from dcp_rs.tensors import pickles  # it imports torch

        first = self._index.first_chunk(entry.number)
        (data,) = self._index.read_bytes(
            [first], io="buffered", threads=1, verify=False, max_inflight_bytes=1 << 22
        )
        value = pickles.load(entry.name, data, weights_only=True)
        if not _is_short(value, 16 * len(data)):
            msg = f"value {entry.name!r} repeats itself: it is much longer as text than the {len(data):,} bytes that are stored"
            raise UnsupportedError(msg, tensor=entry.name)
        return value


def _is_short(value: Any, most: int) -> bool:
    """Return whether a value has at most ``most`` parts and characters.

    A part counts once for each reference to it.
    """
    todo = [value]
    while todo and most >= 0:
        part = todo.pop()
        is_dict, is_list = isinstance(part, dict), isinstance(part, list | tuple | set | frozenset)
        most -= 1 + (
            len(part) if is_dict or is_list or isinstance(part, str | bytes | bytearray) else 0
        )
        if most >= 0 and is_dict:
            todo += [*part.keys(), *part.values()]
        elif most >= 0 and is_list:
            todo += part
    return most >= 0


def open_contents(
    path: str | os.PathLike[str],
    *,
    rank: int | None = None,
    allow_external: bool = False,
    layout: Layout | None = None,
) -> Contents:
    """Opens whatever is at ``path`` to look at it, with ``layout`` at its logical tensors. No data is read."""
    return Contents(location(path), allow_external=allow_external, rank=rank, layout=layout)


def value_text(contents: Contents, entry: Entry, most: int) -> str:
    """What a value is, in one line; nothing for a tensor. One that cannot be told is said to be so."""
    if entry.dtype is not None:
        return ""
    try:
        text = printable(repr(contents.value(entry)))
    except UNSHOWN as error:
        return f"({printable(for_command_line(str(error)))})"
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"
