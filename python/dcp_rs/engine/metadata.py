"""DCP's ``Metadata``, as views of an index: an entry becomes Python objects when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_rs import _core
from dcp_rs._url import StorageOptions, location, options_for
from dcp_rs.checkpoint.views import Layout
from dcp_rs.errors import CheckpointNotFoundError, UnsupportedError
from dcp_rs.tensors.dtypes import BY_NAME, REQUIRES_GRAD
from dcp_rs.tensors.nesting import text_path

__all__ = [
    "Entries",
    "PlannerPaths",
    "StorageInfo",
    "StorageInfos",
    "describe_saved",
    "index_of",
    "make_metadata",
    "tensor_flags",
    "tensor_properties",
]

#: What torch writes into ``Metadata.version`` (``filesystem.py``, CURRENT_DCP_VERSION).
DCP_VERSION = "1.0.0"

_PIN_MEMORY, _MEMORY_FORMAT_SHIFT = 2, 2
_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)


def tensor_flags(properties: TensorProperties) -> int:
    """The ``flags`` of section 3.3 of the format for DCP's tensor properties."""
    memory_format = properties.memory_format
    code = _MEMORY_FORMATS.index(memory_format) if memory_format in _MEMORY_FORMATS else 0
    return (
        (REQUIRES_GRAD if properties.requires_grad else 0)
        | (_PIN_MEMORY if properties.pin_memory else 0)
        | (code << _MEMORY_FORMAT_SHIFT)
    )


def tensor_properties(dtype: torch.dtype, flags: int) -> TensorProperties:
    """DCP's tensor properties for the ``flags`` of section 3.3 of the format."""
    code = flags >> _MEMORY_FORMAT_SHIFT & 3
    return TensorProperties(
        dtype=dtype,
        requires_grad=bool(flags & REQUIRES_GRAD),
        memory_format=_MEMORY_FORMATS[code],
        pin_memory=bool(flags & _PIN_MEMORY),
    )


class _Handle:
    """An index, or where to open it: what is pickled is the path alone, however much the index holds.

    Options of a store go with it, without their secrets. With ``rank`` it is what that rank wrote
    for itself.
    """

    def __init__(
        self,
        index: _core.Index,
        rank: int | None,
        storage_options: StorageOptions | None,
        layout: Layout,
    ) -> None:
        self._index: _core.Index | None = index
        path = os.fspath(index.path)
        self._path = path if index.is_in_memory else os.path.dirname(path)  # noqa: PTH120  # a URL is no Path
        self._rank = rank
        self._save_id = index.save_id
        self._storage_options = storage_options
        self._layout = layout

    @property
    def index(self) -> _core.Index:
        if self._index is None:
            where = location(self._path)
            index = _core.Index.open(
                os.fspath(where), self._rank, False, options_for(where, self._storage_options)
            )
            if index.save_id != self._save_id:
                msg = (
                    f"the checkpoint at {self._path} that this metadata describes has been replaced"
                )
                raise CheckpointNotFoundError(msg, path=self._path)
            self._index = self._layout.apply(index)
        return self._index

    def __getstate__(self) -> tuple[str, int | None, str | None, StorageOptions | None, Layout]:
        return self._path, self._rank, self._save_id, self._storage_options, self._layout

    def __setstate__(
        self, state: tuple[str, int | None, str | None, StorageOptions | None, Layout]
    ) -> None:
        self._path, self._rank, self._save_id, self._storage_options, self._layout = state
        self._index = None


class Entries(Mapping[str, Any]):
    """``state_dict_metadata``: FQN to ``TensorStorageMetadata`` or ``BytesStorageMetadata``."""

    def __init__(self, handle: _Handle) -> None:
        self._handle = handle

    @property
    def index(self) -> _core.Index:
        """The index; opened anew in a process that this came to from another."""
        return self._handle.index

    def __getitem__(self, fqn: str) -> TensorStorageMetadata | BytesStorageMetadata:
        tensor = self.index.find(fqn) if isinstance(fqn, str) else None
        if tensor is None:
            raise KeyError(fqn)
        entry = self.index.tensor(tensor)
        if entry.is_bytes:
            return BytesStorageMetadata()
        if entry.dtype not in BY_NAME:
            msg = f"tensor {entry.name!r} is of dtype {entry.dtype}, which torch {torch.__version__} does not have"
            raise UnsupportedError(msg, path=self.index.path, tensor=entry.name)
        return TensorStorageMetadata(
            properties=tensor_properties(BY_NAME[entry.dtype], entry.flags),
            size=torch.Size(entry.shape),
            chunks=self.index.make_chunks(tensor, ChunkStorageMetadata, torch.Size),
        )

    def __contains__(self, fqn: object) -> bool:
        return isinstance(fqn, str) and self.index.find(fqn) is not None

    def __repr__(self) -> str:
        return f"<{len(self):,} entries of {self.index.path}>"

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.names())

    def __len__(self) -> int:
        return self.index.tensor_count


class PlannerPaths(Mapping[str, Any]):
    """``planner_data`` of DCP's default planner: FQN to its path in the state dict that was saved."""

    def __init__(self, handle: _Handle, rest: dict[str, Any], *, flat: bool = False) -> None:
        self._handle = handle
        self._rest = rest  # paths that belong to no entry
        self._flat = flat  # what has no path is at its name

    def __getitem__(self, fqn: str) -> Any:
        path = self._own(fqn)
        return self._rest[fqn] if path is None else path

    def __iter__(self) -> Iterator[str]:
        index = self._handle.index
        yield from (
            name
            for i, name in enumerate(index.names())
            if self._flat or index.planner_path(i) is not None
        )
        yield from (key for key in self._rest if self._own(key) is None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<paths in {self._handle.index.path}>"

    def _own(self, fqn: Any) -> tuple[Any, ...] | None:
        """The path that stands with an entry itself: it comes before one of the root."""
        tensor = self._handle.index.find(fqn) if isinstance(fqn, str) else None
        path = None if tensor is None else self._handle.index.planner_path(tensor)
        if path is None:
            return (fqn,) if tensor is not None and self._flat else None
        return text_path(path)


@dataclass(frozen=True)
class StorageInfo:
    """Where a chunk is: ``length`` bytes from byte ``offset`` of the file ``relative_path``."""

    relative_path: str
    offset: int
    length: int


class StorageInfos(Mapping[MetadataIndex, StorageInfo]):
    """``storage_data``: where each chunk is."""

    def __init__(self, handle: _Handle) -> None:
        self._handle = handle

    def __getitem__(self, key: MetadataIndex) -> StorageInfo:
        tensor = self._handle.index.find(key.fqn)
        for chunk in [] if tensor is None else self._handle.index.chunks(tensor):
            if key.offset is None or tuple(key.offset) == chunk.offsets:
                return StorageInfo(
                    self._handle.index.files()[chunk.file].name, chunk.offset, chunk.length
                )
        raise KeyError(key)

    def __iter__(self) -> Iterator[MetadataIndex]:
        for tensor, name in enumerate(self._handle.index.names()):
            is_bytes = self._handle.index.tensor(tensor).is_bytes
            for i, chunk in enumerate(self._handle.index.chunks(tensor)):
                yield (
                    MetadataIndex(name)
                    if is_bytes
                    else MetadataIndex(name, torch.Size(chunk.offsets), i)
                )

    def __len__(self) -> int:
        return self._handle.index.chunk_count

    def __repr__(self) -> str:
        return f"<{len(self):,} chunks of {self._handle.index.path}>"


def index_of(metadata: Metadata | None) -> _core.Index | None:
    """Return the index that the metadata is a view of, if it is one of this package."""
    return None if metadata is None else getattr(metadata.state_dict_metadata, "index", None)


def describe_saved(
    metadata: Metadata,
    index: _core.Index,
    meta: StorageMeta,
    *,
    rank: int | None,
    storage_options: StorageOptions | None,
) -> None:
    """Makes ``metadata`` that of the checkpoint that was committed as ``index``, with ``rank`` its own. It pickles to a few bytes."""
    lazy = make_metadata(
        index, rank=rank, checkpoint_id="", load_id="", storage_options=storage_options
    )
    metadata.state_dict_metadata = lazy.state_dict_metadata
    metadata.planner_data = lazy.planner_data
    metadata.storage_data = lazy.storage_data
    metadata.storage_meta = meta
    if hasattr(metadata, "version"):  # torch 2.8 has none
        metadata.version = DCP_VERSION


def make_metadata(
    index: _core.Index,
    *,
    rank: int | None,
    checkpoint_id: str,
    load_id: str,
    storage_options: StorageOptions | None = None,
    layout: Layout | None = None,
) -> Metadata:
    """DCP's ``Metadata`` over ``index``. Costs the same whatever the index holds."""
    root = index.planner_root()
    if (
        root is None and index.source == "safetensors"
    ):  # as a checkpoint of DCP of the same names has it
        root = {}
    handle = _Handle(index, rank, storage_options, layout or Layout())
    metadata = Metadata(
        state_dict_metadata=Entries(handle),  # type: ignore[arg-type]  # a mapping is all that planners use
        planner_data=PlannerPaths(handle, root, flat=index.source == "safetensors")
        if isinstance(root, dict)
        else root,
        storage_data=StorageInfos(handle),
        storage_meta=StorageMeta(
            checkpoint_id=checkpoint_id, save_id=index.save_id, load_id=load_id
        ),
    )
    if any(field.name == "version" for field in fields(Metadata)):  # torch 2.8 has none
        metadata.version = DCP_VERSION
    return metadata


def plain_data(planner_data: Any) -> Any:
    """Planner data as an exact dict, where it is a mapping."""
    return dict(planner_data) if isinstance(planner_data, dict) else planner_data
