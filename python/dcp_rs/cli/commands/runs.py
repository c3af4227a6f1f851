"""Commands on the folder of a run, with its steps: ``steps``, ``prune``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from dcp_rs.checkpoint.locate import local_path
from dcp_rs.cli.app import app
from dcp_rs.cli.options import Json, examples

Root = Annotated[
    Path,
    typer.Argument(
        metavar="ROOT",
        help="The folder of a run, with a folder step-N for each.",
        show_default=False,
        parser=local_path,
    ),
]

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {"": 1, "B": 1} | {
    unit: base**power
    for base, suffix in ((1000, "B"), (1024, "iB"))
    for power, prefix in enumerate(("k", "M", "G", "T"), 1)
    for unit in (prefix + suffix, prefix.upper() + suffix)
}


def _amount(text: str, units: dict[str, int], what: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if found is None or found[2] not in units or float(found[1]) <= 0:
        msg = f"{text!r} is no {what}"
        raise typer.BadParameter(msg)
    return float(found[1]) * units[found[2]]


def _seconds(text: str) -> float:
    return _amount(text, _SECONDS, "time: 90, 45m, 12h, 7d, 2w")


def _bytes(text: str) -> int:
    return int(_amount(text, _BYTES, "size: 500000, 500GB, 2TiB"))


@app.command("steps", epilog=examples("dcp-rs steps run/", "dcp-rs steps run/ --json | jq '.steps[-1].path'"))
def _steps(root: Root, as_json: Json = False) -> None:
    """List the steps that a run can resume from, and what is passed over and why."""
    from dcp_rs.cli.steps import steps

    steps(root, as_json=as_json)


@app.command(
    "prune",
    epilog=examples(
        "dcp-rs prune run/ --keep-last 3 --keep-every 10000",
        "dcp-rs prune run/ --keep-best 2 --metric loss --verify --yes",
        "dcp-rs prune run/ --max-bytes 2TB --yes",
    ),
)
def _prune(
    root: Root,
    keep_last: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep the N newest.", show_default=False)
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Keep the first at or after each multiple of N.", show_default=False),
    ] = None,
    keep_within: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            help="Keep what was saved so long before the newest, or less: 90 (s), 45m, 12h, 7d.",
            show_default=False,
            parser=_seconds,
        ),
    ] = None,
    keep_best: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep the N best by --metric.", show_default=False)
    ] = None,
    metric: Annotated[str | None, typer.Option(help="What tells the best, which stays.", show_default=False)] = None,
    mode: Annotated[Literal["min", "max"], typer.Option(help="Which value of it is best.")] = "min",
    max_bytes: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            help="Remove the oldest until the rest takes no more: 500GB, 2TiB.",
            show_default=False,
            parser=_bytes,
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Remove nothing unless a step that stays matches its digests.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it.")] = False,
    as_json: Json = False,
) -> None:
    """List the steps that no --keep option keeps, and what killed saves left; with --yes, remove them.

    Never the latest step. Exit status 1: something could not be removed.
    """
    from dcp_rs.cli.steps import prune
    from dcp_rs.steps.policies import Policies

    policies = Policies(
        keep_last=keep_last,
        keep_every=keep_every,
        keep_within=keep_within,
        keep_best=keep_best,
        max_bytes=max_bytes,
        metric=metric,
        mode=mode,
    )
    raise typer.Exit(prune(root, policies, verify=verify, yes=yes, as_json=as_json))
