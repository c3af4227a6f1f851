"""A custom planner that merges low-rank adapters into the weights that it loads.

python examples/custom_planner.py /tmp/planner
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import ReadItem

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader


class MergeAdapters(RsLoadPlanner):
    """A planner that adds ``scale * up @ down`` of another checkpoint to weights with adapters.

    A planner that overrides ``resolve_tensor`` or ``commit_tensor`` sees each item of its rank, as
    with torch's own.
    """

    def __init__(self, adapters: str | Path, scale: float, **options: Any) -> None:
        super().__init__(**options)
        self.adapters = dcp_rs.open(adapters)
        self.scale = scale

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Add the adapters to a tensor that was filled."""
        name = read_item.dest_index.fqn
        if f"{name}.up" in self.adapters:
            # The rows and columns of this item: the weight may be sharded.
            (row, column), (rows, columns) = read_item.storage_offsets, read_item.lengths
            offset = read_item.storage_index.offset or (0, 0)
            row, column = row + offset[0], column + offset[1]
            up = self.adapters.get_slice(f"{name}.up")[row : row + rows]
            down = self.adapters.get_slice(f"{name}.down")[:, column : column + columns]
            tensor += self.scale * (up @ down)
        super().commit_tensor(read_item, tensor)


def main(folder: str) -> dict[str, torch.Tensor]:
    """Save a checkpoint and adapters for it, and load both as one."""
    base, adapters = Path(folder) / "base", Path(folder) / "adapters"
    weight, bias = torch.randn(6, 8), torch.randn(6)
    up, down = torch.randn(6, 2), torch.randn(2, 8)
    dcp_rs.save({"fc.weight": weight, "fc.bias": bias}, base)
    dcp_rs.save({"fc.weight.up": up, "fc.weight.down": down}, adapters)

    state = {"fc.weight": torch.empty(6, 8), "fc.bias": torch.empty(6)}
    dcp_rs.load_state_dict(state, RsReader(base), planner=MergeAdapters(adapters, scale=0.5))
    torch.testing.assert_close(state["fc.weight"], weight + 0.5 * (up @ down))
    assert torch.equal(state["fc.bias"], bias)
    return state


if __name__ == "__main__":
    print({name: tuple(value.shape) for name, value in main(sys.argv[1]).items()})
