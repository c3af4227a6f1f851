"""`open` and a touch of every name, without a copy, beside `safetensors.load_file`."""

from pathlib import Path

import torch
from harness import checkpoints, page_cache
from harness.context import Context
from harness.pairs import Contender, measure
from harness.rows import Row, versus
from harness.states import Pattern, Shapes, model_shapes, size_of, small_shapes
from safetensors.torch import load_file, save_file

import dcp_rs

OURS = "dcp_rs.open, every name"
SAFETENSORS = "safetensors load_file"


def run(context: Context) -> list[Row]:
    return [
        _case(context, "model", model_shapes(context.sizes), torch.bfloat16),
        _case(context, "small", small_shapes(context.sizes.small), torch.float32),
    ]


def _case(context: Context, name: str, shapes: Shapes, dtype: torch.dtype) -> Row:
    pattern = Pattern(shapes, dtype)
    folder = context.folder / name
    native = checkpoints.native(folder, pattern)

    def make(path: Path) -> None:
        path.mkdir()
        save_file(pattern.state(), path / "model.safetensors")

    single = checkpoints.ensure(folder / "single", make) / "model.safetensors"
    page_cache.warm(native, single)
    seen: dict[str, torch.Tensor] = {}

    def ours() -> None:
        with dcp_rs.open(native) as checkpoint:
            seen.update((fqn, checkpoint[fqn]) for fqn in checkpoint)

    def check() -> None:
        pattern.check(seen)
        seen.clear()

    times = measure(
        [
            Contender(OURS, ours, verify=check),
            Contender(SAFETENSORS, lambda: seen.update(load_file(single)), verify=check),
        ],
        **context.pairs,
    )
    case = f"open, {len(shapes):,} tensors, {size_of(pattern.nbytes)}, zero-copy"
    return versus(case, times, OURS, SAFETENSORS, reach=0.5, stretch=1)
