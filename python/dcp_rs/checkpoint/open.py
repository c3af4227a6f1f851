"""A checkpoint as a mapping of FQN to torch's tensor or value, read when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs.checkpoint.elements import safetensors_name
from dcp_rs.checkpoint.mapping import OpenCheckpoint, TensorInfo
from dcp_rs.checkpoint.stream import stream
from dcp_rs.checkpoint.values import unwrap
from dcp_rs.errors import PlanError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors import objects
from dcp_rs.tensors.boxes import selection
from dcp_rs.tensors.dtypes import NAMES, REQUIRES_GRAD
from dcp_rs.tensors.nesting import Container, TreePath, nest
from dcp_rs.tensors.trees import number_parameters
from dcp_rs.transfer.load import fill
from dcp_rs.transfer.target import Target, stored_dtype

__all__ = ["Checkpoint", "TensorSlice", "containers_of"]


class Checkpoint(OpenCheckpoint):
    """A checkpoint that is open for reading. Made by :func:`dcp_rs.open`.

    On the CPU a tensor that is stored in one piece is a view of a private mapping of its file: nothing is read until it is touched,
    and writing to it changes no file. (Two look-ups of one name share memory.) A tensor stored in several pieces is put together in new memory. Tensors stay valid after
    :meth:`close`.
    """

    def __init__(
        self,
        index: _core.Index,
        *,
        device: torch.device | str | int = "cpu",
        weights_only: bool = True,
        options: ReadOptions,
    ) -> None:
        super().__init__(index)
        self._device = torch.device(device)
        self._weights_only = weights_only
        self._options = options

    def __getitem__(self, fqn: str) -> Any:
        """The tensor, or the value, with this name.

        Raises:
            EntryNotFoundError: there is none.
            CorruptDataError: a data file is missing or damaged.
            UnsafePickleError: a value that needs more than ``weights_only=True`` allows.
        """
        tensor = self._find(fqn)
        name, is_bytes, dtype, shape, flags, chunks = self._index.tensor(tensor)
        if is_bytes:
            (data,) = self._index.read_bytes([self._index.first_chunk(tensor)], **self._options.engine())
            return unwrap(objects.load(name, data, weights_only=self._weights_only))
        torch_dtype = stored_dtype(name, dtype)
        if self._device.type == "meta":
            may_require = torch_dtype.is_floating_point or torch_dtype.is_complex
            return torch.empty(
                shape, dtype=torch_dtype, device="meta", requires_grad=may_require and bool(flags & REQUIRES_GRAD)
            )
        if self._device.type == "cpu" and chunks == 1:
            return self._view(tensor, torch_dtype, shape)
        return self._read(tensor, name, torch_dtype, [0] * len(shape), shape)

    def get_slice(self, fqn: str) -> TensorSlice:
        """An object to index like the tensor ``fqn``: ``ckpt.get_slice("emb")[10:20, :]`` reads only what it returns."""
        tensor = self._find(fqn)
        if self._index.tensor(tensor)[1]:
            msg = f"{fqn!r} is not a tensor"
            raise TypeError(msg)
        return TensorSlice(self, tensor)

    def _info(self, name: str, dtype: str | None, shape: tuple[int, ...], chunks: int, nbytes: int) -> TensorInfo:
        return TensorInfo(name, None if dtype is None else stored_dtype(name, dtype), torch.Size(shape), chunks, nbytes)

    def state_dict(self, *, copy: bool = False) -> dict[str, Any]:
        """Everything, nested as it was saved.

        Args:
            copy: every tensor has memory of its own, and all is read at once; else tensors on the CPU are views of the files, where they can be.

        What DCP itself saved has text for keys, as DCP keeps them, but for the numbers in an optimizer's state, and lacks empty dicts. Of mappings, ``dict``,
        ``OrderedDict``, ``Counter`` and ``defaultdict`` come back as what they were, others as a ``dict``.

        Raises:
            PlanError: the paths in the checkpoint contradict each other.
        """
        if self._device.type == "meta" or (self._device.type == "cpu" and not copy):
            flat = {name: self[name] for name in self}
        else:  # one load for all, and not one for each
            streamed = dict(self.stream())
            flat = {name: streamed[name] for name in self}
        index = self._index
        root, containers, positions = index.planner_root(), containers_of(index), index.positions()
        rest = root if isinstance(root, dict) else {}
        paths = [index.planner_path(i) or _path_in(rest, name) or (name,) for i, name in enumerate(flat)]
        nested = nest(zip(positions, paths, flat.values(), strict=True), containers or ())
        if containers is None:
            number_parameters(nested)
        return nested

    def stream(self, device: torch.device | str | None = None) -> Iterator[tuple[str, Any]]:
        """(name, tensor or value) in the order of the files, which is the fastest order to read in.

        What comes next is read ahead, within ``max_inflight_bytes``; every tensor has memory of its own. On a device, a tensor is safe to use on the
        stream that was current when the iterator was asked for it. A stream that is not read to its end should be closed.

        Args:
            device: where the tensors go; default: the checkpoint's.
        """
        self._check_open()
        device = self._device if device is None else torch.device(device)
        if torch.device(device).type == "meta":
            raise ValueError("on meta there is nothing to stream: state_dict() gives the skeleton")
        return stream(self._index, torch.device(device), self._options, self.__getitem__)

    def __repr__(self) -> str:
        return f"Checkpoint({self._facts()}, device={str(self._device)!r})"

    def chunk_view(self, tensor: int, chunk: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A contiguous tensor over the mapping of the file that holds a chunk; None where the chunk does not lie so."""
        file, offset, length, _, sizes = self._index.chunks(tensor)[chunk]
        number = self._index.first_chunk(tensor) + chunk
        if length == 0 or offset % dtype.itemsize or self._index.chunk_strides(number) or self._index.has_signs(number):
            return None
        return self._map(file, offset, length).view(dtype).view(sizes)

    def _map(self, file: int, offset: int, length: int) -> torch.Tensor:
        return torch.frombuffer(self._mapped(file), dtype=torch.uint8, count=length, offset=offset)

    def _view(self, tensor: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor over the mapping of the one file that holds it."""
        file, offset, length, _, sizes = self._index.chunks(tensor)[0]
        if tuple(sizes) != tuple(shape) or length == 0 or self._index.has_signs(self._index.first_chunk(tensor)):
            return self._read(tensor, self._index.name(tensor), dtype, [0] * len(shape), shape)
        if self._options.verify:
            self._index.verify_chunks([self._index.first_chunk(tensor)], **self._options.engine())
        flat = self._map(file, offset, length)
        strides = self._index.chunk_strides(self._index.first_chunk(tensor))
        if offset % dtype.itemsize:
            flat = flat.clone()  # foreign files need not align tensors
        if strides is None:
            return flat.view(dtype).view(shape)
        return flat.view(dtype).as_strided(shape, strides)

    def _read(
        self, tensor: int, name: str, dtype: torch.dtype, offsets: list[int], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """A region of a tensor, in new memory on the device."""
        if self._device.type == "meta":
            return torch.empty(sizes, dtype=dtype, device="meta")
        # Before there is memory for it: a shape may be of any size, what chunks hold is bounded by their files.
        for _, at, lacking in self._index.check_regions([(tensor, offsets, sizes)], []):
            msg = f"tensor {name!r}: the checkpoint does not hold {list(lacking)} elements at {list(at)}"
            raise PlanError(msg, path=self.path, tensor=name)
        result = torch.empty(sizes, dtype=dtype, device=self._device)
        fill(self._index, [Target(tensor, offsets, result, name, dtype)], self._options)
        return result


class TensorSlice:
    """A stored tensor, to be indexed by integers, slices and ``...``, as in torch.

    Each indexing reads what it returns, and no more than its bounding rectangle.
    """

    def __init__(self, checkpoint: Checkpoint, tensor: int) -> None:
        self._checkpoint = checkpoint
        self._tensor = tensor
        self._name, _, dtype, shape, _, self._chunks = checkpoint._index.tensor(tensor)
        self.dtype = stored_dtype(self._name, dtype)
        self.shape = torch.Size(shape)

    def __repr__(self) -> str:
        return f"TensorSlice({self._name!r}, {str(self.dtype).removeprefix('torch.')}, shape={list(self.shape)})"

    def get_shape(self) -> list[int]:
        """The sizes, as ``safetensors`` slices give them."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """What a header of safetensors calls the dtype, as its slices give it; torch's name of one that it lacks."""
        return safetensors_name(NAMES[self.dtype])

    def __getitem__(self, key: Any) -> torch.Tensor:
        """The elements that ``key`` selects.

        Raises:
            IndexError: out of range, or too many indices.
            ValueError: a slice with a negative step.
            TypeError: another kind of index.
        """
        offsets, sizes, local = selection(key, self.shape)
        checkpoint = self._checkpoint
        checkpoint._find(self._name)
        if self._chunks == 1 and checkpoint._device.type == "cpu":
            view: torch.Tensor = checkpoint[self._name]
            return view[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))][local]
        return checkpoint._read(self._tensor, self._name, self.dtype, offsets, tuple(sizes))[local]


def containers_of(index: _core.Index) -> list[Container] | None:
    """The containers that an index knows of beside paths; None where it does not know which there were."""
    nesting = index.nesting()
    return None if nesting is None else [Container(*container) for container in nesting]


def _path_in(root: Mapping[str, Any], name: str) -> TreePath | None:
    path = root.get(name)
    return path if isinstance(path, tuple) and path and all(type(part) in (str, int) for part in path) else None
