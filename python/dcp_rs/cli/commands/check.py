"""Commands that check: ``verify``, ``diff``, ``clean``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dcp_rs.checkpoint.locate import local_path
from dcp_rs.cli.app import app
from dcp_rs.cli.options import AnyCheckpoint, Exclude, External, Html, Include, Json, Threads, WithStats, examples


@app.command(
    "verify",
    epilog=examples(
        "dcp-rs verify ckpt/",
        "dcp-rs verify ckpt/ --json | jq .problems",
    ),
)
def _verify(
    path: AnyCheckpoint, allow_external: External = False, threads: Threads = None, as_json: Json = False
) -> None:
    """Read everything and check it against its digests. Exit status 1: something is damaged."""
    from dcp_rs.cli.work import verify

    raise typer.Exit(verify(path, allow_external=allow_external, threads=threads, as_json=as_json))


@app.command(
    "diff",
    epilog=examples(
        "dcp-rs diff before/ after/",
        "dcp-rs diff ckpt/ hf_model/ --include 'model.*' --tolerance 1e-3",
        "dcp-rs diff before/ after/ --html page.html --stats",
    ),
)
def _diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint.", show_default=False, parser=local_path)],
    b: Annotated[
        Path, typer.Argument(metavar="B", help="Another one, of any kind.", show_default=False, parser=local_path)
    ],
    include: Include = None,
    exclude: Exclude = None,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Absolute differences up to that do not count.")] = 0.0,
    html: Html = None,
    with_stats: WithStats = False,
    allow_external: External = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes, every element. Exit status 1: they differ."""
    if with_stats and html is None:
        raise typer.BadParameter("--stats goes with --html: dcp-rs stats prints them")
    from dcp_rs.cli.difference import diff

    raise typer.Exit(
        diff(
            a,
            b,
            include=include or [],
            exclude=exclude or [],
            tolerance=tolerance,
            html=html,
            with_stats=with_stats,
            allow_external=allow_external,
            threads=threads,
            as_json=as_json,
        )
    )


@app.command(
    "clean",
    epilog=examples(
        "dcp-rs clean ckpt/",
        "dcp-rs clean ckpt/ --yes",
        "dcp-rs clean /mnt/nfs/ckpt --yes --older-than 3600",
    ),
)
def _clean(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="The folder of a checkpoint, or what was converted to.",
            show_default=False,
            parser=local_path,
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Remove it.")] = False,
    older_than: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="Leave alone what was written to since. [default: 0; a day, where the file system does not tell who is at work]",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List what killed saves and conversions left behind; with --yes, remove it."""
    from dcp_rs.cli.cleaning import clean

    clean(path, yes=yes, older_than=older_than, as_json=as_json)
