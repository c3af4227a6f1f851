"""Checkpoints in every format that a conversion knows: made by its own writer, judged by its stock reader, and planned with."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dcp_rs
from dcp_rs.checkpoint.source import Item
from support import assert_state_equal, blank
from support.both import load_rs, load_stock, save_rs, save_stock

SOURCES = ["dcp-rs", "dcp", "torch"]


def make(kind: str, state: dict, path: Path) -> Path:
    if kind == "dcp-rs":
        save_rs(state, path)
    elif kind == "dcp":
        save_stock(state, path)
    elif kind == "torch":
        torch.save(state, path)
    else:
        path.mkdir()
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return path


def judge(kind: str, path: Path, state: dict) -> None:
    """Fails unless stock readers find `state` at `path`, bit for bit."""
    if kind == "dcp-rs":
        assert_state_equal(load_rs(blank(state), path), state)
        assert dcp_rs.verify(path)
    elif kind == "dcp":
        assert_state_equal(load_stock(blank(state), path), state)
    elif kind == "torch":
        assert_state_equal(torch.load(path, weights_only=True), state)
    else:
        assert_state_equal(load_hf(path), state)


def load_hf(path: Path) -> dict[str, torch.Tensor]:
    """A Hugging Face folder as transformers reads it."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        assert [file.name for file in path.iterdir()] == ["model.safetensors"]
        return load_file(path / "model.safetensors")
    said = json.loads(index.read_text())
    files = sorted(set(said["weight_map"].values()))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert {file.name for file in path.iterdir()} == {*files, index.name}
    state = {}
    for file in files:
        loaded = load_file(path / file)
        with safe_open(path / file, framework="pt") as opened:
            assert opened.metadata()["format"] == "pt"
        assert {name for name, where in said["weight_map"].items() if where == file} == set(loaded)
        state |= loaded
    assert said["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    assert list(said["weight_map"]) == sorted(state)
    return state


def leftovers(folder: Path) -> list[str]:
    return [
        entry.name
        for entry in folder.iterdir()
        if entry.name.endswith(".tmp") or entry.name.startswith(".")
    ]


def item(name: str, numel: int, dtype: torch.dtype) -> Item:
    """Return an item of a source of tensors, as a conversion plans with them."""
    return Item(
        name,
        0,
        dtype,
        (numel,),
        (SimpleNamespace(offsets=(0,), sizes=(numel,), file=0),),
        numel * dtype.itemsize,
    )
