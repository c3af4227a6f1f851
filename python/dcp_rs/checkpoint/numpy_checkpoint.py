"""Open checkpoints as NumPy arrays, without torch but for non-tensor values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dcp_rs import _core
from dcp_rs._reports import short_repr
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.mapping import OpenCheckpoint, check_held
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.elements import bits_dtype, numpy_dtype


class NumpyCheckpoint(OpenCheckpoint["np.ndarray[Any, Any]"]):
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

    def __init__(
        self,
        index: _core.Index,
        *,
        options: ReadOptions,
        open_again: Callable[[], OpenCheckpoint[np.ndarray[Any, Any]]] | None = None,
    ) -> None:
        super().__init__(index, options, open_again)
        self._warned: set[str] = set()

    def _value(self, name: str, data: bytes) -> Any:
        from dcp_rs.tensors import pickles  # it imports torch

        return pickles.load(name, data, weights_only=True)

    def _dtype(self, entry: _core.TensorEntry) -> np.dtype[Any]:
        found = numpy_dtype(entry.dtype or "")
        return bits_dtype(entry.dtype or "") if found is None else found

    def _view(self, number: int, entry: _core.TensorEntry) -> Any:
        """Warn if NumPy lacks the dtype. Each read asks for a view first."""
        dtype = entry.dtype or ""
        if numpy_dtype(dtype) is None and dtype not in self._warned:
            self._warned.add(dtype)
            is_young = dtype.startswith(("bfloat", "float8"))
            without = " without ml_dtypes (pip install ml_dtypes)" if is_young else ""
            warn_caller(
                f"tensor {entry.name!r} is of dtype {dtype}, which NumPy lacks{without}: it comes "
                f"as its bits, in {bits_dtype(dtype).name}"
            )
        return super()._view(number, entry)

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
        self, number: int, entry: _core.TensorEntry, offsets: Sequence[int], sizes: Sequence[int]
    ) -> np.ndarray[Any, Any]:
        check_held(self._index, [(number, offsets, sizes)])
        made = np.empty(sizes, self._dtype(entry))
        strides = [stride // made.itemsize for stride in made.strides]
        if made.size:
            fill = _core.Fill(number, offsets, sizes, made.ctypes.data, strides)
            self._counts.add(self._index.read_regions([fill], **self._options.engine()))
        return made

    def __repr__(self) -> str:
        return short_repr(self, self._facts())
