"""``steps`` and ``prune``: the folder of a run."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcp_rs._url import Url
from dcp_rs.checkpoint.folders import holds_index
from dcp_rs.checkpoint.names import some
from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.output import count, for_command_line, line, print_json, size, table
from dcp_rs.errors import CheckpointNotFoundError, PlanError

# The modules of steps are imported where they are used: ``ls`` of a checkpoint starts without them.
if TYPE_CHECKING:
    from dcp_rs.steps.step_store import Listing, SkippedStep, Step, StepStore

_ASIDE = "it was removed, and is still there"
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def _amount(text: str, units: dict[str, int], what: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if found is None or found[2] not in units or float(found[1]) <= 0:
        msg = f"{text!r} is not a {what}"
        raise click.BadParameter(msg)
    return float(found[1]) * units[found[2]]


def _seconds(text: str) -> float:
    return _amount(text, _SECONDS, "time, such as 90, 45m, 12h, 7d or 2w")


def _bytes(text: str) -> int:
    return int(_amount(text.lower(), _BYTES, "size, such as 500000, 500GB or 2TiB"))


_root = options.location_argument("root")
_number = click.IntRange(min=1)
_step_name = click.option(
    "--step-name",
    metavar="NAME",
    default="step-{}",
    help="The name of a step's folder, with {} for its number.",
)


@command(
    "steps",
    "dcp-rs steps run/",
    "dcp-rs steps run/ --json | jq '.steps[-1].path'",
    "dcp-rs steps s3://bucket/run --local /nvme/run",
    "dcp-rs steps run/ --local node0/run --local node1/run",
)
@_root
@_step_name
@options.local("show where each step is, and how much of it is uploaded.")
@options.storage
@options.json
def _steps(root: Path, step_name: str, local: tuple[Path, ...], as_json: bool) -> None:
    """List the steps that a run can resume from, and those that are passed over and why.

    ROOT is the folder of a run, which holds a folder step-N for each step, or its URL.
    """
    if local:
        _list_places(root, local, step_name, as_json=as_json)
        return
    _, found = _look(root, step_name)
    _list_steps(root, found, as_json=as_json)


def _places(root: Path, folders: Sequence[Path], step_name: str) -> list[dict[str, Any]]:
    """Return where each step is: on how many nodes, with how many copies, and at the root."""
    from dcp_rs.steps.nodes import NodeStepStore, bytes_at
    from dcp_rs.steps.object_store import step_store_at

    store = step_store_at(root, step_name=step_name)
    at_root = {step.number: step.save_id for step in store.look().steps}
    nodes = [NodeStepStore(folder, step_name) for folder in folders]
    listed = [{step.number: step.save_id for step in node.look().steps} for node in nodes]
    rows: list[dict[str, Any]] = []
    for number in sorted({n for steps in (at_root, *listed) for n in steps}):
        having = [at for at, steps in enumerate(listed) if number in steps]
        row: dict[str, Any] = {"step": number, "nodes": len(having), "is_at_root": not having}
        if having:
            index = nodes[having[0]].index(number)
            sizes = {entry.name: entry.size for entry in index.files()}
            lengths = [node.lengths(number) for node in nodes]
            held = [sum(of.get(n) == size for of in lengths) for n, size in sizes.items()]
            row |= {
                "is_at_root": at_root.get(number) == listed[having[0]][number],
                "files": len(held),
                "files_on_nodes": sum(map(bool, held)),
                "copies": min(held, default=0) - 1,
                "bytes": sum(sizes.values()),
                "uploaded_bytes": bytes_at(store.lengths(number), index),
            }
        rows.append(row)
    return rows


def _list_places(root: Path, folders: Sequence[Path], step_name: str, *, as_json: bool) -> None:
    """Print where each step is."""
    rows = _places(root, folders, step_name)
    if as_json:
        print_json({"path": str(root), "local": list(map(str, folders)), "steps": rows})
        return
    table(
        [">step", ">nodes", ">files there", ">copies", "<at the root"],
        [
            [
                str(row["step"]),
                f"{row['nodes']} of {len(folders)}",
                f"{row['files_on_nodes']} of {row['files']}" if row["nodes"] else "",
                str(row["copies"]) if row.get("copies", -1) >= 0 else "",
                "yes"
                if row["is_at_root"]
                else f"{size(row['uploaded_bytes'])} of {size(row['bytes'])}",
            ]
            for row in rows
        ],
    )


def list_if_run(path: Path, *, as_json: bool) -> bool:
    """If the folder is a run, list its steps. Return True if it was."""
    store = _run_at(path)
    if store is not None:
        _list_steps(path, store.look(), as_json=as_json)
    return store is not None


def _run_at(path: Path) -> StepStore | None:
    """Return the steps of a run; None for another folder, or a file."""
    if not isinstance(path, Url) and (path.is_file() or holds_index(path)):
        return None
    from dcp_rs.steps.object_store import step_store_at

    store = step_store_at(path)
    return store if store.is_run() else None


def _list_steps(path: Path, found: Listing, *, as_json: bool) -> None:
    """Print a line for each step, and the steps that are passed over."""
    from dcp_rs.steps.retention import used

    if as_json:
        print_json(
            {
                "path": str(path),
                "latest": found.steps[-1].number if found.steps else None,
                "bytes": used(found.steps),
                "steps": [_to_json(step) for step in found.steps],
                "passed_over": [_skipped_to_json(skipped) for skipped in found.passed_over],
            }
        )
        return
    now = time.time()
    table(
        [">step", ">age", ">size", ">new", ">reused", "<verified", "<metrics"],
        [
            [
                str(step.number),
                _age(now - step.saved),
                size(step.nbytes),
                size(step.written),
                size(step.reused) if step.reused else "",
                "yes" if step.verified else "",
                " ".join(f"{k}={v:.6g}" for k, v in sorted(step.metrics.items())),
            ]
            for step in found.steps
        ],
    )
    _list_passed_over(found)
    line((f"{count(len(found.steps), 'step')}, {size(used(found.steps))}", "bold"))


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
    help="Keep steps that were saved within this time before the newest: "
    "90 (seconds), 45m, 12h, 7d.",
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
    root: Path, step_name: str, verify: bool, yes: bool, as_json: bool, **policies: Any
) -> int:
    """List the steps that no --keep option keeps, and remains of killed saves.

    With --yes, remove them. ROOT is the folder of a run, or its URL. The latest step is never
    removed. Exit code 1: something could not be removed.
    """
    from dcp_rs.steps.retention import Policies, Pruned, prune, used

    kept_by = Policies(**policies)
    opened, found = _look(root, step_name)
    _check_metric(kept_by.metric, found.steps)
    if yes:
        done = prune(opened, kept_by, verify=verify)
    else:
        aside = opened.aside(found.names)
        done = Pruned(kept_by.unneeded(found.steps), found.left, aside)
    removed = {step.number for step in done.removed}
    kept = [step for step in found.steps if step.number not in removed]
    nbytes = used(found.steps) - used(kept)
    if as_json:
        print_json(
            {
                "path": str(root),
                "removed" if yes else "found": [_to_json(step) for step in done.removed],
                "unfinished": [_skipped_to_json(skipped) for skipped in done.swept],
                "aside": [str(path) for path in done.aside],
                "kept": [_to_json(step) for step in kept],
                "bytes": nbytes,
                "problems": done.problems,
            }
        )
        return 1 if done.problems else 0
    what, style = ("removed", "red") if yes else ("to remove", "yellow")
    for title, title_style, steps in (("kept", "dim", kept), (what, style, done.removed)):
        for step in steps:
            line((f"{title:<11}", title_style), f"{step.path.name}  {size(step.nbytes):>9}")
    for skipped in done.swept:
        unfinished = ("its save did not finish", "yellow")
        line((f"{what:<11}", style), f"{skipped.path.name}  ", unfinished)
    for path in done.aside:
        line((f"{what:<11}", style), f"{path.name}  ", (_ASIDE, "yellow"))
    for problem in done.problems:
        line(("problem    ", "red"), for_command_line(problem))
    number = len(done.removed) + len(done.swept) + len(done.aside)
    total = f"{count(number, 'step')}, {size(nbytes)}"
    if not number:
        line("nothing to remove")
    else:
        line((f"removed {total}" if yes else f"{total} to remove: run again with --yes", "bold"))
    return 1 if done.problems else 0


def mention_leftovers(path: Path) -> bool:
    """If the folder is a run, print what is left in it, and what removes that.

    Returns:
        True if it is a run.
    """
    store = _run_at(path)
    if store is None:
        return False
    found = store.look()
    aside = store.aside(found.names)
    for folder in aside:
        line(("left         ", "yellow"), f"{folder.name}: {_ASIDE}")
    _list_passed_over(found)
    number = len(aside) + len(found.left)
    removes = f"dcp-rs prune {path} --yes removes {count(number, 'leftover')} of the run"
    line(f"{path} is a run, and clean looks at one of its steps", f"; {removes}" if number else "")
    return True


def _list_passed_over(found: Listing) -> None:
    for skipped in found.passed_over:
        line(("passed over  ", "yellow"), for_command_line(str(skipped)))


def _look(path: Path, step_name: str) -> tuple[StepStore, Listing]:
    from dcp_rs.steps.object_store import step_store_at

    root = step_store_at(path, step_name=step_name)
    found = root.look()
    if not found.steps and not found.passed_over:
        name = root.folder(0).name.replace("0", "N")
        msg = f"{root.path} is not the folder of a run: it has no folder {name}"
        raise CheckpointNotFoundError(msg, path=root.path)
    return root, found


def _check_metric(metric: str | None, steps: Sequence[Step]) -> None:
    """Raise if no step has the metric: all steps but the latest would be removed."""
    known = sorted({name for step in steps for name in step.metrics})
    if metric is not None and steps and metric not in known:
        they = f"they have {some(known)}" if known else "they have none"
        msg = f"no step has the metric {metric!r}: {they}"
        raise PlanError(msg)


def _to_json(step: Step) -> dict[str, Any]:
    return {
        "step": step.number,
        "path": str(step.path),
        "save_id": step.save_id,
        "saved": step.saved,
        "bytes": step.nbytes,
        "written": step.written,
        "reused": step.reused,
        "verified": step.verified,
        "metrics": dict(step.metrics),
    }


def _skipped_to_json(skipped: SkippedStep) -> dict[str, Any]:
    return {
        "step": skipped.number,
        "path": str(skipped.path),
        "kind": skipped.kind,
        "why": skipped.why,
    }


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
