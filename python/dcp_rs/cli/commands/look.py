"""Commands that look: ``ls``, ``tree``, ``inspect``, ``stats``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from dcp_rs.cli.app import app
from dcp_rs.cli.options import (
    AnyCheckpoint,
    Exclude,
    External,
    Globs,
    Html,
    Include,
    Json,
    Rank,
    Threads,
    WithStats,
    chosen,
    examples,
)
from dcp_rs.cli.output import text_argument


@app.command(
    "ls",
    epilog=examples(
        "dcp-rs ls ckpt/",
        "dcp-rs ls ckpt/ 'model.layers.0.*' --sort size",
        "dcp-rs ls hf_model/ --json",
    ),
)
def _ls(
    path: AnyCheckpoint,
    patterns: Globs = None,
    include: Include = None,
    exclude: Exclude = None,
    sort: Annotated[Literal["name", "size", "dtype", "chunks"], typer.Option(help="Order.")] = "name",
    values: Annotated[bool, typer.Option("--values", help="Show the values of what is not a tensor.")] = False,
    rank: Rank = None,
    as_json: Json = False,
) -> None:
    """List what a checkpoint holds: dtype, shape, chunks, size, name. Of the folder of a run, its steps."""
    from dcp_rs.cli.listing import ls
    from dcp_rs.cli.steps import is_root, steps

    if is_root(path):
        steps(path, as_json=as_json)
        return
    ls(path, chosen(patterns, include, exclude), sort=sort, values=values, as_json=as_json, rank=rank)


@app.command(
    "tree",
    epilog=examples(
        "dcp-rs tree ckpt/",
        "dcp-rs tree ckpt/ 'model.*' --depth 0 --sort size",
    ),
)
def _tree(
    path: AnyCheckpoint,
    patterns: Globs = None,
    include: Include = None,
    exclude: Exclude = None,
    depth: Annotated[int, typer.Option(min=0, help="Levels of modules; 0: all.")] = 3,
    sort: Annotated[Literal["name", "size"], typer.Option(help="Order.")] = "name",
    rank: Rank = None,
    as_json: Json = False,
) -> None:
    """Show how large the modules are."""
    from dcp_rs.cli.tree import tree

    tree(path, chosen(patterns, include, exclude), depth=depth, sort=sort, as_json=as_json, rank=rank)


@app.command(
    "inspect",
    epilog=examples(
        "dcp-rs inspect ckpt/",
        "dcp-rs inspect ckpt/ model.embed.weight",
        "dcp-rs inspect ckpt/ --html page.html",
    ),
)
def _inspect(
    path: AnyCheckpoint,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="One entry: how it is cut, and over which files.",
            show_default=False,
            parser=text_argument,
        ),
    ] = None,
    html: Html = None,
    with_stats: WithStats = False,
    show_all: Annotated[bool, typer.Option("--all", help="Lists to their end.")] = False,
    rank: Rank = None,
    allow_external: External = False,
    as_json: Json = False,
) -> None:
    """Show how a checkpoint, or one entry of it, is made up. The map of an entry shows which file holds what."""
    from dcp_rs.cli import listing
    from dcp_rs.cli.steps import is_root, steps

    if name is None and html is None and is_root(path):
        steps(path, as_json=as_json)
    elif html is not None:
        if name is not None:
            raise typer.BadParameter("--html shows the whole checkpoint, not one entry")
        listing.write_page(path, html, with_stats=with_stats, as_json=as_json, rank=rank, allow_external=allow_external)
    elif name is not None:
        listing.inspect_entry(path, name, show_all=show_all, as_json=as_json, rank=rank, allow_external=allow_external)
    else:
        listing.inspect(path, show_all=show_all, as_json=as_json, rank=rank)


@app.command(
    "stats",
    epilog=examples(
        "dcp-rs stats ckpt/",
        "dcp-rs stats ckpt/ 'model.*' --sort max",
        "dcp-rs stats ckpt/ --fail-on-nan --json",
    ),
)
def _stats(
    path: AnyCheckpoint,
    patterns: Globs = None,
    include: Include = None,
    exclude: Exclude = None,
    sort: Annotated[
        Literal["name", "min", "max", "mean", "std", "zeros", "nan", "inf", "elements"],
        typer.Option(help="Order; of numbers, the largest first."),
    ] = "name",
    fail_on_nan: Annotated[bool, typer.Option("--fail-on-nan", help="Exit status 1 if there is a NaN.")] = False,
    rank: Rank = None,
    allow_external: External = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Read tensors and tell their least and greatest elements, mean, standard deviation, and how many are zero, NaN, infinite."""
    from dcp_rs.cli.statistics import show_stats

    raise typer.Exit(
        show_stats(
            path,
            chosen(patterns, include, exclude),
            sort=sort,
            fail_on_nan=fail_on_nan,
            rank=rank,
            allow_external=allow_external,
            threads=threads,
            as_json=as_json,
        )
    )
