"""Commands that look: ``ls``, ``tree``, ``inspect``, ``stats``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from dcp_rs._url import Url, location
from dcp_rs.checkpoint.folders import holds_index
from dcp_rs.checkpoint.views import Layout
from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.options import chosen
from dcp_rs.cli.output import text_argument


def _is_run(path: Path) -> bool:
    """Whether a folder is that of a run, and no checkpoint itself."""
    where = location(path)
    if not isinstance(where, Url) and (where.is_file() or holds_index(where)):
        return False  # and most are: they need not wait for the import of what knows runs
    from dcp_rs.steps.object_store import step_store_at

    return step_store_at(path).is_run()


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
@click.option(
    "--sort",
    type=click.Choice(["name", "size", "dtype", "chunks"]),
    default="name",
    help="Sort by this.",
)
@click.option("--values", is_flag=True, help="Show the values of entries that are not tensors.")
@options.layout
@options.rank
@options.storage
@options.json
def _ls(
    path: Path,
    patterns: Sequence[str],
    include: Sequence[str],
    exclude: Sequence[str],
    sort: str,
    values: bool,
    layout: Layout,
    rank: int | None,
    as_json: bool,
) -> None:
    """List the entries of a checkpoint with dtype, shape, chunks and size.

    For the folder of a run, list its steps.
    """
    from dcp_rs.cli.listing import ls

    if _is_run(path):
        _steps(path, as_json=as_json)
        return
    ls(
        path,
        chosen(patterns, include, exclude),
        sort=sort,
        values=values,
        as_json=as_json,
        rank=rank,
        layout=layout,
    )


@command("tree", "dcp-rs tree ckpt/", "dcp-rs tree ckpt/ 'model.*' --depth 0 --sort size")
@options.any_checkpoint
@options.globs
@options.include
@options.exclude
@click.option(
    "--depth",
    type=click.IntRange(min=0),
    default=3,
    metavar="N",
    help="Show N levels of modules; 0 for all.",
)
@click.option("--sort", type=click.Choice(["name", "size"]), default="name", help="Sort by this.")
@options.layout
@options.rank
@options.storage
@options.json
def _tree(
    path: Path,
    patterns: Sequence[str],
    include: Sequence[str],
    exclude: Sequence[str],
    depth: int,
    sort: str,
    layout: Layout,
    rank: int | None,
    as_json: bool,
) -> None:
    """Show the size of each module."""
    from dcp_rs.cli.tree import tree

    tree(
        path,
        chosen(patterns, include, exclude),
        depth=depth,
        sort=sort,
        as_json=as_json,
        rank=rank,
        layout=layout,
    )


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
@options.show_all
@options.layout
@options.rank
@options.external
@options.storage
@options.json
def _inspect(
    path: Path,
    name: str | None,
    html: Path | None,
    with_stats: bool,
    show_all: bool,
    layout: Layout,
    rank: int | None,
    allow_external: bool,
    as_json: bool,
) -> None:
    """Show how a checkpoint is stored: files, dtypes, largest entries.

    With NAME, show how that entry is sharded: its chunks, and a map of the files that hold them.
    """
    from dcp_rs.cli import listing

    if with_stats and html is None:
        raise click.UsageError("--stats needs --html; dcp-rs stats prints statistics")
    if name is None and html is None and _is_run(path):
        _steps(path, as_json=as_json)
    elif html is not None:
        if name is not None:
            raise click.UsageError("--html shows the whole checkpoint: leave NAME out")
        listing.write_page(
            path,
            html,
            with_stats=with_stats,
            as_json=as_json,
            rank=rank,
            allow_external=allow_external,
            layout=layout,
        )
    elif name is not None:
        listing.inspect_entry(
            path,
            name,
            show_all=show_all,
            as_json=as_json,
            rank=rank,
            allow_external=allow_external,
            layout=layout,
        )
    else:
        listing.inspect(path, show_all=show_all, as_json=as_json, rank=rank, layout=layout)


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
    patterns: Sequence[str],
    include: Sequence[str],
    exclude: Sequence[str],
    sort: str,
    fail_on_nan: bool,
    layout: Layout,
    rank: int | None,
    allow_external: bool,
    threads: int | None,
    as_json: bool,
) -> int:
    """Read tensors and show minimum, maximum, mean, standard deviation, and counts of zeros, NaN and infinities."""
    from dcp_rs.cli.statistics import show_stats

    return show_stats(
        path,
        chosen(patterns, include, exclude),
        sort=sort,
        fail_on_nan=fail_on_nan,
        layout=layout,
        rank=rank,
        allow_external=allow_external,
        threads=threads,
        as_json=as_json,
    )
