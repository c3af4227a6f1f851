"""Checkpoints put together by hand: from what `_core.Save` writes, and indexes that are forged section by section."""

import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_rs
from dcp_rs import _core
from dcp_rs.errors import CorruptIndexError

INDEX = "index.dcprs"
HEADER_LEN = 256
DIGEST_AT = 40

#: Planner data, and nesting: none of both.
NOTHING = b"\0\0"


def sealed(data):
    """The bytes with the digest that they should have: who forges an index can compute that."""
    if len(data) < HEADER_LEN:
        return bytes(data)
    data = bytearray(data)
    data[DIGEST_AT : DIGEST_AT + 8] = bytes(8)
    data[DIGEST_AT : DIGEST_AT + 8] = struct.pack("<Q", _core.block_digest(bytes(data)))
    return bytes(data)


def section(data, number):
    return struct.unpack_from("<QQ", data, 96 + 16 * number)


def rebuild(header, sections, **fields):
    """An index of these sections, sealed. `header` gives the rest."""
    data = bytearray(header[:HEADER_LEN])
    for number, body in enumerate(sections):
        struct.pack_into("<QQ", data, 96 + 16 * number, len(data), len(body))
        data += body + bytes(-len(body) % 8)
    struct.pack_into("<Q", data, 32, len(data))
    struct.pack_into("<Q", data, 16, 0)  # no contents
    for at, value in fields.get("patch", []):
        struct.pack_into("<Q", data, at, value)
    return sealed(data)


def sections_of(data):
    return [data[at : at + length] for at, length in (section(data, n) for n in range(7))]


def tensor_record(name, path=(0, 0), shape=0, chunks=(0, 0), dtype=12, ndim=0, kind=0):
    return struct.pack(
        "<QIBBBBQQQQIIQ",
        name[0],
        name[1],
        kind,
        dtype,
        ndim,
        0,
        shape,
        *chunks,
        *path,
        0xFFFFFFFF,
        0,
    )


def encoded(tag, *items):
    return bytes([tag]) + struct.pack("<I", len(items) // (2 if tag == 9 else 1)) + b"".join(items)


TEXT = b"\5" + struct.pack("<I", 1) + b"w"
INTEGER = b"\3" + struct.pack("<q", 0)
BYTES = b"\6" + struct.pack("<I", 1) + b"w"


def refused_at_once(path, match):
    began = time.process_time()  # not of the wall: the machine may be busy
    with pytest.raises(CorruptIndexError, match=match):
        dcp_rs.open(path)
    assert time.process_time() - began < 5


def whole_item(name: str, tensor: torch.Tensor, **options: Any) -> _core.SaveItem:
    """A tensor that is saved in one piece."""
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _core.SaveItem(
        name,
        tensor.nbytes,
        dtype=dtype,
        shape=shape,
        offsets=(0,) * tensor.dim(),
        sizes=shape,
        **options,
    )


def commit_ranks(
    path: Path, indexes: list[bytes], *, generation: int = 1, planner_data: Any = None
) -> None:
    """Commits the indexes of all ranks, as the coordinator of a save does."""
    _core.commit_indexes(
        str(path),
        None,
        indexes,
        save_id=bytes(range(16)),
        generation=generation,
        planner_data={} if planner_data is None else planner_data,
        items=None,
        names=(),
        fsync=False,
    )


def save_with_hole(path: Path) -> None:
    """Rows 0 to 3 of 8, in an index that is valid: as if a rank's part had been lost."""
    rows = torch.arange(4.0)
    item = _core.SaveItem(
        "w",
        rows.nbytes,
        dtype="float32",
        shape=(8, 1),
        offsets=(0, 0),
        sizes=(4, 1),
        path=("w",),
        position=0,
    )
    save_items(path, [item], [_core.Part(0, 0, rows.data_ptr(), rows.nbytes)], ["w"])


def save_items(path: Path, items: list[Any], parts: list[Any], names: list[str]) -> None:
    """A checkpoint of one rank from these items and their bytes, whether or not they are whole."""
    generation = _core.next_generation(str(path))
    save = _core.Save.create(
        str(path),
        items,
        save_id=bytes(range(16)),
        generation=generation,
        token=1,
        rank=0,
        world_size=1,
        threads=1,
        fsync=False,
        io="buffered",
        max_inflight_bytes=1 << 20,
    )
    save.write(parts)
    data = {name: (name,) for name in names}
    commit_ranks(path, [save.finish()], generation=generation, planner_data=data)
