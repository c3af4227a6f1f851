"""Commands that check: ``verify``, ``diff``, ``clean``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from dcp_rs.checkpoint.views import Layout
from dcp_rs.cli import options
from dcp_rs.cli.app import command


@command("verify", "dcp-rs verify ckpt/", "dcp-rs verify ckpt/ --json | jq .problems")
@options.any_checkpoint
@click.option(
    "--allow-unverified", is_flag=True, help="Exit with 0 if there are no digests to check against."
)
@options.external
@options.threads
@options.storage
@options.json
def _verify(
    path: Path, allow_unverified: bool, allow_external: bool, threads: int | None, as_json: bool
) -> int:
    """Read all data and check it against its digests.

    Exit code 1: something is damaged, or there is no digest to check against.
    """
    from dcp_rs.cli.work import verify

    return verify(
        path,
        allow_external=allow_external,
        allow_unverified=allow_unverified,
        threads=threads,
        as_json=as_json,
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
@options.show_all
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0.0),
    default=0.0,
    help="Ignore absolute differences up to this.",
)
@options.html
@options.with_stats
@options.dequantize
@options.external
@options.threads
@options.storage
@options.json
def _diff(
    a: Path,
    b: Path,
    include: Sequence[str],
    exclude: Sequence[str],
    show_all: bool,
    tolerance: float,
    html: Path | None,
    with_stats: bool,
    dequantize: bool,
    allow_external: bool,
    threads: int | None,
    as_json: bool,
) -> int:
    """Compare two checkpoints: names, shapes, dtypes and every element. Exit code 1: they differ.

    A and B are two checkpoints of any kinds, torch.save files and URLs included. How they are
    sharded makes no difference.
    """
    if with_stats and html is None:
        raise click.UsageError("--stats needs --html; dcp-rs stats prints statistics")
    from dcp_rs.cli.difference import diff

    return diff(
        a,
        b,
        include=include,
        exclude=exclude,
        show_all=show_all,
        tolerance=tolerance,
        html=html,
        with_stats=with_stats,
        layout=Layout.of(dequantize, None),
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
@click.option("--yes", is_flag=True, help="Remove them.")
@click.option(
    "--older-than",
    metavar="SECONDS",
    type=click.FloatRange(min=0.0),
    help="Keep files that changed in the last so many seconds.  [default: 0; a day on object stores and on file systems without locks]",
)
@options.storage
@options.json
def _clean(path: Path, yes: bool, older_than: float | None, as_json: bool) -> int:
    """List files that killed saves and conversions left behind. With --yes, remove them.

    PATH is the folder of a checkpoint or its URL, or the output of a conversion. Exit code 1:
    something could not be removed.
    """
    from dcp_rs.cli.cleaning import clean

    return clean(path, yes=yes, older_than=older_than, as_json=as_json)
