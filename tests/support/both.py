"""The same saves and loads through stock DCP's storage and through this package's."""

import inspect
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from dcp_rs import RsReader, RsWriter
from support.states import blank

# torch 2.8 has no rank-local saves.
HAS_RANK_LOCAL = "use_collectives" in inspect.signature(dcp.save).parameters


def save_rs(state: dict[str, Any], path: Path, **options: Any) -> None:
    """Save without a process group. A shallow copy is handed over: nothing may change the test's own."""
    dcp.save(dict(state), storage_writer=RsWriter(path, **options), no_dist=True)


def save_in_two_chunks(name: str, path: Path) -> None:
    """Save a tensor of 4 rows and 16 columns, half of the columns in each of two files."""
    halves = LocalShardsWrapper([torch.zeros(4, 8), torch.ones(4, 8)], [(0, 0), (0, 8)])
    save_rs({name: halves}, path)


def load_rs(template: dict[str, Any], path: Path, **options: Any) -> dict[str, Any]:
    """Fill `template` without a process group, and return it."""
    dcp.load(template, storage_reader=RsReader(path, **options), no_dist=True)
    return template


def save_stock(state: dict[str, Any], path: Path) -> None:
    dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(path), no_dist=True)


def load_stock(template: dict[str, Any], path: Path) -> dict[str, Any]:
    dcp.load(template, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return template


def through_rs(state: dict[str, Any], path: Path, **options: Any) -> dict[str, Any]:
    """What comes back of `state`."""
    save_rs(state, path)
    return load_rs(blank(state), path, **options)


def through_stock(state: dict[str, Any], path: Path) -> dict[str, Any]:
    save_stock(state, path)
    return load_stock(blank(state), path)
