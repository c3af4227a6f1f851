"""Checkpoints of others, loaded where they are, beside their own readers; and their conversion."""

import shutil
import subprocess
from typing import Literal, get_args

import torch
from harness import checkpoints, loaders, page_cache
from harness.context import Context
from harness.loaders import HUGGING_FACE, STOCK
from harness.pairs import Contender, measure
from harness.rows import Row, versus
from harness.states import Pattern, model_shapes, size_of, small_shapes

import dcp_rs

ON_STOCK = "dcp_rs.load of the stock folder"
ON_STOCK_PLUGGED = "dcp.load, RsReader of the stock folder"
ON_HUGGING_FACE = "dcp_rs.load of the Hugging Face folder"
CONVERT = "dcp_rs.convert, stock to "
COPY = "cp -r and sync"

Target = Literal["dcp-rs", "dcp", "safetensors", "torch"]
TARGETS: tuple[Target, ...] = get_args(Target)


def run(context: Context) -> list[Row]:
    return [*_large(context), *_small(context), *_convert(context)]


def _large(context: Context) -> list[Row]:
    pattern = Pattern(model_shapes(context.sizes), torch.bfloat16)
    stock = checkpoints.stock(context.folder / "model", pattern)
    hugging_face = checkpoints.hugging_face(context.folder / "model", pattern)
    page_cache.warm(stock, hugging_face)
    state = pattern.blank()
    times = measure(
        [
            loaders.loads(ON_STOCK, loaders.ours, stock, state, pattern),
            loaders.loads(STOCK, loaders.stock, stock, state, pattern),
            loaders.loads(ON_STOCK_PLUGGED, loaders.ours_stock_planner, stock, state, pattern),
            loaders.loads(ON_HUGGING_FACE, loaders.ours, hugging_face, state, pattern),
            loaders.loads(HUGGING_FACE, loaders.hugging_face, hugging_face, state, pattern),
        ],
        **context.pairs,
    )
    case = f"foreign, warm, {len(pattern.shapes)} bf16 tensors, {size_of(pattern.nbytes)}"
    return [
        versus(case, times, ON_STOCK, STOCK, reach=6),
        versus(case, times, ON_STOCK_PLUGGED, STOCK),
        versus(case, times, ON_HUGGING_FACE, HUGGING_FACE, reach=1.3),
    ]


def _small(context: Context) -> list[Row]:
    pattern = Pattern(small_shapes(context.sizes.small), torch.float32)
    stock = checkpoints.stock(context.folder / "small", pattern)
    page_cache.warm(stock)
    state = pattern.blank()
    times = measure(
        [
            loaders.loads(ON_STOCK, loaders.ours, stock, state, pattern),
            loaders.loads(STOCK, loaders.stock, stock, state, pattern, warm_up=False),
        ],
        **context.pairs,
    )
    case = f"foreign, {len(pattern.shapes):,} float32 tensors of 64x16"
    return [versus(case, times, ON_STOCK, STOCK, reach=10)]


def _convert(context: Context) -> list[Row]:
    pattern = Pattern(model_shapes(context.sizes), torch.bfloat16)
    stock = checkpoints.stock(context.folder / "model", pattern)
    page_cache.warm(stock)
    to = context.folder / "converted"

    def copy() -> None:
        subprocess.run(["cp", "-r", stock, to], check=True)
        subprocess.run(["sync", *page_cache.files_of(to)], check=True)

    def remove() -> None:
        shutil.rmtree(to, ignore_errors=True)
        to.unlink(missing_ok=True)

    def converts(target: Target) -> Contender:
        def check() -> None:
            state = pattern.blank()
            if target == "torch":
                for name, tensor in torch.load(to, mmap=True).items():
                    state[name].copy_(tensor)
            else:
                loaders.ours(to, state)
            pattern.check(state)

        def convert() -> None:
            dcp_rs.convert(stock, to, to=target)

        return Contender(CONVERT + target, convert, before=remove, verify=check)

    times = measure(
        [*map(converts, TARGETS), Contender(COPY, copy, before=remove)], **context.pairs
    )
    remove()
    case = f"convert {size_of(pattern.nbytes)}"
    return [
        versus(case, times, CONVERT + target, COPY, reach=round(1 / 1.3, 2)) for target in TARGETS
    ]
