"""The contents of a checkpoint, as commands show them. Values and statistics alone import torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp_rs import _core
from dcp_rs._progress import watching
from dcp_rs._url import location
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.checkpoint.metadata import merged_from
from dcp_rs.checkpoint.views import Layout
from dcp_rs.cli.output import count, for_command_line, is_json, printable, size
from dcp_rs.errors import DcpRsError, UnsupportedError
from dcp_rs.tensors.elements import ITEMSIZES

if TYPE_CHECKING:
    from dcp_rs.checkpoint.stats import TensorStats

__all__ = [
    "Contents",
    "Entry",
    "decoded_text",
    "entries_text",
    "open_contents",
    "stats_by_name",
    "tensor_stats",
]

#: Errors of values that cannot be shown. ``ValueError``: an integer of thousands of digits.
#: ``RecursionError``: nested too deep for ``repr``.
_UNSHOWN = (DcpRsError, ValueError, RecursionError)


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
        """Return the entry for ``--json``."""
        return {
            "name": self.name,
            "kind": "value" if self.dtype is None else "tensor",
            "dtype": self.dtype,
            "shape": None if self.dtype is None else self.shape,
            "chunks": self.chunks,
            "bytes": self.nbytes,
        }


class Contents:
    """The entries and files of a checkpoint.

    Attributes:
        path: as it was given.
        index: the opened index.
        format: ``dcp-rs``, ``dcp``, ``safetensors`` or ``torch``.
        facts: version, writer and save of the index, by name; none if it was made in memory.
        files: (name, size in bytes).
        merged_from: the inputs of :func:`dcp_rs.merge`, if it wrote the checkpoint.
        entries: sorted by name.
    """

    def __init__(self, path: Path, index: _core.Index) -> None:
        self.path, self.index = path, index
        self.format = index.source
        self.files = [(file.name, file.size) for file in index.files()]
        self.facts: dict[str, Any] = {}
        if not index.is_in_memory:
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
        tensor = self.index.tensor(number)
        if tensor.dtype is None:
            nbytes = self.index.chunks(number)[0].length
        else:
            nbytes = math.prod(tensor.shape) * ITEMSIZES.get(tensor.dtype, 1)
        return Entry(tensor.name, number, tensor.dtype, tensor.shape, tensor.chunk_count, nbytes)

    @property
    def nbytes(self) -> int:
        """The bytes of all entries."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def tensors(self) -> int:
        """The number of tensors."""
        return sum(entry.dtype is not None for entry in self.entries)

    def stored_chunks(self, entry: Entry) -> list[_core.ChunkEntry]:
        """Return the stored chunks of an entry."""
        return self.index.chunks(entry.number)

    def state_path(self, entry: Entry) -> tuple[Any, ...] | None:
        """Return the path of an entry in the state dict."""
        return self.index.planner_path(entry.number)

    def decoded_from(self, entry: Entry) -> tuple[str, list[str]] | None:
        """Return the format and the stored tensors of a quantized weight, or None."""
        return None if entry.dtype is None else self.index.coded_from(entry.number)

    def decoded(self) -> tuple[int, int]:
        """Return the number of tensors that are decoded, and their stored bytes."""
        entries = self.entries if self.index.is_view else []
        coded = [self.stored_chunks(entry) for entry in entries if self.decoded_from(entry)]
        return len(coded), sum(chunk.length for chunks in coded for chunk in chunks)

    def sharing(self, entry: Entry) -> list[str]:
        """Return the other tensors with bytes of this one.

        In files of ``torch.save``, tensors are views of storages.
        """
        if self.format != "torch" or entry.dtype is None:
            return []
        chunks = self.stored_chunks(entry)  # several, if it is joined by a view
        return [
            other.name
            for other in self.entries
            if other is not entry and other.dtype is not None
            if any(
                theirs.file == own.file
                and theirs.offset < own.offset + own.length
                and own.offset < theirs.offset + theirs.length
                for theirs in self.stored_chunks(other)
                for own in chunks
            )
        ]

    def value(self, entry: Entry) -> Any:
        """Load a non-tensor value with torch.

        Raises:
            UnsafePickleError: it needs more than ``torch.load(weights_only=True)`` allows.
            UnsupportedError: its text would be many times longer than what is stored.
        """
        from dcp_rs.tensors import pickles  # it imports torch

        first = self.index.first_chunk(entry.number)
        (data,) = self.index.read_bytes(
            [first], io="buffered", threads=1, verify=False, max_inflight_bytes=1 << 22
        )
        value = pickles.load(entry.name, data, weights_only=True)
        if not _is_short(value, 16 * len(data)):
            msg = (
                f"value {entry.name!r} repeats itself: it is much longer as text than the "
                f"{len(data):,} bytes that are stored"
            )
            raise UnsupportedError(msg, tensor=entry.name)
        return value

    def value_json(self, entry: Entry) -> dict[str, Any]:
        """Return ``value`` if JSON can hold it, else its ``repr``, else the ``problem``."""
        if entry.dtype is not None:
            return {}
        try:
            value = self.value(entry)
            return {"value": value} if is_json(value) else {"repr": repr(value)}
        except _UNSHOWN as error:
            return {"problem": for_command_line(str(error))}

    def value_text(self, entry: Entry, most: int) -> str:
        """Return a value, or why it cannot be shown, in one line; nothing for a tensor."""
        if entry.dtype is not None:
            return ""
        try:
            text = printable(repr(self.value(entry)))
        except _UNSHOWN as error:
            return f"({printable(for_command_line(str(error)))})"
        return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


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
    """Open a checkpoint to list its entries, with ``layout`` its logical tensors."""
    where = location(path)
    return Contents(
        where, open_index(where, rank=rank, allow_external=allow_external, layout=layout)
    )


def entries_text(entries: Sequence[Entry]) -> str:
    """Return ``2 tensors, 1 value``."""
    tensors = sum(entry.dtype is not None for entry in entries)
    values = len(entries) - tensors
    return count(tensors, "tensor") + (f", {count(values, 'value')}" if values else "")


def decoded_text(contents: Contents) -> str:
    """Return the end of a line of totals, if tensors are decoded."""
    number, nbytes = contents.decoded()
    return f"; {number:,} of them decoded from {size(nbytes)} that are stored" if number else ""


def tensor_stats(
    index: _core.Index, chosen: Callable[[str], bool] | None = None, threads: int | None = None
) -> tuple[list[TensorStats], int]:
    """Return statistics of the tensors, with a progress bar, and the number of bytes read."""
    from dcp_rs.checkpoint.stats import stats

    numbers = [
        number
        for number in index.file_order()
        if not index.tensor(number).is_bytes and (chosen is None or chosen(index.name(number)))
    ]
    nbytes = 0
    with watching(True, "reading") as progress:

        def seen(done: int, total: int) -> None:
            nonlocal nbytes
            nbytes = done
            if progress is not None:
                progress(done, total)

        return list(stats(index, numbers, threads=threads, progress=seen)), nbytes


def stats_by_name(contents: Contents) -> dict[str, TensorStats]:
    """Return statistics of all tensors, by name."""
    found, _ = tensor_stats(contents.index)
    return {one.name: one for one in found}
