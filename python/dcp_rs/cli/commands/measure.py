"""The command that measures: ``bench``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from dcp_rs.cli import options
from dcp_rs.cli.app import command


@command("bench", "dcp-rs bench ckpt/", "dcp-rs bench ckpt/ --cold --include 'model.layers.0.*'")
@options.checkpoint
@options.include
@click.option(
    "--rounds",
    metavar="N",
    type=click.IntRange(min=1),
    default=3,
    help="Read N times with each reader; the best time counts.",
)
@click.option("--cold", is_flag=True, help="Drop the files from the page cache before each read.")
@options.external
@options.threads
@options.json
def _bench(
    path: Path,
    include: Sequence[str],
    rounds: int,
    cold: bool,
    allow_external: bool,
    threads: int | None,
    as_json: bool,
) -> int:
    """Time dcp-rs, torch and safetensors as they read this checkpoint on this machine."""
    from dcp_rs.cli.bench import bench

    return bench(
        path,
        include=include,
        rounds=rounds,
        cold=cold,
        allow_external=allow_external,
        threads=threads,
        as_json=as_json,
    )
