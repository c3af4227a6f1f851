"""A checkpoint as NumPy arrays. Only a non-tensor value imports torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from dcp_rs import _core
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.mapping import OpenCheckpoint, StoredSlice, TensorInfo
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

    Non-tensor values are read by ``torch.load``: the first one imports torch, and tensors within a
    value are torch tensors.

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

    def _tensor(self, tensor: int, entry: _core.TensorEntry) -> np.ndarray[Any, Any]:
        dtype, shape = self._element_dtype(entry.name, entry.dtype), entry.shape
        view = (
            self._view(tensor, dtype, shape)
            if entry.chunk_count == 1 and self._is_in_place
            else None
        )
        return (
            self._read(tensor, entry.name, dtype, [0] * len(shape), shape) if view is None else view
        )

    def _slice(self, tensor: int) -> ArraySlice:
        return ArraySlice(self, tensor)

    def _element_dtype(self, name: str, dtype: str | None) -> np.dtype[Any]:
        """Elements of the tensor ``name``, which is stored as ``dtype``. Warns where they are only bits."""
        found = numpy_dtype(dtype or "")
        if found is not None:
            return found
        bits = bits_dtype(dtype or "")
        if dtype not in self._warned:
            self._warned.add(dtype or "")
            warn_caller(
                f"tensor {name!r} is of dtype {dtype}, which NumPy lacks"
                + (
                    " without ml_dtypes (pip install ml_dtypes)"
                    if (dtype or "").startswith(("bfloat", "float8"))
                    else ""
                )
                + f": it comes as its bits, in {bits.name}"
            )
        return bits

    def _info(self, entry: _core.TensorEntry, nbytes: int) -> TensorInfo:
        dtype = None if entry.dtype is None else numpy_dtype(entry.dtype) or bits_dtype(entry.dtype)
        return TensorInfo(entry.name, dtype, entry.shape, entry.chunk_count, nbytes)

    def _view(
        self, tensor: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> np.ndarray[Any, Any] | None:
        """An array over the mapping of the one file that holds it; None where it does not lie so."""
        stored, chunk = self._index.chunks(tensor)[0], self._index.first_chunk(tensor)
        is_whole = stored.sizes == tuple(shape) and stored.length > 0
        if not is_whole or stored.offset % dtype.itemsize or not self._index.is_in_place(chunk):
            return None
        if self._options.verify is True:
            if self._index.is_view:
                return None
            self._index.verify_chunks([chunk], **self._options.engine())
        strides = self._index.chunk_strides(chunk)
        in_bytes = None if strides is None else [stride * dtype.itemsize for stride in strides]
        return np.ndarray(
            tuple(shape), dtype, memoryview(self._mapped(stored.file)), stored.offset, in_bytes
        )

    def _read(
        self,
        tensor: int,
        name: str,
        dtype: np.dtype[Any],
        offsets: list[int],
        sizes: tuple[int, ...],
    ) -> np.ndarray[Any, Any]:
        """A region of an array, in new memory."""
        self._check_held(tensor, name, offsets, sizes)
        made = np.empty(sizes, dtype)
        strides = [stride // dtype.itemsize for stride in made.strides]
        if made.size:
            fill = _core.Fill(tensor, offsets, sizes, made.ctypes.data, strides)
            self._counts.add(self._index.read_regions([fill], **self._options.engine()))
        return made

    def __repr__(self) -> str:
        return f"NumpyCheckpoint({self._facts()})"


class ArraySlice(StoredSlice[Any]):
    """A stored array, to be indexed by integers, slices and ``...``, as in NumPy.

    Each indexing reads what it returns, and no more than its bounding rectangle.
    """

    def __init__(self, checkpoint: NumpyCheckpoint, tensor: int) -> None:
        super().__init__(checkpoint, tensor)
        self.dtype = checkpoint._element_dtype(self._name, self._stored)

    def __repr__(self) -> str:
        return f"ArraySlice({self._name!r}, {self.dtype.name}, shape={list(self.shape)})"
