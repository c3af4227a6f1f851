"""Commands that check: ``verify``, ``diff``, ``clean``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from dcp_rs.cli import options
from dcp_rs.cli.app import command


@command("verify", "dcp-rs verify ckpt/", "dcp-rs verify ckpt/ --json | jq .problems")
@options.any_checkpoint
@click.option(
    "--allow-unverified", is_flag=True, help="Exit status 0 also where there are no digests to check against."
)
@options.external
@options.threads
@options.json
def _verify(path: Path, allow_unverified: bool, allow_external: bool, threads: int | None, as_json: bool) -> int:
    """Read everything and check it against its digests. Exit status 1: something is damaged, or nothing has a digest."""
    from dcp_rs.cli.work import verify

    return verify(
        path, allow_external=allow_external, allow_unverified=allow_unverified, threads=threads, as_json=as_json
    )


@command(
    "diff",
    "dcp-rs diff before/ after/",
    "dcp-rs diff ckpt/ hf_model/ --include 'model.*' --tolerance 1e-3",
    "dcp-rs diff before/ after/ --html page.html --stats",
)
@options.location_argument("a")
@options.location_argument("b")
@options.include
@options.exclude
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0.0),
    default=0.0,
    help="Absolute differences up to that do not count.",
)
@options.html
@options.with_stats
@options.external
@options.threads
@options.json
def _diff(
    a: Path,
    b: Path,
    include: Sequence[str],
    exclude: Sequence[str],
    tolerance: float,
    html: Path | None,
    with_stats: bool,
    allow_external: bool,
    threads: int | None,
    as_json: bool,
) -> int:
    """Compare two checkpoints: names, shapes, dtypes, every element. Exit status 1: they differ.

    A and B are checkpoints of any two kinds, files of torch.save and URLs too.
    """
    if with_stats and html is None:
        raise click.BadParameter("--stats goes with --html: dcp-rs stats prints them")
    from dcp_rs.cli.difference import diff

    return diff(
        a,
        b,
        include=include,
        exclude=exclude,
        tolerance=tolerance,
        html=html,
        with_stats=with_stats,
        allow_external=allow_external,
        threads=threads,
        as_json=as_json,
    )


@command(
    "clean",
    "dcp-rs clean ckpt/",
    "dcp-rs clean ckpt/ --yes",
    "dcp-rs clean /mnt/nfs/ckpt --yes --older-than 3600",
    "dcp-rs clean s3://bucket/ckpt",
)
@options.location_argument("path")
@click.option("--yes", is_flag=True, help="Remove it.")
@click.option(
    "--older-than",
    metavar="SECONDS",
    type=click.FloatRange(min=0.0),
    help="Leave alone what was written to since.  [default: 0; a day, where the file system does not tell who is at work, and on stores]",
)
@options.json
def _clean(path: Path, yes: bool, older_than: float | None, as_json: bool) -> None:
    """List what killed saves and conversions left behind; with --yes, remove it.

    PATH is the folder of a checkpoint, or its URL; or what was converted to.
    """
    from dcp_rs.cli.cleaning import clean

    clean(path, yes=yes, older_than=older_than, as_json=as_json)
