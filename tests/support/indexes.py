"""Checkpoints put together by hand, from what `_core.Save` writes."""

from pathlib import Path
from typing import Any

import torch

from dcp_rs import _core


def whole_item(name: str, tensor: torch.Tensor, **options: Any) -> _core.SaveItem:
    """A tensor that is saved in one piece."""
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _core.SaveItem(
        name, tensor.nbytes, dtype=dtype, shape=shape, offsets=(0,) * tensor.dim(), sizes=shape, **options
    )


def commit_ranks(path: Path, indexes: list[bytes], *, generation: int = 1, planner_data: Any = None) -> None:
    """Commits the indexes of all ranks, as the coordinator of a save does."""
    _core.commit_indexes(
        str(path),
        None,
        indexes,
        save_id=bytes(range(16)),
        generation=generation,
        planner_data={} if planner_data is None else planner_data,
        items=None,
        names=(),
        fsync=False,
    )


def save_with_hole(path: Path) -> None:
    """Rows 0 to 3 of 8, in an index that is valid: as if a rank's part had been lost."""
    rows = torch.arange(4.0)
    item = _core.SaveItem(
        "w", rows.nbytes, dtype="float32", shape=(8, 1), offsets=(0, 0), sizes=(4, 1), path=("w",), position=0
    )
    generation = _core.next_generation(str(path))
    save = _core.Save.create(
        str(path),
        [item],
        save_id=bytes(range(16)),
        generation=generation,
        token=1,
        rank=0,
        world_size=1,
        threads=1,
        fsync=False,
        io="buffered",
        max_inflight_bytes=1 << 20,
    )
    save.write([_core.Part(0, 0, rows.data_ptr(), rows.nbytes)])
    commit_ranks(path, [save.finish()], generation=generation, planner_data={"w": ("w",)})
