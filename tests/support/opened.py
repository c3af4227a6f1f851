"""A state that several ranks save in many pieces, to be opened as a whole."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_rs import RsWriter

WHOLE = torch.arange(11 * 7, dtype=torch.float64).reshape(11, 7)
CUBE = torch.arange(4 * 5 * 6, dtype=torch.int32).reshape(4, 5, 6)


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
