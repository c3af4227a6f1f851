"""Odd and hostile files that no library writes: what each is, and what ``open`` says.

``PYTHONPATH=tests python -m support.odd_files`` opens each in a process of its own, with larger
counts, and prints a table of sizes, memory and processor time.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import dcp_rs
from dcp_rs.errors import (
    CheckpointNotFoundError,
    CorruptDataError,
    CorruptIndexError,
    DcpRsError,
    UnsupportedError,
)
from support.torch_files import archive, text

#: Memory that opening a file may take: this, or 40 times its size. What a pickle makes may have 32 times.
LEAST = 96 << 20


@dataclass(frozen=True)
class OddFile:
    """A file, and what opening it says.

    Attributes:
        make: writes it to a folder, with a count of whatever there are many of; returns the path
            to open.
        error: the error, or None for a file that is read.
        says: a pattern that its message matches.
    """

    make: Callable[[Path, int], Path]
    error: type[DcpRsError] | None = None
    says: str = ""


def peak() -> int:
    """Return the most memory that this process had since `reset`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


def reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def size(folder: Path) -> int:
    """Return the bytes on the disk below a folder."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def read_all(path: Path) -> None:
    """Open a checkpoint, and read and verify what it has."""
    with dcp_rs.open(path) as checkpoint:
        for name in list(checkpoint)[:10]:
            checkpoint[name]
    dcp_rs.verify(path)


def safetensors(header: object, data: int = 0) -> Callable[[Path, int], Path]:
    def make(folder: Path, many: int) -> Path:
        made = header(many) if callable(header) else header
        raw = made if isinstance(made, bytes) else json.dumps(made).encode()
        path = folder / "m.safetensors"
        path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(data))
        return path

    return make


def entry(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def plain(content: bytes, name: str) -> Callable[[Path, int], Path]:
    def make(folder: Path, _: int) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def sparse(folder: Path, _: int) -> Path:
    """A header of a terabyte that takes no room."""
    path = folder / "m.safetensors"
    path.write_bytes(struct.pack("<Q", (1 << 40) - 8))
    with path.open("ab") as file:
        file.truncate(1 << 40)
    return path


def saved() -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(4)}, buffer)
    return buffer.getvalue()


def records() -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(saved())) as file:
        return {name.partition("/")[2]: file.read(name) for name in file.namelist()}


def torch_file(data: Callable[[int], bytes]) -> Callable[[Path, int], Path]:
    def make(folder: Path, many: int) -> Path:
        (folder / "m.pt").write_bytes(data(many))
        return folder / "m.pt"

    return make


def twice(_: int) -> bytes:
    buffer = io.BytesIO(saved())
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "a") as file:
        warnings.simplefilter("ignore")
        file.writestr("archive/data.pkl", b"\x80\x02}.")
    return buffer.getvalue()


class Unseekable(io.RawIOBase):
    """A file that zipfile writes with data descriptors."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += bytes(data)
        return len(data)


def described(_: int) -> bytes:
    file = Unseekable()
    with zipfile.ZipFile(file, "w") as into:
        for name, data in records().items():
            into.writestr(f"archive/{name}", data)
    return bytes(file.data)


def many_entries_told(_: int) -> bytes:
    data = bytearray(saved())
    at = data.rindex(b"PK\x06\x06")
    data[at + 32 : at + 40] = struct.pack("<Q", 1 << 60)
    return bytes(data)


def bomb(many: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(100 * many))
    return buffer.getvalue()


def compressed_record(_: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, data in records().items():
            method = zipfile.ZIP_DEFLATED if name == "data/0" else zipfile.ZIP_STORED
            file.writestr(f"archive/{name}", data, method)
    return buffer.getvalue()


def encrypted(_: int) -> bytes:
    data = bytearray(saved())
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = -1
        while (at := data.find(mark, at + 1)) >= 0:
            data[at + flags] |= 1
    return bytes(data)


def many_records(many: int) -> bytes:
    others = ((f"x/{number}", b"") for number in range(many))
    return archive(records()["data.pkl"], [("data/0", bytes(16)), *others])


def long_storage(_: int) -> bytes:
    data = records()["data.pkl"]
    at = data.index(b"K\x04tq")
    long = b"\x8a\x08" + struct.pack("<q", 1 << 62)
    return archive(data[:at] + long + data[at + 2 :], [("data/0", bytes(16))])


def long_integer(many: int) -> bytes:
    number = b"\x8b" + struct.pack("<i", 30 * many) + b"\x7f" * (30 * many)
    return archive(b"\x80\x02}" + text("n") + number + b"s.")


def stock(change: Callable[[Any], object]) -> Callable[[Path, int], Path]:
    """A stock checkpoint whose metadata is changed, or replaced by a pickle that is returned."""

    def make(folder: Path, many: int) -> Path:
        state = {"m": {"w": torch.ones(4, 3)}, "v": 1}
        dcp.save(state, checkpoint_id=folder / "s", no_dist=True)
        path = folder / "s" / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        metadata.many = many
        made = change(metadata)
        path.write_bytes(made if isinstance(made, bytes) else pickle.dumps(metadata))
        return folder / "s"

    return make


def chunk(metadata: Any) -> Any:
    return metadata.state_dict_metadata["m.w"].chunks[0]


def cyclic(metadata: Any) -> None:
    metadata.planner_data["self"] = metadata.planner_data
    metadata.planner_data["all"] = metadata


def cyclic_chunks(metadata: Any) -> None:
    chunks = metadata.state_dict_metadata["m.w"].chunks
    chunks.append(chunks)


def huge(metadata: Any) -> None:
    metadata.state_dict_metadata["m.w"].size = torch.Size([1 << 40, 1 << 20])
    chunk(metadata).sizes = torch.Size([1 << 40, 1 << 20])


def placed(**fields: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            for name, value in fields.items():
                setattr(place, name, value)

    return change


def deep(metadata: Any) -> bytes:
    return b"\x80\x02" + b"]" * 3 * metadata.many + b"a" * (3 * metadata.many - 1) + b"."


def long_tuple(metadata: Any) -> bytes:
    return b"\x80\x02(" + b"K\x01" * 10 * metadata.many + b"t."


ONE, TWO = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def weight_map(index: object) -> Callable[[Path, int], Path]:
    """A model in two files with this index."""

    def make(folder: Path, many: int) -> Path:
        save_file({"a": torch.ones(2)}, folder / ONE)
        save_file({"b": torch.ones(2)}, folder / TWO)
        made = index(many) if callable(index) else index
        content = made if isinstance(made, str) else json.dumps({"weight_map": made})
        (folder / "model.safetensors.index.json").write_text(content)
        return folder

    return make


def pair(name: str, where: Any) -> str:
    return f"{json.dumps(name)}: {json.dumps(where)}"


def array() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, w=np.ones(3))
    return buffer.getvalue()


GGUF = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + bytes(100)
HEADER = CorruptIndexError
ODD: Mapping[str, OddFile] = {
    "a name twice in a header": OddFile(
        safetensors(b'{"w":%b,"w":%b}' % ((json.dumps(entry([1], 0, 4)).encode(),) * 2), 4),
        HEADER,
        r'the name "w" is there twice',
    ),
    "a field twice in a header": OddFile(
        safetensors(b'{"w":{"dtype":"F32","shape":[1],"shape":[2],"data_offsets":[0,8]}}', 8),
        HEADER,
        "duplicate field `shape`",
    ),
    "tensors that share bytes": OddFile(
        safetensors({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12),
        HEADER,
        r'tensor "b" has bytes 4\.\.12',
    ),
    "bytes of no tensor": OddFile(
        safetensors({"a": entry([2], 0, 8), "b": entry([2], 16, 24)}, 24),
        HEADER,
        r'tensor "b" has bytes 16\.\.24',
    ),
    "a huge shape with a zero": OddFile(
        safetensors({"w": entry([1 << 62, 1 << 62, 0], 0, 0)}), HEADER, 'tensor "w" has 0 bytes'
    ),
    "a shape beyond 64 bits": OddFile(
        safetensors({"w": entry([1 << 63, 1 << 63], 0, 0)}), HEADER, 'tensor "w" has 0 bytes'
    ),
    "a shape of 1,000 dimensions": OddFile(
        safetensors({"w": entry([1] * 1000, 0, 4)}, 4),
        HEADER,
        'tensor "w" has 1000 dimensions',
    ),
    "a negative size": OddFile(
        safetensors({"w": entry([-1], 0, -4)}), HEADER, "integer `-1`, expected u64"
    ),
    "a size with a fraction": OddFile(
        safetensors({"w": {**entry([1], 0, 4), "shape": [1.0]}}, 4), HEADER, "expected u64"
    ),
    "half of a surrogate in a name": OddFile(
        safetensors(b'{"a\\ud800":%b}' % json.dumps(entry([1], 0, 4)).encode(), 4),
        HEADER,
        "hex escape",
    ),
    "a header that is no UTF-8": OddFile(
        safetensors(b'{"a\xff":{}}'), HEADER, "header is not UTF-8"
    ),
    "a header of lists in lists": OddFile(
        safetensors(lambda many: b'{"w":' + b"[" * many + b"]" * many + b"}"),
        HEADER,
        "expected value|invalid type",
    ),
    "a header of 2**63 bytes": OddFile(
        plain(struct.pack("<Q", 1 << 63) + b"{}", "m.safetensors"), HEADER, "more than 100000000"
    ),
    "a header of a terabyte that is there": OddFile(sparse, HEADER, "more than 100000000"),
    "names with NUL, escapes and ..": OddFile(
        safetensors({"a\0b": entry([1], 0, 4), "../../x": entry([1], 4, 8), "\x1b[2J": entry([1], 8, 12)}, 12)
    ),
    "metadata of megabytes": OddFile(
        safetensors(lambda many: {"__metadata__": {"x": "y" * (50 * many)}, "w": entry([1], 0, 4)}, 4)
    ),
    "metadata of many keys": OddFile(
        safetensors(lambda many: {"__metadata__": {str(i): "" for i in range(many)}, "w": entry([1], 0, 4)}, 4)
    ),
    "many tensors without elements": OddFile(
        safetensors(lambda many: {f"t{i}": entry([0], 0, 0) for i in range(many)})
    ),
    "data.pkl twice": OddFile(
        torch_file(twice), CorruptDataError, 'data.pkl" is there twice'
    ),
    "data descriptors": OddFile(torch_file(described)),
    "a directory of 2**60 entries": OddFile(
        torch_file(many_entries_told), CorruptDataError, "its end says 1152921504606846976"
    ),
    "a bomb": OddFile(torch_file(bomb), UnsupportedError, 'data.pkl" is compressed'),
    "one compressed record": OddFile(
        torch_file(compressed_record), UnsupportedError, 'data/0" is compressed'
    ),
    "encrypted records": OddFile(torch_file(encrypted), UnsupportedError, "is encrypted"),
    "bytes before the archive": OddFile(
        torch_file(lambda _: b"#!/bin/sh\n" + saved()), CorruptDataError, "does not begin like one"
    ),
    "many records": OddFile(torch_file(many_records)),
    "a storage of 2**62 elements": OddFile(
        torch_file(long_storage), CorruptDataError, 'tensor "w": .*a storage too long'
    ),
    "an integer of megabytes": OddFile(
        torch_file(long_integer), DcpRsError, "value 'n' of .* does not load"
    ),
    "planner data with itself inside": OddFile(stock(cyclic)),
    "chunks with themselves inside": OddFile(
        stock(cyclic_chunks), CorruptIndexError, "a chunk without fields"
    ),
    "lists in lists in .metadata": OddFile(
        stock(deep), DcpRsError, "more than|not an instance of Metadata"
    ),
    "a long tuple as .metadata": OddFile(
        stock(long_tuple), CorruptIndexError, "not an instance of Metadata"
    ),
    "a shape of 2**60 in .metadata": OddFile(
        stock(huge), CorruptDataError, r'tensor "m\.w": it is stored as float32 \[4, 3\]'
    ),
    "a chunk before its file": OddFile(
        stock(placed(offset=-8)), CorruptIndexError, "its place in the file"
    ),
    "a data file elsewhere": OddFile(
        stock(placed(relative_path="../../etc/passwd")), CorruptIndexError, "leads out of the folder"
    ),
    "a data file with NUL in its name": OddFile(
        stock(placed(relative_path="a\0b")), CorruptIndexError, "leads out of the folder"
    ),
    "unknown keys in an index": OddFile(
        weight_map(json.dumps({"weight_map": {"a": ONE, "b": TWO}, "metadata": {"x": [1]}, "y": {}}))
    ),
    "files in an index that are swapped": OddFile(
        weight_map({"a": TWO, "b": ONE}), CorruptDataError, 'tensor "a": the index of the folder'
    ),
    "an absolute path in an index": OddFile(
        weight_map({"a": "/etc/passwd", "b": TWO}), CorruptIndexError, "leads out of the folder"
    ),
    "a file in an index that is not there": OddFile(
        weight_map({"a": ONE, "b": TWO, "c": "model-00003-of-00003.safetensors"}),
        CorruptDataError,
        "model-00003-of-00003.safetensors: it is missing",
    ),
    "an index that names itself": OddFile(
        weight_map({"a": "model.safetensors.index.json"}), CorruptIndexError, "more than 100000000"
    ),
    "no texts in an index": OddFile(
        weight_map({"a": [ONE], "b": None}), CorruptIndexError, "expected a string"
    ),
    "a name twice in an index": OddFile(
        weight_map("{" + pair("weight_map", {})[:-1] + ", ".join((pair("a", ONE), pair("a", TWO))) + "}}"),
        CorruptDataError,
        'tensor "a": the index of the folder',
    ),
    "NUL in an index": OddFile(
        weight_map({"a": "m\0.safetensors"}), CorruptIndexError, "leads out of the folder"
    ),
    "dicts in dicts in an index": OddFile(
        weight_map(lambda many: '{"weight_map":' + '{"a":' * many + "1" + "}" * many + "}"),
        CorruptIndexError,
        "expected a string",
    ),
    "many names in an index": OddFile(
        weight_map(lambda many: {f"t{number}": ONE for number in range(many)}),
        CorruptDataError,
        'tensor "t0": the index of the folder',
    ),
    "GGUF": OddFile(plain(GGUF, "m.gguf"), CheckpointNotFoundError, "a single file must be"),
    "GGUF as .safetensors": OddFile(plain(GGUF, "m.safetensors"), HEADER, "more than 100000000"),
    "HTML as .safetensors": OddFile(
        plain(b"<!DOCTYPE html><html>404</html>", "m.safetensors"), HEADER, "it is a web page"
    ),
    "torch.save as .safetensors": OddFile(plain(saved(), "m.safetensors")),
    ".npz": OddFile(plain(array(), "m.npz"), CorruptDataError, "torch.save did not write it"),
    ".npz as .pt": OddFile(plain(array(), "m.pt"), CorruptDataError, "torch.save did not write it"),
    "gzip as .pt": OddFile(
        plain(gzip.compress(saved()), "m.pt"), CorruptDataError, "does not begin like one"
    ),
    "HDF5 as .pt": OddFile(
        plain(b"\x89HDF\r\n\x1a\n" + bytes(200), "m.pt"), CorruptDataError, "does not begin like one"
    ),
}  # fmt: skip


def measure(name: str, many: int) -> str:
    """Open a file, and return a row of the table."""
    with tempfile.TemporaryDirectory(prefix="odd-") as made:
        folder = Path(made)
        path = ODD[name].make(folder, many)
        reset()
        before, began = peak(), time.process_time()
        try:
            read_all(path)
            outcome = "read"
        except DcpRsError as error:
            outcome = type(error).__name__
        seconds, memory = time.process_time() - began, peak() - before
        return f"| {name} | {size(folder) / 1e6:,.1f} | {memory / 1e6:,.0f} | {seconds:.2f} | {outcome} |"


def main() -> None:
    print(
        "| file | MB | memory, MB | processor, s | outcome |\n|---|---:|---:|---:|---|", flush=True
    )
    warnings.simplefilter("ignore")
    for name in ODD:
        child = os.fork()
        if child == 0:
            try:
                print(measure(name, 1_000_000), flush=True)
            finally:
                os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
