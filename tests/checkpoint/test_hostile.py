"""Indexes and data files of which every byte may be wrong: a typed error, or exactly the right tensors."""

import contextlib
import os
import resource
import shutil
import struct
import subprocess
import sys
import time

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import dcp_rs
from dcp_rs import RsReader, _core
from dcp_rs.errors import CorruptDataError, CorruptIndexError, DcpRsError, PlanError, UnsupportedError
from support import same_bits
from support.both import save_rs
from support.places import STOCK

INDEX = "index.dcprs"
HEADER_LEN = 256
DIGEST_AT = 40

STATE = {
    "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.arange(3, dtype=torch.bfloat16)},
    "count": torch.tensor(3),
    "value": "x",
}
FLAT = {
    "model.w": STATE["model"]["w"],
    "model.b": STATE["model"]["b"],
    "count": STATE["count"],
    "value": "x",
}


#: Planner data, and nesting: none of both.
NOTHING = b"\0\0"


@pytest.fixture
def saved(ckpt):
    save_rs(STATE, ckpt)
    return ckpt


def sealed(data):
    """The bytes with the digest that they should have: who forges an index can compute that."""
    if len(data) < HEADER_LEN:
        return bytes(data)
    data = bytearray(data)
    data[DIGEST_AT : DIGEST_AT + 8] = bytes(8)
    data[DIGEST_AT : DIGEST_AT + 8] = struct.pack("<Q", _core.block_digest(bytes(data)))
    return bytes(data)


def read_all(path):
    with dcp_rs.open(path, verify=True) as checkpoint:
        return {name: checkpoint[name] for name in checkpoint}


def same(left, right):
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return same_bits(left, right)
    return type(left) is type(right) and left == right


def outcome(path, want=FLAT):
    """The name of the typed error, or "right"; anything else fails. `want` is None where the bytes may say anything."""
    try:
        got = read_all(path)
    except DcpRsError as error:
        return type(error).__name__
    if want is not None:
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert same(got[name], value), name
    return "right"


def test_every_flipped_byte_of_an_index_is_found(saved):
    good = (saved / INDEX).read_bytes()
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        (saved / INDEX).write_bytes(bad)
        with pytest.raises((CorruptIndexError, UnsupportedError)) as raised:
            dcp_rs.open(saved)
        assert raised.value.path in (str(saved / INDEX), None)


def test_every_truncation_of_an_index_is_found(saved):
    good = (saved / INDEX).read_bytes()
    for length in range(len(good)):
        for data in (good[:length], sealed(good[:length])):
            (saved / INDEX).write_bytes(data)
            with pytest.raises(CorruptIndexError):
                dcp_rs.open(saved)
    (saved / INDEX).write_bytes(good + b"\0")
    with pytest.raises(CorruptIndexError):
        dcp_rs.open(saved)


def test_every_forged_byte_of_an_index_is_refused_or_harmless(saved):
    """With the digest computed anew nothing says what is right: any tensors may come out, but nothing else."""
    good = (saved / INDEX).read_bytes()
    seen = {}
    for at in range(8, len(good)):
        for value in {good[at] ^ 1, good[at] ^ 0x80, 0, 0xFF} - {good[at]}:
            bad = bytearray(good)
            bad[at] = value
            (saved / INDEX).write_bytes(sealed(bad))
            said = outcome(saved, want=None)
            seen[said] = seen.get(said, 0) + 1
    assert seen["CorruptIndexError"] > 1000
    assert seen.keys() <= {
        "right",
        "CorruptIndexError",
        "CorruptDataError",
        "UnsupportedError",
        "UnsafePickleError",
        "PlanError",
    }


def test_every_flipped_bit_of_a_data_file_is_found(saved):
    """Header, payload and what lies between; by `verify`, which says where, and by a load, before anything is handed over."""
    (file,) = saved.glob("g*.safetensors")
    good = file.read_bytes()
    checkpoint = dcp_rs.open(saved)
    places = {}
    for name in checkpoint:
        (chunk,) = checkpoint.chunks(name)
        places[name] = range(chunk.offset, chunk.offset + chunk.nbytes)
    payload = range(min(p.start for p in places.values()), max(p.stop for p in places.values()))
    assert payload.stop == len(good)
    every = [*range(0, payload.start, 61), *(at for place in places.values() for at in place)]
    for at in every:
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        file.write_bytes(bad)
        report = dcp_rs.verify(saved)
        (problem,) = report.problems
        assert not report
        assert problem.file == str(file)
        inside = [name for name, place in places.items() if at in place]
        if not inside:
            assert (problem.tensor, problem.offset) == ("", 0)
            assert outcome(saved) == "right"  # a load reads no headers
            continue
        (name,) = inside
        assert (problem.tensor, problem.block, problem.offset) == (name, 0, places[name].start)
        assert problem.expected != problem.got
        with pytest.raises(CorruptDataError, match="digest") as raised:
            dcp_rs.open(saved, verify=True)[name]
        assert (raised.value.path, raised.value.tensor, raised.value.offset) == (
            str(file),
            name,
            places[name].start,
        )


class Committing(DefaultLoadPlanner):
    """Notes what was handed over."""

    def __init__(self):
        super().__init__()
        self.committed = []

    def commit_tensor(self, read_item, tensor):
        self.committed.append(read_item.dest_index.fqn)
        super().commit_tensor(read_item, tensor)


def test_a_tensor_with_a_damaged_block_is_not_handed_over(ckpt):
    """Three blocks, the second one damaged: found in each way of reading, and by parts that touch it only."""
    block = 1 << 20
    save_rs({"w": torch.ones(3 * block, dtype=torch.uint8)}, ckpt)
    (file,) = ckpt.glob("g*.safetensors")
    (chunk,) = dcp_rs.open(ckpt).chunks("w")
    with file.open("r+b") as data:
        data.seek(chunk.offset + block + 77)
        data.write(b"\2")
    (problem,) = dcp_rs.verify(ckpt).problems
    assert (problem.block, problem.offset) == (1, chunk.offset + block)
    for io in ("mmap", "buffered", "direct"):
        planner = Committing()
        reader = RsReader(ckpt, verify=True, io=io)
        state = {"w": torch.zeros(3 * block, dtype=torch.uint8)}
        with pytest.raises(CorruptDataError) as raised:
            dcp_rs.load_state_dict(state, reader, no_dist=True, planner=planner)
        assert (raised.value.tensor, raised.value.offset) == ("w", chunk.offset + block)
        assert planner.committed == []
        index = dcp_rs._core.Index.open(str(ckpt), None, False)
        for begin, damaged in ((0, False), (block - 1, True), (block + 5, True), (2 * block, False)):
            target = torch.zeros(2, dtype=torch.uint8)
            fill = _core.Fill(0, (begin,), (2,), target.data_ptr(), (1,))
            options = {"io": io, "threads": 1, "verify": True, "max_inflight_bytes": 1 << 22}
            with pytest.raises(CorruptDataError) if damaged else contextlib.nullcontext():
                index.read_regions([fill], **options)
            assert damaged or target.tolist() == [1, 1]


def test_every_truncation_of_a_data_file_is_found(saved):
    (file,) = saved.glob("g*.safetensors")
    good = file.read_bytes()
    for length in [*range(0, len(good), 97), len(good) - 1]:
        file.write_bytes(good[:length])
        assert outcome(saved) == "CorruptDataError"
        (problem,) = dcp_rs.verify(saved).problems
        assert problem.tensor == ""
        assert str(length) in problem.got
    file.write_bytes(good + b"\0")
    assert outcome(saved) == "CorruptDataError"


def test_every_byte_of_the_header_of_a_foreign_file(tmp_path):
    """No index: the header itself is what is trusted."""
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.int8)}, path)
    good = path.read_bytes()
    header = 8 + struct.unpack("<Q", good[:8])[0]
    want = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.int8)}
    for at in range(header):
        for value in {good[at] ^ 1, good[at] ^ 0x80, 0, 0xFF, ord("9")} - {good[at]}:
            bad = bytearray(good)
            bad[at] = value
            path.write_bytes(bad)
            compare_with_safetensors(path)
    for length in range(header):
        path.write_bytes(good[:length])
        with pytest.raises(DcpRsError):
            dcp_rs.open(path)
    path.write_bytes(good)
    assert outcome(path, want) == "right"


def compare_with_safetensors(path):
    """We take what the reference reader takes, and the same of it."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as reference:
            want = {name: reference.get_tensor(name) for name in reference.keys()}  # noqa: SIM118
    except Exception:  # noqa: BLE001 - each of its releases has other classes
        with pytest.raises(DcpRsError):
            read_all(path)
        return
    got = read_all(path)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert same(got[name], value), name


# --- what a forged index could do to time and memory ------------------------------------------------


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


def test_names_that_share_bytes_are_refused(saved):
    """10,000 names that are each half of a megabyte would be 5 GB."""
    header = (saved / INDEX).read_bytes()
    strings = b"a" * (1 << 19)
    count = 10_000
    tensors = b"".join(tensor_record((0, len(strings) - count + i)) for i in range(count))
    (saved / INDEX).write_bytes(rebuild(header, [b"", tensors, b"", b"", b"", strings, NOTHING]))
    refused_at_once(saved, "share bytes")


def test_paths_that_share_bytes_are_refused(saved):
    header = (saved / INDEX).read_bytes()
    long = 1 << 17
    planner = NOTHING + b"\7" + struct.pack("<I", long) + b"\5\0\0\0\0" * long
    names = b"".join(b"%08d" % i for i in range(4000))
    tensors = b"".join(tensor_record((8 * i, 8), path=(2, len(planner) - 2)) for i in range(4000))
    (saved / INDEX).write_bytes(rebuild(header, [b"", tensors, b"", b"", b"", names, planner]))
    refused_at_once(saved, "share bytes")


def test_chunks_that_share_bytes_are_refused(saved):
    """One megabyte of a file, a thousand times over, would be a tensor of a gigabyte."""
    header = (saved / INDEX).read_bytes()
    files, *_ = sections_of(header)
    file = bytearray(files[:64])
    struct.pack_into("<QIIQQQ", file, 0, 1, 4, 0, (1 << 20) + 4096, 4096, 0)
    count, each = 1000, 1 << 20
    dims = struct.pack("<Q", count * each) + b"".join(struct.pack("<QQ", i * each, each) for i in range(count))
    chunks = b"".join(struct.pack("<IIQQQQII", 0, 0, 4096, each, 1 + 2 * i, 0, 0, 0) for i in range(count))
    tensors = tensor_record((0, 1), shape=0, chunks=(0, count), dtype=2, ndim=1)
    (saved / INDEX).write_bytes(rebuild(header, [bytes(file), tensors, chunks, dims, b"", b"wfile", NOTHING]))
    (saved / "file").write_bytes(bytes((1 << 20) + 4096))
    refused_at_once(saved, "share bytes")


def test_elements_that_share_bytes_stay_views(saved):
    """Strides of zero, as torch's own files have them: one element that claims to be 2**40."""
    header = (saved / INDEX).read_bytes()
    files, *_ = sections_of(header)
    file = bytearray(files[:64])
    struct.pack_into("<QIIQQQ", file, 0, 1, 4, 0, 4097, 4096, 0)
    dims = struct.pack("<QQQQ", 1 << 40, 0, 1 << 40, 0)
    chunks = struct.pack("<IIQQQQII", 0, 0, 4096, 1, 1, 0, 1, 0)
    tensors = tensor_record((0, 1), shape=0, chunks=(0, 1), dtype=2, ndim=1)
    sections = [bytes(file), tensors, chunks, dims, b"", b"wfile", NOTHING]
    for source in (1, 2):
        (saved / INDEX).write_bytes(rebuild(header, sections, patch=[(80, source)]))
        (saved / "file").write_bytes(bytes(4096) + b"\7")
        with dcp_rs.open(saved) as checkpoint:
            assert checkpoint["w"].stride() == (0,)
            assert checkpoint["w"][1 << 39] == checkpoint.get_slice("w")[-1] == 7
        with dcp_rs.open(saved, framework="np") as checkpoint:
            assert checkpoint["w"].strides == (0,)
        into = {"w": torch.zeros(5, dtype=torch.uint8)}
        with pytest.raises(PlanError, match="shape"):
            dcp_rs.load(into, saved)
    (saved / INDEX).write_bytes(rebuild(header, sections))
    refused_at_once(saved, "no adopted tensor")


@pytest.mark.parametrize("shape", [(1 << 62, 1 << 62, 0), (0, 1 << 62, 1 << 62), (1 << 61, 0), (1 << 63, 0)])
def test_a_shape_that_torch_cannot_multiply_is_refused(saved, shape):
    header = (saved / INDEX).read_bytes()
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    tensors = tensor_record((0, 1), ndim=len(shape))
    (saved / INDEX).write_bytes(rebuild(header, [b"", tensors, b"", dims, b"", b"w", NOTHING]))
    refused_at_once(saved, "shape is too large")


def test_the_largest_shape_that_holds_nothing_is_read(saved):
    header = (saved / INDEX).read_bytes()
    tensors = tensor_record((0, 1), ndim=2)
    dims = struct.pack("<QQ", (1 << 61) - 1, 0)
    (saved / INDEX).write_bytes(rebuild(header, [b"", tensors, b"", dims, b"", b"w", NOTHING]))
    assert read_all(saved)["w"].shape == ((1 << 61) - 1, 0)


def encoded(tag, *items):
    return bytes([tag]) + struct.pack("<I", len(items) // (2 if tag == 9 else 1)) + b"".join(items)


TEXT = b"\5" + struct.pack("<I", 1) + b"w"
INTEGER = b"\3" + struct.pack("<q", 0)
BYTES = b"\6" + struct.pack("<I", 1) + b"w"


@pytest.mark.parametrize("key", [encoded(8), encoded(9), encoded(7, INTEGER, encoded(8))])
def test_a_key_that_python_cannot_hash_is_refused(saved, key):
    header = (saved / INDEX).read_bytes()
    (saved / INDEX).write_bytes(rebuild(header, [b""] * 6 + [encoded(9, key, b"\0") + b"\0"]))
    refused_at_once(saved, "a key of a dict")
    with pytest.raises(CorruptIndexError):
        RsReader(saved).read_metadata()


@pytest.mark.parametrize("key", [b"\0", b"\2", INTEGER, BYTES, encoded(7), encoded(7, TEXT, encoded(7, BYTES))])
def test_every_other_key_is_read(saved, key):
    header = (saved / INDEX).read_bytes()
    (saved / INDEX).write_bytes(rebuild(header, [b""] * 6 + [encoded(9, key, INTEGER) + b"\0"]))
    assert list(RsReader(saved).read_metadata().planner_data.values()) == [0]
    assert dcp_rs.open(saved).state_dict() == {}


def test_the_path_of_a_tensor_comes_before_what_the_root_says_of_it(saved):
    header = (saved / INDEX).read_bytes()
    root, path = encoded(9, TEXT, INTEGER, BYTES, INTEGER), encoded(7, INTEGER, TEXT)
    tensors = tensor_record((0, 1), path=(len(root) + 1, len(path)))
    (saved / INDEX).write_bytes(rebuild(header, [b"", tensors, b"", b"", b"", b"w", root + b"\0" + path]))
    paths = RsReader(saved).read_metadata().planner_data
    assert dict(paths) == {"w": (0, "w"), b"w": 0}
    assert len(paths) == 2


@pytest.mark.parametrize(
    "path",
    [encoded(7), encoded(8, TEXT), TEXT, *(encoded(7, TEXT, part) for part in (b"\0", b"\1", BYTES, encoded(7, TEXT)))],
)
def test_a_path_of_other_than_strings_and_integers_is_refused(saved, path):
    header = (saved / INDEX).read_bytes()
    for planner, match in ((path, "path is not"), (encoded(7, TEXT, INTEGER), None)):
        tensors = tensor_record((0, 1), path=(2, len(planner)))
        (saved / INDEX).write_bytes(rebuild(header, [b"", tensors, b"", b"", b"", b"w", NOTHING + planner]))
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


def test_a_memory_format_without_a_meaning_is_refused(saved):
    header = (saved / INDEX).read_bytes()
    tensors = bytearray(tensor_record((0, 1)))
    for flags in (0b1100, 0b1111):
        tensors[15] = flags
        (saved / INDEX).write_bytes(rebuild(header, [b"", bytes(tensors), b"", b"", b"", b"w", NOTHING]))
        refused_at_once(saved, "memory format")
    tensors[15] = 0b11111011
    (saved / INDEX).write_bytes(rebuild(header, [b"", bytes(tensors), b"", b"", b"", b"w", NOTHING]))
    assert dcp_rs.open(saved).info("w").shape == ()


@pytest.mark.parametrize(
    ("source", "kind", "stride", "match"),
    [
        (0, 0, 1, "no adopted tensor"),
        (1, 1, 1, "no adopted tensor"),
        (1, 0, 1 << 63, "stride is too large"),
        (1, 0, (1 << 63) - 1, None),
    ],
)
def test_strides_are_those_of_adopted_tensors(saved, source, kind, stride, match):
    header = (saved / INDEX).read_bytes()
    files, *_ = sections_of(header)
    file = bytearray(files[:64])
    struct.pack_into("<QIIQQQ", file, 0, 1, 4, 0, 4097, 4096, 0)
    dims = struct.pack("<QQQQ", 1, 0, 1, stride)
    chunks = struct.pack("<IIQQQQII", 0, 0, 4096, 1, 1, 0, 1, 0)
    tensors = tensor_record((0, 1), chunks=(0, 1), kind=kind, dtype=0 if kind else 2, ndim=0 if kind else 1)
    sections = [bytes(file), tensors, chunks, dims, b"", b"wfile", NOTHING]
    (saved / INDEX).write_bytes(rebuild(header, sections, patch=[(80, source)]))
    (saved / "file").write_bytes(bytes(4097))
    if match is None:
        assert read_all(saved)["w"].tolist() == [0]
    else:
        refused_at_once(saved, match)


@pytest.mark.parametrize(
    ("source", "incompat", "code", "flags", "match"),
    [
        (2, 1, 15, 8, None),  # complex64, conjugate
        (2, 1, 15, 24, None),
        (1, 1, 12, 16, None),  # float32, negative
        (0, 1, 15, 8, "no adopted tensor"),
        (2, 0, 15, 8, "no adopted tensor of an index that says so"),
        (2, 1, 12, 8, "which have none"),
        (2, 1, 6, 16, "which have none"),
    ],
)
def test_signs_are_those_of_adopted_tensors(saved, source, incompat, code, flags, match):
    header = (saved / INDEX).read_bytes()
    files, *_ = sections_of(header)
    file = bytearray(files[:64])
    struct.pack_into("<QIIQQQ", file, 0, 1, 4, 0, 4104, 4096, 0)
    length = 4 if code == 12 else 8
    chunks = struct.pack("<IIQQQQII", 0, 0, 4096, length, 0, 0, flags, 0)
    tensors = tensor_record((0, 1), chunks=(0, 1), dtype=code)
    sections = [bytes(file), tensors, chunks, b"", b"", b"wfile", NOTHING]
    (saved / INDEX).write_bytes(rebuild(header, sections, patch=[(80, source), (24, incompat)]))
    (saved / "file").write_bytes(bytes(4096) + struct.pack("<ff", 1, 2))
    want = {8: 1 - 2j, 24: -1 + 2j, 16: -1}
    if match is None:
        assert read_all(saved)["w"] == want[flags]
    else:
        refused_at_once(saved, match)


@pytest.mark.parametrize(
    ("source", "incompat", "flags", "match"),
    [(0, 2, 4, None), (0, 0, 4, "does not say so"), (2, 2, 4, "what others wrote"), (0, 2, 5, "what others wrote")],
)
def test_links_are_of_native_data_in_an_index_that_says_so(saved, source, incompat, flags, match):
    header = (saved / INDEX).read_bytes()
    files, *_ = sections_of(header)
    file = bytearray(files[:64])
    struct.pack_into("<QIIQQQ", file, 0, 1, 4, flags, 4100, 4096, 0)
    chunks = struct.pack("<IIQQQQII", 0, 0, 4096, 4, 0, 0, 0, 0)
    sections = [bytes(file), tensor_record((0, 1), chunks=(0, 1)), chunks, b"", b"", b"wfile", NOTHING]
    (saved / INDEX).write_bytes(rebuild(header, sections, patch=[(80, source), (24, incompat)]))
    (saved / "file").write_bytes(bytes(4096) + struct.pack("<f", 1))
    if match is None:
        assert read_all(saved)["w"] == 1
    else:
        refused_at_once(saved, match)


@pytest.mark.parametrize(("at", "length"), [(4, 16), (1 << 40, 16), (256, 8), (256, 32), (256, 1 << 63)])
def test_contents_are_sixteen_bytes_a_chunk_within_the_index(saved, at, length):
    header = bytearray((saved / INDEX).read_bytes())
    struct.pack_into("<QQ", header, 208, at, length)
    (saved / INDEX).write_bytes(sealed(header))
    refused_at_once(saved, "contents")


def test_an_index_of_the_future_is_refused(saved):
    header = (saved / INDEX).read_bytes()
    sections = [b""] * 6 + [NOTHING]
    (saved / INDEX).write_bytes(rebuild(header, sections, patch=[(24, 12)]))
    with pytest.raises(UnsupportedError, match="0xc"):
        dcp_rs.open(saved)


def refused_at_once(path, match):
    began = time.monotonic()
    with pytest.raises(CorruptIndexError, match=match):
        dcp_rs.open(path)
    assert time.monotonic() - began < 5


def test_a_shape_that_no_chunk_holds_takes_no_memory(saved):
    """The shape is the index's word alone; chunks are bounded by their files."""
    header = (saved / INDEX).read_bytes()
    dims = struct.pack("<Q", 1 << 60)
    tensors = tensor_record((0, 1), shape=0, chunks=(0, 0), dtype=2, ndim=1)
    (saved / INDEX).write_bytes(rebuild(header, [b"", tensors, b"", dims, b"", b"w", NOTHING]))
    checkpoint = dcp_rs.open(saved)
    assert checkpoint.info("w").shape == (1 << 60,)
    with pytest.raises(PlanError, match="does not hold"):
        checkpoint["w"]


BOUNDED = """
import resource, sys
import torch, dcp_rs
base = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = base + (96 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from dcp_rs.errors import DcpRsError
for path in sys.argv[1:]:
    try:
        with dcp_rs.open(path, threads=1) as checkpoint:
            for name in checkpoint:
                checkpoint[name]
        print("right")
    except DcpRsError as error:
        print(type(error).__name__)
"""


def test_forged_lengths_allocate_nothing(saved, tmp_path):
    """96 MiB of address space have to be enough to refuse whatever the numbers of a small file claim."""
    good = (saved / INDEX).read_bytes()
    (data,) = saved.glob("g*.safetensors")
    folders = [
        forge(tmp_path / f"section-{at}-{value}", data, good, at, value)
        for at in range(96, 96 + 16 * 7, 8)
        for value in (1 << 31, (1 << 64) - 1)
    ]
    for start, length in (section(good, number) for number in range(7)):
        folders += [
            forge(tmp_path / f"record-{at}-{value}", data, good, at, value)
            for at in range(start, start + min(length, 64), 8)
            for value in (1 << 31, (1 << 63) - 1)
        ]
    for length in (1 << 31, 99_999_999, 1 << 60):
        path = tmp_path / f"header-{length}.safetensors"
        path.write_bytes(struct.pack("<Q", length) + b"{}" * 50)
        folders.append(path)
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, *folders], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = done.stdout.split()
    assert len(said) == len(folders)
    assert said.count("CorruptIndexError") > len(folders) // 2


def forge(folder, data, good, at, value):
    folder.mkdir()
    (folder / data.name).hardlink_to(data)
    bad = bytearray(good)
    struct.pack_into("<Q", bad, at, value)
    (folder / INDEX).write_bytes(sealed(bad))
    return folder


# --- paths that lead out ----------------------------------------------------------------------------


def with_name(path, name, *, external=False):
    """The index in `path` with its one data file called `name`."""
    data = (path / INDEX).read_bytes()
    files, tensors, chunks, dims, digests, strings, planner = sections_of(data)
    file = bytearray(files)
    struct.pack_into("<QI", file, 0, len(strings), len(name))
    if external:
        struct.pack_into("<I", file, 12, struct.unpack_from("<I", file, 12)[0] | 1)
    # The names of files and of tensors are counted apart; the old name of the file stays, unused.
    (path / INDEX).write_bytes(rebuild(data, [bytes(file), tensors, chunks, dims, digests, strings + name, planner]))


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("kind", ["absolute", "parent", "link", "linked folder", "link within"])
def test_no_name_leads_out_of_the_folder(saved, tmp_path, kind, external):
    (data,) = saved.glob("g*.safetensors")
    outside = tmp_path / "outside"
    outside.mkdir()
    secret = outside / data.name
    if kind == "link within":
        (saved / "kept").mkdir()
        secret = saved / "kept" / "data"
    data.rename(secret)
    name = {
        "absolute": str(secret),
        "parent": f"../outside/{data.name}",
        "link": "link",
        "linked folder": f"folder/{data.name}",
        "link within": "link",
    }[kind]
    if kind.startswith("link") and kind != "linked folder":
        (saved / "link").symlink_to(secret)
    if kind == "linked folder":
        (saved / "folder").symlink_to(outside)
    with_name(saved, name.encode(), external=external)
    allowed = kind == "link within" and external
    if allowed:
        assert outcome(saved) == "right"
    else:
        with pytest.raises((UnsupportedError, CorruptIndexError, CorruptDataError)) as raised:
            read_all(saved)
        if type(raised.value) is UnsupportedError:
            assert "allow_external=True" in str(raised.value)
        target = {"model": {"w": torch.zeros(3, 4)}}
        with pytest.raises(DcpRsError):
            dcp_rs.load(target, saved)
        assert not target["model"]["w"].any()
    if external:
        with dcp_rs.open(saved, allow_external=True) as checkpoint:
            assert torch.equal(checkpoint["model.w"], STATE["model"]["w"])


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("name", ["./x", "kept//x", "kept/./x", "x/", "kept\\x"])
def test_names_are_paths_where_someone_else_wrote_the_file(saved, name, external):
    (data,) = saved.glob("g*.safetensors")
    (saved / "kept").mkdir()
    for copy in ("x", "kept/x", "kept\\x"):
        (saved / copy).hardlink_to(data)
    with_name(saved, name.encode(), external=external)
    expected = "CorruptIndexError" if not external else "CorruptDataError" if name == "x/" else "right"
    assert outcome(saved) == expected


def test_an_index_elsewhere_needs_permission_and_one_beside_does_not(tmp_path):
    from safetensors.torch import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    dcp_rs.index(folder)
    assert outcome(folder, {"w": torch.ones(3)}) == "right"
    dcp_rs.index(folder / "model.safetensors", out=tmp_path / "elsewhere")
    with pytest.raises(UnsupportedError, match="allow_external=True"):
        read_all(tmp_path / "elsewhere")
    with dcp_rs.open(tmp_path / "elsewhere", allow_external=True) as checkpoint:
        assert torch.equal(checkpoint["w"], torch.ones(3))


def test_a_cache_of_links_opens_without_an_index(tmp_path):
    """As Hugging Face's cache has them: the folder was made by a tool of this machine, not by an index."""
    from safetensors.torch import save_file

    (tmp_path / "blobs").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "blobs" / "0123.safetensors")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123.safetensors")
    assert outcome(tmp_path / "snapshot", {"w": torch.ones(3)}) == "right"
    with pytest.warns(UserWarning, match="allow_external=True"):
        dcp_rs.index(tmp_path / "snapshot")
    with pytest.raises(UnsupportedError, match="allow_external=True"):
        read_all(tmp_path / "snapshot")
    with dcp_rs.open(tmp_path / "snapshot", allow_external=True) as checkpoint:
        assert torch.equal(checkpoint["w"], torch.ones(3))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("which", ["index", "data", "safetensors", "metadata"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(saved, tmp_path, which):
    (data,) = saved.glob("g*.safetensors")
    path = saved
    if which == "index":
        target = saved / INDEX
    elif which == "data":
        target = data
    elif which == "safetensors":
        path = target = tmp_path / "model.safetensors"
    else:
        stock = STOCK / "torch-2.15.0" / "plain"
        path = shutil.copytree(stock, tmp_path / "stock")
        target = path / ".metadata"
    target.unlink(missing_ok=True)
    os.mkfifo(target)
    with pytest.raises((DcpRsError, OSError)):
        read_all(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
