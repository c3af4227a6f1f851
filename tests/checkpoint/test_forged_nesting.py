"""Forged indexes whose keys, paths or nesting make no state dict."""

import struct

import pytest

import dcp_rs
from dcp_rs import RsReader
from dcp_rs.errors import CorruptIndexError, PlanError
from support.forged import (
    BYTES,
    INDEX,
    INTEGER,
    NOTHING,
    TEXT,
    encoded,
    rebuild,
    refused_at_once,
    tensor_record,
)


@pytest.mark.parametrize("key", [encoded(8), encoded(9), encoded(7, INTEGER, encoded(8))])
def test_a_key_that_python_cannot_hash_is_refused(saved, key):
    header = (saved / INDEX).read_bytes()
    (saved / INDEX).write_bytes(rebuild(header, [b""] * 6 + [encoded(9, key, b"\0") + b"\0"]))
    refused_at_once(saved, "a key of a dict")
    with pytest.raises(CorruptIndexError):
        RsReader(saved).read_metadata()


@pytest.mark.parametrize(
    "key", [b"\0", b"\2", INTEGER, BYTES, encoded(7), encoded(7, TEXT, encoded(7, BYTES))]
)
def test_every_other_key_is_read(saved, key):
    header = (saved / INDEX).read_bytes()
    (saved / INDEX).write_bytes(rebuild(header, [b""] * 6 + [encoded(9, key, INTEGER) + b"\0"]))
    assert list(RsReader(saved).read_metadata().planner_data.values()) == [0]
    assert dcp_rs.open(saved).state_dict() == {}


def test_the_path_of_a_tensor_comes_before_what_the_root_says_of_it(saved):
    header = (saved / INDEX).read_bytes()
    root, path = encoded(9, TEXT, INTEGER, BYTES, INTEGER), encoded(7, INTEGER, TEXT)
    tensors = tensor_record((0, 1), path=(len(root) + 1, len(path)))
    (saved / INDEX).write_bytes(
        rebuild(header, [b"", tensors, b"", b"", b"", b"w", root + b"\0" + path])
    )
    paths = RsReader(saved).read_metadata().planner_data
    assert dict(paths) == {"w": (0, "w"), b"w": 0}
    assert len(paths) == 2


@pytest.mark.parametrize(
    "path",
    [
        encoded(7),
        encoded(8, TEXT),
        TEXT,
        *(encoded(7, TEXT, part) for part in (b"\0", b"\1", BYTES, encoded(7, TEXT))),
    ],
)
def test_a_path_of_other_than_strings_and_integers_is_refused(saved, path):
    header = (saved / INDEX).read_bytes()
    for planner, match in ((path, "path is not"), (encoded(7, TEXT, INTEGER), None)):
        tensors = tensor_record((0, 1), path=(2, len(planner)))
        (saved / INDEX).write_bytes(
            rebuild(header, [b"", tensors, b"", b"", b"", b"w", NOTHING + planner])
        )
        if match is None:
            assert dcp_rs.open(saved).info("w").shape == ()
        else:
            refused_at_once(saved, match)


def container(position, path, kind=TEXT):
    return encoded(7, b"\3" + struct.pack("<q", position), path, kind)


@pytest.mark.parametrize(
    "nesting",
    [
        b"",
        b"\1",
        encoded(8, TEXT),
        encoded(8, container(0, TEXT)),
        encoded(8, container(-1, encoded(7))),
        encoded(8, container(1 << 32, encoded(7))),
        encoded(8, container(0, encoded(7, b"\0"))),
        encoded(8, container(0, encoded(7), INTEGER)),
    ],
)
def test_nesting_of_another_form_is_refused(saved, nesting):
    header = (saved / INDEX).read_bytes()
    (saved / INDEX).write_bytes(rebuild(header, [b""] * 6 + [b"\0" + nesting]))
    refused_at_once(saved, "nesting")


def part(index):
    return b"\3" + struct.pack("<q", index)


@pytest.mark.parametrize(
    ("paths", "match"),
    [
        ([encoded(7, TEXT), encoded(7, TEXT, TEXT)], "contradict"),
        ([encoded(7, TEXT, TEXT), encoded(7, TEXT)], "contradict"),
        ([encoded(7, TEXT, TEXT), encoded(7, TEXT, part(0))], "contradict"),
        ([encoded(7, TEXT), encoded(7, TEXT)], "contradict"),
        ([encoded(7, TEXT, part(-1)), encoded(7, TEXT, part(0))], "contradict"),
        ([encoded(7, TEXT, part(1 << 40)), encoded(7, TEXT, part(0))], "most are empty"),
        ([encoded(7, *[TEXT] * 100_000), encoded(7, b"\5\1\0\0\0v")], None),
    ],
)
def test_paths_that_make_no_state_dict(saved, paths, match):
    header = (saved / INDEX).read_bytes()
    planner, tensors = b"\0" + encoded(8), b""
    dims = struct.pack("<Q", 0)
    for number, path in enumerate(paths):
        tensors += tensor_record((number, 1), path=(len(planner), len(path)), ndim=1)
        planner += path
    (saved / INDEX).write_bytes(rebuild(header, [b"", tensors, b"", dims, b"", b"vw", planner]))
    with dcp_rs.open(saved) as checkpoint:
        if match is None:
            assert set(checkpoint.state_dict()) == {"v", "w"}
        else:
            with pytest.raises(PlanError, match=match):
                checkpoint.state_dict()
