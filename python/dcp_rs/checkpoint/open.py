"""``dcp_rs.open``: a checkpoint as a mapping of names to tensors and values."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import torch

from dcp_rs import _core
from dcp_rs._arguments import no_attribute, suggest_option
from dcp_rs._progress import Counts
from dcp_rs._reports import Report, short_repr, size
from dcp_rs._url import StrPath, absolute, location
from dcp_rs.checkpoint.entries import ChunkInfo, TensorInfo, check_held, describe
from dcp_rs.checkpoint.folders import checkpoint_path
from dcp_rs.checkpoint.locate import LoadSource
from dcp_rs.checkpoint.metadata import planner_data, safetensors_metadata
from dcp_rs.checkpoint.names import hint
from dcp_rs.checkpoint.stream import stream
from dcp_rs.errors import (
    CheckpointReplacedError,
    DcpRsError,
    EntryNotFoundError,
    UnsupportedError,
)
from dcp_rs.options import OpenArguments, ReadOptions, check_choice, take_options
from dcp_rs.tensors import pickles
from dcp_rs.tensors.dtypes import REQUIRES_GRAD, can_require_grad
from dcp_rs.tensors.elements import safetensors_name, safetensors_shape
from dcp_rs.tensors.flatten import number_parameters
from dcp_rs.tensors.memory import parse_device
from dcp_rs.tensors.nesting import TreePath, nest
from dcp_rs.tensors.regions import selection
from dcp_rs.transfer.load import fill
from dcp_rs.transfer.target import Target, stored_dtype

#: Number of entries that a notebook shows.
_SHOWN_ROWS = 50
#: Errors of file systems on which files cannot be mapped.
_UNMAPPED = (errno.ENODEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


@suggest_option
def open(
    path: StrPath,
    framework: Literal["pt"] = "pt",
    device: torch.device | str | int = "cpu",
    **options: Unpack[OpenArguments],
) -> Checkpoint:
    """Open a checkpoint for reading by name. It is a mapping from names to tensors and values.

    The arguments are those of ``safetensors.safe_open(path, framework, device)``, and so are the
    methods of the result.

    Args:
        path: a folder of dcp-rs, Hugging Face or stock DCP, a ``.safetensors`` file, a file of
            ``torch.save``, or the URL of one on a store. From a store each tensor is read when you
            ask for it. Files that each rank saved with ``torch.save`` are one checkpoint: give
            their folder, or a pattern (``"run/optim_world_size_8_rank_*.pt"``).
        framework: ``"pt"``. For a NumPy array, call ``numpy()`` of a tensor.
        device: the device of the tensors. ``"meta"`` gives shapes, dtypes and ``requires_grad``
            without reading a tensor.
        weights_only: refuse values that ``torch.load(weights_only=True)`` would refuse. That is the
            default.
        allow_external: open data files outside of the folder, if the index names any.
        io, threads, verify, shared, max_inflight_bytes: see :class:`dcp_rs.options.ReadOptions`.
        storage_options, tiers, dequantize, views: see :class:`dcp_rs.RsReader`.

    Returns:
        A :class:`Checkpoint`.

    Raises:
        CheckpointNotFoundError, CorruptIndexError, UnsupportedError: see :mod:`dcp_rs.errors`.

    Example:
        ```python
        with dcp_rs.open("ckpt") as checkpoint:
            weight = checkpoint["model.weight"]
            first_rows = checkpoint.get_slice("model.weight")[:2]
        ```
    """
    source = LoadSource.of(path, take_options(open, options))
    check_choice("framework", framework, "pt")
    index, _ = source.open()
    where = os.fspath(absolute(location(path)))
    return Checkpoint(
        index,
        device=device,
        weights_only=source.weights_only,
        options=source.read,
        open_again=partial(open, where, framework, device, **source.given()),
    )


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


@dataclass(frozen=True, repr=False)
class ReadReport(Report):
    """Report of the reads from a checkpoint since it was opened.

    Tensors that are views of a mapped file are not read, and not counted.

    Attributes:
        path: the checkpoint.
        bytes_wanted: the bytes of the tensors, slices and values that were asked for.
        bytes_read: the bytes read from files or a store, with gaps that were read through.
        bytes_direct: those of them that were read by direct I/O.
        bytes_mapped: those of them that were copied from mappings.
        requests: the number of reads; for a store, of requests.
    """

    path: str = ""
    bytes_wanted: int = 0
    bytes_read: int = 0
    bytes_direct: int = 0
    bytes_mapped: int = 0
    requests: int = 0

    def __str__(self) -> str:
        return (
            f"read {size(self.bytes_read)} of {self.path} for {size(self.bytes_wanted)}, "
            f"in {self.requests:,} requests"
        )


class Checkpoint(Mapping[str, Any]):
    """A checkpoint that is open for reading: a mapping from names to tensors and values.

    :func:`dcp_rs.open` makes it. On the CPU, a tensor that is stored in one piece is a view of a
    private mapping of its file. It is read when you touch it, and writing to it changes no file.
    With ``io="buffered"`` or ``"direct"`` nothing is mapped, and every tensor is read at once.
    Two look-ups of one name share memory. A tensor in several pieces is read into new memory.
    Tensors stay valid after :meth:`close`.

    A copy by pickle, as in a worker of a ``DataLoader``, opens the checkpoint again. It raises
    ``CheckpointReplacedError`` if another save has replaced the checkpoint meanwhile.

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
        open_again: Callable[[], Checkpoint] | None = None,
    ) -> None:
        self._index = index
        self._options = options
        self._open_again = open_again
        self._device = parse_device(device)
        self._weights_only = weights_only
        self._can_view = (
            not index.is_remote and options.io in ("auto", "mmap") and self._device.type == "cpu"
        )
        self._files: dict[int, _core.FileMapping] = {}
        self._counts = Counts()
        self._closed = False

    if not TYPE_CHECKING:  # where types are checked, an unknown name is an error

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name)

    @property
    def path(self) -> str:
        """The path of the checkpoint: its folder or its file, or the URL of one."""
        return checkpoint_path(self._index)

    @property
    def report(self) -> ReadReport:
        """A report of what was read so far."""
        counts = self._counts
        return ReadReport(
            self.path, counts.wanted, counts.read, counts.direct, counts.mapped, counts.requests
        )

    @property
    def source(self) -> str:
        """The kind of the data files: ``dcp-rs``, ``safetensors``, ``dcp`` or ``torch``."""
        return self._index.source

    @property
    def save_id(self) -> str | None:
        """The UUID of the save; None for checkpoints that have none, as those of Hugging Face."""
        return self._index.save_id

    def __getitem__(self, fqn: str) -> Any:
        """Return the tensor or value with this name.

        For type checkers it is of any type, as a value may be; :meth:`get_tensor` returns tensors.

        Raises:
            EntryNotFoundError: there is no such entry.
            CorruptDataError: a data file is missing or damaged.
            UnsafePickleError: a value needs more than ``weights_only=True`` allows.
        """
        number = self._find(fqn)
        entry = self._index.tensor(number)
        if not entry.is_bytes:
            view = self._view(number, entry)
            if view is not None:
                return view
            return self._read(number, entry, [0] * len(entry.shape), entry.shape)
        (data,) = self._index.read_bytes(
            [self._index.first_chunk(number)], **self._options.engine()
        )
        self._counts.add(Counts(len(data), len(data)))
        return pickles.load(fqn, data, weights_only=self._weights_only, path=self.path)

    def _view(self, number: int, entry: _core.TensorEntry) -> torch.Tensor | None:
        """Return a tensor over the mapped file that holds it; None if it must be read."""
        index = self._index
        if not self._can_view or entry.chunk_count != 1:
            return None
        chunk, first = index.chunks(number)[0], index.first_chunk(number)
        if chunk.sizes != entry.shape or chunk.length == 0 or not index.is_in_place(first):
            return None
        if self._options.verify is True:
            if index.is_view:  # a read verifies only the blocks that it needs
                return None
            index.verify_chunks([first], **self._options.engine())
        mapping = self._files.get(chunk.file)
        if mapping is None:
            found = _map_file(index, chunk.file)
            if found is None:
                self._can_view = False
                return None
            # Of two threads that get here at once, both must see the same memory.
            mapping = self._files.setdefault(chunk.file, found)
        return self._over(mapping, chunk, self._dtype(entry), index.chunk_strides(first))

    def _over(
        self,
        mapping: _core.FileMapping,
        chunk: _core.ChunkEntry,
        dtype: torch.dtype,
        strides: tuple[int, ...] | None,
    ) -> torch.Tensor:
        """Return a tensor over a mapped chunk. Foreign files need not align tensors.

        Args:
            mapping: the mapping of the file.
            chunk: the place of the chunk in it.
            dtype: the dtype of the elements.
            strides: the strides in elements; None for a contiguous tensor.
        """
        flat = torch.frombuffer(mapping, dtype=torch.uint8, count=chunk.length, offset=chunk.offset)
        flat = (flat.clone() if chunk.offset % dtype.itemsize else flat).view(dtype)
        return flat.view(chunk.sizes) if strides is None else flat.as_strided(chunk.sizes, strides)

    def _read(
        self, number: int, entry: _core.TensorEntry, offsets: Sequence[int], sizes: Sequence[int]
    ) -> torch.Tensor:
        """Read a region of a tensor into new memory."""
        dtype = self._dtype(entry)
        if self._device.type == "meta":
            requires_grad = can_require_grad(dtype) and bool(entry.flags & REQUIRES_GRAD)
            return torch.empty(sizes, dtype=dtype, device="meta", requires_grad=requires_grad)
        check_held(self._index, [(number, offsets, sizes)])
        tensor = torch.empty(sizes, dtype=dtype, device=self._device)
        target = Target(number, offsets, tensor, entry.name, dtype)
        fill(self._index, [target], self._options, self._counts)
        return tensor

    def _dtype(self, entry: _core.TensorEntry) -> torch.dtype:
        return stored_dtype(entry.name, entry.dtype)

    def get_slice(self, fqn: str) -> TensorSlice:
        """Open the tensor ``fqn`` to read parts of it.

        Args:
            fqn: the name of the tensor.

        Returns:
            An object to index like the tensor. Each indexing reads only what it returns.

        Raises:
            EntryNotFoundError: there is no such entry.
            TypeError: the entry is a value.

        Example:
            ```python
            checkpoint = dcp_rs.open("ckpt")
            rows = checkpoint.get_slice("model.weight")[1:3, :]
            ```
        """
        return TensorSlice(self, *self._find_tensor(fqn))

    def info(self, fqn: str) -> TensorInfo:
        """Describe the entry ``fqn`` without reading it.

        Args:
            fqn: the name of a tensor or a value.

        Returns:
            Name, dtype, shape, number of chunks and bytes.

        Raises:
            EntryNotFoundError: there is no such entry.

        Example:
            ```python
            assert dcp_rs.open("ckpt").info("model.weight").shape == (3, 2)
            ```
        """
        number = self._find(fqn)
        entry = self._index.tensor(number)
        dtype = None if entry.is_bytes else self._dtype(entry)
        shape = torch.Size(entry.shape)
        return replace(describe(self._index, number), dtype=dtype, shape=shape)

    def chunks(self, fqn: str) -> list[ChunkInfo]:
        """List the chunks that ``fqn`` is stored in.

        Args:
            fqn: the name of a tensor or a value.

        Returns:
            The chunks, in the order of their offsets.

        Raises:
            EntryNotFoundError: there is no such entry.

        Example:
            ```python
            for chunk in dcp_rs.open("ckpt").chunks("model.weight"):
                print(chunk.offsets, chunk.sizes, chunk.file, chunk.offset)
            ```
        """
        files = self._index.files()
        return [
            ChunkInfo(
                chunk.offsets, chunk.sizes, files[chunk.file].name, chunk.offset, chunk.length
            )
            for chunk in self._index.chunks(self._find(fqn))
        ]

    def get(self, fqn: str, default: Any = None) -> Any:
        """Return the tensor or value with this name, or ``default`` if there is none.

        Args:
            fqn: the name.
            default: the result if there is no such entry.

        Returns:
            A tensor, a value, or ``default``.

        Raises:
            Exception: the entry cannot be read; see ``checkpoint[fqn]``.

        Example:
            ```python
            step = dcp_rs.open("ckpt").get("step", 0)
            ```
        """
        if fqn not in self:  # the error would look for the nearest name
            return default
        return self[fqn]

    def get_tensor(self, fqn: str) -> torch.Tensor:
        """Return the tensor ``fqn``, under the name of ``safetensors.safe_open``.

        Args:
            fqn: the name of a tensor.

        Returns:
            The tensor, as ``checkpoint[fqn]``.

        Raises:
            EntryNotFoundError: there is no such entry.
            TypeError: the entry is a value.

        Example:
            ```python
            weight = dcp_rs.open("ckpt").get_tensor("model.weight")
            ```
        """
        self._find_tensor(fqn)
        tensor: torch.Tensor = self[fqn]
        return tensor

    def get_tensors(self) -> dict[str, Any]:
        """Return all entries by name, as ``safetensors.safe_open`` does.

        Returns:
            A new dict from names to tensors and values.

        Raises:
            Exception: an entry cannot be read; see ``checkpoint[fqn]``.

        Example:
            ```python
            tensors = dcp_rs.open("ckpt").get_tensors()
            ```
        """
        return {name: self[name] for name in self}

    def offset_keys(self) -> list[str]:
        """List the names in the order of the files, as ``safetensors.safe_open`` does.

        Returns:
            The names.

        Example:
            ```python
            names = dcp_rs.open("ckpt").offset_keys()
            ```
        """
        self._check_open()
        return [self._index.name(number) for number in self._index.file_order()]

    def metadata(self) -> dict[str, str] | None:
        """Return ``__metadata__`` of safetensors files. Of several values, the first file's counts.

        Checkpoints of torch and of this package have none: their values are entries.

        Returns:
            The metadata, or None if there is none.

        Raises:
            UnsupportedError: the checkpoint is on a store.

        Example:
            ```python
            assert dcp_rs.open("hf_model").metadata() == {"format": "pt"}
            ```
        """
        self._check_open()
        if self.source != "safetensors":
            return None
        if self._index.is_remote:
            msg = (
                f"{self.path}: what the headers of files say of themselves is read on the file "
                "system"
            )
            raise UnsupportedError(msg, path=self.path)
        return safetensors_metadata(self._index.file_paths()) or None

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

    def close(self) -> None:
        """Close the files. Tensors that you got stay valid.

        Example:
            ```python
            checkpoint = dcp_rs.open("ckpt")
            weight = checkpoint["model.weight"]
            checkpoint.close()
            ```
        """
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_open()
        if self._open_again is None:
            raise TypeError("a checkpoint that dcp_rs.open did not open does not pickle")
        return _reopen, (self._open_again, self._identity())

    def _identity(self) -> str:
        """Return an id that changes when another checkpoint takes the path."""
        if self.source == "dcp-rs" and self.save_id is not None:
            return self.save_id
        # A foreign index names the places and lengths of all data.
        return hashlib.blake2b(self._index.to_bytes(), digest_size=16).hexdigest()

    def __repr__(self) -> str:
        entries = f"{len(self):,} {'entry' if len(self) == 1 else 'entries'}"
        closed = ["closed"] if self._closed else []
        return short_repr(self, repr(self.path), entries, *closed, device=str(self._device))

    def _repr_html_(self) -> str:
        """Return a table of the first entries, for notebooks."""
        rows = [("name", "dtype", "shape", "chunks")]
        for number in range(min(len(self), _SHOWN_ROWS)):
            entry = self._index.tensor(number)
            shape = "" if entry.is_bytes else str(list(entry.shape))
            rows.append((entry.name, entry.dtype or "value", shape, str(entry.chunk_count)))
        cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
        more = len(self) - _SHOWN_ROWS
        caption = escape(repr(self)) + (f", {more:,} entries more" if more > 0 else "")
        table = "".join(f"<tr>{row}</tr>" for row in cells).replace("td>", "th>", 8)
        return f"<table><caption>{caption}</caption>{table}</table>"

    def _ipython_key_completions_(self) -> list[str]:
        return self._index.names()

    def _check_open(self) -> None:
        if self._closed:
            msg = f"the checkpoint {self.path} is closed"
            raise DcpRsError(msg, path=self.path)

    def _find(self, fqn: str) -> int:
        self._check_open()
        if not isinstance(fqn, str):
            raise TypeError(f"a name is text, and {fqn!r} is of type {type(fqn).__name__}")
        tensor = self._index.find(fqn)
        if tensor is None:
            msg = f"there is no entry {fqn!r} in {self.path}{hint(fqn, self._index.names())}"
            raise EntryNotFoundError(msg, path=self.path, tensor=fqn)
        return tensor

    def _find_tensor(self, fqn: str) -> tuple[int, _core.TensorEntry]:
        number = self._find(fqn)
        entry = self._index.tensor(number)
        if entry.is_bytes:
            msg = f"{fqn!r} is not a tensor: checkpoint[{fqn!r}] reads the value"
            raise TypeError(msg)
        return number, entry


def _reopen(open_again: Callable[[], Checkpoint], identity: str) -> Checkpoint:
    checkpoint = open_again()
    if checkpoint._identity() != identity:
        msg = (
            f"the checkpoint at {checkpoint.path} was replaced by another save since it was opened"
        )
        raise CheckpointReplacedError(msg, path=checkpoint.path)
    return checkpoint


class TensorSlice:
    """A stored tensor, to be indexed by integers, slices and ``...`` as in torch.

    Each indexing reads no more than its bounding rectangle.

    Attributes:
        dtype: the dtype.
        shape: the shape of the whole tensor.
    """

    def __init__(self, checkpoint: Checkpoint, number: int, entry: _core.TensorEntry) -> None:
        self._checkpoint = checkpoint
        self._number = number
        self._entry = entry
        self.dtype = checkpoint._dtype(entry)
        self.shape = torch.Size(entry.shape)

    def get_shape(self) -> list[int]:
        """Return the shape as safetensors gives it. It counts float4 values, not torch's pairs."""
        return safetensors_shape(self._entry.dtype or "", self.shape)

    def get_dtype(self) -> str:
        """Return the dtype as safetensors gives it, or torch's name if it has none."""
        return safetensors_name(self._entry.dtype or "")

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Return the elements that ``key`` selects.

        Raises:
            IndexError: the index is out of range, or has too many dimensions.
            ValueError: a slice has a negative step.
            TypeError: the index is of another kind.
        """
        offsets, sizes, local = selection(key, self.shape)
        checkpoint = self._checkpoint
        checkpoint._check_open()
        part = checkpoint._view(self._number, self._entry)
        if part is None:
            part = checkpoint._read(self._number, self._entry, offsets, sizes)
        else:
            part = part[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        return part[local]

    def __reduce__(self) -> tuple[Any, ...]:
        return self._checkpoint.get_slice, (self._entry.name,)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"TensorSlice({self._entry.name!r}, {dtype}, shape={list(self.shape)})"


def _path_in(root: Mapping[str, Any], name: str) -> TreePath | None:
    path = root.get(name)
    is_path = isinstance(path, tuple) and all(type(part) in (str, int) for part in path)
    return path if is_path and path else None


def _map_file(index: _core.Index, file: int) -> _core.FileMapping | None:
    """Map a data file; None if the file system maps no files."""
    try:
        return index.map_file(file)
    except OSError as error:
        if error.errno in _UNMAPPED:
            return None
        raise
