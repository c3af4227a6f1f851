"""Commands that measure: ``bench``, ``demo``."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_rs.cli.app import app
from dcp_rs.cli.options import Checkpoint, External, Include, Json, Threads, examples
from dcp_rs.cli.output import console, print_json


@app.command(
    "bench",
    epilog=examples(
        "dcp-rs bench ckpt/",
        "dcp-rs bench ckpt/ --cold --include 'model.layers.0.*'",
    ),
)
def _bench(
    path: Checkpoint,
    include: Include = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times each reader reads; the best counts.")] = 3,
    cold: Annotated[bool, typer.Option("--cold", help="Drop the files from the page cache before each time.")] = False,
    allow_external: External = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Time all readers on this checkpoint, this disk, this machine."""
    from dcp_rs.cli.bench import bench

    raise typer.Exit(
        bench(
            path,
            include=include or [],
            rounds=rounds,
            cold=cold,
            allow_external=allow_external,
            threads=threads,
            as_json=as_json,
        )
    )


@app.command(
    "demo",
    epilog=examples(
        "dcp-rs demo",
        "dcp-rs demo --size-mb 1000",
    ),
)
def _demo(
    size_mb: Annotated[int, typer.Option(min=1, help="Size of the model's weights.")] = 300,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the checkpoints on the disk.")] = False,
    as_json: Json = False,
) -> None:
    """Save and restore a model with stock DCP and with dcp-rs, and compare."""
    from dcp_rs.demo import run

    if as_json:
        rows = run.demo_rows(size_mb, keep, console(stderr=True))
        print_json([vars(row) for row in rows])
        well = all(row.same is not False for row in rows)
    else:
        well = run.run_demo(size_mb, keep)
    raise typer.Exit(0 if well else 1)
