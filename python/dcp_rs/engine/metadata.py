"""DCP's ``Metadata`` as lazy views of an index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_rs import _core
from dcp_rs._url import StorageOptions, StrPath, location, options_for
from dcp_rs.checkpoint.folders import checkpoint_path
from dcp_rs.checkpoint.metadata import planner_data
from dcp_rs.checkpoint.views import Views
from dcp_rs.errors import CheckpointNotFoundError
from dcp_rs.tensors.dtypes import REQUIRES_GRAD
from dcp_rs.tensors.nesting import text_path
from dcp_rs.transfer.target import stored_dtype

#: ``Metadata.version`` as torch writes it (``filesystem.py``, CURRENT_DCP_VERSION).
_DCP_VERSION = "1.0.0"
#: Bits of ``flags``, section 3.3 of the format.
_PIN_MEMORY, _MEMORY_FORMAT_SHIFT = 2, 2
_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)


def make_metadata(
    index: _core.Index,
    *,
    rank: int | None,
    checkpoint_id: StrPath,
    load_id: str | None = None,
    storage_options: StorageOptions | None = None,
    views: Views | None = None,
) -> Metadata:
    """Return DCP's ``Metadata`` of an index. It costs the same for any number of entries.

    Args:
        index: the index.
        rank: the rank that the index belongs to, in a rank-local save.
        checkpoint_id, load_id: for ``storage_meta``.
        storage_options, views: for another process, which opens the index again.
    """
    is_flat = index.source == "safetensors"  # its names are paths of one key
    data, _ = planner_data(index)
    if data is None and is_flat:
        data = {}
    path, views = checkpoint_path(index), views or Views()
    handle = _Handle(index, rank, storage_options, views, path, index.save_id)
    if isinstance(data, dict):
        data = PlannerPaths(handle, data, is_flat)
    metadata = Metadata(
        state_dict_metadata=Entries(handle),  # type: ignore[arg-type]  # planners need a mapping
        planner_data=data,
        storage_meta=StorageMeta(
            checkpoint_id=checkpoint_id, save_id=index.save_id, load_id=load_id
        ),
    )
    if any(field.name == "version" for field in fields(Metadata)):  # torch 2.8 has none
        metadata.version = _DCP_VERSION
    return metadata


def index_of(metadata: Metadata | None) -> _core.Index | None:
    """Return the index behind the metadata; None for metadata of another storage."""
    return None if metadata is None else getattr(metadata.state_dict_metadata, "index", None)


def tensor_flags(properties: TensorProperties) -> int:
    """Return the ``flags`` of section 3.3 of the format for DCP's tensor properties."""
    memory_format = properties.memory_format
    code = _MEMORY_FORMATS.index(memory_format) if memory_format in _MEMORY_FORMATS else 0
    return (
        (REQUIRES_GRAD if properties.requires_grad else 0)
        | (_PIN_MEMORY if properties.pin_memory else 0)
        | (code << _MEMORY_FORMAT_SHIFT)
    )


def tensor_properties(dtype: torch.dtype, flags: int) -> TensorProperties:
    """Return DCP's tensor properties for the ``flags`` of section 3.3 of the format."""
    return TensorProperties(
        dtype=dtype,
        requires_grad=bool(flags & REQUIRES_GRAD),
        memory_format=_MEMORY_FORMATS[flags >> _MEMORY_FORMAT_SHIFT & 3],
        pin_memory=bool(flags & _PIN_MEMORY),
    )


@dataclass
class _Handle:
    """Index that pickles as the path to open it at, whatever its size.

    Options of a store are pickled too, without their secrets.
    """

    opened: _core.Index | None
    rank: int | None
    storage_options: StorageOptions | None
    views: Views
    path: str
    save_id: str | None

    @property
    def index(self) -> _core.Index:
        if self.opened is None:
            where = location(self.path)
            index = _core.Index.open(
                where, self.rank, False, options_for(where, self.storage_options)
            )
            if index.save_id != self.save_id:
                msg = (
                    f"the checkpoint at {self.path} that this metadata describes has been replaced"
                )
                raise CheckpointNotFoundError(msg, path=self.path)
            self.opened = self.views.apply(index)
        return self.opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "opened": None}


@dataclass(eq=False, repr=False)
class Entries(Mapping[str, Any]):
    """``state_dict_metadata``: a mapping of names to tensors' and values' metadata."""

    _handle: _Handle

    @property
    def index(self) -> _core.Index:
        """The index. In another process, it is opened again."""
        return self._handle.index

    def __getitem__(self, fqn: str) -> TensorStorageMetadata | BytesStorageMetadata:
        tensor = self.index.find(fqn) if isinstance(fqn, str) else None
        if tensor is None:
            raise KeyError(fqn)
        entry = self.index.tensor(tensor)
        if entry.is_bytes:
            return BytesStorageMetadata()
        dtype = stored_dtype(entry.name, entry.dtype)
        return TensorStorageMetadata(
            properties=tensor_properties(dtype, entry.flags),
            size=torch.Size(entry.shape),
            chunks=self.index.make_chunks(tensor, ChunkStorageMetadata, torch.Size),
        )

    def __contains__(self, fqn: object) -> bool:
        return isinstance(fqn, str) and self.index.find(fqn) is not None

    def __repr__(self) -> str:
        return f"<{len(self):,} entries of {checkpoint_path(self.index)}>"

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.names())

    def __len__(self) -> int:
        return self.index.tensor_count


@dataclass(eq=False, repr=False)
class PlannerPaths(Mapping[str, Any]):
    """``planner_data`` of torch's planner: a mapping of names to paths in the saved state dict."""

    _handle: _Handle
    _other: dict[str, Any]  # paths that belong to no entry
    _is_flat: bool  # entries without a path are at their names

    @cached_property
    def _paths(self) -> dict[str, Any]:
        index = self._handle.index
        paths = {name: index.planner_path(number) for number, name in enumerate(index.names())}
        return self._other | {
            name: (name,) if path is None else text_path(path)
            for name, path in paths.items()
            if self._is_flat or path is not None
        }

    def __getitem__(self, fqn: str) -> Any:
        return self._paths[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __repr__(self) -> str:
        return f"<paths in {checkpoint_path(self._handle.index)}>"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_paths"}
