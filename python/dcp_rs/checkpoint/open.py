"""``dcp_rs.open``: a checkpoint as a mapping of FQN to tensor or value, read when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from dcp_rs import _core, _torch
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.checkpoint.stream import stream
from dcp_rs.errors import DcpRsError, PlanError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors import objects
from dcp_rs.tensors.trees import number_parameters
from dcp_rs.transfer.load import fill
from dcp_rs.transfer.target import Target, stored_dtype

__all__ = ["Checkpoint", "ChunkInfo", "TensorInfo", "TensorSlice", "open_checkpoint"]


@dataclass(frozen=True)
class TensorInfo:
    """What is stored under a name.

    Attributes:
        name: FQN.
        dtype: element type; None for a non-tensor value.
        shape: sizes of the whole tensor; empty for a non-tensor value.
        chunks: how many pieces it is stored in.
        nbytes: bytes of all pieces.
    """

    name: str
    dtype: torch.dtype | None
    shape: torch.Size
    chunks: int
    nbytes: int


@dataclass(frozen=True)
class ChunkInfo:
    """A stored piece of a tensor: ``sizes`` elements from ``offsets``, at ``nbytes`` bytes from byte ``offset`` of ``file``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


class Checkpoint(Mapping[str, Any]):
    """A checkpoint that is open for reading. Made by :func:`dcp_rs.open`.

    On the CPU a tensor that is stored in one piece is a view of a private mapping of its file: nothing is read until it is touched,
    and writing to it changes no file. (Two look-ups of one name share memory.) A tensor stored in several pieces is put together in new memory. Tensors stay valid after
    :meth:`close`.
    """

    def __init__(
        self, index: _core.Index, *, device: torch.device | str = "cpu", weights_only: bool = True, options: ReadOptions
    ) -> None:
        self._index = index
        self._device = torch.device(device)
        self._weights_only = weights_only
        self._options = options
        self._files: dict[int, _core.FileMapping] = {}
        self._closed = False

    @property
    def path(self) -> str:
        """The file that the index came from."""
        return os.fspath(self._index.path)

    @property
    def source(self) -> str:
        """What the data files are: ``dcp-rs``, ``safetensors`` or ``dcp``."""
        return self._index.source

    @property
    def save_id(self) -> str:
        """32 hexadecimal digits that identify the save."""
        return self._index.save_id

    def __getitem__(self, fqn: str) -> Any:
        """The tensor, or the value, with this name.

        Raises:
            KeyError: there is none.
            CorruptDataError: a data file is missing or damaged.
            UnsafePickleError: a value that needs more than ``weights_only=True`` allows.
        """
        tensor = self._find(fqn)
        name, is_bytes, dtype, shape, _, chunks = self._index.tensor(tensor)
        if is_bytes:
            (data,) = self._index.read_bytes([self._index.first_chunk(tensor)], **self._options.engine())
            return objects.unwrap(objects.load(name, data, weights_only=self._weights_only))
        torch_dtype = stored_dtype(name, dtype)
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

    def info(self, fqn: str) -> TensorInfo:
        """What is stored under ``fqn``, without reading it."""
        tensor = self._find(fqn)
        name, is_bytes, dtype, shape, _, chunks = self._index.tensor(tensor)
        nbytes = sum(length for _, _, length, _, _ in self._index.chunks(tensor))
        return TensorInfo(name, None if is_bytes else stored_dtype(name, dtype), torch.Size(shape), chunks, nbytes)

    def chunks(self, fqn: str) -> list[ChunkInfo]:
        """The pieces that ``fqn`` is stored in, in order of their offsets."""
        files = self._index.files()
        return [
            ChunkInfo(offsets, sizes, files[file][0], offset, length)
            for file, offset, length, offsets, sizes in self._index.chunks(self._find(fqn))
        ]

    def state_dict(self) -> dict[str, Any]:
        """Everything, nested as it was saved. Keys are text, as DCP keeps them; those of an optimizer's state are its numbers again."""
        if self._device.type == "cpu":
            flat = {name: self[name] for name in self}
        else:  # one load for all, and not one for each
            streamed = dict(self.stream())
            flat = {name: streamed[name] for name in self}
        root = self._index.planner_root()
        rest = root if isinstance(root, dict) else {}
        paths = {name: self._index.planner_path(i) or rest.get(name) or (name,) for i, name in enumerate(flat)}
        nested = _torch.unflatten(flat, paths)
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
        return stream(
            self._index, self._device if device is None else torch.device(device), self._options, self.__getitem__
        )

    def close(self) -> None:
        """Lets go of the files. Tensors that were handed out stay valid."""
        self._closed = True
        self._files = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.names())

    def __len__(self) -> int:
        return self._index.tensor_count

    def __contains__(self, fqn: object) -> bool:
        return isinstance(fqn, str) and self._index.find(fqn) is not None

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, {len(self)} entries, device={str(self._device)!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            msg = f"the checkpoint {self.path} is closed"
            raise DcpRsError(msg, path=self.path)

    def _find(self, fqn: str) -> int:
        self._check_open()
        tensor = self._index.find(fqn)
        if tensor is None:
            raise KeyError(fqn)
        return tensor

    def chunk_view(self, tensor: int, chunk: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A contiguous tensor over the mapping of the file that holds a chunk; None where the chunk does not lie so."""
        file, offset, length, _, sizes = self._index.chunks(tensor)[chunk]
        number = self._index.first_chunk(tensor) + chunk
        if length == 0 or offset % dtype.itemsize or self._index.chunk_strides(number) or self._index.has_signs(number):
            return None
        return self._map(file, offset, length).view(dtype).view(sizes)

    def _map(self, file: int, offset: int, length: int) -> torch.Tensor:
        mapping = self._files.get(file)
        if mapping is None:
            # Of two threads that get here at once, both must see one memory.
            mapping = self._files.setdefault(file, self._index.map_file(file))
        return torch.frombuffer(mapping, dtype=torch.uint8, count=length, offset=offset)

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

    def get_shape(self) -> list[int]:
        """The sizes, as ``safetensors`` slices give them."""
        return list(self.shape)

    def __getitem__(self, key: Any) -> torch.Tensor:
        """The elements that ``key`` selects.

        Raises:
            IndexError: out of range, or too many indices.
            ValueError: a slice with a negative step.
            TypeError: another kind of index.
        """
        offsets, sizes, local = _region(key, self.shape)
        checkpoint = self._checkpoint
        checkpoint._find(self._name)
        if self._chunks == 1 and checkpoint._device.type == "cpu":
            view: torch.Tensor = checkpoint[self._name]
            return view[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))][local]
        return checkpoint._read(self._tensor, self._name, self.dtype, offsets, tuple(sizes))[local]


def _region(key: Any, shape: torch.Size) -> tuple[list[int], list[int], tuple[int | slice, ...]]:
    """The bounding rectangle of a selection, and the selection within it."""
    keys = list(key) if isinstance(key, tuple) else [key]
    ellipses = [i for i, k in enumerate(keys) if k is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    given = len(keys) - len(ellipses)
    if given > len(shape):
        msg = f"too many indices for a tensor of {len(shape)} dimensions: {given}"
        raise IndexError(msg)
    fill = [slice(None)] * (len(shape) - given)
    at = ellipses[0] if ellipses else len(keys)
    keys[at : at + 1] = fill
    offsets: list[int] = []
    sizes: list[int] = []
    local: list[int | slice] = []
    for dim, (k, size) in enumerate(zip(keys, shape, strict=True)):
        if isinstance(k, slice):
            start, stop, step = k.indices(size)
            if step < 0:
                raise ValueError("step must be greater than zero")
            extent = max(0, stop - start)
            offsets.append(start if extent else 0)
            sizes.append(extent)
            local.append(slice(None, None, step))
        elif hasattr(k, "__index__") and not isinstance(k, bool):
            position = k.__index__()
            if not -size <= position < size:
                msg = f"index {position} is out of bounds for dimension {dim} with size {size}"
                raise IndexError(msg)
            offsets.append(position % size)
            sizes.append(1)
            local.append(0)
        else:
            msg = f"indices are integers, slices and '...', not {type(k).__name__}"
            raise TypeError(msg)
    return offsets, sizes, tuple(local)


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    weights_only: bool = True,
    allow_external: bool = False,
    **read_options: Any,
) -> Checkpoint:
    """Opens a checkpoint for reading by name: a mapping of FQN to tensor or value.

    Args:
        path: a checkpoint: a folder of this package, of Hugging Face or of stock DCP, or a ``.safetensors`` file.
        device: where tensors go.
        weights_only: refuse values that need more than ``torch.load(weights_only=True)`` allows.
        allow_external: open data files outside the folder, if the index names any.
        read_options: see :class:`dcp_rs.ReadOptions`.

    Raises:
        CheckpointNotFoundError, CorruptIndexError, UnsupportedError: see :mod:`dcp_rs.errors`.
    """
    options = ReadOptions(**read_options)
    index = open_index(path, rank=None, allow_external=allow_external, verify=options.verify)
    return Checkpoint(index, device=device, weights_only=weights_only, options=options)
