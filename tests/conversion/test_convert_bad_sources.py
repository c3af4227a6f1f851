"""Sources of a conversion that are damaged, hostile, or no checkpoint at all."""

import os
import pickle
import sys
from pathlib import Path

import pytest
import torch

import dcp_rs
import programs
from dcp_rs.errors import (
    CheckpointNotFoundError,
    CorruptDataError,
    CorruptIndexError,
    PlanError,
    UnsafePickleError,
    UnsupportedError,
)
from support import random_tensor
from support.formats import make


class Exploit:
    def __reduce__(self):
        return os.system, ("touch owned",)


def test_bad_sources(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content, error in [
        ("evil.pt", Exploit(), UnsafePickleError),
        ("list.pt", [torch.ones(2)], UnsupportedError),
        ("keys.pt", {(1, 2): torch.ones(2)}, UnsupportedError),
        ("clash.pt", {"a": {"b": 1}, "a.b": 2}, PlanError),
    ]:
        torch.save(content, name)
        with pytest.raises(error):
            dcp_rs.convert(name, "dst")
    Path("junk.pt").write_bytes(b"PK\x03\x04" + b"\x00" * 100)
    Path("pickle.pt").write_bytes(pickle.dumps(Exploit()))
    for name in ("junk.pt", "pickle.pt"):
        with pytest.raises((CorruptDataError, UnsafePickleError, UnsupportedError)):
            dcp_rs.convert(name, "dst")
    torch.save({"w": torch.ones(2000)}, "short.pt")
    os.truncate("short.pt", 5000)
    Path("empty.pt").write_bytes(b"")
    Path("text.pt").write_text("junk")
    for name, why in [
        ("short.pt", "it was cut short"),
        ("empty.pt", "not a file of torch.save: it is empty"),
        ("text.pt", "not a file of torch.save: it does not begin like one"),
    ]:
        with pytest.raises(CorruptDataError, match=f"{name}: .*{why}") as raised:
            dcp_rs.convert(name, "dst")
        assert raised.value.path == name
    with pytest.raises(CheckpointNotFoundError):
        dcp_rs.convert("nowhere", "dst")
    assert not Path("owned").exists()
    assert not Path("dst").exists()


def test_damage_goes_over_only_where_it_is_asked_to(tmp_path: Path) -> None:
    state = {"a": random_tensor((10, 7), seed=1)}
    data = next(make("dcp-rs", state, tmp_path / "src").glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1] + bytes([data.read_bytes()[-1] ^ 1]))
    dcp_rs.convert(tmp_path / "src", tmp_path / "dst", verify=False)
    with dcp_rs.open(tmp_path / "dst", verify=True) as opened:
        assert (
            opened["a"].view(torch.int32) != state["a"].view(torch.int32)
        ).sum() == 1  # the bits: some are NaN


@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "torch", "safetensors"])
def test_damaged_sources(to: str, tmp_path: Path) -> None:
    state = {"a": random_tensor((1000, 700), seed=1), "b": random_tensor((9,), seed=2)}
    make("dcp-rs", state, tmp_path / "src")
    data = next((tmp_path / "src").glob("*.safetensors"))
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    with pytest.raises(CorruptDataError):
        dcp_rs.convert(tmp_path / "src", tmp_path / "dst", to=to)
    data.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    with pytest.raises(CorruptDataError, match=r'tensor "b": block 0'):
        dcp_rs.convert(tmp_path / "src", tmp_path / "dst", to=to)
    assert not (tmp_path / "dst").exists()
    data.unlink()
    with pytest.raises(CorruptDataError):
        dcp_rs.convert(tmp_path / "src", tmp_path / "dst", to=to)
    index = tmp_path / "src" / "index.dcprs"
    index.write_bytes(index.read_bytes()[:-8])
    with pytest.raises(CorruptIndexError):
        dcp_rs.convert(tmp_path / "src", tmp_path / "dst", to=to)
    assert {entry.name for entry in tmp_path.iterdir()} == {"src"}


CUT_SHORT = """
import os, pathlib, sys, dcp_rs
src, dst, file = sys.argv[1:]
whole = pathlib.Path(file).read_bytes()

def cut_short(done, total):
    if done >= 2 << 20 and os.path.getsize(file) > keep:
        os.truncate(file, keep)

for to in ("dcp-rs", "dcp", "torch", "safetensors"):
    for keep in (1 << 20, len(whole) - 1):
        pathlib.Path(file).write_bytes(whole)
        try:
            dcp_rs.convert(src, dst, to=to, progress=cut_short)
        except dcp_rs.errors.CorruptDataError as error:
            assert error.path == file, error
        else:
            raise AssertionError(to)
        assert not os.path.exists(dst)
"""


@pytest.mark.parametrize(
    "source", ["dcp-rs", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dcp", "torch"))]
)
def test_a_source_that_is_cut_short_meanwhile(source: str, tmp_path: Path) -> None:
    """It used to end the process with a bus error, or to leave zeros in the result."""
    state = {f"w{i}": random_tensor((1 << 20,), torch.uint8, seed=i) for i in range(8)}
    src = make(source, state, tmp_path / "src")
    file = src if source == "torch" else max(src.iterdir(), key=lambda path: path.stat().st_size)
    command = [sys.executable, "-c", CUT_SHORT, src, tmp_path / "dst", file]
    done = programs.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
