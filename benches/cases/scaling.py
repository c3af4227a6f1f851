"""How cost grows with bytes, tensors, chunks, ranks and files: times at several sizes, and the power law through them."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import checkpoints, loaders, page_cache
from harness.context import Context
from harness.driven import worker
from harness.pairs import Contender, measure
from harness.rows import Row
from harness.states import Pattern, Shapes, scramble, small_shapes

from cases import metadata, save

#: For each quantity its sizes, by the size of the run.
BYTES = {
    "full": (128 << 20, 512 << 20, 1 << 30, 2 << 30),
    "quick": (64 << 20, 256 << 20, 1 << 30),
    "tiny": (1 << 20, 2 << 20, 4 << 20),
}
TENSORS = {
    "full": (1_000, 5_000, 20_000, 100_000, 250_000, 500_000, 1_000_000),
    "quick": (1_000, 4_000, 16_000),
    "tiny": (10, 20, 40),
}
#: FQNs and ranks: chunks grow by FQNs, at one number of ranks; then ranks at one number of FQNs.
CHUNKS = {
    "full": ((20, 512), (200, 512), (2_000, 512)),
    "quick": ((20, 64), (200, 64), (1_000, 64)),
    "tiny": ((2, 4), (4, 4), (8, 4)),
}
RANKS = {
    "full": ((200, 16), (200, 128), (200, 1_024), (200, 4_096), (200, 16_384)),
    "quick": ((100, 16), (100, 64), (100, 256)),
    "tiny": ((4, 2), (4, 4), (4, 8)),
}
FILES = {
    "full": (100, 1_000, 10_000, 100_000),
    "quick": (100, 1_000, 4_000),
    "tiny": (2, 4, 8),
}
#: Stock DCP takes minutes beyond this many tensors, or chunks.
STOCK_TENSORS = 20_000
STOCK_CHUNKS = 1_024_000


@dataclass(frozen=True)
class Took:
    """The least seconds of some runs, and of processor time where it was spent in this process. The least, since what else runs only adds."""

    seconds: float
    cpu: float | None = None


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Exponent and R squared of the power law through the points, by least squares of the logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    line = statistics.linear_regression(x, y)
    spread = statistics.pvariance(y)
    if spread == 0:
        return line.slope, 1.0
    left = statistics.fmean(
        (b - line.slope * a - line.intercept) ** 2 for a, b in zip(x, y, strict=True)
    )
    return line.slope, 1 - left / spread


def _rows(what: str, ours: str, sizes: Sequence[int], took: Sequence[Took]) -> list[Row]:
    """A row for each size, and one for the fit."""
    rows = [
        Row(
            f"{size:,} {what}",
            ours,
            unit="s",
            value=one.seconds,
            lower_is_better=True,
            ours_s=one.seconds,
            ours_cpu_s=one.cpu,
        )
        for size, one in zip(sizes, took, strict=True)
    ]
    if len(sizes) < 3:
        return rows
    exponent, fitted = fit(sizes, [one.seconds for one in took])
    note = f"R2 {fitted:.3f}; {took[-1].seconds / sizes[-1] * 1e9:.3g} ns each at the largest size"
    cpu = [one.cpu for one in took if one.cpu]
    if len(cpu) == len(sizes):
        each = " / ".join(
            f"{1e9 * spent / size:.3g}" for size, spent in zip(sizes, cpu, strict=True)
        )
        note += f"; of processor time: exponent {fit(sizes, cpu)[0]:.3f}, {each} ns each"
    law = Row(f"growth with {what}", ours, unit="exponent", value=exponent, note=note)
    return [*rows, law]


def _least(context: Context, contender: Contender) -> Took:
    times = measure([contender], **context.pairs)[contender.name]
    if times.error is not None:
        raise RuntimeError(times.error)
    return Took(min(times.seconds), min(times.cpu_seconds))


def nbytes(context: Context) -> list[Row]:
    """64 tensors that grow."""
    sizes = BYTES[context.size]
    results: dict[str, list[Took]] = {loaders.OURS: [], loaders.STOCK: [], save.OURS: []}
    for size in sizes:
        shapes = {f"layers.{i}.weight": (64, size // 64 // 64 // 2) for i in range(64)}
        loads, saved = _load_and_save(context, shapes, torch.bfloat16)
        results[loaders.OURS].append(loads[0])
        results[loaders.STOCK].append(loads[1])
        results[save.OURS].append(saved)
    return [
        *_rows("bytes, warm load", loaders.OURS, sizes, results[loaders.OURS]),
        *_rows("bytes, warm load", loaders.STOCK, sizes, results[loaders.STOCK]),
        *_rows("bytes, save with fsync", save.OURS, sizes, results[save.OURS]),
    ]


def tensors(context: Context) -> list[Row]:
    """Tensors of 256 bytes."""
    sizes = TENSORS[context.size]
    stock_sizes = [size for size in sizes if size <= STOCK_TENSORS]
    ours: list[Took] = []
    stock: list[Took] = []
    saved: list[Took] = []
    for size in sizes:
        shapes = dict.fromkeys(small_shapes(size), (8, 8))
        loads, took = _load_and_save(context, shapes, torch.float32, stock=size in stock_sizes)
        ours.append(loads[0])
        stock += loads[1:]
        saved.append(took)
    return [
        *_rows("tensors of 256 bytes, warm load", loaders.OURS, sizes, ours),
        *_rows("tensors of 256 bytes, warm load", loaders.STOCK, stock_sizes, stock),
        *_rows("tensors of 256 bytes, save with fsync", save.OURS, sizes, saved),
    ]


def chunks(context: Context) -> list[Row]:
    """FQNs that grow, each cut by as many ranks."""
    return _planned(context, "chunks, plan of one rank", CHUNKS[context.size], by_chunks=True)


def ranks(context: Context) -> list[Row]:
    """As many FQNs, cut by ranks that grow."""
    return _planned(
        context, "ranks that saved, plan of one rank", RANKS[context.size], by_chunks=False
    )


def files(context: Context) -> list[Row]:
    """One tensor, of which each file has 64 bytes."""
    sizes = FILES[context.size]
    took = []
    folder = context.folder / "scaling"
    for size in sizes:
        metadata.write_native(folder / "dcp-rs", 1, size)
        [name] = metadata.names(1)
        state = {name: torch.empty(metadata.ROWS * size, metadata.COLUMNS)}

        def check(state: loaders.State = state, name: str = name) -> None:
            assert not state[name].any()  # what every rank saved

        contender = Contender(
            loaders.OURS,
            lambda state=state: loaders.ours(folder / "dcp-rs", state),
            before=lambda state=state: scramble(state.values()),
            verify=check,
        )
        took.append(_least(context, contender))
        checkpoints.remove(folder)
    return _rows("files, warm load", loaders.OURS, sizes, took)


def _load_and_save(
    context: Context, shapes: Shapes, dtype: torch.dtype, *, stock: bool = True
) -> tuple[list[Took], Took]:
    """To load, ours and stock, and to save."""
    pattern = Pattern(shapes, dtype)
    folder = context.folder / "scaling"
    ways: list[tuple[Path, str, Callable[[Path, loaders.State], None]]] = [
        (checkpoints.native(folder, pattern), loaders.OURS, loaders.ours)
    ]
    if stock:
        ways.append((checkpoints.stock(folder, pattern), loaders.STOCK, loaders.stock))
    page_cache.warm(folder)
    state = pattern.blank()
    loads = [
        _least(
            context, loaders.loads(name, load, path, state, pattern, warm_up=name == loaders.OURS)
        )
        for path, name, load in ways
    ]
    to = folder / "saved"
    saved = _least(
        context,
        Contender(save.OURS, lambda: save.ours(state, to), before=lambda: checkpoints.remove(to)),
    )
    checkpoints.remove(folder)
    return loads, saved


def _planned(
    context: Context, what: str, sizes: Sequence[tuple[int, int]], *, by_chunks: bool
) -> list[Row]:
    ours: list[Took] = []
    stock: list[Took] = []
    for fqns, count in sizes:
        folder = context.folder / "scaling"
        native, theirs = folder / "dcp-rs", folder / "stock"
        metadata.write_native(native, fqns, count)
        ways = [(native, "ours", ours)]
        if fqns * count <= STOCK_CHUNKS:
            metadata.write_stock(theirs, fqns, count)
            ways.append((theirs, "stock", stock))
        for path, word, into in ways:
            runs = []
            for _ in range(context.pairs["slow_rounds"]):
                with worker("metadata_worker", path, fqns, count) as process:
                    answer = process.ask(word)
                    runs.append(answer["read_metadata"] + answer["plan"])
            into.append(Took(min(runs)))
        checkpoints.remove(folder)
    counts = [fqns * count if by_chunks else count for fqns, count in sizes]
    note = "" if by_chunks else f" ({sizes[0][0]} FQNs)"
    return [
        *_rows(what + note, "dcp_rs", counts, ours),
        *_rows(what + note, "stock", counts[: len(stock)], stock),
    ]
