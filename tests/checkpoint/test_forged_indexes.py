"""Forged indexes: no record of theirs is believed unchecked, whatever it would cost in time or memory."""

import struct
import subprocess
import sys

import pytest
import torch

import dcp_rs
from dcp_rs.errors import PlanError, UnsupportedError
from support.failures import read_whole
from support.forged import (
    INDEX,
    NOTHING,
    rebuild,
    refused_at_once,
    sealed,
    section,
    sections_of,
    tensor_record,
)


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
    dims = struct.pack("<Q", count * each) + b"".join(
        struct.pack("<QQ", i * each, each) for i in range(count)
    )
    chunks = b"".join(
        struct.pack("<IIQQQQII", 0, 0, 4096, each, 1 + 2 * i, 0, 0, 0) for i in range(count)
    )
    tensors = tensor_record((0, 1), shape=0, chunks=(0, count), dtype=2, ndim=1)
    (saved / INDEX).write_bytes(
        rebuild(header, [bytes(file), tensors, chunks, dims, b"", b"wfile", NOTHING])
    )
    (saved / "file").write_bytes(bytes((1 << 20) + 4096))
    refused_at_once(saved, "share bytes")


def forge_chunks(saved, chunks, dims, tensors, *, source=0, files=(b"file",), size=64):
    """An index of tensors `a` and `b`, whose chunks are (tensor, file, offset, length, dims), over files of 64 bytes each."""
    header = (saved / INDEX).read_bytes()
    names = b"ab" + b"".join(files)
    at, records = 2, b""
    for name in files:
        records += struct.pack("<QIIQQQ", at, len(name), 0, 4096 + size, 4096, 0) + bytes(24)
        at += len(name)
        (saved / name.decode()).write_bytes(bytes(4096 + size))
    body = b"".join(struct.pack("<IIQQQQII", *chunk, 0, 0, 0) for chunk in chunks)
    pool = struct.pack(f"<{len(dims)}Q", *dims)
    sections = [records, b"".join(tensors), body, pool, b"", names, NOTHING]
    (saved / INDEX).write_bytes(rebuild(header, sections, patch=[(80, source)]))


def one_chunk(number, at):
    """The record of the tensor of this number: 16 bytes, whose shape is the first of `dims`."""
    return tensor_record((number, 1), shape=0, chunks=(at, 1), dtype=2, ndim=1)


@pytest.mark.parametrize("source", [0, 1, 2])
@pytest.mark.parametrize(("a", "b"), [(4096, 4096), (4096, 4111), (4111, 4096)])
def test_entries_that_share_bytes_are_refused(saved, source, a, b):
    """Sums were compared once, not ranges: in a file that is long enough, a tensor was another's alias, and `verify` said that all is well."""
    tensors = [one_chunk(0, 0), one_chunk(1, 1)]
    forge_chunks(saved, [(0, 0, a, 16, 1), (1, 0, b, 16, 1)], (16, 0, 16), tensors, source=source)
    refused_at_once(saved, 'share bytes.*"a" and "b"')
    forge_chunks(
        saved, [(0, 0, 4096, 16, 1), (1, 0, 4112, 16, 1)], (16, 0, 16), tensors, source=source
    )
    assert set(dcp_rs.open(saved)) == {"a", "b"}


def test_chunks_of_one_tensor_may_overlap_in_the_tensor_but_not_in_the_file(saved):
    tensors = [tensor_record((0, 1), shape=0, chunks=(0, 2), dtype=2, ndim=1)]
    dims = (24, 0, 16, 8, 16)
    forge_chunks(saved, [(0, 0, 4096, 16, 1), (0, 0, 4112, 16, 3)], dims, tensors)
    with dcp_rs.open(saved) as checkpoint:
        assert checkpoint["a"].tolist() == [0] * 24
    forge_chunks(saved, [(0, 0, 4096, 16, 1), (0, 0, 4104, 16, 3)], dims, tensors)
    refused_at_once(saved, "share bytes")


def test_a_file_that_is_named_twice_is_refused(saved):
    """Under two numbers, the ranges of one file would not be compared with each other."""
    tensors = [one_chunk(0, 0), one_chunk(1, 1)]
    chunks = [(0, 0, 4096, 16, 1), (1, 1, 4096, 16, 1)]
    forge_chunks(saved, chunks, (16, 0, 16), tensors, files=(b"file", b"file"))
    refused_at_once(saved, "named twice")


def test_a_tensor_of_a_torch_file_is_one_chunk(saved):
    """Entries of such a file may share bytes, as tied weights do: 256 kB of chunks over 1 MiB of file were a tensor of 4 GB."""
    tensors = [tensor_record((0, 1), shape=0, chunks=(0, 2), dtype=2, ndim=1)]
    forge_chunks(
        saved, [(0, 0, 4096, 16, 1), (0, 0, 4096, 16, 3)], (32, 0, 16, 16, 16), tensors, source=3
    )
    refused_at_once(saved, "more than one chunk")
    tensors = [one_chunk(0, 0), one_chunk(1, 1)]
    forge_chunks(saved, [(0, 0, 4096, 16, 1), (1, 0, 4096, 16, 1)], (16, 0, 16), tensors, source=3)
    assert set(dcp_rs.open(saved)) == {"a", "b"}


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
    refused_at_once(saved, "not an adopted tensor")


@pytest.mark.parametrize(
    "shape", [(1 << 62, 1 << 62, 0), (0, 1 << 62, 1 << 62), (1 << 61, 0), (1 << 63, 0)]
)
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
    assert read_whole(saved, verify=True)["w"].shape == ((1 << 61) - 1, 0)


def test_a_memory_format_without_a_meaning_is_refused(saved):
    header = (saved / INDEX).read_bytes()
    tensors = bytearray(tensor_record((0, 1)))
    for flags in (0b1100, 0b1111):
        tensors[15] = flags
        (saved / INDEX).write_bytes(
            rebuild(header, [b"", bytes(tensors), b"", b"", b"", b"w", NOTHING])
        )
        refused_at_once(saved, "memory format")
    tensors[15] = 0b11111011
    (saved / INDEX).write_bytes(
        rebuild(header, [b"", bytes(tensors), b"", b"", b"", b"w", NOTHING])
    )
    assert dcp_rs.open(saved).info("w").shape == ()


@pytest.mark.parametrize(
    ("source", "kind", "stride", "match"),
    [
        (0, 0, 1, "not an adopted tensor"),
        (1, 1, 1, "not an adopted tensor"),
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
    tensors = tensor_record(
        (0, 1), chunks=(0, 1), kind=kind, dtype=0 if kind else 2, ndim=0 if kind else 1
    )
    sections = [bytes(file), tensors, chunks, dims, b"", b"wfile", NOTHING]
    (saved / INDEX).write_bytes(rebuild(header, sections, patch=[(80, source)]))
    (saved / "file").write_bytes(bytes(4097))
    if match is None:
        assert read_whole(saved, verify=True)["w"].tolist() == [0]
    else:
        refused_at_once(saved, match)


@pytest.mark.parametrize(
    ("source", "incompat", "code", "flags", "match"),
    [
        (2, 1, 15, 8, None),  # complex64, conjugate
        (2, 1, 15, 24, None),
        (1, 1, 12, 16, None),  # float32, negative
        (0, 1, 15, 8, "not an adopted tensor"),
        (2, 0, 15, 8, "not an adopted tensor"),
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
        assert read_whole(saved, verify=True)["w"] == want[flags]
    else:
        refused_at_once(saved, match)


@pytest.mark.parametrize(
    ("source", "incompat", "flags", "match"),
    [
        (0, 2, 4, None),
        (0, 0, 4, "does not say so"),
        (2, 2, 4, "what others wrote"),
        (0, 2, 5, "what others wrote"),
    ],
)
def test_links_are_of_native_data_in_an_index_that_says_so(saved, source, incompat, flags, match):
    header = (saved / INDEX).read_bytes()
    files, *_ = sections_of(header)
    file = bytearray(files[:64])
    struct.pack_into("<QIIQQQ", file, 0, 1, 4, flags, 4100, 4096, 0)
    chunks = struct.pack("<IIQQQQII", 0, 0, 4096, 4, 0, 0, 0, 0)
    sections = [
        bytes(file),
        tensor_record((0, 1), chunks=(0, 1)),
        chunks,
        b"",
        b"",
        b"wfile",
        NOTHING,
    ]
    (saved / INDEX).write_bytes(rebuild(header, sections, patch=[(80, source), (24, incompat)]))
    (saved / "file").write_bytes(bytes(4096) + struct.pack("<f", 1))
    if match is None:
        assert read_whole(saved, verify=True)["w"] == 1
    else:
        refused_at_once(saved, match)


@pytest.mark.parametrize(
    ("at", "length"), [(4, 16), (1 << 40, 16), (256, 8), (256, 32), (256, 1 << 63)]
)
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
    with pytest.raises(PlanError, match="does not hold"):  # it was torch's RuntimeError
        next(checkpoint.stream())


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


@pytest.mark.slow
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
        [sys.executable, "-c", BOUNDED, *folders],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
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
