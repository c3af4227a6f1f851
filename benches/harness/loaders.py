"""The ways to load a checkpoint into a state dict that the cases compare."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import dcp_rs
from harness.checkpoints import read_options
from harness.pairs import Contender, nothing
from harness.states import Pattern, scramble

State = dict[str, torch.Tensor]

OURS = "dcp_rs.load"
OURS_VERIFIED = "dcp_rs.load, verify=True"
OURS_SHARED = "dcp_rs.load, shared=True"
OURS_ALONE = "dcp_rs.load, shared=False"
OURS_STOCK_PLANNER = "dcp.load, RsReader"
STOCK = "FileSystemReader"
HUGGING_FACE = "HuggingFaceStorageReader"
SAFETENSORS = "safetensors load_file + copy_"
BROADCAST = "BroadcastingTorchSaveReader, and copy_ of the rows"


def ours(path: Path, state: State) -> None:
    dcp_rs.load(state, path, no_dist=True)


def ours_verified(path: Path, state: State) -> None:
    dcp_rs.load(state, path, no_dist=True, verify=True)


def ours_shared(path: Path, state: State) -> None:
    dcp_rs.load(state, path, no_dist=True, shared=True)


def ours_stock_planner(path: Path, state: State) -> None:
    dcp.load(state, storage_reader=dcp_rs.RsReader(path), no_dist=True)


def stock(path: Path, state: State) -> None:
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)


def hugging_face(path: Path, state: State) -> None:
    reader = dcp.HuggingFaceStorageReader(str(path), **read_options())
    dcp.load(state, storage_reader=reader, no_dist=True)


def safetensors(path: Path, state: State) -> None:
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            state[name].copy_(tensor)


def loads(
    name: str,
    load: Callable[[Path, State], None],
    path: Path,
    state: State,
    pattern: Pattern,
    *,
    before: Callable[[], None] = nothing,
    warm_up: bool = True,
) -> Contender:
    """A contender that loads `path` into `state`, which is scrambled before and compared with `pattern` after each run."""

    def prepare() -> None:
        scramble(state.values())
        before()

    return Contender(
        name,
        run=lambda: load(path, state),
        before=prepare,
        verify=lambda: pattern.check(state),
        warm_up=warm_up,
    )
