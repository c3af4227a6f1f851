"""Loads and saves through slabs, as for an accelerator."""

import torch

import dcp_rs
from dcp_rs import _core
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.engine.writes import Entry
from dcp_rs.options import ReadOptions, WriteOptions
from dcp_rs.transfer import load
from dcp_rs.transfer.target import Target, stored_dtype
from support.files import flip
from support.forged import commit_ranks

SMALL = ReadOptions(max_inflight_bytes=1 << 20)  # slabs of 128 KiB


def state(tensors=30, rows=50, seed=0):
    torch.manual_seed(seed)
    return {f"layer.{i}": torch.randn(rows + i, 32) for i in range(tensors)}


def saved(path, state_dict):
    dcp_rs.save(state_dict, path)
    return open_index(path)


def whole(index, name, tensor):
    number = index.find(name)
    dtype = stored_dtype(name, index.tensor(number).dtype)
    return Target(number, [0] * tensor.dim(), tensor, name, dtype)


def fill(index, tensors, options=SMALL):
    load.fill(index, [whole(index, name, t) for name, t in tensors.items()], options)


def batch_of(index):
    """A batch of all tensors, to be filled through slabs."""
    batch = _core.Batch(index)
    for number in range(index.tensor_count):
        entry = index.tensor(number)
        if entry.is_bytes:
            continue
        tensor = torch.empty(
            entry.shape, dtype=stored_dtype(entry.name, entry.dtype), device="meta"
        )
        target = Target(number, [0] * tensor.dim(), tensor, entry.name, tensor.dtype)
        batch.add_device_target(number, target, 0, there=False)
    return batch


def damage(path, index):
    """Flips a byte near the end of the data."""
    last = index.files()[-1]
    flip(path / last.name, -3)


def entries_of(state_dict):
    return [
        Entry(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape))
        for name, tensor in state_dict.items()
    ]


def save_shards(path, whole, ranks):
    """A checkpoint as so many ranks write it, each some rows of every tensor."""
    path.mkdir()
    indexes = []
    for rank in range(ranks):
        rows = {name: tensor.chunk(ranks)[rank].contiguous() for name, tensor in whole.items()}
        entries = entries_of(rows)
        for entry in entries:
            entry.shape = tuple(whole[entry.fqn].shape)
            entry.offsets = (rank * entry.sizes[0], 0)
        begun = _core.Save.create(
            str(path),
            [entry.item() for entry in entries],
            save_id=bytes(16),
            generation=1,
            token=rank,
            rank=rank,
            world_size=ranks,
            **WriteOptions(fsync=False).engine(),
        )
        begun.write(
            [_core.Part(i, 0, e.data.data_ptr(), e.data.nbytes) for i, e in enumerate(entries)]
        )
        indexes.append(begun.finish())
    commit_ranks(path, indexes)
