"""Commands on the folder of a run, with its steps: ``steps``, ``prune``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import click

from dcp_rs.cli import options
from dcp_rs.cli.app import command

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
        msg = f"{text!r} is not a {what}"
        raise click.BadParameter(msg)
    return float(found[1]) * units[found[2]]


def _seconds(text: str) -> float:
    return _amount(text, _SECONDS, "time, such as 90, 45m, 12h, 7d or 2w")


def _bytes(text: str) -> int:
    return int(_amount(text, _BYTES, "size, such as 500000, 500GB or 2TiB"))


_root = options.location_argument("root")
_number = click.IntRange(min=1)
_step_name = click.option(
    "--step-name",
    metavar="NAME",
    default="step-{}",
    help="The name of a step's folder, with {} for its number.",
)


@command("steps", "dcp-rs steps run/", "dcp-rs steps run/ --json | jq '.steps[-1].path'")
@_root
@_step_name
@options.storage
@options.json
def _steps(root: Path, step_name: str, as_json: bool) -> None:
    """List the steps that a run can resume from, and those that are passed over and why.

    ROOT is the folder of a run, which holds a folder step-N for each step, or its URL.
    """
    from dcp_rs.cli.steps import steps

    steps(root, step_name=step_name, as_json=as_json)


@command(
    "prune",
    "dcp-rs prune run/ --keep-last 3 --keep-every 10000",
    "dcp-rs prune run/ --keep-best 2 --metric loss --verify --yes",
    "dcp-rs prune run/ --max-bytes 2TB --yes",
)
@_root
@click.option("--keep-last", type=_number, metavar="N", help="Keep the N newest steps.")
@click.option(
    "--keep-every",
    type=_number,
    metavar="N",
    help="Keep the first step at or after each multiple of N.",
)
@click.option(
    "--keep-within",
    type=_seconds,
    metavar="TIME",
    help="Keep steps that were saved within this time before the newest: 90 (seconds), 45m, 12h, 7d.",
)
@click.option("--keep-best", type=_number, metavar="N", help="Keep the N best steps by --metric.")
@click.option("--metric", metavar="NAME", help="The metric that decides which steps are best.")
@click.option(
    "--mode",
    type=click.Choice(["min", "max"]),
    default="min",
    help="Whether its lowest or highest value is best.",
)
@click.option(
    "--max-bytes",
    type=_bytes,
    metavar="SIZE",
    help="Remove the oldest steps until the rest fits: 500GB, 2TiB.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Remove nothing unless a step that stays was read and matches its digests.",
)
@click.option("--yes", is_flag=True, help="Remove them.")
@_step_name
@options.storage
@options.json
def _prune(
    root: Path,
    keep_last: int | None,
    keep_every: int | None,
    keep_within: float | None,
    keep_best: int | None,
    metric: str | None,
    mode: Literal["min", "max"],
    max_bytes: int | None,
    verify: bool,
    yes: bool,
    step_name: str,
    as_json: bool,
) -> int:
    """List the steps that no --keep option keeps, and what killed saves left behind. With --yes, remove them.

    ROOT is the folder of a run, or its URL. The latest step is never removed. Exit code 1:
    something could not be removed.
    """
    from dcp_rs.cli.steps import prune
    from dcp_rs.steps.retention import Policies

    policies = Policies(
        keep_last=keep_last,
        keep_every=keep_every,
        keep_within=keep_within,
        keep_best=keep_best,
        max_bytes=max_bytes,
        metric=metric,
        mode=mode,
    )
    return prune(root, policies, step_name=step_name, verify=verify, yes=yes, as_json=as_json)
