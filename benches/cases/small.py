"""Many small tensors, warm: what each of them costs."""

import torch
from harness import checkpoints, loaders, page_cache
from harness.context import Context
from harness.loaders import HUGGING_FACE, OURS, OURS_STOCK_PLANNER, SAFETENSORS, STOCK
from harness.pairs import measure
from harness.rows import Row, versus
from harness.states import Pattern, small_shapes


def run(context: Context) -> list[Row]:
    pattern = Pattern(small_shapes(context.sizes.small), torch.float32)
    folder = context.folder / "small"
    native = checkpoints.native(folder, pattern)
    stock = checkpoints.stock(folder, pattern)
    hugging_face = checkpoints.hugging_face(folder, pattern)
    page_cache.warm(native, stock, hugging_face)
    state = pattern.blank()
    times = measure(
        [
            loaders.loads(OURS, loaders.ours, native, state, pattern),
            loaders.loads(STOCK, loaders.stock, stock, state, pattern, warm_up=False),
            loaders.loads(OURS_STOCK_PLANNER, loaders.ours_stock_planner, native, state, pattern),
            loaders.loads(
                HUGGING_FACE, loaders.hugging_face, hugging_face, state, pattern, warm_up=False
            ),
            loaders.loads(SAFETENSORS, loaders.safetensors, hugging_face, state, pattern),
        ],
        **context.pairs,
    )
    case = f"{len(pattern.shapes):,} float32 tensors of 64x16"
    return [
        versus(case, times, OURS, STOCK, reach=60, stretch=150),
        versus(case, times, OURS_STOCK_PLANNER, STOCK, reach=3.5, stretch=4.3),
        versus(case, times, OURS, HUGGING_FACE),
        versus(case, times, OURS, SAFETENSORS),
    ]
