"""The entries of a checkpoint, as far as a load has to know them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dcp_rs import _core
from dcp_rs.transfer.target import stored_dtype

__all__ = ["Entries", "EntryInfo", "IndexEntries"]


@dataclass(slots=True)
class EntryInfo:
    """An entry of a checkpoint.

    Attributes:
        name: the stored name.
        dtype: of a tensor; None for a value that is not a tensor.
        shape: of the whole tensor.
        index: its number in the index; -1 in metadata of others.
    """

    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    index: int = -1

    @property
    def is_bytes(self) -> bool:
        """Return whether it is a value and no tensor."""
        return self.dtype is None


class Entries(Collection[str], Protocol):
    """The stored names of a checkpoint, and what stands under each."""

    def describe(self, names: Sequence[str]) -> list[EntryInfo | None]:
        """Return the entry under each name, or None.

        Raises:
            UnsupportedError: a tensor has a dtype that this torch lacks.
        """


class IndexEntries(Collection[str]):
    """The entries of an index."""

    def __init__(self, index: _core.Index) -> None:
        self._index = index

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._index.find(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.names())

    def __len__(self) -> int:
        return self._index.tensor_count

    def describe(self, names: Sequence[str]) -> list[EntryInfo | None]:
        """Return the entry under each name, or None.

        Raises:
            UnsupportedError: a tensor has a dtype that this torch lacks.
        """
        found = zip(names, self._index.describe(names), strict=True)
        return [None if row is None else _entry(name, *row) for name, row in found]


def _entry(name: str, index: int, dtype: str | None, shape: tuple[int, ...]) -> EntryInfo:
    return EntryInfo(name, None if dtype is None else stored_dtype(name, dtype), shape, index)
