"""``steps`` and ``prune``, and what ``ls`` and ``inspect`` say of the folder of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dcp_rs.checkpoint.names import some
from dcp_rs.cli.output import count, for_command_line, line, print_json, printable, size, table
from dcp_rs.errors import CheckpointNotFoundError, PlanError
from dcp_rs.steps.object_store import step_store_at
from dcp_rs.steps.retention import Policies, Pruned, unneeded, used
from dcp_rs.steps.retention import prune as remove
from dcp_rs.steps.step_store import Listing, SkippedStep, Step, StepNames, StepStore

__all__ = ["prune", "steps"]


def steps(path: Path, *, step_name: str = "step-{}", as_json: bool) -> None:
    """One line a step, and what is passed over."""
    found = _look(step_store_at(path, names=StepNames(step_name)))
    if as_json:
        latest = found.steps[-1].number if found.steps else None
        print_json(
            {
                "path": str(path),
                "latest": latest,
                "bytes": used(found.steps),
                "steps": [_to_json(step) for step in found.steps],
                "passed_over": [_passed_to_json(passed) for passed in found.passed_over],
            }
        )
        return
    now = time.time()
    rows = [
        [
            str(step.number),
            _age(now - step.saved),
            size(step.nbytes),
            size(step.written),
            size(step.reused) if step.reused else "",
            "yes" if step.verified else "",
            printable(
                " ".join(f"{name}={value:.6g}" for name, value in sorted(step.metrics.items()))
            ),
        ]
        for step in found.steps
    ]
    table(
        ["step", "age", "size", "new", "reused", "verified", "metrics"],
        [">", ">", ">", ">", ">", "<", "<"],
        rows,
    )
    for passed in found.passed_over:
        line(("passed over  ", "yellow"), printable(for_command_line(str(passed))))
    line((f"{count(len(found.steps), 'step')}, {size(used(found.steps))}", "bold"))


def prune(
    path: Path, policies: Policies, *, step_name: str, verify: bool, yes: bool, as_json: bool
) -> int:
    """Lists what is not kept, and removes it if that was asked for. 1 where that did not work."""
    root = step_store_at(path, names=StepNames(step_name))
    found = _look(root)
    _check_metric(policies, found.steps)
    done = (
        remove(root, policies, verify=verify)
        if yes
        else Pruned(unneeded(found.steps, policies), found.left)
    )
    gone = {step.number for step in done.removed}
    kept = [step for step in found.steps if step.number not in gone]
    nbytes = used(found.steps) - used(kept)
    if as_json:
        print_json(
            {
                "path": str(path),
                "removed" if yes else "found": [_to_json(step) for step in done.removed],
                "unfinished": [_passed_to_json(passed) for passed in done.swept],
                "kept": [_to_json(step) for step in kept],
                "bytes": nbytes,
                "problems": done.problems,
            }
        )
        return 1 if done.problems else 0
    _rows(("kept", "dim"), kept)
    what = ("removed", "red") if yes else ("to remove", "yellow")
    _rows(what, done.removed)
    for passed in done.swept:
        line(
            (f"{what[0]:<11}", what[1]),
            f"{passed.path.name}  ",
            ("its save did not finish", "yellow"),
        )
    for problem in done.problems:
        line(("problem    ", "red"), printable(for_command_line(problem)))
    number = len(done.removed) + len(done.swept)
    if not number:
        line("nothing to remove")
    else:
        total = f"{count(number, 'step')}, {size(nbytes)}"
        line((f"removed {total}" if yes else f"{total} to remove: run again with --yes", "bold"))
    return 1 if done.problems else 0


def _look(root: StepStore) -> Listing:
    found = root.look()
    if not found.steps and not found.passed_over:
        name = root.folder(0).name.replace("0", "N")
        msg = f"{root.path} is not the folder of a run: it has no folder {name}"
        raise CheckpointNotFoundError(msg, path=root.path)
    return found


def _check_metric(policies: Policies, steps: Sequence[Step]) -> None:
    """Raise where the metric that decides what stays is one that no step has: all but the latest would go."""
    known = sorted({name for step in steps for name in step.metrics})
    if policies.metric is not None and steps and policies.metric not in known:
        msg = f"no step has the metric {policies.metric!r}: " + (
            f"they have {some(known)}" if known else "they have none"
        )
        raise PlanError(msg)


def _rows(what: tuple[str, str], steps: Sequence[Step]) -> None:
    width = max((len(step.path.name) for step in steps), default=0)
    for step in steps:
        line((f"{what[0]:<11}", what[1]), f"{step.path.name:<{width}}  {size(step.nbytes):>9}")


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


def _passed_to_json(passed: SkippedStep) -> dict[str, Any]:
    return {"step": passed.number, "path": str(passed.path), "kind": passed.kind, "why": passed.why}


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
