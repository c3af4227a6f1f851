"""``verify``: data against its digests."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import click

from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.commands.clean import mention
from dcp_rs.cli.output import (
    count,
    entries,
    for_command_line,
    line,
    print_json,
    printable,
    rate,
    size,
)

#: Names of lost entries that are printed.
_SOME = 10


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
    from dcp_rs.checkpoint.folders import INDEX_NAME
    from dcp_rs.checkpoint.verify import verify

    begin = time.perf_counter()
    report = verify(path, threads=threads, allow_external=allow_external, progress=True)
    seconds = time.perf_counter() - begin
    status = 0 if report or (report.ok is None and allow_unverified) else 1
    if as_json:
        print_json(
            {
                "path": str(path),
                "ok": report.ok,
                "entries": report.entries,
                "bytes_verified": report.bytes_verified,
                "bytes_without_digest": report.bytes_without_digest,
                "seconds": seconds,
                "lost": report.lost,
                "problems": [asdict(problem) for problem in report.problems],
                "leftovers": [asdict(leftover) for leftover in report.leftovers],
            }
        )
        return status
    for problem in report.problems:
        text = problem.got if report.entries is None else str(problem)
        line(("damaged  ", "red"), printable(for_command_line(text)))
    if report.entries is None:
        advice = ""
        if Path(report.problems[0].file).name == INDEX_NAME:
            advice = "; dcp-rs index --overwrite rebuilds the index, if the data is whole"
        line(("lost     ", "red"), f"all of it: it does not open{advice}")
    elif report.lost:
        names = ", ".join(map(printable, report.lost[:_SOME]))
        more = len(report.lost) - _SOME
        rest = f" and {more:,} more (--json)" if more > 0 else ""
        number = f"{len(report.lost):,} of {entries(report.entries)}"
        line(("lost     ", "red"), f"{number}: {names}{rest}")
    mention(report.leftovers)
    if report.entries is None:
        line(("1 problem", "bold red"), ": nothing was verified")
        return status
    without = report.bytes_without_digest
    if without:
        advice = f"{size(without)} of data without digests (dcp-rs index --digests adds them)"
        line(("not checked  ", "yellow"), advice)
    if report.ok is None:
        line(("the files are there and of the right size; nothing was verified", "yellow"))
        return status
    verdict = (count(len(report.problems), "problem"), "bold red")
    if report.ok:
        verdict = ("no damage found", "yellow") if without else ("all is well", "green")
    verified = report.bytes_verified
    line(verdict, f": {size(verified)} verified in {seconds:.1f} s ({rate(verified, seconds)})")
    return status
