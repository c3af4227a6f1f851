"""``index``: an index over data that is there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from dcp_rs.checkpoint.folders import local_path
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.output import count, line, print_json, size


@command(
    "index",
    "dcp-rs index old_dcp_folder/",
    "dcp-rs index hf_model/ --digests",
    "dcp-rs index ckpt/   (after its index was lost)",
)
@options.checkpoint
@click.option(
    "--out",
    metavar="DIR",
    type=local_path,
    help="Write the index to this folder, not beside the data.",
)
@click.option(
    "--digests", is_flag=True, help="Hash the data, so that dcp-rs verify can check it later."
)
@click.option(
    "--generation",
    metavar="N",
    type=click.IntRange(min=0),
    help="Recover the save of this generation (the number after g in file names).",
)
@click.option("--save-id", metavar="ID", help="Recover the save with this id.")
@click.option("--overwrite", is_flag=True, help="Replace the index.")
@options.threads
@options.storage
@options.json
def _index(path: Path, as_json: bool, **given: Any) -> None:
    """Write an index for existing data.

    With it a checkpoint opens faster, and a dcp-rs folder that lost its index opens again. The data
    is not changed.
    """
    from dcp_rs.checkpoint.index import index

    begin = time.perf_counter()
    made = index(path, progress=True, **given)
    seconds = time.perf_counter() - begin
    opened = open_index(made.parent, allow_external=True)
    nbytes = len(opened.to_bytes())
    if as_json:
        print_json(
            {
                "index": str(made),
                "bytes": nbytes,
                "source": opened.source,
                "entries": opened.tensor_count,
                "chunks": opened.chunk_count,
                "seconds": seconds,
            }
        )
        return
    over = f"{count(opened.tensor_count, 'entry')} in {count(len(opened.files()), 'file')}"
    line(f"wrote {made} ({size(nbytes)}) over {over}; no data was touched")
    if given["digests"] or opened.source == "dcp-rs":
        line(
            "its digests are of the data as it is now: what was damaged before will pass for whole"
        )
