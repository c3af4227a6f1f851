"""Loads through slabs as for an accelerator, on one that is made up."""

import contextlib
from pathlib import Path

import torch

import dcp_rs
from dcp_rs import fill, payload, staging
from dcp_rs.options import ReadOptions
from dcp_rs.sources import open_index

SMALL = ReadOptions(max_inflight_bytes=1 << 20)  # slabs of 128 KiB


def install(monkeypatch, fake):
    """Takes all tensors for tensors of the fake device."""
    monkeypatch.setattr(staging, "lane_for", fake.lane)
    monkeypatch.setattr(staging, "is_accelerator", lambda _: True)
    monkeypatch.setattr(fill, "is_plain", lambda *_: False)
    # There is no pinned memory without an accelerator.
    take = staging._SlabCache().take
    monkeypatch.setattr(staging.slabs, "take", lambda count, nbytes, **_: take(count, nbytes, pinned=False))
    return fake


def state(tensors=30, rows=50, seed=0):
    torch.manual_seed(seed)
    return {f"layer.{i}": torch.randn(rows + i, 32) for i in range(tensors)}


def saved(path, state_dict):
    dcp_rs.save(state_dict, path)
    return open_index(path, rank=None, allow_external=False)


def whole(index, name, tensor):
    number = index.find(name)
    dtype = fill.stored_dtype(name, index.tensor(number)[2])
    return fill.Target(number, [0] * tensor.dim(), tensor, name, dtype)


def load(index, tensors, options=SMALL):
    fill.fill_regions(index, [whole(index, name, t) for name, t in tensors.items()], options)


def damage(path, index):
    """Flips a byte near the end of the data."""
    name, size, _, _ = index.files()[-1]
    with (path / name).open("r+b") as file:
        file.seek(size - 3)
        byte = file.read(1)
        file.seek(size - 3)
        file.write(bytes([byte[0] ^ 1]))


def no_slab_threads():
    """Whether no thread of the engine is left."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # one that has just ended
            names.append((task / "comm").read_text().strip())
    return not any(name.startswith("dcp-rs-slab") for name in names)


def entries_of(state_dict):
    return [
        payload.Entry(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape))
        for name, tensor in state_dict.items()
    ]
