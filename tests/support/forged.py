"""Indexes that somebody forged, section by section, under a digest that fits."""

import struct
import time

import pytest

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
    return struct.pack("<QIBBBBQQQQIIQ", name[0], name[1], kind, dtype, ndim, 0, shape, *chunks, *path, 0xFFFFFFFF, 0)


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
