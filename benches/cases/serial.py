"""What of a load does not get shorter with more cores: the same tensors with next to nothing in them, and one thread against all."""

from collections.abc import Callable
from pathlib import Path

import torch
from harness import checkpoints, loaders, page_cache
from harness.context import Context
from harness.loaders import OURS, State
from harness.pairs import Contender, measure
from harness.rows import Row, figure, versus
from harness.states import Pattern, model_shapes, size_of

import dcp_rs

EMPTY, ONE = "dcp_rs.load, 64 bytes of each tensor", "dcp_rs.load, threads=1"


def one_thread(path: Path, state: State) -> None:
    dcp_rs.load(state, path, no_dist=True, threads=1)


def run(context: Context) -> list[Row]:
    pattern = Pattern(model_shapes(context.sizes), torch.bfloat16)
    empty = Pattern(dict.fromkeys(pattern.shapes, (32,)), torch.bfloat16)
    native = checkpoints.native(context.folder / "model", pattern)
    small = checkpoints.native(context.folder / "empty", empty)
    state, none = pattern.blank(), empty.blank()
    rows = []
    for cache, prepare in (("warm", page_cache.warm), ("cold", page_cache.drop)):

        def contender(
            name: str,
            load: Callable[[Path, State], None],
            path: Path,
            state: State,
            pattern: Pattern,
            prepare: Callable[[Path], object] = prepare,
        ) -> Contender:
            return loaders.loads(name, load, path, state, pattern, before=lambda: prepare(path))

        times = measure(
            [
                contender(OURS, loaders.ours, native, state, pattern),
                contender(ONE, one_thread, native, state, pattern),
                contender(EMPTY, loaders.ours, small, none, empty),
            ],
            **context.pairs,
        )
        case = f"{cache}, {len(pattern.shapes)} bf16 tensors, {size_of(pattern.nbytes)}"
        rows.append(versus(f"{case}: all cores", times, OURS, ONE))
        if not (times[EMPTY].error or times[OURS].error):
            shares = [
                100 * least / all_
                for least, all_ in zip(times[EMPTY].seconds, times[OURS].seconds, strict=True)
            ]
            note = "Python, the index, planning, threads: all that is not bytes"
            rows.append(
                figure(
                    f"{case}: what does not grow with the bytes",
                    EMPTY,
                    "%",
                    shares,
                    reach=3,
                    note=note,
                )
            )
    return rows
