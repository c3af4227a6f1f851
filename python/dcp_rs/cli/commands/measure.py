"""Commands that measure: ``bench``, ``demo``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.output import print_json


@command("bench", "dcp-rs bench ckpt/", "dcp-rs bench ckpt/ --cold --include 'model.layers.0.*'")
@options.checkpoint
@options.include
@click.option("--rounds", type=click.IntRange(min=1), default=3, help="Times each reader reads; the best counts.")
@click.option("--cold", is_flag=True, help="Drop the files from the page cache before each time.")
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
    """Time all readers on this checkpoint, this disk, this machine."""
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


@command("demo", "dcp-rs demo", "dcp-rs demo --size-mb 1000")
@click.option("--size-mb", type=click.IntRange(min=1), default=300, help="Size of the model's weights.")
@click.option("--keep", is_flag=True, help="Leave the checkpoints on the disk.")
@options.json
def _demo(size_mb: int, keep: bool, as_json: bool) -> int:
    """Save and restore a model with stock DCP and with dcp-rs, and compare."""
    from rich.console import Console

    from dcp_rs.demo import run

    if as_json:
        rows = run.demo_rows(size_mb, keep, Console(stderr=True))
        print_json([vars(row) for row in rows])
        well = all(row.same is not False for row in rows)
    else:
        well = run.run_demo(size_mb, keep)
    return 0 if well else 1
