"""What a checkpoint has under a name, as far as a load has to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from dcp_rs import _core
from dcp_rs.errors import UnsupportedError
from dcp_rs.tensors.dtypes import BY_NAME

__all__ = ["Stored", "describe", "index_of"]


@dataclass(slots=True)
class Stored:
    """An entry of a checkpoint.

    Attributes:
        name: FQN.
        is_bytes: it is a value, and no tensor.
        dtype: of a tensor.
        shape: of the whole tensor.
        index: its number in the index; -1 in metadata of others.
    """

    name: str
    is_bytes: bool
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    index: int


def index_of(metadata: Metadata | None) -> _core.Index | None:
    """The index that the metadata is a view of, if it is one of this package."""
    return None if metadata is None else getattr(metadata.state_dict_metadata, "index", None)


def describe(metadata: Metadata, names: Sequence[str]) -> list[Stored | None]:
    """What there is under each name; None where there is nothing.

    Raises:
        UnsupportedError: a tensor of a dtype that this torch does not have.
    """
    index = index_of(metadata)
    if index is not None:
        return [
            None if row is None else Stored(name, row[1] is None, _dtype(name, row[1]), row[2], row[0])
            for name, row in zip(names, index.describe(names), strict=True)
        ]
    described: list[Stored | None] = []
    for name in names:
        entry = metadata.state_dict_metadata.get(name)
        if entry is None:
            described.append(None)
        elif isinstance(entry, BytesStorageMetadata):
            described.append(Stored(name, True, None, (), -1))
        else:
            described.append(Stored(name, False, entry.properties.dtype, tuple(entry.size), -1))
    return described


def _dtype(name: str, dtype: str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    found = BY_NAME.get(dtype)
    if found is None:
        msg = f"tensor {name!r} is of dtype {dtype}, which torch {torch.__version__} does not have"
        raise UnsupportedError(msg, tensor=name)
    return found
