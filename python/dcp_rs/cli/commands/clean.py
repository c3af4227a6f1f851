"""``clean``: files that killed saves left behind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from dcp_rs._url import Url, location
from dcp_rs.checkpoint.clean import Leftover
from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.commands.runs import mention_leftovers
from dcp_rs.cli.output import count, for_command_line, line, print_json, size


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
    help="Keep files that changed within this many seconds.  "
    "[default: 0; a day on object stores and on file systems without locks]",
)
@options.storage
@options.json
def _clean(path: Path, yes: bool, older_than: float | None, as_json: bool) -> int:
    """List files that killed saves and conversions left behind. With --yes, remove them.

    PATH is the folder of a checkpoint or its URL, or the output of a conversion. Exit code 1:
    something could not be removed.
    """
    import dcp_rs

    report = dcp_rs.clean(path, yes=yes, older_than=older_than)
    if as_json:
        print_json(
            {
                "path": str(path),
                "bytes": report.nbytes,
                **asdict(report),
                "kept": [asdict(leftover) | {"why": leftover.why_kept} for leftover in report.kept],
            }
        )
        return 1 if report.failed else 0
    for leftover in report.kept:
        why = for_command_line(leftover.why_kept or "")
        line(("kept     ", "dim"), f"{_row(leftover)}  ", (why, "yellow"))
    for leftover in report.found:
        line(("removed  " if yes else "left     ", "red" if yes else "yellow"), _row(leftover))
    total = _total(report.found)
    if report.found:
        line((f"removed {total}" if yes else f"{total} to remove: run again with --yes", "bold"))
    if not mention_leftovers(path) and not report.found:
        line("nothing to remove")
    if isinstance(path, Url):
        line(("unfinished uploads are in no listing: a lifecycle rule removes them", "dim"))
    return 1 if report.failed else 0


def mention(leftovers: Sequence[Leftover]) -> None:
    """Print a line if there is something to remove."""
    left = [leftover for leftover in leftovers if leftover.why_kept is None]
    if left:
        total = f"{_total(left)}, of saves that did not finish (dcp-rs clean)"
        line(("left behind  ", "yellow"), total)


def _row(leftover: Leftover) -> str:
    path = leftover.path
    if not isinstance(location(path), Url):
        path = min(path, os.path.relpath(path), key=len)
    return f"{size(leftover.nbytes):>9}  {leftover.kind:<15}  {path}"


def _total(leftovers: Sequence[Leftover]) -> str:
    nbytes = sum(leftover.nbytes for leftover in leftovers)
    return f"{count(len(leftovers), 'leftover')}, {size(nbytes)}"
