"""Several ranks of one machine load at once from a cold disk: what all want, what lies between what others want, and what each wants alone."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from harness import checkpoints, page_cache
from harness.context import Context
from harness.driven import Driven, worker
from harness.loaders import OURS, OURS_ALONE, OURS_SHARED, OURS_STOCK_PLANNER, STOCK
from harness.pairs import Contender, measure, nothing
from harness.rows import Row, versus
from harness.states import Pattern, size_of, square_shapes

SAVED_BY, RANKS = 8, 4


def run(context: Context) -> list[Row]:
    pattern = Pattern(square_shapes(context.sizes), torch.bfloat16)
    native, stock = checkpoints.row_sharded(context.folder / "reshard", pattern, SAVED_BY)
    rows = []
    with together(context) as ranks:
        for what in ("replicas", "columns", "rows", "stages"):
            ranks.ask("want", what)
            loaders = [(OURS, native), (OURS_STOCK_PLANNER, native), (STOCK, stock)]
            if (
                what == "stages"
            ):  # each other matrices, whole: as if nobody else were there, and by the shape of what is wanted
                loaders += [(OURS_ALONE, native), (OURS_SHARED, native)]
            times = measure(
                [
                    ranks.contender(name, path, lambda path=path: page_cache.drop(path))
                    for name, path in loaders
                ],
                **context.pairs,
            )
            case = f"cold, {size_of(pattern.nbytes)}, {RANKS} ranks of a machine load {what}"
            rows += [
                versus(case, times, OURS, STOCK),
                versus(case, times, OURS_STOCK_PLANNER, STOCK),
            ]
            if what == "stages":
                rows += [
                    versus(case, times, name, OURS_ALONE, reach=0.9, stretch=1.0)
                    for name in (OURS, OURS_STOCK_PLANNER)
                ]
                rows.append(versus(case, times, OURS, OURS_SHARED))
    return rows


class Ranks:
    """Processes that do the same at once."""

    def __init__(self, processes: list[Driven], pool: ThreadPoolExecutor) -> None:
        self._processes = processes
        self._pool = pool

    def ask(self, *words: str | Path) -> None:
        list(self._pool.map(lambda process: process.ask(*words), self._processes))

    def contender(
        self, name: str, path: Path, before: Callable[[], None] = nothing, *, warm_up: bool = False
    ) -> Contender:
        """The load of that name, by all of them, in what each wants."""
        return Contender(
            name,
            run=lambda: self.ask("load", name, path),
            before=before,
            verify=lambda: self.ask("verify"),
            warm_up=warm_up,
        )


@contextmanager
def together(context: Context) -> Iterator[Ranks]:
    """The processes, which meet in one process group."""
    store = context.folder / "ranks.store"
    store.unlink(missing_ok=True)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(RANKS))
        processes = [
            stack.enter_context(worker("rank_worker", rank, RANKS, store, context.size))
            for rank in range(RANKS)
        ]
        yield Ranks(processes, pool)
