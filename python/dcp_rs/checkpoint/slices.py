"""A stored tensor that is indexed and not loaded: each indexing reads what it returns."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from dcp_rs.checkpoint.elements import safetensors_name, safetensors_shape
from dcp_rs.checkpoint.mapping import OpenCheckpoint
from dcp_rs.tensors.boxes import selection

__all__ = ["StoredSlice"]

T = TypeVar("T")


class StoredSlice(Generic[T]):
    """A tensor of an open checkpoint, to be indexed.

    Attributes:
        dtype: of the framework that reads.
        shape: sizes of the whole.
    """

    dtype: Any

    def __init__(self, checkpoint: OpenCheckpoint[Any], tensor: int) -> None:
        self._checkpoint = checkpoint
        self._tensor = tensor
        entry = checkpoint._index.tensor(tensor)
        self._name, self._stored, self._chunks = entry.name, entry.dtype, entry.chunk_count
        self.shape = entry.shape

    def get_shape(self) -> list[int]:
        """The sizes, as ``safetensors`` slices give them: of float4 the last one counts values, where ``shape`` counts torch's pairs."""
        return safetensors_shape(self._stored or "", self.shape)

    def get_dtype(self) -> str:
        """What a header of safetensors calls the dtype, as its slices give it; torch's name of one that it lacks."""
        return safetensors_name(self._stored or "")

    def __getitem__(self, key: Any) -> T:
        """The elements that ``key`` selects.

        Raises:
            IndexError: out of range, or too many indices.
            ValueError: a slice with a negative step.
            TypeError: another kind of index.
        """
        offsets, sizes, local = selection(key, self.shape)
        checkpoint = self._checkpoint
        checkpoint._find(self._name)
        index = checkpoint._index
        if self._chunks == 1 and checkpoint._is_in_place and index.is_in_place(index.first_chunk(self._tensor)):
            part = checkpoint[self._name][tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        else:
            part = checkpoint._read(self._tensor, self._name, self.dtype, offsets, tuple(sizes))
        found: T = part[local]
        return found
