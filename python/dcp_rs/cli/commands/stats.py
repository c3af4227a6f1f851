"""``stats``: statistics of the elements of tensors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcp_rs._progress import watching
from dcp_rs.checkpoint.names import every, natural
from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.contents import Contents
from dcp_rs.cli.output import count, line, print_json, show_shape, size, table, took
from dcp_rs.errors import PlanError
from dcp_rs.options import ReadOptions

if TYPE_CHECKING:
    from dcp_rs.checkpoint.stats import TensorStats  # it imports torch

_SORTS = ("name", "min", "max", "mean", "nan", "inf", "elements")
_COLUMNS = ["<dtype", "<shape", *(f">{name}" for name in _SORTS[1:-1]), "<name"]


@command(
    "stats",
    "dcp-rs stats ckpt/",
    "dcp-rs stats ckpt/ 'model.*' --sort max",
    "dcp-rs stats ckpt/ --fail-on-nan --json",
)
@options.checkpoint
@options.selection
@click.option(
    "--sort",
    type=click.Choice(_SORTS),
    default="name",
    help="Sort by this, the largest number first.",
)
@click.option("--fail-on-nan", is_flag=True, help="Exit with 1 if a tensor has a NaN.")
@options.views
@options.rank
@options.external
@options.threads
@options.storage
@options.json
def _stats(
    path: Path,
    chosen: Callable[[str], bool],
    sort: str,
    fail_on_nan: bool,
    threads: int | None,
    as_json: bool,
    **how: Any,
) -> int:
    """Read tensors and show statistics of their elements.

    These are minimum, maximum, mean, and counts of NaN and infinities.
    """
    from dcp_rs.checkpoint.source import IndexSource
    from dcp_rs.checkpoint.stats import stats

    contents = Contents(path, chosen, **how)
    source = IndexSource(contents.index, ReadOptions(threads=threads), chosen)
    items = [item for item in source.items if item.dtype is not None]
    if chosen is not every and not items:
        msg = "no tensor matches: a pattern covers a whole name, as '*norm*' does"
        raise PlanError(msg, path=path)
    nbytes = sum(item.nbytes for item in items)
    begin = time.perf_counter()
    with watching(True, "reading") as progress:
        found = stats(source, items, progress)
    seconds = time.perf_counter() - begin
    found.sort(key=lambda one: natural(one.name))
    if sort != "name":
        found.sort(key=lambda one: _numbered(getattr(one, sort)), reverse=True)
    bad = sum(1 for one in found if one.nan)
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
        table(_COLUMNS, [_row(one) for one in found])
        worst = f": NaN in {count(bad, 'tensor')}" if bad else ""
        total = f"{count(len(found), 'tensor')}, {size(nbytes)} in {took(seconds, nbytes)}"
        line((total, "bold"), (worst, "red"))
    return 1 if bad and fail_on_nan else 0


def _numbered(value: float | None) -> float:
    return -math.inf if value is None else value


def _row(one: TensorStats) -> list[str]:
    return [
        one.dtype,
        show_shape(one.shape),
        *map(_number, (one.min, one.max, one.mean)),
        f"{one.nan:,}",
        f"{one.inf:,}",
        one.name,
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"
