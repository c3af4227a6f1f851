"""``verify``: data against its digests."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.commands.clean import mention
from dcp_rs.cli.output import count, for_command_line, line, print_json, size, took

#: Names of lost entries that are printed.
_SOME = 10


@command("verify", "dcp-rs verify ckpt/", "dcp-rs verify ckpt/ --json | jq .problems")
@options.checkpoint
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

    Every file must be there, and have all elements of its tensors. Exit codes: 1 something is
    damaged, 3 nothing is damaged, and there are no digests to check against.
    """
    from dcp_rs.checkpoint.folders import INDEX_NAME
    from dcp_rs.checkpoint.verify import verify

    report = verify(path, threads=threads, allow_external=allow_external, progress=True)
    status = {True: 0, False: 1, None: 0 if allow_unverified else 3}[report.ok]
    if as_json:
        print_json({"path": str(path), "ok": report.ok, **asdict(report)})
        return status
    if report.entries is None:  # it does not open
        (problem,) = report.problems
        line(("damaged  ", "red"), for_command_line(problem.got))
        advice = ""
        if Path(problem.file).name == INDEX_NAME:
            advice = "; dcp-rs index --overwrite rebuilds the index, if the data is whole"
        line(("lost     ", "red"), f"all of it: it does not open{advice}")
        mention(report.leftovers)
        line(("1 problem", "red"), ": nothing was verified")
        return status
    for problem in report.problems:
        line(("damaged  ", "red"), for_command_line(str(problem)))
    if report.lost:
        names = ", ".join(report.lost[:_SOME])
        more = len(report.lost) - _SOME
        rest = f" and {more:,} more (--json)" if more > 0 else ""
        number = f"{len(report.lost):,} of {count(report.entries, 'entry')}"
        line(("lost     ", "red"), f"{number}: {names}{rest}")
    mention(report.leftovers)
    without = report.bytes_without_digest
    if without:
        advice = f"{size(without)} of data without digests (dcp-rs index --digests adds them)"
        line(("not checked  ", "yellow"), advice)
    if report.ok is None:
        line(
            ("no damage found", "green"),
            ": the files are there and of the right size; nothing was verified, as there are no "
            "digests",
        )
        return status
    verdict = (count(len(report.problems), "problem"), "red")
    if report.ok:
        verdict = ("no damage found", "yellow") if without else ("all is well", "green")
    verified = report.bytes_verified
    line(verdict, f": {size(verified)} verified in {took(report.seconds, verified)}")
    return status
