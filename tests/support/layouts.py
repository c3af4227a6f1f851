"""States of tensors that lie over the ranks of a group in several ways, and what is opened of them as a whole."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp_rs import RsWriter

WHOLE = torch.arange(11 * 7, dtype=torch.float64).reshape(11, 7)
CUBE = torch.arange(4 * 5 * 6, dtype=torch.int32).reshape(4, 5, 6)


def layouts(seed=0):
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    square = init_device_mesh("cpu", (2, size // 2) if size > 1 else (1, 1))
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "rows": distribute_tensor(whole(7, 3), mesh, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(whole(3, 9), mesh, [Shard(1)], src_data_rank=None),
        "hybrid": distribute_tensor(
            whole(8, 6), square, [Replicate(), Shard(0)], src_data_rank=None
        ),
        "block": distribute_tensor(whole(8, 6), square, [Shard(0), Shard(1)], src_data_rank=None),
        "empty": distribute_tensor(whole(1, 3), mesh, [Shard(0)], src_data_rank=None),
        "model": {f"w{i}": whole(5 + i, 4) for i in range(9)},
        "step": 3,
        f"own.{dist.get_rank()}": whole(2),
    }


def sharded_state(seed):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(21.0).reshape(7, 3) + seed
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None),
        "all": distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None),
        "model": {f"w{i}": torch.full((50,), float(i + seed)) for i in range(40)},
        "step": seed,
    }


def save_sharded(path):
    size = dist.get_world_size()
    flat = init_device_mesh("cpu", (size,))
    square = init_device_mesh("cpu", (2, size // 2))
    state = {
        "rows": distribute_tensor(WHOLE, flat, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(WHOLE, flat, [Shard(1)], src_data_rank=None),
        "blocks": distribute_tensor(WHOLE, square, [Shard(0), Shard(1)], src_data_rank=None),
        "cube": distribute_tensor(CUBE, flat, [Shard(2)], src_data_rank=None),
        "alone": WHOLE,
        "step": 4,
    }
    dcp.save(state, storage_writer=RsWriter(path))
