"""The contents of a checkpoint, as commands show them. Values alone import torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dcp_rs import _core
from dcp_rs._url import StrPath, absolute, location
from dcp_rs.checkpoint.entries import TensorInfo, describe
from dcp_rs.checkpoint.locate import Tiers, open_index
from dcp_rs.checkpoint.names import every, hint, natural
from dcp_rs.checkpoint.views import Views
from dcp_rs.cli.output import count, for_command_line, json_text, size
from dcp_rs.errors import DcpRsError, EntryNotFoundError, UnsafePickleError, UnsupportedError
from dcp_rs.tensors.nesting import TreePath

#: The formats, for people.
FORMATS = {
    "dcp-rs": "dcp-rs",
    "dcp": "stock DCP (.distcp)",
    "safetensors": "safetensors",
    "torch": "a file of torch.save",
}

#: The keys that lists are sorted by. They take anything with a name and a number of bytes.
SORTS: dict[str, Callable[[Any], Any]] = {
    "name": lambda entry: natural(entry.name),
    "size": lambda entry: (-entry.nbytes, natural(entry.name)),
}


def to_json(entry: TensorInfo) -> dict[str, Any]:
    """Return an entry for ``--json``."""
    return {
        "name": entry.name,
        "kind": "value" if entry.dtype is None else "tensor",
        "dtype": entry.dtype,
        "shape": None if entry.dtype is None else entry.shape,
        "chunks": entry.chunks,
        "bytes": entry.nbytes,
    }


class Contents:
    """The entries and files of a checkpoint.

    Args:
        path: a path, or a URL of a store.
        chosen: a test of names.
        rank, allow_external, views: see :func:`dcp_rs.checkpoint.locate.open_index`.
        local: folders of nodes, which may have the files of the step at ``path``.

    Attributes:
        path: as it was given.
        index: the opened index.
        nodes: for each file, those of the folders ``local`` that have all of it; None without
            such folders.
        format: ``dcp-rs``, ``dcp``, ``safetensors`` or ``torch``.
        facts: version, writer and save of the index, by name; none if it was made in memory.
        files: (name, size in bytes).
        entries: those that are chosen, sorted by name, with the format's names of dtypes.
        numbers: their numbers in the index, by name.
        tensors, nbytes: how many of them are tensors, and the bytes of all.
    """

    def __init__(
        self,
        path: StrPath,
        chosen: Callable[[str], bool] = every,
        *,
        rank: int | None = None,
        allow_external: bool = False,
        views: Views | None = None,
        local: Sequence[Path] = (),
    ) -> None:
        self.path = location(path)
        name = absolute(self.path).name  # the path may be a dot
        steps = {str(folder): folder / name for folder in local}
        self.index = index = open_index(
            path,
            rank=rank,
            allow_external=allow_external,
            views=views,
            tiers=Tiers(tuple(map(os.fspath, steps.values()))),
        )
        self.format = index.source
        self.files = [(file.name, file.size) for file in index.files()]
        self.nodes: list[list[str]] | None = None
        if steps:
            self.nodes = [
                [node for node, step in steps.items() if _nbytes(step / name) == nbytes]
                for name, nbytes in self.files
            ]
        self.facts: dict[str, Any] = {}
        if not index.is_in_memory:
            self.facts = {
                "index": str(index.path),
                "version": index.version,
                "writer": index.writer,
                "generation": index.generation,
                "save_id": index.save_id,
            }
        self.numbers = {name: n for n, name in enumerate(index.names()) if chosen(name)}
        self.entries = [describe(index, number) for number in self.numbers.values()]
        self.tensors = sum(entry.dtype is not None for entry in self.entries)
        self.nbytes = sum(entry.nbytes for entry in self.entries)

    def entry(self, name: str) -> TensorInfo:
        """Return an entry by name, if all are wanted.

        Raises:
            EntryNotFoundError: there is none.
        """
        number = self.index.find(name)
        if number is None:
            msg = f"there is no entry {name!r} in {self.path}{hint(name, self.index.names())}"
            raise EntryNotFoundError(msg, path=self.path, tensor=name)
        return self.entries[number]

    def state_path(self, entry: TensorInfo) -> TreePath | None:
        """Return the keys of an entry in the state dict, if they are known."""
        path = self.index.planner_path(self.numbers[entry.name])
        if path is None or self.index.nesting() is not None:
            return path
        # Stock DCP stores the numbers of parameters in an optimizer's state as text, and a load
        # turns them into numbers again.
        return tuple(
            int(part) if before == "state" and isinstance(part, str) and part.isdecimal() else part
            for before, part in zip((None, *path), path, strict=False)
        )

    @property
    def values(self) -> int:
        """The number of entries that are no tensors."""
        return len(self.entries) - self.tensors

    def counted(self) -> str:
        """Return ``2 tensors, 1 value``."""
        values = f", {count(self.values, 'value')}" if self.values else ""
        return count(self.tensors, "tensor") + values

    def stored_chunks(self, entry: TensorInfo) -> list[_core.ChunkEntry]:
        """Return the stored chunks of an entry."""
        return self.index.chunks(self.numbers[entry.name])

    def decoded(self) -> tuple[int, int]:
        """Return the number of tensors that are decoded, and their stored bytes."""
        numbers = self.numbers.values() if self.index.is_view else ()
        coded = [self.index.chunks(n) for n in numbers if self.index.coded_from(n)]
        return len(coded), sum(chunk.length for chunks in coded for chunk in chunks)

    def decoded_text(self) -> str:
        """Return the end of a line of totals, if tensors are decoded."""
        number, nbytes = self.decoded()
        return f"; {number:,} of them decoded from {size(nbytes)} that are stored" if number else ""

    def sharing(self, entry: TensorInfo) -> list[str]:
        """Return the other tensors with bytes of this one.

        In files of ``torch.save``, tensors are views of storages.
        """
        if self.format != "torch" or entry.dtype is None:
            return []
        chunks = self.stored_chunks(entry)
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

    def value(self, entry: TensorInfo) -> Any:
        """Load a non-tensor value with torch.

        Raises:
            UnsafePickleError: it needs more than ``torch.load(weights_only=True)`` allows.
            UnsupportedError: its text would be many times longer than what is stored.
        """
        from dcp_rs.tensors import pickles  # it imports torch

        first = self.index.first_chunk(self.numbers[entry.name])
        (data,) = self.index.read_bytes(
            [first], io="buffered", threads=1, verify=False, max_inflight_bytes=1 << 22
        )
        try:
            value = pickles.load(entry.name, data, weights_only=True)
        except UnsafePickleError as error:
            # The advice is for loads: no option of a listing runs a pickle.
            reason = str(error).partition(" Nothing was executed.")[0]
            raise UnsafePickleError(reason, tensor=entry.name) from error
        if not _is_short(value, 16 * len(data)):
            msg = (
                f"value {entry.name!r} repeats itself: it is much longer as text than the "
                f"{len(data):,} bytes that are stored"
            )
            raise UnsupportedError(msg, tensor=entry.name)
        return value

    def value_json(self, entry: TensorInfo) -> dict[str, Any]:
        """Return ``value`` if JSON can hold it, else its ``repr``, else the ``problem``."""
        if entry.dtype is not None:
            return {}
        try:
            return value_json(self.value(entry))
        except Exception as error:  # noqa: BLE001 - the methods of a forged value may raise anything
            return {"problem": _why_unshown(error)}

    def value_text(self, entry: TensorInfo, most: int) -> str:
        """Return a value, or why it cannot be shown, in one line; nothing for a tensor."""
        if entry.dtype is not None:
            return ""
        try:
            return value_text(self.value(entry), most)
        except Exception as error:  # noqa: BLE001 - the methods of a forged value may raise anything
            return f"({_why_unshown(error)})"


def value_json(value: Any) -> dict[str, Any]:
    """Return ``value`` if JSON can hold it, else its ``repr``."""
    try:
        json_text(value)
    except (TypeError, ValueError):
        return {"repr": repr(value)}
    return {"value": value}


def value_text(value: Any, most: int) -> str:
    """Return a value in one line of at most ``most`` characters of it."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def _nbytes(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _why_unshown(error: Exception) -> str:
    # ValueError: an integer of thousands of digits.
    if isinstance(error, DcpRsError | ValueError):
        return for_command_line(str(error))
    return f"it cannot be shown: {type(error).__name__}: {error}"


def _is_short(value: Any, most: int) -> bool:
    """Return whether a value has at most ``most`` parts and characters.

    A part counts once for each reference to it, before it is kept: a file of a few bytes may have
    millions.
    """
    todo = [value]
    while todo and most >= 0:
        part = todo.pop()
        if not isinstance(part, str | bytes | bytearray | dict | list | tuple | set | frozenset):
            continue
        most -= len(part)
        if most >= 0 and not isinstance(part, str | bytes | bytearray):
            todo += [*part.keys(), *part.values()] if isinstance(part, dict) else part
    return most >= 0
