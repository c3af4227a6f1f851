"""``stats``: statistics of the elements of tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcp_rs.checkpoint.locate import open_index
from dcp_rs.checkpoint.names import natural
from dcp_rs.checkpoint.views import Layout
from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.contents import tensor_stats
from dcp_rs.cli.output import count, line, print_json, printable, rate, show_shape, size, table
from dcp_rs.errors import PlanError

if TYPE_CHECKING:
    from dcp_rs.checkpoint.stats import TensorStats  # it imports torch

_SORTS = ("name", "min", "max", "mean", "std", "zeros", "nan", "inf", "elements")
_COLUMNS = ("dtype", "shape", "min", "max", "mean", "std", "zeros", "nan", "inf", "name")
#: The dtypes with two numbers in an element. Each number is counted.
_PAIRS = frozenset(["complex32", "bcomplex32", "complex64", "complex128", "float4_e2m1fn_x2"])


@command(
    "stats",
    "dcp-rs stats ckpt/",
    "dcp-rs stats ckpt/ 'model.*' --sort max",
    "dcp-rs stats ckpt/ --fail-on-nan --json",
)
@options.any_checkpoint
@options.selection
@click.option(
    "--sort",
    type=click.Choice(_SORTS),
    default="name",
    help="Sort by this, the largest number first.",
)
@click.option("--fail-on-nan", is_flag=True, help="Exit with 1 if a tensor has a NaN.")
@options.layout
@options.rank
@options.external
@options.threads
@options.storage
@options.json
def _stats(
    path: Path,
    chosen: Callable[[str], bool] | None,
    sort: str,
    fail_on_nan: bool,
    layout: Layout,
    rank: int | None,
    allow_external: bool,
    threads: int | None,
    as_json: bool,
) -> int:
    """Read tensors and show statistics of their elements.

    These are minimum, maximum, mean, standard deviation, and counts of zeros, NaN and infinities.
    """
    index = open_index(path, rank=rank, allow_external=allow_external, layout=layout)
    begin = time.perf_counter()
    found, nbytes = tensor_stats(index, chosen, threads=threads)
    seconds = time.perf_counter() - begin
    if chosen is not None and not found:
        msg = "no tensor matches: a pattern covers a whole name, as '*norm*' does"
        raise PlanError(msg, path=path)

    def key(one: TensorStats) -> Any:
        value = 0 if sort == "name" else getattr(one, sort)
        return (value is None, -(value or 0), natural(one.name))

    found.sort(key=key)
    bad = sum(1 for one in found if one.nan)
    if as_json:
        tensors = [asdict(one) for one in found]
        print_json({"path": str(path), "bytes": nbytes, "seconds": seconds, "tensors": tensors})
    else:
        table(
            [(name, "<" if name in ("dtype", "shape", "name") else ">") for name in _COLUMNS],
            [_row(one) for one in found],
        )
        speed = f"{seconds:.1f} s ({rate(nbytes, seconds)})"
        worst = f": NaN in {count(bad, 'tensor')}" if bad else ""
        line(
            (f"{count(len(found), 'tensor')}, {size(nbytes)} in {speed}", "bold"),
            (worst, "bold red"),
        )
    return 1 if bad and fail_on_nan else 0


def _row(one: TensorStats) -> list[str]:
    numbers = one.elements * (2 if one.dtype in _PAIRS else 1)
    return [
        one.dtype,
        show_shape(one.shape),
        *map(_number, (one.min, one.max, one.mean, one.std)),
        f"{one.zeros / numbers:.1%}" if one.zeros else "0",
        f"{one.nan:,}",
        f"{one.inf:,}",
        printable(one.name),
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"
