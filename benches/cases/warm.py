"""A model's state in the page cache, into preallocated CPU tensors."""

import torch
from harness import checkpoints, loaders, page_cache
from harness.context import Context, ask_limit
from harness.loaders import (
    HUGGING_FACE,
    OURS,
    OURS_STOCK_PLANNER,
    OURS_VERIFIED,
    SAFETENSORS,
    STOCK,
)
from harness.pairs import Contender, measure
from harness.rows import Row, versus
from harness.states import Pattern, model_shapes, size_of

LIMIT = "limit: streaming stores from a kept mapping, all cores"


def run(context: Context) -> list[Row]:
    pattern = Pattern(model_shapes(context.sizes), torch.bfloat16)
    folder = context.folder / "model"
    native = checkpoints.native(folder, pattern)
    stock = checkpoints.stock(folder, pattern)
    hugging_face = checkpoints.hugging_face(folder, pattern)
    page_cache.warm(native, stock, hugging_face)
    state = pattern.blank()
    with context.limit_over(*native.glob("*.safetensors")) as limit:
        times = measure(
            [
                loaders.loads(OURS, loaders.ours, native, state, pattern),
                loaders.loads(STOCK, loaders.stock, stock, state, pattern),
                loaders.loads(OURS_VERIFIED, loaders.ours_verified, native, state, pattern),
                loaders.loads(HUGGING_FACE, loaders.hugging_face, hugging_face, state, pattern),
                loaders.loads(
                    OURS_STOCK_PLANNER, loaders.ours_stock_planner, native, state, pattern
                ),
                loaders.loads(SAFETENSORS, loaders.safetensors, hugging_face, state, pattern),
                Contender(LIMIT, lambda: ask_limit(limit, "copy")),
            ],
            **context.pairs,
        )
    case = f"warm, {len(pattern.shapes)} bf16 tensors, {size_of(pattern.nbytes)}"
    return [
        versus(case, times, OURS, STOCK, reach=7, stretch=9),
        versus(case, times, OURS, HUGGING_FACE, reach=1.4, stretch=1.8),
        versus(case, times, OURS, SAFETENSORS, reach=1.2, stretch=1.5),
        versus(case, times, OURS, LIMIT, reach=0.6, stretch=0.8),
        versus(case, times, OURS_STOCK_PLANNER, STOCK),
        versus(case, times, OURS_STOCK_PLANNER, LIMIT),
        versus(
            case,
            times,
            OURS_VERIFIED,
            OURS,
            reach=0.8,
            stretch=0.9,
            note="what verify leaves of the speed",
        ),
    ]
