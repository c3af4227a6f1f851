"""The mean of four checkpoints, beside loops of loads and `add_`, from a warm cache to a new checkpoint on the disk."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from harness import checkpoints, loaders, page_cache
from harness.context import Context
from harness.pairs import Contender, measure
from harness.rows import Row, versus
from harness.states import Pattern, model_shapes, size_of

import dcp_rs

State = dict[str, torch.Tensor]

INPUTS = 4
OURS = "dcp_rs.merge"
OURS_OF_STOCK = "dcp_rs.merge of stock folders"
STOCK = "dcp.load, add_ in float32, dcp.save"
OPENED = "dcp_rs.open, add_ in float32, dcp_rs.save"


def run(context: Context) -> list[Row]:
    """Each input is the same checkpoint: four of them would not fit into the page cache of a small machine."""
    pattern = Pattern(model_shapes(context.sizes), torch.bfloat16)
    native = checkpoints.native(context.folder / "model", pattern)
    stock = checkpoints.stock(context.folder / "model", pattern)
    page_cache.warm(native, stock)
    out = context.folder / "merged"

    def loaded() -> Iterator[State]:
        state = pattern.blank()
        for _ in range(INPUTS):
            loaders.stock(stock, state)
            yield state

    def opened() -> Iterator[State]:
        for _ in range(INPUTS):
            with dcp_rs.open(native) as checkpoint:
                yield {name: checkpoint[name] for name in checkpoint}

    def check() -> None:
        state = pattern.blank()
        loaders.ours(out, state)
        for name in pattern.shapes:
            # The mean of equal numbers is the number: a quarter of each is exact. The pattern is
            # random bits.
            got, want = state[name], pattern.view(name)
            assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)), f"{name} is not the mean"

    def contender(name: str, work: Callable[[], None]) -> Contender:
        return Contender(
            name, work, before=lambda: shutil.rmtree(out, ignore_errors=True), verify=check
        )

    def merge(path: Path) -> None:
        dcp_rs.merge([path] * INPUTS, out)

    def by_stock() -> None:
        dcp.save(_mean(loaded()), checkpoint_id=out, no_dist=True)

    def by_torch() -> None:
        dcp_rs.save(_mean(opened()), out, no_dist=True)

    times = measure(
        [
            contender(OURS, lambda: merge(native)),
            contender(STOCK, by_stock),
            contender(OPENED, by_torch),
            contender(OURS_OF_STOCK, lambda: merge(stock)),
        ],
        **context.pairs,
    )
    shutil.rmtree(out, ignore_errors=True)
    case = f"merge {INPUTS} times {size_of(pattern.nbytes)}"
    return [
        versus(case, times, OURS, STOCK, reach=15),
        versus(case, times, OURS, OPENED, reach=8),
        versus(f"{case}, of stock", times, OURS_OF_STOCK, STOCK, reach=15),
    ]


def _mean(states: Iterator[State]) -> State:
    sums: State = {}
    for state in states:
        for name, tensor in state.items():
            if name not in sums:
                sums[name] = torch.zeros(tensor.shape, dtype=torch.float32)
            sums[name].add_(tensor.float(), alpha=1 / INPUTS)
    return {name: tensor.bfloat16() for name, tensor in sums.items()}
