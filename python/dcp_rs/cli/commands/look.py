"""Commands that look: ``ls``, ``tree``, ``inspect``, ``stats``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from dcp_rs._url import Url, location
from dcp_rs.checkpoint.locate import holds_index
from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.options import chosen
from dcp_rs.cli.output import text_argument


def _is_run(path: Path) -> bool:
    """Whether a folder is that of a run, and no checkpoint itself."""
    where = location(path)
    if not isinstance(where, Url) and (where.is_file() or holds_index(where)):
        return False  # and most are: they need not wait for the import of what knows runs
    from dcp_rs.steps.roots import root_at

    return root_at(path).is_run()


def _steps(path: Path, *, as_json: bool) -> None:
    from dcp_rs.cli.steps import steps

    steps(path, as_json=as_json)


@command(
    "ls",
    "dcp-rs ls ckpt/",
    "dcp-rs ls ckpt/ 'model.layers.0.*' --sort size",
    "dcp-rs ls hf_model/ --json",
)
@options.any_checkpoint
@options.globs
@options.include
@options.exclude
@click.option("--sort", type=click.Choice(["name", "size", "dtype", "chunks"]), default="name", help="Order.")
@click.option("--values", is_flag=True, help="Show the values of what is not a tensor.")
@options.rank
@options.json
def _ls(
    path: Path,
    patterns: Sequence[str],
    include: Sequence[str],
    exclude: Sequence[str],
    sort: str,
    values: bool,
    rank: int | None,
    as_json: bool,
) -> None:
    """List what a checkpoint holds: dtype, shape, chunks, size, name. Of the folder of a run, its steps."""
    from dcp_rs.cli.listing import ls

    if _is_run(path):
        _steps(path, as_json=as_json)
        return
    ls(path, chosen(patterns, include, exclude), sort=sort, values=values, as_json=as_json, rank=rank)


@command("tree", "dcp-rs tree ckpt/", "dcp-rs tree ckpt/ 'model.*' --depth 0 --sort size")
@options.any_checkpoint
@options.globs
@options.include
@options.exclude
@click.option("--depth", type=click.IntRange(min=0), default=3, help="Levels of modules; 0: all.")
@click.option("--sort", type=click.Choice(["name", "size"]), default="name", help="Order.")
@options.rank
@options.json
def _tree(
    path: Path,
    patterns: Sequence[str],
    include: Sequence[str],
    exclude: Sequence[str],
    depth: int,
    sort: str,
    rank: int | None,
    as_json: bool,
) -> None:
    """Show how large the modules are."""
    from dcp_rs.cli.tree import tree

    tree(path, chosen(patterns, include, exclude), depth=depth, sort=sort, as_json=as_json, rank=rank)


@command(
    "inspect",
    "dcp-rs inspect ckpt/",
    "dcp-rs inspect ckpt/ model.embed.weight",
    "dcp-rs inspect ckpt/ --html page.html",
)
@options.any_checkpoint
@click.argument("name", required=False, type=text_argument)
@options.html
@options.with_stats
@click.option("--all", "show_all", is_flag=True, help="Lists to their end.")
@options.rank
@options.external
@options.json
def _inspect(
    path: Path,
    name: str | None,
    html: Path | None,
    with_stats: bool,
    show_all: bool,
    rank: int | None,
    allow_external: bool,
    as_json: bool,
) -> None:
    """Show how a checkpoint, or one entry of it, is made up.

    With NAME: how that entry is cut, with a map of which file holds what.
    """
    from dcp_rs.cli import listing

    if name is None and html is None and _is_run(path):
        _steps(path, as_json=as_json)
    elif html is not None:
        if name is not None:
            raise click.BadParameter("--html shows the whole checkpoint, not one entry")
        listing.write_page(path, html, with_stats=with_stats, as_json=as_json, rank=rank, allow_external=allow_external)
    elif name is not None:
        listing.inspect_entry(path, name, show_all=show_all, as_json=as_json, rank=rank, allow_external=allow_external)
    else:
        listing.inspect(path, show_all=show_all, as_json=as_json, rank=rank)


@command(
    "stats",
    "dcp-rs stats ckpt/",
    "dcp-rs stats ckpt/ 'model.*' --sort max",
    "dcp-rs stats ckpt/ --fail-on-nan --json",
)
@options.any_checkpoint
@options.globs
@options.include
@options.exclude
@click.option(
    "--sort",
    type=click.Choice(["name", "min", "max", "mean", "std", "zeros", "nan", "inf", "elements"]),
    default="name",
    help="Order; of numbers, the largest first.",
)
@click.option("--fail-on-nan", is_flag=True, help="Exit status 1 if there is a NaN.")
@options.rank
@options.external
@options.threads
@options.json
def _stats(
    path: Path,
    patterns: Sequence[str],
    include: Sequence[str],
    exclude: Sequence[str],
    sort: str,
    fail_on_nan: bool,
    rank: int | None,
    allow_external: bool,
    threads: int | None,
    as_json: bool,
) -> int:
    """Read tensors and tell their least and greatest elements, mean, standard deviation, and how many are zero, NaN, infinite."""
    from dcp_rs.cli.statistics import show_stats

    return show_stats(
        path,
        chosen(patterns, include, exclude),
        sort=sort,
        fail_on_nan=fail_on_nan,
        rank=rank,
        allow_external=allow_external,
        threads=threads,
        as_json=as_json,
    )
