"""The same state with nothing of it in the page cache, which is checked before every run."""

from collections.abc import Callable
from pathlib import Path

import torch
from harness import checkpoints, loaders, page_cache
from harness.context import Context, ask_limit
from harness.loaders import HUGGING_FACE, OURS, OURS_STOCK_PLANNER, SAFETENSORS, STOCK
from harness.pairs import Contender, measure
from harness.rows import Row, versus
from harness.states import Pattern, model_shapes, size_of

import dcp_rs

LIMIT = "limit: O_DIRECT, 16 in flight"
#: What the disk gives to a reader that keeps nothing: harder, since small buffers used again stay
#: in caches.
DRAIN = "limit: O_DIRECT, 16 in flight, kept nowhere"
VERIFY = "dcp_rs.verify"


def run(context: Context) -> list[Row]:
    pattern = Pattern(model_shapes(context.sizes), torch.bfloat16)
    folder = context.folder / "model"
    native = checkpoints.native(folder, pattern)
    stock = checkpoints.stock(folder, pattern)
    hugging_face = checkpoints.hugging_face(folder, pattern)
    state = pattern.blank()

    def cold(name: str, load: Callable[[Path, loaders.State], None], path: Path) -> Contender:
        return loaders.loads(
            name, load, path, state, pattern, before=lambda: page_cache.drop(path), warm_up=False
        )

    def verify() -> None:
        found = dcp_rs.verify(native)
        assert found.ok
        assert found.bytes_verified >= pattern.nbytes

    with context.limit_over(*native.glob("*.safetensors")) as limit:

        def limited(name: str, word: str) -> Contender:
            return Contender(
                name,
                lambda: ask_limit(limit, word),
                before=lambda: page_cache.drop(native),
                warm_up=False,
            )

        times = measure(
            [
                cold(OURS, loaders.ours, native),
                cold(STOCK, loaders.stock, stock),
                limited(LIMIT, "direct"),
                limited(DRAIN, "drain"),
                cold(HUGGING_FACE, loaders.hugging_face, hugging_face),
                cold(OURS_STOCK_PLANNER, loaders.ours_stock_planner, native),
                cold(SAFETENSORS, loaders.safetensors, hugging_face),
                Contender(VERIFY, verify, before=lambda: page_cache.drop(native), warm_up=False),
            ],
            **context.pairs,
        )
    case = f"cold, {len(pattern.shapes)} bf16 tensors, {size_of(pattern.nbytes)}"
    return [
        versus(case, times, OURS, STOCK, reach=2, stretch=2.4),
        versus(case, times, OURS, HUGGING_FACE, reach=2, stretch=2.4),
        versus(case, times, OURS, LIMIT, reach=0.9, stretch=0.97),
        versus(case, times, OURS, DRAIN),
        versus(case, times, OURS, SAFETENSORS),
        versus(case, times, OURS_STOCK_PLANNER, STOCK),
        versus(case, times, OURS_STOCK_PLANNER, LIMIT),
        versus(case, times, VERIFY, DRAIN, reach=0.9, stretch=1.0),
    ]
