"""Open checkpoints as NumPy arrays, without torch but for non-tensor values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dcp_rs import _core
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.mapping import OpenCheckpoint, StoredSlice, TensorInfo, check_held
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.elements import bits_dtype, numpy_dtype

__all__ = ["ArraySlice", "NumpyCheckpoint"]


class NumpyCheckpoint(OpenCheckpoint["ArraySlice"]):
    """A checkpoint that is open for reading, as NumPy arrays.

    :func:`dcp_rs.open` makes it with ``framework="np"``. An array that is stored in one piece is a
    view of a private mapping of its file. It is read when you touch it, and writing to it changes
    no file. An array in several pieces is read into new memory. Arrays stay valid after
    :meth:`close`.

    Dtypes that NumPy lacks are those of ``ml_dtypes``, if it is installed and has them. Otherwise
    you get the bits as unsigned integers, and one warning for each dtype.

    ``torch.load`` reads non-tensor values: the first one imports torch, and tensors within a value
    are torch tensors.

    Example:
        ```python
        checkpoint = dcp_rs.open("ckpt", framework="np")
        assert checkpoint["model.weight"].shape == (3, 2)
        ```
    """

    def __init__(self, index: _core.Index, *, options: ReadOptions) -> None:
        super().__init__(index, options)
        self._warned: set[str] = set()

    def _value(self, name: str, data: bytes) -> Any:
        from dcp_rs.tensors import pickles  # it imports torch

        return pickles.load(name, data, weights_only=True)

    def _slice(self, number: int) -> ArraySlice:
        return ArraySlice(self, number)

    def _element_dtype(self, name: str, dtype: str | None) -> np.dtype[Any]:
        """Return the dtype in NumPy. Warn if it is only the bits."""
        dtype = dtype or ""
        found = numpy_dtype(dtype)
        if found is not None:
            return found
        bits = bits_dtype(dtype)
        if dtype not in self._warned:
            self._warned.add(dtype)
            is_young = dtype.startswith(("bfloat", "float8"))
            without = " without ml_dtypes (pip install ml_dtypes)" if is_young else ""
            warn_caller(
                f"tensor {name!r} is of dtype {dtype}, which NumPy lacks{without}: it comes as its "
                f"bits, in {bits.name}"
            )
        return bits

    def _info(self, entry: _core.TensorEntry, nbytes: int) -> TensorInfo:
        dtype = None if entry.dtype is None else numpy_dtype(entry.dtype) or bits_dtype(entry.dtype)
        return TensorInfo(entry.name, dtype, entry.shape, entry.chunk_count, nbytes)

    def _over(
        self,
        mapping: _core.FileMapping,
        chunk: _core.ChunkEntry,
        dtype: np.dtype[Any],
        strides: tuple[int, ...] | None,
    ) -> np.ndarray[Any, Any] | None:
        if chunk.offset % dtype.itemsize:
            return None
        in_bytes = None if strides is None else [stride * dtype.itemsize for stride in strides]
        return np.ndarray(chunk.sizes, dtype, memoryview(mapping), chunk.offset, in_bytes)

    def _read(
        self,
        number: int,
        name: str,
        dtype: np.dtype[Any],
        offsets: Sequence[int],
        sizes: Sequence[int],
    ) -> np.ndarray[Any, Any]:
        check_held(self._index, [(number, offsets, sizes)])
        made = np.empty(sizes, dtype)
        strides = [stride // dtype.itemsize for stride in made.strides]
        if made.size:
            fill = _core.Fill(number, offsets, sizes, made.ctypes.data, strides)
            self._counts.add(self._index.read_regions([fill], **self._options.engine()))
        return made

    def __repr__(self) -> str:
        return f"NumpyCheckpoint({self._facts()})"


class ArraySlice(StoredSlice[Any]):
    """A stored array, to be indexed by integers, slices and ``...`` as in NumPy.

    Each indexing reads no more than its bounding rectangle.
    """

    def __init__(self, checkpoint: NumpyCheckpoint, number: int) -> None:
        super().__init__(checkpoint, number)
        self.dtype = checkpoint._element_dtype(self._name, self._stored)

    def __repr__(self) -> str:
        return f"ArraySlice({self._name!r}, {self.dtype.name}, shape={list(self.shape)})"
