"""``clean``, and what other commands say of what it would find."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dcp_rs._url import Url, location
from dcp_rs.checkpoint.clean import Leftover
from dcp_rs.cli.output import count, for_command_line, line, print_json, printable, size

__all__ = ["clean", "mention"]


def clean(path: Path, *, yes: bool, older_than: float | None, as_json: bool) -> int:
    """List what was left behind, and remove it if that was asked for. Return the exit status."""
    import dcp_rs

    report = dcp_rs.clean(path, yes=yes, older_than=older_than)
    if as_json:
        print_json(
            {
                "path": str(path),
                "bytes": report.nbytes,
                "found": [asdict(leftover) for leftover in report.found],
                "removed": [asdict(leftover) for leftover in report.removed],
                "kept": [asdict(leftover) | {"why": leftover.why_kept} for leftover in report.kept],
                "failed": report.failed,
            }
        )
        return 1 if report.failed else 0
    for leftover in report.kept:
        line(
            ("kept     ", "dim"),
            f"{_row(leftover)}  ",
            (for_command_line(leftover.why_kept or ""), "yellow"),
        )
    for leftover in report.found:
        line(("removed  " if yes else "left     ", "red" if yes else "yellow"), _row(leftover))
    what = _sum(report.found)
    if not report.found:
        line("nothing to remove")
    else:
        line((f"removed {what}" if yes else f"{what} to remove: run again with --yes", "bold"))
    if isinstance(location(path), Url):
        line(("unfinished uploads are in no listing: a lifecycle rule removes them", "dim"))
    return 1 if report.failed else 0


def mention(leftovers: Sequence[Leftover]) -> None:
    """One line, where there is something that could be removed."""
    left = [leftover for leftover in leftovers if leftover.why_kept is None]
    if left:
        line(
            ("left behind  ", "yellow"),
            f"{_sum(left)}, of saves that did not finish (dcp-rs clean)",
        )


def _row(leftover: Leftover) -> str:
    is_url = isinstance(location(leftover.path), Url)
    path = leftover.path if is_url else min(leftover.path, os.path.relpath(leftover.path), key=len)
    return f"{size(leftover.nbytes):>9}  {leftover.kind:<15}  {printable(path)}"


def _sum(leftovers: Sequence[Leftover]) -> str:
    return f"{count(len(leftovers), 'leftover')}, {size(sum(leftover.nbytes for leftover in leftovers))}"
