"""Items of a source of tensors, as a conversion plans with them."""

import torch

from dcp_rs.checkpoint.source import Chunk, Item


def item(name: str, numel: int, dtype: torch.dtype) -> Item:
    return Item(name, 0, dtype, (numel,), (Chunk((0,), (numel,)),), numel * dtype.itemsize)
