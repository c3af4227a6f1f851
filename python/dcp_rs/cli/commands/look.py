"""Commands that look: ``ls``, ``inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dcp_rs.checkpoint.locate import local_path
from dcp_rs.cli.app import app
from dcp_rs.cli.options import AnyCheckpoint, Exclude, External, Globs, Include, Json, Rank, chosen, examples
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
    """List what a checkpoint holds: dtype, shape, chunks, size, name."""
    from dcp_rs.cli.listing import ls

    ls(path, chosen(patterns, include, exclude), sort=sort, values=values, as_json=as_json, rank=rank)


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
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write one page of HTML with all of it.", show_default=False, parser=local_path
        ),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Lists to their end.")] = False,
    rank: Rank = None,
    allow_external: External = False,
    as_json: Json = False,
) -> None:
    """Show how a checkpoint, or one entry of it, is made up. The map of an entry shows which file holds what."""
    from dcp_rs.cli import listing

    if html is not None:
        if name is not None:
            raise typer.BadParameter("--html shows the whole checkpoint, not one entry")
        listing.write_page(path, html, as_json=as_json, rank=rank)
    elif name is not None:
        listing.inspect_entry(path, name, show_all=show_all, as_json=as_json, rank=rank, allow_external=allow_external)
    else:
        listing.inspect(path, show_all=show_all, as_json=as_json, rank=rank)
