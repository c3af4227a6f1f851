"""A checkpoint as NumPy arrays, without torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from dcp_rs import _core
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.elements import bits_dtype, numpy_dtype, safetensors_name
from dcp_rs.checkpoint.mapping import OpenCheckpoint, TensorInfo
from dcp_rs.checkpoint.values import load_value, unwrap
from dcp_rs.errors import PlanError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.boxes import selection

__all__ = ["ArraySlice", "NumpyCheckpoint"]


class NumpyCheckpoint(OpenCheckpoint):
    """A checkpoint that is open for reading, as NumPy arrays. Made by :func:`dcp_rs.open` with ``framework="np"``.

    An array that is stored in one piece is a view of a private mapping of its file: nothing is read until it is touched, and writing to it changes
    no file. One that is stored in several pieces is put together in new memory. Arrays stay valid after :meth:`close`.

    Of dtypes that NumPy lacks arrays are those of ``ml_dtypes`` where it is installed and has them; else they are the bits of the elements,
    as unsigned integers, of which a warning says so once for each dtype.
    """

    def __init__(self, index: _core.Index, *, options: ReadOptions) -> None:
        super().__init__(index)
        self._options = options
        self._warned: set[str] = set()

    def __getitem__(self, fqn: str) -> Any:
        """The array, or the value, with this name.

        Raises:
            EntryNotFoundError: there is none.
            CorruptDataError: a data file is missing or damaged.
            UnsafePickleError: a value that needs torch, or more than plain types and tensors.
        """
        tensor = self._find(fqn)
        name, is_bytes, dtype, shape, _, chunks = self._index.tensor(tensor)
        if is_bytes:
            (data,) = self._index.read_bytes([self._index.first_chunk(tensor)], **self._options.engine())
            return unwrap(load_value(name, data))
        made = self.element_dtype(name, dtype)
        if chunks == 1:
            view = self._view(tensor, made, shape)
            if view is not None:
                return view
        return self._read(tensor, name, made, [0] * len(shape), shape)

    def get_slice(self, fqn: str) -> ArraySlice:
        """An object to index like the array ``fqn``: ``ckpt.get_slice("emb")[10:20, :]`` reads only what it returns."""
        tensor = self._find(fqn)
        if self._index.tensor(tensor)[1]:
            msg = f"{fqn!r} is not a tensor"
            raise TypeError(msg)
        return ArraySlice(self, tensor)

    def element_dtype(self, name: str, dtype: str | None) -> np.dtype[Any]:
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

    def _info(self, name: str, dtype: str | None, shape: tuple[int, ...], chunks: int, nbytes: int) -> TensorInfo:
        made = None if dtype is None else numpy_dtype(dtype) or bits_dtype(dtype)
        return TensorInfo(name, made, tuple(shape), chunks, nbytes)

    def _view(self, tensor: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any] | None:
        """An array over the mapping of the one file that holds it; None where it does not lie so."""
        file, offset, length, _, sizes = self._index.chunks(tensor)[0]
        chunk = self._index.first_chunk(tensor)
        if tuple(sizes) != tuple(shape) or length == 0 or offset % dtype.itemsize or self._index.has_signs(chunk):
            return None
        if self._options.verify:
            self._index.verify_chunks([chunk], **self._options.engine())
        strides = self._index.chunk_strides(chunk)
        in_bytes = None if strides is None else [stride * dtype.itemsize for stride in strides]
        return np.ndarray(tuple(shape), dtype, memoryview(self._mapped(file)), offset, in_bytes)

    def _read(
        self, tensor: int, name: str, dtype: np.dtype[Any], offsets: list[int], sizes: tuple[int, ...]
    ) -> np.ndarray[Any, Any]:
        """A region of an array, in new memory."""
        # Before there is memory for it: a shape may be of any size, what chunks hold is bounded by their files.
        for _, at, lacking in self._index.check_regions([(tensor, offsets, sizes)], []):
            msg = f"tensor {name!r}: the checkpoint does not hold {list(lacking)} elements at {list(at)}"
            raise PlanError(msg, path=self.path, tensor=name)
        made = np.empty(sizes, dtype)
        strides = [stride // dtype.itemsize for stride in made.strides]
        if made.size:
            self._index.read_regions([(tensor, offsets, sizes, made.ctypes.data, strides)], **self._options.engine())
        return made

    def __repr__(self) -> str:
        return f"NumpyCheckpoint({self._facts()})"


class ArraySlice:
    """A stored array, to be indexed by integers, slices and ``...``, as in NumPy.

    Each indexing reads what it returns, and no more than its bounding rectangle.
    """

    def __init__(self, checkpoint: NumpyCheckpoint, tensor: int) -> None:
        self._checkpoint = checkpoint
        self._tensor = tensor
        self._name, _, dtype, self.shape, _, self._chunks = checkpoint._index.tensor(tensor)
        self._stored = dtype or ""
        self.dtype = checkpoint.element_dtype(self._name, dtype)

    def get_shape(self) -> list[int]:
        """The sizes, as ``safetensors`` slices give them."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """What a header of safetensors calls the dtype, as its slices give it; torch's name of one that it lacks."""
        return safetensors_name(self._stored)

    def __getitem__(self, key: Any) -> Any:
        """The elements that ``key`` selects.

        Raises:
            IndexError: out of range, or too many indices.
            ValueError: a slice with a negative step.
            TypeError: another kind of index.
        """
        offsets, sizes, local = selection(key, self.shape)
        checkpoint = self._checkpoint
        checkpoint._find(self._name)
        if self._chunks == 1:
            whole = checkpoint[self._name]
            return whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))][local]
        return checkpoint._read(self._tensor, self._name, self.dtype, offsets, tuple(sizes))[local]

    def __repr__(self) -> str:
        return f"ArraySlice({self._name!r}, {self.dtype.name}, shape={list(self.shape)})"
