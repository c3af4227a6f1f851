"""How cost grows with bytes, tensors, chunks and ranks: times at several sizes, and the power law through them."""

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from harness import checkpoints, loaders, page_cache
from harness.context import Context
from harness.driven import worker
from harness.pairs import Contender, measure
from harness.rows import Row
from harness.states import Pattern, Shapes, small_shapes

from cases import metadata, save

#: For each quantity its sizes, by the size of the run.
BYTES = {
    "full": (128 << 20, 512 << 20, 1 << 30, 2 << 30),
    "quick": (64 << 20, 256 << 20, 1 << 30),
    "tiny": (1 << 20, 2 << 20, 4 << 20),
}
TENSORS = {
    "full": (1_000, 5_000, 20_000, 100_000),
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
    "full": ((200, 16), (200, 128), (200, 1_024)),
    "quick": ((100, 16), (100, 64), (100, 256)),
    "tiny": ((4, 2), (4, 4), (4, 8)),
}
#: Stock DCP takes minutes beyond this many tensors.
STOCK_TENSORS = 20_000


def run(context: Context) -> list[Row]:
    return [
        *_bytes(context),
        *_tensors(context),
        *_chunks(context, "chunks, plan of one rank", CHUNKS[context.size], by_chunks=True),
        *_chunks(context, "ranks that saved, plan of one rank", RANKS[context.size], by_chunks=False),
    ]


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Exponent and R squared of the power law through the points, by least squares of the logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    line = statistics.linear_regression(x, y)
    spread = statistics.pvariance(y)
    if spread == 0:
        return line.slope, 1.0
    left = statistics.fmean((b - line.slope * a - line.intercept) ** 2 for a, b in zip(x, y, strict=True))
    return line.slope, 1 - left / spread


def _rows(what: str, ours: str, sizes: Sequence[int], seconds: Sequence[float]) -> list[Row]:
    """A row for each size, and one for the fit."""
    rows = [
        Row(f"{size:,} {what}", ours, unit="s", value=s, lower_is_better=True, ours_s=s)
        for size, s in zip(sizes, seconds, strict=True)
    ]
    if len(sizes) < 3:
        return rows
    exponent, fitted = fit(sizes, seconds)
    at_last = seconds[-1] / sizes[-1]
    note = f"R2 {fitted:.3f}; {at_last * 1e9:.3g} ns each at the largest size"
    law = Row(f"growth with {what}", ours, unit="exponent", value=exponent, note=note)
    return [*rows, law]


def _median(context: Context, contender: Contender) -> float:
    times = measure([contender], **context.pairs)[contender.name]
    if times.error is not None:
        raise RuntimeError(times.error)
    return times.median


def _bytes(context: Context) -> list[Row]:
    """64 tensors that grow."""
    sizes = BYTES[context.size]
    results: dict[str, list[float]] = {loaders.OURS: [], loaders.STOCK: [], save.OURS: []}
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


def _tensors(context: Context) -> list[Row]:
    """Tensors of 4 KiB."""
    sizes = TENSORS[context.size]
    stock_sizes = [size for size in sizes if size <= STOCK_TENSORS]
    ours: list[float] = []
    stock: list[float] = []
    saved: list[float] = []
    for size in sizes:
        with_stock = size in stock_sizes
        loads, took = _load_and_save(context, small_shapes(size), torch.float32, stock=with_stock)
        ours.append(loads[0])
        stock += loads[1:]
        saved.append(took)
    return [
        *_rows("tensors, warm load", loaders.OURS, sizes, ours),
        *_rows("tensors, warm load", loaders.STOCK, stock_sizes, stock),
        *_rows("tensors, save with fsync", save.OURS, sizes, saved),
    ]


def _load_and_save(
    context: Context, shapes: Shapes, dtype: torch.dtype, *, stock: bool = True
) -> tuple[list[float], float]:
    """Seconds to load, ours and stock, and to save."""
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
        _median(context, loaders.loads(name, load, path, state, pattern, warm_up=name == loaders.OURS))
        for path, name, load in ways
    ]
    to = folder / "saved"
    saved = _median(
        context,
        Contender(save.OURS, lambda: save.ours(state, to), before=lambda: checkpoints.remove(to)),
    )
    checkpoints.remove(folder)
    return loads, saved


def _chunks(context: Context, what: str, sizes: Sequence[tuple[int, int]], *, by_chunks: bool) -> list[Row]:
    ours: list[float] = []
    stock: list[float] = []
    for fqns, ranks in sizes:
        folder = context.folder / "scaling"
        native, theirs = folder / "dcp-rs", folder / "stock"
        metadata.write_native(native, fqns, ranks)
        metadata.write_stock(theirs, fqns, ranks)
        for path, word, into in ((native, "ours", ours), (theirs, "stock", stock)):
            runs = []
            for _ in range(context.pairs["slow_rounds"]):
                with worker("metadata_worker", path, fqns, ranks) as process:
                    answer = process.ask(word)
                    runs.append(answer["read_metadata"] + answer["plan"])
            into.append(statistics.median(runs))
        checkpoints.remove(folder)
    counts = [fqns * ranks if by_chunks else ranks for fqns, ranks in sizes]
    note = "" if by_chunks else f" ({sizes[0][0]} FQNs)"
    return [
        *_rows(what + note, "dcp_rs", counts, ours),
        *_rows(what + note, "stock", counts, stock),
    ]
