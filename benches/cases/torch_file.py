"""A file of torch.save, beside torch's own ways to read one."""

import subprocess
import sys
from pathlib import Path

import torch
from harness import checkpoints, loaders, page_cache
from harness.context import Context
from harness.loaders import OURS
from harness.pairs import Contender, measure
from harness.rows import Row, versus
from harness.states import Pattern, model_shapes, size_of, small_shapes

MAPPED = "torch.load(mmap=True) and copy_"
LOADED = "torch.load and copy_"
LS = "dcp-rs ls"
IMPORT = "python -c 'import torch'"


def run(context: Context) -> list[Row]:
    return [*_large(context), *_small(context), *_ls(context)]


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


def _ls(context: Context) -> list[Row]:
    pattern = Pattern(model_shapes(context.sizes), torch.bfloat16)
    path = checkpoints.torch_file(context.folder / "model", pattern)

    def process(name: str, *command: str | Path) -> Contender:
        return Contender(name, lambda: drop_output([sys.executable, *command]))

    times = measure(
        [process(LS, Path(sys.executable).with_name("dcp-rs"), "ls", path), process(IMPORT, "-c", "import torch")],
        **context.pairs,
    )
    return [versus(f"ls of {len(pattern.shapes)} tensors of torch.save", times, LS, IMPORT, reach=20, stretch=50)]


def drop_output(command: list[str | Path]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
