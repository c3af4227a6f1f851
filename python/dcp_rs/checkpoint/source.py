"""What is converted: the entries of a checkpoint of any kind, and their bytes."""

from __future__ import annotations

import errno
import os
import pickle
import re
import zipfile
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from dcp_rs import _core
from dcp_rs.checkpoint.locate import ZIP_START, is_torch_file, open_index
from dcp_rs.checkpoint.open import Checkpoint
from dcp_rs.errors import (
    CheckpointNotFoundError,
    CorruptDataError,
    DcpRsError,
    PlanError,
    UnsafePickleError,
    UnsupportedError,
)
from dcp_rs.options import ReadOptions
from dcp_rs.tensors import objects, trees
from dcp_rs.tensors.memory import identity, is_plain
from dcp_rs.transfer.save import as_object, why_not_raw
from dcp_rs.transfer.target import stored_dtype

__all__ = ["Chunk", "IndexSource", "Item", "Request", "Source", "TorchSource", "open_source"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored piece of a tensor: ``sizes`` elements from ``offsets``; ``file`` is the number of its data file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """An entry of a source.

    Attributes:
        name: FQN.
        number: of the entry, in its source.
        dtype, shape: None and empty for a value.
        chunks: at least one, but for a tensor that is stored nowhere (an empty one may be).
        nbytes: of the tensor, or of the value as ``torch.save`` writes it.
        flags: section 3.3 of the format.
        path: in the state dict, where it is known.
    """

    name: str
    number: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    nbytes: int
    flags: int = 0
    path: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A rectangle of a tensor (or, where ``chunk`` is given, of that chunk of it), and the contiguous memory it goes to."""

    item: Item
    chunk: int | None
    offsets: Sequence[int]
    into: torch.Tensor


class Source(Protocol):
    """A checkpoint to convert from."""

    kind: str
    #: Planner data that belongs to no entry.
    root: Any
    #: The entries, in the order in which they are best read.
    items: list[Item]
    #: The files that hold them.
    files: list[Path]

    def check(self, items: Sequence[Item]) -> None:
        """Raises, before anything is read, unless all of the items is there."""

    def check_again(self) -> None:
        """Raises unless the files are as they were. Views are of mapped files: of one that was cut short they hold zeros, or end the process."""

    def read(self, requests: Sequence[Request]) -> None:
        """Fills every destination. Runs in any thread."""

    def value(self, item: Item) -> bytes:
        """A value, as ``torch.save`` writes it."""

    def view(self, item: Item, chunk: int | None) -> torch.Tensor | None:
        """A tensor, or a chunk of it, contiguous and without a copy, where that is possible."""

    def tied(self, items: Sequence[Item]) -> dict[str, str]:
        """Names of tensors that are another one under a second name, and that other name."""


def open_source(
    path: str | os.PathLike[str], *, options: ReadOptions, weights_only: bool, allow_external: bool
) -> Source:
    """Opens a checkpoint of any kind, or a file that ``torch.save`` wrote."""
    if is_torch_file(path):
        return TorchSource(Path(path), weights_only=weights_only)
    return IndexSource(open_index(path, rank=None, allow_external=allow_external), options)


class IndexSource:
    """Everything that has an index, or is given one when it is opened."""

    def __init__(self, index: _core.Index, options: ReadOptions) -> None:
        self.kind = index.source
        self.root = index.planner_root()
        self.index = index
        self.files = index.file_paths()
        self._options = options
        self._verifies_views = options.verify and index.has_digests()
        self._views = Checkpoint(index, options=ReadOptions(threads=options.threads))
        self.items = [self._item(number) for number in index.file_order()]

    def _item(self, number: int) -> Item:
        name, is_bytes, dtype_name, shape, flags, _ = self.index.tensor(number)
        stored = self.index.chunks(number)
        path = self.index.planner_path(number)
        if is_bytes:
            return Item(name, number, None, (), (Chunk((), (), stored[0][0]),), stored[0][2], 0, path)
        dtype = stored_dtype(name, dtype_name)
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        chunks = tuple(Chunk(offsets, sizes, file) for file, _, _, offsets, sizes in stored)
        return Item(name, number, dtype, shape, chunks, nbytes, flags, path)

    def check(self, items: Sequence[Item]) -> None:
        """Raises unless the files are there and as long as they should be, and the chunks of every tensor hold all of it."""
        tensors = [item for item in items if item.dtype is not None]
        holes = self.index.check_regions(
            [(item.number, [0] * len(item.shape), item.shape) for item in tensors],
            [item.number for item in items if item.dtype is None],
        )
        for region, offsets, sizes in holes:
            name = tensors[region].name
            msg = f"tensor {name!r} is not all there: nothing holds {list(sizes)} elements at {list(offsets)}"
            raise CorruptDataError(msg, path=self.index.path, tensor=name)

    @cached_property
    def _one_of_each_file(self) -> list[int]:
        chunks: dict[int, int] = {}
        for item in self.items:
            for number, chunk in enumerate(item.chunks):
                chunks.setdefault(chunk.file, self.index.first_chunk(item.number) + number)
        return list(chunks.values())

    def check_again(self) -> None:
        """Looks at every file."""
        self.index.check_files(self._one_of_each_file)

    def read(self, requests: Sequence[Request]) -> None:
        """Reads in one batch, whatever the requests are."""
        chunks, regions = [], []
        for request in requests:
            into = request.into
            where = (request.offsets, into.shape, into.data_ptr(), into.stride())
            if request.chunk is None:
                regions.append((request.item.number, *where))
            else:
                chunks.append((self.index.first_chunk(request.item.number) + request.chunk, *where))
        if chunks:
            self.index.read_chunks(chunks, **self._options.engine())
        if regions:
            self.index.read_regions(regions, **self._options.engine())

    def value(self, item: Item) -> bytes:
        """The stored bytes, as they are."""
        return self.index.read_bytes([self.index.first_chunk(item.number)], **self._options.engine())[0]

    def view(self, item: Item, chunk: int | None) -> torch.Tensor | None:
        """A view of a private mapping of the file, after its digests were checked where reading has to verify."""
        if item.dtype is None or (chunk is None and len(item.chunks) != 1):
            return None
        view = self._views.chunk_view(item.number, chunk or 0, item.dtype)
        if view is not None and self._verifies_views:
            self.index.verify_chunks([self.index.first_chunk(item.number) + (chunk or 0)], **self._options.engine())
        return view

    def tied(self, items: Sequence[Item]) -> dict[str, str]:
        """Nothing: a file does not say that two tensors were one."""
        return {}


class TorchSource:
    """A file that ``torch.save`` wrote: a state dict, nested or not. Its tensors stay in the file, mapped."""

    kind = "torch"

    def __init__(self, path: Path, *, weights_only: bool) -> None:
        self._path = path
        self._stat = _stat(path)
        self.state = load_torch_file(path, weights_only=weights_only)
        self.root: Any = {}
        self.files = [path]
        flat, paths = trees.flatten(self.state)
        self._tensors: dict[int, torch.Tensor] = {}
        self._values: dict[int, bytes] = {}
        self.items = [self._item(i, name, value, paths[name]) for i, (name, value) in enumerate(flat.items())]

    def _item(self, number: int, name: str, value: Any, path: tuple[Any, ...]) -> Item:
        if isinstance(value, torch.Tensor):
            refusal = why_not_raw(value)
            if refusal is None:
                # The flag first: a detached tensor has lost it.
                flags = 1 if value.requires_grad else 0
                tensor = self._tensors[number] = value.detach().resolve_conj().resolve_neg()
                chunk = Chunk((0,) * tensor.dim(), tuple(tensor.shape))
                return Item(name, number, tensor.dtype, chunk.sizes, (chunk,), tensor.nbytes, flags, path)
            data = as_object(name, value, refusal)
        else:
            data = objects.dump(value)
        self._values[number] = data
        return Item(name, number, None, (), (Chunk((), ()),), len(data), 0, path)

    def check(self, items: Sequence[Item]) -> None:
        """Nothing to check: the file was opened whole."""

    def check_again(self) -> None:
        """Looks at the file."""
        if _stat(self._path) != self._stat:
            msg = f"{self._path} was changed while it was being read"
            raise CorruptDataError(msg, path=self._path)

    def read(self, requests: Sequence[Request]) -> None:
        """Copies from the mapped file."""
        self.check_again()
        for request in requests:
            part = self._tensors[request.item.number]
            for dim, (offset, size) in enumerate(zip(request.offsets, request.into.shape, strict=True)):
                part = part.narrow(dim, offset, size)
            into = request.into
            if into.dtype == part.dtype and part.element_size() == 1:  # older torch cannot copy its youngest dtypes
                into, part = into.view(torch.uint8), part.view(torch.uint8)
            into.copy_(part)

    def value(self, item: Item) -> bytes:
        """The value, saved again."""
        return self._values[item.number]

    def view(self, item: Item, chunk: int | None) -> torch.Tensor | None:
        """The tensor itself, which is a view of the mapped file."""
        tensor = self._tensors.get(item.number)
        if tensor is None or item.dtype is None or not is_plain(tensor, item.dtype) or not tensor.is_contiguous():
            return None
        return tensor

    def tied(self, items: Sequence[Item]) -> dict[str, str]:
        """Tensors that are the same memory. The first name in the order of the state dict stays, which is that of the modules, but none of a head.

        It is the name that ``transformers`` keeps: the weights of an output layer are those of an embedding there, not the other way round.
        """
        first: dict[Hashable, str] = {}
        tied: dict[str, str] = {}
        for item in sorted(items, key=lambda item: (_HEAD.search(item.name) is not None, item.number)):
            tensor = self._tensors.get(item.number)
            if tensor is None or tensor.numel() == 0:
                continue
            kept = first.setdefault(identity(tensor), item.name)
            if kept != item.name:
                tied[item.name] = kept
        return tied


#: What ``transformers`` calls output layers that are tied to an embedding, where a state dict is not in the order of its modules.
_HEAD = re.compile(r"(?:^|\.)lm_head(?:\.|$)")


def _stat(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_size, stat.st_mtime_ns


def load_torch_file(path: Path, *, weights_only: bool) -> dict[str, Any]:
    """What is in a file of ``torch.save``, with its tensors mapped.

    Raises:
        UnsafePickleError: it needs more than ``torch.load(weights_only=True)`` allows.
        UnsupportedError: it holds something else than a state dict, or is of a torch before 1.6.
        CorruptDataError: it is no file of ``torch.save``, or cut short.
    """
    try:
        with _named_for_torch(path) as name:
            state = torch.load(name, map_location="cpu", weights_only=weights_only, mmap=True)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"no checkpoint at {path}: there is no such path", path=path) from error
    except pickle.UnpicklingError as error:
        msg = (
            f"{path} does not load under torch.load(weights_only=True): {objects.reason(error)}. "
            "Allow its types with torch.serialization.add_safe_globals, or pass weights_only=False if you trust whoever wrote it."
        )
        raise UnsafePickleError(msg, path=path) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        if (
            isinstance(error, OSError) and error.errno != errno.EINVAL
        ):  # torch seeks to before the file where that is cut short
            raise
        raise _refusal(path, error) from error
    if not isinstance(state, Mapping):
        msg = f"{path} holds a {type(state).__name__}, not a state dict"
        raise UnsupportedError(msg, path=path)
    if not all(isinstance(key, str | int) for key in state):
        msg = f"{path}: the keys of a state dict are strings, or numbers"
        raise PlanError(msg, path=path)
    return dict(state)


@contextmanager
def _named_for_torch(path: Path) -> Iterator[str]:
    """A name of the file that torch can open: it takes UTF-8 alone, and a name that Python could not decode is none."""
    name = os.fspath(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        with path.open("rb") as file:
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        yield name


def _refusal(path: Path, error: Exception) -> DcpRsError:
    """What is wrong with a file that torch cannot load. torch takes whatever is no zip archive for a file in its old format."""
    with path.open("rb") as file:
        start = file.read(4)
    if start == ZIP_START:
        if not zipfile.is_zipfile(path):
            msg = f"{path} begins as a file of torch.save, and its end is missing: it was cut short"
            return CorruptDataError(msg, path=path)
        return CorruptDataError(f"{path} is not what torch.save writes: {error}", path=path)
    if start[:1] == pickle.PROTO:
        msg = f"{path} is in the format of torch before 1.6, which cannot be mapped: load it and save it again with a newer torch"
        return UnsupportedError(msg, path=path)
    why = "it begins as none does" if start else "it is empty"
    return CorruptDataError(f"{path} is not a file of torch.save: {why}", path=path)
