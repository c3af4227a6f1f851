"""Writes `seeds/`: small inputs that every fuzz target accepts. Run from the repository root, after `make build`."""

import io
import json
import random
import struct
import tempfile
import zipfile
from collections import OrderedDict
from pathlib import Path, PurePosixPath

import torch
import torch.distributed.checkpoint as dcp

import dcp_rs

SEEDS = Path("rust/fuzz/seeds")
STOCK = Path("tests/fixtures/stock/torch-2.15.0")


def put(target: str, name: str, data: bytes) -> None:
    (SEEDS / target).mkdir(parents=True, exist_ok=True)
    (SEEDS / target / name).write_bytes(data)


def native(name: str, state: dict) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dcp_rs.save(state, folder, no_dist=True)
        put("index", name, (Path(folder) / "index.dcprs").read_bytes())
        for file in Path(folder).glob("g*.safetensors"):
            put("header", f"{name}.safetensors", file.read_bytes())
            # The target gives every file the same name: generation, rank and file are in the header too, the token is not.
            put("recovery", f"{name}.safetensors", file.read_bytes())


def torch_files() -> None:
    """Small files of torch.save, of every kind that is read."""
    base = torch.arange(12.0)
    states = {
        "plain": {"w": torch.ones(2, 3), "n": torch.zeros(0)},
        "nested": {"m": OrderedDict(a=base[2:4], b=base.view(3, 4).t()), "l": [1, [torch.ones(1)]], "o": {0: {"s": 1.5}}},
        "views": {"e": torch.ones(1).expand(3, 2), "t": base, "u": base, "c": torch.ones(2, dtype=torch.cfloat).conj()},
        "values": {"x": None, "s": "text", "i": 1 << 70, "b": b"ab", "d": torch.float16, "z": torch.Size([1]), "e": [], "t": (1, {2})},
        "others": {"s": torch.eye(2).to_sparse(), "p": torch.nn.Parameter(torch.ones(2)), "path": PurePosixPath("x")},
    }
    for name, state in states.items():
        for kind, zipped in (("zip", True), ("legacy", False)):
            buffer = io.BytesIO()
            torch.save(state, buffer, _use_new_zipfile_serialization=zipped)
            put("torch_file", f"{name}-{kind}", buffer.getvalue())
    kinds = {"s": {1}, "f": frozenset({2}), "b": bytearray(b"x"), "m": torch.channels_last, "g": torch.Generator, "w": base}
    for kind, zipped in (("zip", True), ("legacy", False)):
        buffer = io.BytesIO()
        torch.save(kinds, buffer, pickle_protocol=5, _use_new_zipfile_serialization=zipped)
        put("torch_file", f"protocol5-{kind}", buffer.getvalue())


def main() -> None:
    random.seed(0)
    torch.manual_seed(0)
    native("small", {"w": torch.arange(6.0).reshape(2, 3), "value": 3})
    native("nested", {"model": {"a.b": torch.ones(3, dtype=torch.bfloat16)}, "list": [torch.zeros(0), {"k": 1.5}]})
    native("dtypes", {"c": torch.zeros(2, dtype=torch.complex128), "f8": torch.zeros(4).to(torch.float8_e4m3fn)})
    for case in ("plain", "nested", "sharded", "hf", "hf_sharded"):
        index = dcp_rs._core.Index.from_data(str(STOCK / case))
        put("index", f"adopted-{case}", index.to_bytes())
    for name in ("hf", "hf_sharded"):
        for file in sorted((STOCK / name).glob("*.safetensors")):
            put("header", file.name, file.read_bytes())
    for case in ("plain", "nested", "sharded"):
        put("metadata", case, (STOCK / case / ".metadata").read_bytes())
        for info in dcp.FileSystemReader(STOCK / case).read_metadata().storage_data.values():
            data = (STOCK / case / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
            if not zipfile.is_zipfile(io.BytesIO(data)):
                continue
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                pickle = next(n for n in archive.namelist() if n.endswith("data.pkl"))
                text = archive.read(pickle)
            if b"_rebuild_tensor" in text and len(list((SEEDS / "archive").glob("*"))) < 12:
                put("archive", f"{case}-{info.offset}", data)
                put("tensor_pickle", f"{case}-{info.offset}", text)
    torch_files()
    values = {
        "none": b"\0",
        "path": b"\7" + struct.pack("<I", 2) + b"\5" + struct.pack("<I", 5) + b"model" + b"\3" + struct.pack("<q", -1),
        "dict": b"\x09" + struct.pack("<I", 1) + b"\5" + struct.pack("<I", 1) + b"k" + b"\4" + struct.pack("<d", 0.5),
        "key": b"\x09" + struct.pack("<I", 1) + b"\7" + struct.pack("<I", 2) + b"\1\0" + b"\x08" + struct.pack("<I", 0),
        "nested": (b"\x08" + struct.pack("<I", 1)) * 60 + b"\2",
        "bytes": b"\6" + struct.pack("<I", 3) + b"abc",
    }
    for name, data in values.items():
        put("value", name, data)
    print(json.dumps({target.name: len(list(target.iterdir())) for target in sorted(SEEDS.iterdir())}))


if __name__ == "__main__":
    main()
