"""Forged indexes: no record of theirs is believed unchecked, whatever it would cost in time or memory."""

import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

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
    tensor_record,
)

#: Offset of the content in a data file; of fields in the header of an index.
DATA = 4096
INCOMPAT, SOURCE = 24, 80
UINT8, FLOAT32, COMPLEX64 = 2, 12, 15
MIB = 1 << 20


@dataclass(frozen=True)
class Forged:
    """An index, and the data files that it names.

    Attributes:
        tensors: their records.
        names: of the tensors, one after the other.
        chunks: (tensor, file, offset, length, dims, flags) of each.
        dims: the numbers that shapes, offsets and sizes are taken from.
        content: the bytes of each data file behind its header.
        files: the names of the data files.
        file_flags: those of each.
        planner: planner data and nesting, with the paths of the tensors.
        header: values of the header, by offset.
    """

    tensors: bytes
    names: bytes = b"w"
    chunks: Sequence[tuple[int, ...]] = ()
    dims: Sequence[int] = ()
    content: bytes = b""
    files: Sequence[bytes] = ()
    file_flags: int = 0
    planner: bytes = NOTHING
    header: Mapping[int, int] = field(default_factory=dict)

    def write(self, folder):
        at, records = len(self.names), b""
        for name in self.files:
            size = DATA + len(self.content)
            records += struct.pack("<QIIQQQ", at, len(name), self.file_flags, size, DATA, 0)
            records += bytes(24)
            at += len(name)
            (folder / name.decode()).write_bytes(bytes(DATA) + self.content)
        chunks = b"".join(
            struct.pack("<IIQQQQII", *chunk, 0, flags, 0) for *chunk, flags in self.chunks
        )
        dims = struct.pack(f"<{len(self.dims)}Q", *self.dims)
        names = self.names + b"".join(self.files)
        sections = [records, self.tensors, chunks, dims, b"", names, self.planner]
        good = (folder / INDEX).read_bytes()
        (folder / INDEX).write_bytes(rebuild(good, sections, patch=list(self.header.items())))


def shaped(*shape):
    """A tensor without chunks."""
    return Forged(tensor_record((0, 1), ndim=len(shape)), dims=shape)


def with_flags(flags):
    record = bytearray(tensor_record((0, 1)))
    record[15] = flags
    return Forged(bytes(record))


def rows(count, *chunks, dims, source=0):
    """A tensor `a` of so many bytes, in several chunks."""
    record = tensor_record((0, 1), shape=0, chunks=(0, len(chunks)), dtype=UINT8, ndim=1)
    pool = (count, *dims)
    return Forged(record, b"a", chunks, pool, bytes(64), [b"file"], header={SOURCE: source})


def two(a, b, source=0, files=(b"file",)):
    """Tensors `a` and `b` of 16 bytes at these offsets, each in the last file that there is for it."""
    records = [tensor_record((n, 1), shape=0, chunks=(n, 1), dtype=UINT8, ndim=1) for n in (0, 1)]
    chunks = [(0, 0, a, 16, 1, 0), (1, len(files) - 1, b, 16, 1, 0)]
    return Forged(
        b"".join(records), b"ab", chunks, (16, 0, 16), bytes(64), files, header={SOURCE: source}
    )


def strided(stride, *, source, kind=0, size=1):
    """A tensor of so many elements with a stride, over a file of one byte."""
    dtype, ndim = (0, 0) if kind else (UINT8, 1)
    record = tensor_record((0, 1), chunks=(0, 1), kind=kind, dtype=dtype, ndim=ndim)
    return Forged(
        record,
        chunks=[(0, 0, DATA, 1, 1, 1)],
        dims=(size, 0, size, stride),
        content=b"\7",
        files=[b"file"],
        header={SOURCE: source},
    )


def scalar(code, content, *, flags=0, file_flags=0, source=0, incompat=0):
    """A tensor of one element."""
    return Forged(
        tensor_record((0, 1), chunks=(0, 1), dtype=code),
        chunks=[(0, 0, DATA, len(content), 0, flags)],
        content=content,
        files=[b"file"],
        file_flags=file_flags,
        header={SOURCE: source, INCOMPAT: incompat},
    )


COMPLEX, FLOAT = struct.pack("<ff", 1, 2), struct.pack("<f", 1)
LONG = 1 << 17
PATHS = NOTHING + b"\7" + struct.pack("<I", LONG) + b"\5\0\0\0\0" * LONG
#: What an index says, and the reason why it is refused, or what it holds.
CORPUS: dict[str, tuple[Forged, str | dict[str, Any]]] = {
    # 10,000 names that are each half of a megabyte would be 5 GB.
    "names share bytes": (
        Forged(
            b"".join(tensor_record((0, (1 << 19) - 10_000 + i)) for i in range(10_000)),
            b"a" * (1 << 19),
        ),
        "share bytes",
    ),
    "paths share bytes": (
        Forged(
            b"".join(tensor_record((8 * i, 8), path=(2, len(PATHS) - 2)) for i in range(4000)),
            b"".join(b"%08d" % i for i in range(4000)),
            planner=PATHS,
        ),
        "share bytes",
    ),
    # One megabyte of a file, a thousand times over, would be a tensor of a gigabyte.
    "chunks share bytes": (
        Forged(
            tensor_record((0, 1), shape=0, chunks=(0, 1000), dtype=UINT8, ndim=1),
            chunks=[(0, 0, DATA, MIB, 1 + 2 * i, 0) for i in range(1000)],
            dims=(1000 * MIB, *(n for i in range(1000) for n in (i * MIB, MIB))),
            content=bytes(MIB),
            files=[b"file"],
        ),
        "share bytes",
    ),
    # Sums were compared once, not ranges: in a file that is long enough, a tensor was another's
    # alias, and `verify` said that all is well.
    **{
        f"entries at {a} and {b} share bytes, source {source}": (
            two(a, b, source),
            'share bytes.*"a" and "b"',
        )
        for source, (a, b) in product(
            (0, 1, 2), ((DATA, DATA), (DATA, DATA + 15), (DATA + 15, DATA))
        )
    },
    **{
        f"entries beside each other, source {source}": (
            two(DATA, DATA + 16, source),
            {"a": [0] * 16, "b": [0] * 16},
        )
        for source in (0, 1, 2)
    },
    "chunks overlap in the tensor": (
        rows(24, (0, 0, DATA, 16, 1, 0), (0, 0, DATA + 16, 16, 3, 0), dims=(0, 16, 8, 16)),
        {"a": [0] * 24},
    ),
    "chunks overlap in the file": (
        rows(24, (0, 0, DATA, 16, 1, 0), (0, 0, DATA + 8, 16, 3, 0), dims=(0, 16, 8, 16)),
        "share bytes",
    ),
    # Under two numbers, the ranges of one file would not be compared with each other.
    "a file is named twice": (two(DATA, DATA, files=(b"file", b"file")), "named twice"),
    # Entries of a file of torch may share bytes, as tied weights do: 256 kB of chunks over 1 MiB of
    # file were a tensor of 4 GB.
    "a tensor of a torch file in two chunks": (
        rows(32, (0, 0, DATA, 16, 1, 0), (0, 0, DATA, 16, 3, 0), dims=(0, 16, 16, 16), source=3),
        "more than one chunk",
    ),
    "tied tensors of a torch file": (two(DATA, DATA, 3), {"a": [0] * 16, "b": [0] * 16}),
    **{
        f"shape {shape}, which torch cannot multiply": (shaped(*shape), "shape is too large")
        for shape in (
            (1 << 62, 1 << 62, 0),
            (0, 1 << 62, 1 << 62),
            (1 << 61, 0),
            (1 << 63, 0),
        )
    },
    **{
        f"memory format {flags:b}": (with_flags(flags), "memory format")
        for flags in (0b1100, 0b1111)
    },
    "strides of native data": (strided(1, source=0), "not an adopted tensor"),
    "strides of 0 of native data": (strided(0, source=0, size=1 << 40), "not an adopted tensor"),
    "strides of a value": (strided(1, source=1, kind=1), "not an adopted tensor"),
    "a stride of 2**63": (strided(1 << 63, source=1), "stride is too large"),
    "a stride of 2**63 - 1": (strided((1 << 63) - 1, source=1), {"w": [7]}),
    "a conjugate": (scalar(COMPLEX64, COMPLEX, flags=8, source=2, incompat=1), {"w": 1 - 2j}),
    "a negative conjugate": (
        scalar(COMPLEX64, COMPLEX, flags=24, source=2, incompat=1),
        {"w": -1 + 2j},
    ),
    "a negative": (scalar(FLOAT32, FLOAT, flags=16, source=1, incompat=1), {"w": -1}),
    "a conjugate of native data": (
        scalar(COMPLEX64, COMPLEX, flags=8, incompat=1),
        "not an adopted tensor",
    ),
    "a conjugate, and the index does not say so": (
        scalar(COMPLEX64, COMPLEX, flags=8, source=2),
        "not an adopted tensor",
    ),
    "a conjugate float": (
        scalar(FLOAT32, FLOAT, flags=8, source=2, incompat=1),
        "which have none",
    ),
    "a negative of code 6": (
        scalar(6, COMPLEX, flags=16, source=2, incompat=1),
        "which have none",
    ),
    "a link": (scalar(FLOAT32, FLOAT, file_flags=4, incompat=2), {"w": 1}),
    "a link, and the index does not say so": (
        scalar(FLOAT32, FLOAT, file_flags=4),
        "does not say so",
    ),
    "a link to data of others": (
        scalar(FLOAT32, FLOAT, file_flags=4, source=2, incompat=2),
        "what others wrote",
    ),
    "an external link": (
        scalar(FLOAT32, FLOAT, file_flags=5, incompat=2),
        "what others wrote",
    ),
}


@pytest.mark.parametrize(("index", "outcome"), CORPUS.values(), ids=CORPUS)
def test_forged_index_is_refused_at_once_or_holds_what_it_says(saved, index, outcome):
    index.write(saved)
    if isinstance(outcome, str):
        refused_at_once(saved, outcome)
    else:
        got = read_whole(saved, verify=True)
        assert {name: tensor.tolist() for name, tensor in got.items()} == outcome


@pytest.mark.parametrize("source", [1, 2])
def test_elements_that_share_bytes_stay_views(saved, source):
    """Strides of zero, as torch's own files have them: one element that claims to be 2**40."""
    strided(0, source=source, size=1 << 40).write(saved)
    with dcp_rs.open(saved) as checkpoint:
        assert checkpoint["w"].stride() == (0,)
        assert checkpoint["w"][1 << 39] == checkpoint.get_slice("w")[-1] == 7
    into = {"w": torch.zeros(5, dtype=torch.uint8)}
    with pytest.raises(PlanError, match="shape"):
        dcp_rs.load(into, saved)


def test_the_largest_shape_that_holds_nothing_is_read(saved):
    shaped((1 << 61) - 1, 0).write(saved)
    assert read_whole(saved, verify=True)["w"].shape == ((1 << 61) - 1, 0)


def test_flags_of_a_tensor_that_mean_nothing_are_ignored(saved):
    with_flags(0b11111011).write(saved)
    assert dcp_rs.open(saved).info("w").shape == ()


@pytest.mark.parametrize(
    ("at", "length"), [(4, 16), (1 << 40, 16), (256, 8), (256, 32), (256, 1 << 63)]
)
def test_contents_are_sixteen_bytes_a_chunk_within_the_index(saved, at, length):
    header = bytearray((saved / INDEX).read_bytes())
    struct.pack_into("<QQ", header, 208, at, length)
    (saved / INDEX).write_bytes(sealed(header))
    refused_at_once(saved, "contents")


def test_an_index_of_the_future_is_refused(saved):
    Forged(b"", b"", header={INCOMPAT: 12}).write(saved)
    with pytest.raises(UnsupportedError, match="0xc"):
        dcp_rs.open(saved)


def test_a_shape_that_no_chunk_holds_takes_no_memory(saved):
    """The shape is the index's word alone; chunks are bounded by their files."""
    record = tensor_record((0, 1), shape=0, dtype=UINT8, ndim=1)
    Forged(record, dims=(1 << 60,)).write(saved)
    checkpoint = dcp_rs.open(saved)
    assert checkpoint.info("w").shape == (1 << 60,)
    with pytest.raises(PlanError, match="does not hold"):
        checkpoint["w"]
    with pytest.raises(UnsupportedError, match="more than 16 times"):  # before memory is asked for
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
