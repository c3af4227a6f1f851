"""``stats``: what the elements of tensors are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dcp_rs._progress import watching
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.checkpoint.names import natural
from dcp_rs.checkpoint.stats import TensorStats, stats
from dcp_rs.checkpoint.views import Layout
from dcp_rs.cli.output import count, line, print_json, printable, rate, show_shape, size, table

__all__ = ["show_stats"]


def show_stats(
    path: Path,
    chosen: Callable[[str], bool] | None,
    *,
    sort: str,
    fail_on_nan: bool,
    layout: Layout,
    rank: int | None,
    allow_external: bool,
    threads: int | None,
    as_json: bool,
) -> int:
    """1 where a NaN was found, and that is to be said."""
    index = open_index(path, rank=rank, allow_external=allow_external, layout=layout)
    wanted = [
        number
        for number in index.file_order()
        if not index.tensor(number).is_bytes and (chosen is None or chosen(index.name(number)))
    ]
    begin, nbytes = time.perf_counter(), 0
    with watching(True, "reading") as progress:

        def seen(done: int, total: int) -> None:
            nonlocal nbytes
            nbytes = done
            if progress is not None:
                progress(done, total)

        found = sorted(stats(index, wanted, threads=threads, progress=seen), key=_SORTS[sort])
    seconds = time.perf_counter() - begin
    bad = [one.name for one in found if one.nan]
    if as_json:
        print_json(
            {
                "path": str(path),
                "bytes": nbytes,
                "seconds": seconds,
                "tensors": [asdict(one) for one in found],
            }
        )
    else:
        headings = ["dtype", "shape", "min", "max", "mean", "std", "zeros", "nan", "inf", "name"]
        table(headings, ["<", "<", *[">"] * 7, "<"], [_row(one) for one in found])
        what = f"{count(len(found), 'tensor')}, {size(nbytes)} in {seconds:.1f} s ({rate(nbytes, seconds)})"
        worst = f": NaN in {count(len(bad), 'tensor')}" if bad else ""
        line((what, "bold"), (worst, "bold red"))
    return 1 if bad and fail_on_nan else 0


def _row(one: TensorStats) -> list[str]:
    share = f"{one.zeros / one.elements:.1%}" if one.zeros else "0"
    return [
        one.dtype,
        show_shape(one.shape),
        *map(_number, (one.min, one.max, one.mean, one.std)),
        share,
        f"{one.nan:,}",
        f"{one.inf:,}",
        printable(one.name),
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _largest(attribute: str) -> Callable[[TensorStats], Any]:
    def key(one: TensorStats) -> Any:
        value = getattr(one, attribute)
        return (value is None, -value if value is not None else 0, natural(one.name))

    return key


_SORTS: dict[str, Callable[[TensorStats], Any]] = {
    "name": lambda one: natural(one.name),
    **{
        attribute: _largest(attribute)
        for attribute in ("min", "max", "mean", "std", "zeros", "nan", "inf", "elements")
    },
}
