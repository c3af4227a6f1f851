"""A checkpoint as a mapping of FQN to torch's tensor or value, read when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs._progress import Counts
from dcp_rs.checkpoint.mapping import OpenCheckpoint, StoredSlice, TensorInfo
from dcp_rs.checkpoint.stream import stream
from dcp_rs.errors import PlanError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors import pickles
from dcp_rs.tensors.dtypes import REQUIRES_GRAD, can_require_grad
from dcp_rs.tensors.flatten import number_parameters
from dcp_rs.tensors.nesting import Container, TreePath, nest
from dcp_rs.transfer.load import fill
from dcp_rs.transfer.target import Target, stored_dtype

__all__ = ["Checkpoint", "TensorSlice", "containers_of", "read_whole"]


def read_whole(
    index: _core.Index,
    numbers: Iterable[int],
    device: torch.device | str | int,
    options: ReadOptions,
    counts: Counts | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors with these numbers, by name, in that order.

    Raises:
        PlanError: the checkpoint does not hold all of one.
    """
    wanted: list[tuple[int, str, torch.dtype, tuple[int, ...]]] = []
    for number in numbers:
        entry = index.tensor(number)
        wanted.append((number, entry.name, stored_dtype(entry.name, entry.dtype), entry.shape))
    # Before there is memory for them: a shape may be of any size, what chunks hold is bounded by
    # their files.
    for place, at, lacking in index.check_regions(
        [(n, [0] * len(shape), shape) for n, _, _, shape in wanted], []
    ):
        name = wanted[place][1]
        msg = (
            f"tensor {name!r}: the checkpoint does not hold {list(lacking)} elements at {list(at)}"
        )
        raise PlanError(msg, path=index.path, tensor=name)
    targets = [
        Target(
            number, [0] * len(shape), torch.empty(shape, dtype=dtype, device=device), name, dtype
        )
        for number, name, dtype, shape in wanted
    ]
    fill(index, targets, options, counts)
    return {target.name: target.tensor for target in targets}


class Checkpoint(OpenCheckpoint["TensorSlice"]):
    """A checkpoint that is open for reading: a mapping from names to tensors and values.

    :func:`dcp_rs.open` makes it. On the CPU, a tensor that is stored in one piece is a view of a
    private mapping of its file. It is read when you touch it, and writing to it changes no file.
    Two look-ups of one name share memory. A tensor in several pieces is read into new memory.
    Tensors stay valid after :meth:`close`.

    Example:
        ```python
        checkpoint = dcp_rs.open("ckpt")
        print(list(checkpoint), checkpoint["step"])
        ```
    """

    def __init__(
        self,
        index: _core.Index,
        *,
        device: torch.device | str | int = "cpu",
        weights_only: bool = True,
        options: ReadOptions,
    ) -> None:
        super().__init__(index, options)
        self._device = torch.device(device)
        self._weights_only = weights_only

    def _value(self, name: str, data: bytes) -> Any:
        return pickles.load(name, data, weights_only=self._weights_only)

    def _tensor(self, tensor: int, entry: _core.TensorEntry) -> torch.Tensor:
        dtype, shape = stored_dtype(entry.name, entry.dtype), entry.shape
        if self._device.type == "meta":
            requires_grad = can_require_grad(dtype) and bool(entry.flags & REQUIRES_GRAD)
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)
        if self._is_in_place and entry.chunk_count == 1:
            return self._view(tensor, dtype, shape)
        return self._read(tensor, entry.name, dtype, [0] * len(shape), shape)

    def _slice(self, tensor: int) -> TensorSlice:
        return TensorSlice(self, tensor)

    @property
    def _is_in_place(self) -> bool:
        return self._device.type == "cpu" and super()._is_in_place

    def _info(self, entry: _core.TensorEntry, nbytes: int) -> TensorInfo:
        dtype = None if entry.dtype is None else stored_dtype(entry.name, entry.dtype)
        return TensorInfo(entry.name, dtype, torch.Size(entry.shape), entry.chunk_count, nbytes)

    def state_dict(self, *, copy: bool = False) -> dict[str, Any]:
        """Return all entries, nested as they were saved.

        ``dict``, ``OrderedDict``, ``Counter`` and ``defaultdict`` come back as such, and other
        mappings as a ``dict``. Checkpoints of stock DCP have text for keys, except for numbers in
        an optimizer's state, and lack empty dicts.

        Args:
            copy: read everything at once, each tensor into memory of its own. By default tensors
                on the CPU are views of the files, if they can be.

        Returns:
            A nested dict of tensors and values.

        Raises:
            PlanError: the paths in the checkpoint contradict each other.

        Example:
            ```python
            state = dcp_rs.open("ckpt").state_dict()
            model.load_state_dict(state["model"])
            ```
        """
        if self._device.type == "meta" or (self._is_in_place and not copy):
            flat = {name: self[name] for name in self}
        else:  # one load for all, and not one for each
            self._check_open()
            numbers = [
                number
                for number in range(self._index.tensor_count)
                if not self._index.tensor(number).is_bytes
            ]
            tensors = read_whole(self._index, numbers, self._device, self._options, self._counts)
            flat = {name: tensors[name] if name in tensors else self[name] for name in self}
        index = self._index
        root, containers, positions = index.planner_root(), containers_of(index), index.positions()
        rest = root if isinstance(root, dict) else {}
        paths = [
            index.planner_path(i) or _path_in(rest, name) or (name,) for i, name in enumerate(flat)
        ]
        nested = nest(zip(positions, paths, flat.values(), strict=True), containers or ())
        if containers is None:
            number_parameters(nested)
        return nested

    def stream(self, device: torch.device | str | None = None) -> Iterator[tuple[str, Any]]:
        """Iterate over all entries in the order of the files, which is the fastest order.

        It reads ahead, within ``max_inflight_bytes``. Every tensor has memory of its own. On a
        device, use a tensor on the stream that was current when you asked the iterator for it.
        Close a stream that you do not read to its end.

        Args:
            device: where the tensors go. Default: the checkpoint's device.

        Returns:
            An iterator over (name, tensor or value).

        Raises:
            CorruptDataError: a data file is missing or damaged.

        Example:
            ```python
            for name, value in dcp_rs.open("ckpt").stream():
                print(name, value)
            ```
        """
        self._check_open()
        device = self._device if device is None else torch.device(device)
        if torch.device(device).type == "meta":
            raise ValueError("on meta there is nothing to stream: state_dict() gives the skeleton")
        return stream(
            self._index, torch.device(device), self._options, self.__getitem__, counts=self._counts
        )

    def __repr__(self) -> str:
        return f"Checkpoint({self._facts()}, device={str(self._device)!r})"

    def _map(self, chunk: _core.ChunkEntry) -> torch.Tensor:
        return torch.frombuffer(
            self._mapped(chunk.file), dtype=torch.uint8, count=chunk.length, offset=chunk.offset
        )

    def _view(self, tensor: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor over the mapping of the one file that holds it."""
        chunk, number = self._index.chunks(tensor)[0], self._index.first_chunk(tensor)
        if chunk.sizes != tuple(shape) or chunk.length == 0 or not self._index.is_in_place(number):
            return self._read(tensor, self._index.name(tensor), dtype, [0] * len(shape), shape)
        if self._options.verify is True:
            if (
                self._index.is_view
            ):  # others may be parts of the same blocks: those that this one touches are checked
                return self._read(tensor, self._index.name(tensor), dtype, [0] * len(shape), shape)
            self._index.verify_chunks([number], **self._options.engine())
        flat = self._map(chunk)
        strides = self._index.chunk_strides(number)
        if chunk.offset % dtype.itemsize:
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
        self._check_held(tensor, name, offsets, sizes)
        result = torch.empty(sizes, dtype=dtype, device=self._device)
        fill(
            self._index, [Target(tensor, offsets, result, name, dtype)], self._options, self._counts
        )
        return result


class TensorSlice(StoredSlice[torch.Tensor]):
    """A stored tensor, to be indexed by integers, slices and ``...``, as in torch.

    Each indexing reads what it returns, and no more than its bounding rectangle.
    """

    def __init__(self, checkpoint: Checkpoint, tensor: int) -> None:
        super().__init__(checkpoint, tensor)
        self.dtype = stored_dtype(self._name, self._stored)
        self.shape = torch.Size(self.shape)

    def __repr__(self) -> str:
        return f"TensorSlice({self._name!r}, {str(self.dtype).removeprefix('torch.')}, shape={list(self.shape)})"


def containers_of(index: _core.Index) -> list[Container] | None:
    """The containers that an index knows of beside paths; None where it does not know which there were."""
    nesting = index.nesting()
    return None if nesting is None else [Container(*container) for container in nesting]


def _path_in(root: Mapping[str, Any], name: str) -> TreePath | None:
    path = root.get(name)
    return (
        path
        if isinstance(path, tuple) and path and all(type(part) in (str, int) for part in path)
        else None
    )
