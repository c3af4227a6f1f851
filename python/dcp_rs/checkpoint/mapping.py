"""What an open checkpoint is, whatever its tensors become: a mapping of names, and what is stored under them."""

from __future__ import annotations

import hashlib
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from dcp_rs import _core
from dcp_rs._progress import Counts
from dcp_rs._reports import Report, size
from dcp_rs.checkpoint.names import hint
from dcp_rs.errors import (
    CheckpointReplacedError,
    DcpRsError,
    EntryNotFoundError,
    PlanError,
    UnsupportedError,
)
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.elements import safetensors_name, safetensors_shape
from dcp_rs.tensors.nesting import unwrap
from dcp_rs.tensors.regions import selection

__all__ = ["ChunkInfo", "OpenCheckpoint", "ReadReport", "StoredSlice", "TensorInfo"]


@dataclass(frozen=True, repr=False)
class ReadReport(Report):
    """What was read of an open checkpoint since it was opened. What is used where it lies in a mapping of its file is not read, and not counted.

    Attributes:
        path: the checkpoint.
        bytes_wanted: of the tensors, slices and values that were asked for.
        bytes_read: of files, or of a store: more where gaps were read through.
        bytes_direct: of those, past the page cache.
        bytes_mapped: of those, copied from mappings.
        requests: pieces of files that were read, each in one go; from a store, a request for each.
    """

    path: str = ""
    bytes_wanted: int = 0
    bytes_read: int = 0
    bytes_direct: int = 0
    bytes_mapped: int = 0
    requests: int = 0

    def __str__(self) -> str:
        return f"read {size(self.bytes_read)} of {self.path} for {size(self.bytes_wanted)}, in {self.requests:,} requests"


Slice = TypeVar("Slice")


@dataclass(frozen=True)
class TensorInfo:
    """What is stored under a name.

    Attributes:
        name: FQN.
        dtype: element type, of torch or (``framework="np"``) of NumPy; None for a non-tensor value.
        shape: sizes of the whole tensor; empty for a non-tensor value.
        chunks: how many pieces it is stored in.
        nbytes: bytes of all pieces.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...]
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


class OpenCheckpoint(Mapping[str, Any], Generic[Slice]):
    """A checkpoint that is open for reading, as :func:`dcp_rs.open` returns it.

    It pickles to the way it was opened: a copy, in a worker of a ``DataLoader`` for one, opens it
    anew there. Where another save has replaced the checkpoint meanwhile, that raises
    ``CheckpointReplacedError``.
    """

    #: Opens it again, in whichever process; None where it was not :func:`dcp_rs.open` that did.
    _open_again: Callable[[], OpenCheckpoint[Any]] | None = None

    def __init__(self, index: _core.Index, options: ReadOptions) -> None:
        self._index = index
        self._options = options
        self._files: dict[int, _core.FileMapping] = {}
        self._counts = Counts()
        self._closed = False

    @property
    def path(self) -> str:
        """The file that the index came from."""
        return os.fspath(self._index.path)

    @property
    def report(self) -> ReadReport:
        """What was read of it so far."""
        counts = self._counts
        return ReadReport(
            self.path, counts.wanted, counts.read, counts.direct, counts.mapped, counts.requests
        )

    @property
    def source(self) -> str:
        """What the data files are: ``dcp-rs``, ``safetensors`` or ``dcp``."""
        return self._index.source

    @property
    def save_id(self) -> str | None:
        """The UUID of the save, where it has one: checkpoints of Hugging Face have none."""
        return self._index.save_id

    def __getitem__(self, fqn: str) -> Any:
        """The tensor, or the value, with this name.

        Raises:
            EntryNotFoundError: there is none.
            CorruptDataError: a data file is missing or damaged.
            UnsafePickleError: a value that needs more than ``weights_only=True`` allows.
        """
        tensor = self._find(fqn)
        entry = self._index.tensor(tensor)
        if not entry.is_bytes:
            return self._tensor(tensor, entry)
        (data,) = self._index.read_bytes(
            [self._index.first_chunk(tensor)], **self._options.engine()
        )
        self._counts.add(Counts(len(data), len(data)))
        value = self._value(fqn, data)
        return (
            unwrap(value) if self.source == "dcp-rs" else value
        )  # who else has the mark has it as a value

    @abstractmethod
    def _tensor(self, tensor: int, entry: _core.TensorEntry) -> Any:
        """All of a tensor, as the framework has it."""

    @property
    def _is_in_place(self) -> bool:
        """Whether a tensor that is stored in one piece is used where it lies in its file."""
        return not self._index.is_remote

    @abstractmethod
    def _value(self, name: str, data: bytes) -> Any:
        """What ``torch.save`` wrote."""

    @abstractmethod
    def _slice(self, tensor: int) -> Slice:
        """What is indexed like a tensor."""

    @abstractmethod
    def _read(
        self, tensor: int, name: str, dtype: Any, offsets: list[int], sizes: tuple[int, ...]
    ) -> Any:
        """A region of a tensor, in new memory."""

    def get_slice(self, fqn: str) -> Slice:
        """Open the tensor ``fqn`` to read parts of it.

        Args:
            fqn: the name of a tensor.

        Returns:
            An object to index like the tensor. Each indexing reads only what it returns.

        Raises:
            EntryNotFoundError: there is none.
            TypeError: it is a value.

        Example:
            ```python
            checkpoint = dcp_rs.open("ckpt")
            rows = checkpoint.get_slice("model.weight")[1:3, :]
            ```
        """
        tensor = self._find(fqn)
        if self._index.tensor(tensor).is_bytes:
            msg = f"{fqn!r} is not a tensor"
            raise TypeError(msg)
        return self._slice(tensor)

    def info(self, fqn: str) -> TensorInfo:
        """Describe what is stored under ``fqn``, without reading it.

        Args:
            fqn: the name of a tensor or a value.

        Returns:
            Name, dtype, shape, number of chunks and bytes.

        Raises:
            EntryNotFoundError: there is none.

        Example:
            ```python
            assert dcp_rs.open("ckpt").info("model.weight").shape == (3, 2)
            ```
        """
        tensor = self._find(fqn)
        return self._info(
            self._index.tensor(tensor), sum(chunk.length for chunk in self._index.chunks(tensor))
        )

    @abstractmethod
    def _info(self, entry: _core.TensorEntry, nbytes: int) -> TensorInfo:
        """In terms of the framework."""

    def chunks(self, fqn: str) -> list[ChunkInfo]:
        """List the pieces that ``fqn`` is stored in.

        Args:
            fqn: the name of a tensor or a value.

        Returns:
            The pieces, in order of their offsets.

        Raises:
            EntryNotFoundError: there is none.

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
        """Return the tensor, or the value, with this name; ``default`` if there is none.

        Args:
            fqn: the name.
            default: what to return if there is no such entry.

        Returns:
            A tensor, a value, or ``default``.

        Raises:
            Exception: as for ``checkpoint[fqn]``, if there is an entry that cannot be read.

        Example:
            ```python
            step = dcp_rs.open("ckpt").get("step", 0)
            ```
        """
        if fqn not in self:  # the error would look for the nearest name
            return default
        return self[fqn]

    def get_tensor(self, fqn: str) -> Any:
        """Return ``checkpoint[fqn]``, as ``safetensors.safe_open`` calls it.

        Args:
            fqn: the name of a tensor or a value.

        Returns:
            The tensor, or the value.

        Raises:
            EntryNotFoundError: there is none.

        Example:
            ```python
            weight = dcp_rs.open("ckpt").get_tensor("model.weight")
            ```
        """
        return self[fqn]

    def get_tensors(self) -> dict[str, Any]:
        """Return everything by name, as ``safetensors.safe_open`` calls it.

        Returns:
            A new dict from names to tensors and values.

        Raises:
            Exception: as for ``checkpoint[fqn]``.

        Example:
            ```python
            tensors = dcp_rs.open("ckpt").get_tensors()
            ```
        """
        return {name: self[name] for name in self}

    def offset_keys(self) -> list[str]:
        """List the names in the order of the files, as ``safetensors.safe_open`` calls it.

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
        """Return what the headers of safetensors files hold under ``__metadata__``. The first file's word counts.

        Checkpoints of torch and of this package have nothing there: their values are entries.

        Returns:
            The metadata; None if there is none.

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
            msg = f"{self.path}: what the headers of files say of themselves is read on the file system"
            raise UnsupportedError(msg, path=self.path)
        return safetensors_metadata(self._index.file_paths()) or None

    def close(self) -> None:
        """Close the files. Tensors that were handed out stay valid.

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
        kind: type[BaseException] | None,
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
        """What tells this checkpoint from another one at its path: of others' the whole index, which names lengths and places."""
        if self.source == "dcp-rs" and self.save_id is not None:
            return self.save_id
        return hashlib.blake2b(self._index.to_bytes(), digest_size=16).hexdigest()

    def _facts(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"{self.path!r}, {len(self):,} {'entry' if len(self) == 1 else 'entries'}{closed}"

    def _ipython_key_completions_(self) -> list[str]:
        return self._index.names()

    def _check_open(self) -> None:
        if self._closed:
            msg = f"the checkpoint {self.path} is closed"
            raise DcpRsError(msg, path=self.path)

    def _find(self, fqn: str) -> int:
        self._check_open()
        tensor = self._index.find(fqn)
        if tensor is None:
            msg = f"there is no entry {fqn!r} in {self.path}{hint(fqn, self._index.names())}"
            raise EntryNotFoundError(msg, path=self.path, tensor=fqn)
        return tensor

    def _check_held(
        self, tensor: int, name: str, offsets: list[int], sizes: tuple[int, ...]
    ) -> None:
        """Raises unless all of a region is there. Before there is memory for it: a shape may be of any size, what chunks hold is bounded by their files."""
        for _, at, lacking in self._index.check_regions([(tensor, offsets, sizes)], []):
            msg = f"tensor {name!r}: the checkpoint does not hold {list(lacking)} elements at {list(at)}"
            raise PlanError(msg, path=self.path, tensor=name)

    def _mapped(self, file: int) -> _core.FileMapping:
        mapping = self._files.get(file)
        if mapping is None:
            # Of two threads that get here at once, both must see one memory.
            mapping = self._files.setdefault(file, self._index.map_file(file))
        return mapping


def safetensors_metadata(paths: Iterable[Path]) -> dict[str, str]:
    """``__metadata__`` of the headers of safetensors files, the first one's word first."""
    said: dict[str, str] = {}
    for path in paths:
        with path.open("rb") as file:
            text = file.read(int.from_bytes(file.read(8), "little"))
        said = (json.loads(text).get("__metadata__") or {}) | said
    return said


def _reopen(open_again: Callable[[], OpenCheckpoint[Any]], identity: str) -> OpenCheckpoint[Any]:
    checkpoint = open_again()
    if checkpoint._identity() != identity:  # of this module
        msg = (
            f"the checkpoint at {checkpoint.path} was replaced by another save since it was opened"
        )
        raise CheckpointReplacedError(msg, path=checkpoint.path)
    return checkpoint


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
        if (
            self._chunks == 1
            and checkpoint._is_in_place
            and index.is_in_place(index.first_chunk(self._tensor))
        ):
            part = checkpoint[self._name][
                tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            ]
        else:
            part = checkpoint._read(self._tensor, self._name, self.dtype, offsets, tuple(sizes))
        found: T = part[local]
        return found
