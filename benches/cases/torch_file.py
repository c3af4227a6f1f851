"""A file of torch.save, beside torch's own ways to read one."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from harness import checkpoints, loaders, page_cache
from harness.context import Context
from harness.loaders import BROADCAST, OURS
from harness.pairs import Contender, measure
from harness.rows import Row, versus
from harness.states import (
    Pattern,
    check_shards,
    model_shapes,
    scramble,
    shard,
    shards,
    size_of,
    small_shapes,
    square_shapes,
)
from torch.distributed.device_mesh import init_device_mesh

import dcp_rs
from cases.ranks import RANKS, together

MAPPED = "torch.load(mmap=True) and copy_"
MAPPED_ROWS = "torch.load(mmap=True) and copy_ of the rows"
LOADED = "torch.load and copy_"
LS = "dcp-rs ls"
IMPORT = "python -c 'import torch'"


def run(context: Context) -> list[Row]:
    return [
        *_large(context),
        *_small(context),
        *_one_of_four(context),
        *_four(context),
        *_ls(context),
    ]


def mapped(path: Path, state: loaders.State) -> None:
    for name, tensor in torch.load(path, mmap=True).items():
        state[name].copy_(tensor)


def loaded(path: Path, state: loaders.State) -> None:
    for name, tensor in torch.load(path).items():
        state[name].copy_(tensor)


def _large(context: Context) -> list[Row]:
    pattern = Pattern(model_shapes(context.sizes), torch.bfloat16)
    path = checkpoints.torch_file(context.folder / "model", pattern)
    state = pattern.blank()
    what = f"{len(pattern.shapes)} bf16 tensors, {size_of(pattern.nbytes)}"
    page_cache.warm(path)
    warm = measure(
        [
            loaders.loads(OURS, loaders.ours, path, state, pattern),
            loaders.loads(MAPPED, mapped, path, state, pattern),
        ],
        **context.pairs,
    )

    def drop() -> None:
        page_cache.drop(path)

    cold = measure(
        [
            loaders.loads(OURS, loaders.ours, path, state, pattern, before=drop, warm_up=False),
            loaders.loads(MAPPED, mapped, path, state, pattern, before=drop, warm_up=False),
        ],
        **context.pairs,
    )
    return [
        versus(f"torch.save, warm, {what}", warm, OURS, MAPPED, reach=1.6, stretch=2),
        versus(f"torch.save, cold, {what}", cold, OURS, MAPPED, reach=1.6, stretch=2),
    ]


def _small(context: Context) -> list[Row]:
    pattern = Pattern(small_shapes(context.sizes.small), torch.float32)
    path = checkpoints.torch_file(context.folder / "small", pattern)
    page_cache.warm(path)
    state = pattern.blank()
    times = measure(
        [
            loaders.loads(OURS, loaders.ours, path, state, pattern),
            loaders.loads(LOADED, loaded, path, state, pattern),
        ],
        **context.pairs,
    )
    case = f"torch.save, {len(pattern.shapes):,} float32 tensors of 64x16"
    return [versus(case, times, OURS, LOADED, reach=5, stretch=15)]


def _one_of_four(context: Context) -> list[Row]:
    """One rank, alone on its machine, takes its rows of every tensor."""
    pattern = Pattern(model_shapes(context.sizes), torch.bfloat16)
    path = checkpoints.torch_file(context.folder / "model", pattern)
    page_cache.warm(path)
    with checkpoints.pretend_rank(1, RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        state, memory = shards(pattern, 0, mesh)

        def rows(name: str, load: Callable[[], None]) -> Contender:
            return Contender(
                name,
                load,
                before=lambda: scramble(memory.values()),
                verify=lambda: check_shards(pattern, 0, mesh, memory),
            )

        def ours() -> None:
            dcp_rs.load(state, path, no_dist=True)  # the other ranks are not there

        def mapped_rows() -> None:
            for name, tensor in torch.load(path, mmap=True).items():
                memory[name].copy_(shard(tensor, 0, mesh))

        times = measure([rows(OURS, ours), rows(MAPPED_ROWS, mapped_rows)], **context.pairs)
    case = f"torch.save, warm, {size_of(pattern.nbytes)}, one rank of {RANKS} takes its rows"
    return [versus(case, times, OURS, MAPPED_ROWS, reach=2, stretch=4)]


def _four(context: Context) -> list[Row]:
    """Four ranks of a machine at once, each its rows."""
    pattern = Pattern(square_shapes(context.sizes), torch.bfloat16)
    path = checkpoints.torch_file(context.folder / "reshard", pattern)
    page_cache.warm(path)
    with together(context) as ranks:
        ranks.ask("want", "rows")
        times = measure(
            [ranks.contender(name, path, warm_up=True) for name in (OURS, BROADCAST)],
            **context.pairs,
        )
    case = (
        f"torch.save, warm, {size_of(pattern.nbytes)}, {RANKS} ranks of a machine take their rows"
    )
    return [versus(case, times, OURS, BROADCAST, reach=3, stretch=8)]


def _ls(context: Context) -> list[Row]:
    pattern = Pattern(model_shapes(context.sizes), torch.bfloat16)
    path = checkpoints.torch_file(context.folder / "model", pattern)

    def process(name: str, *command: str | Path) -> Contender:
        return Contender(name, lambda: drop_output([sys.executable, *command]))

    times = measure(
        [
            process(LS, Path(sys.executable).with_name("dcp-rs"), "ls", path),
            process(IMPORT, "-c", "import torch"),
        ],
        **context.pairs,
    )
    return [
        versus(
            f"ls of {len(pattern.shapes)} tensors of torch.save",
            times,
            LS,
            IMPORT,
            reach=20,
            stretch=50,
        )
    ]


def drop_output(command: list[str | Path]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
