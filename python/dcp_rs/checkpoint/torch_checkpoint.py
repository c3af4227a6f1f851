"""Open checkpoints as torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs._progress import Counts
from dcp_rs._reports import short_repr
from dcp_rs.checkpoint.mapping import OpenCheckpoint, check_held
from dcp_rs.checkpoint.metadata import planner_data
from dcp_rs.checkpoint.stream import stream
from dcp_rs.options import ReadOptions
from dcp_rs.tensors import pickles
from dcp_rs.tensors.dtypes import REQUIRES_GRAD, can_require_grad
from dcp_rs.tensors.flatten import number_parameters
from dcp_rs.tensors.memory import parse_device
from dcp_rs.tensors.nesting import TreePath, nest
from dcp_rs.transfer.load import fill
from dcp_rs.transfer.target import Target, stored_dtype


def read_whole(
    index: _core.Index,
    numbers: Iterable[int],
    device: torch.device | str | int,
    options: ReadOptions,
    counts: Counts | None = None,
) -> dict[str, torch.Tensor]:
    """Read whole tensors into new memory, and return them by name.

    Args:
        index: the checkpoint.
        numbers: the numbers of the tensors.
        device: the device of the new memory.
        options: how to read.
        counts: counters for the bytes.

    Raises:
        PlanError: the checkpoint does not hold all of a tensor.
        UnsupportedError: the tensors are much larger than the files.
    """
    numbers = list(numbers)
    index.check_expanded(numbers)
    entries = [(number, index.tensor(number)) for number in numbers]
    check_held(index, [(number, [0] * len(entry.shape), entry.shape) for number, entry in entries])
    targets = [Target.whole(number, entry, device) for number, entry in entries]
    fill(index, targets, options, counts)
    return {target.name: target.tensor for target in targets}


class Checkpoint(OpenCheckpoint[torch.Tensor]):
    """A checkpoint that is open for reading: a mapping from names to tensors and values.

    :func:`dcp_rs.open` makes it. On the CPU, a tensor that is stored in one piece is a view of a
    private mapping of its file. It is read when you touch it, and writing to it changes no file.
    With ``io="buffered"`` or ``"direct"`` nothing is mapped, and every tensor is read at once.
    Two look-ups of one name share memory. A tensor in several pieces is read into new memory.
    Tensors stay valid after :meth:`close`.

    Example:
        ```python
        checkpoint = dcp_rs.open("ckpt")
        print(list(checkpoint), checkpoint["step"])
        ```
    """

    _shape = torch.Size

    def __init__(
        self,
        index: _core.Index,
        *,
        device: torch.device | str | int = "cpu",
        weights_only: bool = True,
        options: ReadOptions,
        open_again: Callable[[], OpenCheckpoint[torch.Tensor]] | None = None,
    ) -> None:
        super().__init__(index, options, open_again)
        self._device = parse_device(device)
        self._weights_only = weights_only
        self._can_view &= self._device.type == "cpu"

    def _value(self, name: str, data: bytes) -> Any:
        return pickles.load(name, data, weights_only=self._weights_only)

    def _dtype(self, entry: _core.TensorEntry) -> torch.dtype:
        return stored_dtype(entry.name, entry.dtype)

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
        index = self._index
        if self._device.type == "meta" or (self._can_view and not copy):
            flat = {name: self[name] for name in self}
        else:  # one load for all tensors
            self._check_open()
            numbers = [n for n in range(index.tensor_count) if not index.tensor(n).is_bytes]
            tensors = read_whole(index, numbers, self._device, self._options, self._counts)
            flat = {name: tensors[name] if name in tensors else self[name] for name in self}
        (root, containers), positions = planner_data(index), index.positions()
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
            device: the device of the tensors. Default: the checkpoint's device.

        Returns:
            An iterator over (name, tensor or value).

        Raises:
            CorruptDataError: a data file is missing or damaged.
            PlanError: the checkpoint does not hold all of a tensor.

        Example:
            ```python
            for name, value in dcp_rs.open("ckpt").stream():
                print(name, value)
            ```
        """
        self._check_open()
        device = self._device if device is None else parse_device(device)
        if device.type == "meta":
            raise ValueError("on meta there is nothing to stream: state_dict() gives the skeleton")
        return stream(self._index, device, self._options, self.__getitem__, counts=self._counts)

    def __repr__(self) -> str:
        return short_repr(self, self._facts(), device=str(self._device))

    def _over(
        self,
        mapping: _core.FileMapping,
        chunk: _core.ChunkEntry,
        dtype: torch.dtype,
        strides: tuple[int, ...] | None,
    ) -> torch.Tensor:
        flat = torch.frombuffer(mapping, dtype=torch.uint8, count=chunk.length, offset=chunk.offset)
        flat = (flat.clone() if chunk.offset % dtype.itemsize else flat).view(dtype)
        return flat.view(chunk.sizes) if strides is None else flat.as_strided(chunk.sizes, strides)

    def _read(
        self, number: int, entry: _core.TensorEntry, offsets: Sequence[int], sizes: Sequence[int]
    ) -> torch.Tensor:
        dtype = self._dtype(entry)
        if self._device.type == "meta":
            requires_grad = can_require_grad(dtype) and bool(entry.flags & REQUIRES_GRAD)
            return torch.empty(sizes, dtype=dtype, device="meta", requires_grad=requires_grad)
        check_held(self._index, [(number, offsets, sizes)])
        tensor = torch.empty(sizes, dtype=dtype, device=self._device)
        target = Target(number, offsets, tensor, entry.name, dtype)
        fill(self._index, [target], self._options, self._counts)
        return tensor


def _path_in(root: Mapping[str, Any], name: str) -> TreePath | None:
    path = root.get(name)
    is_path = isinstance(path, tuple) and all(type(part) in (str, int) for part in path)
    return path if is_path and path else None
