"""Hands cases to rank processes, and judges what came back: the same as stock, or one of the differences that are documented."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from differential.cases import Case, Holder, Load, Save
from differential.ranks import Result, load_step, save_step
from support.ranks import shared_pool

#: How long one step of a case may take, on a machine that is busy.
WATCHDOG = 60.0  # seconds


class DisagreementError(AssertionError):
    """Stock and dcp-rs did not do the same."""


@dataclass(frozen=True)
class Difference:
    """A difference from stock that is meant.

    Attributes:
        name: what it is called in the tally.
        applies: whether it explains this step's result.
        why: the reason.
        documented: the page that says so.
    """

    name: str
    applies: Callable[[Case, Save | Load, Result, Result], bool]
    why: str
    documented: str


def _is_pending(case: Case, step: Save | Load, stock: Result, ours: Result) -> bool:
    return ours.errors == ("PlanError",) and "pending reductions" in ours.message


def _is_of_another_rank(case: Case, step: Save | Load, stock: Result, ours: Result) -> bool:
    whole = any(
        isinstance(s, Save) and s.options.get("flatten_state_dict") is False for s in case.steps
    )
    return whole and not ours.errors and "kind='own'" in repr(case.state)


def _is_ambiguous(case: Case, step: Save | Load, stock: Result, ours: Result) -> bool:
    return isinstance(step, Load) and (
        (ours.errors == ("PlanError",) and "entries of the state dict flatten to" in ours.message)
        # Of a name and an empty dict, torch puts the value of the name into the place of the dict.
        or (not ours.errors and _has_keys_alike(case.state))
    )


def _has_keys_alike(node: Any) -> bool:
    """Return whether a dict has a key and, in place of an entry, an empty dict under its text."""
    if isinstance(node, Holder):
        return _has_keys_alike(node.state)
    if isinstance(node, list):
        return any(map(_has_keys_alike, node))
    return isinstance(node, dict) and (
        any(not isinstance(key, str) and node.get(str(key)) == {} for key in node)
        or any(map(_has_keys_alike, node.values()))
    )


def _has_nothing_in_common(case: Case, step: Save | Load, stock: Result, ours: Result) -> bool:
    is_partial = isinstance(step, Load) and bool(step.options.get("allow_partial_load"))
    return (
        is_partial and ours.errors == ("PlanError",) and "there is nothing to load" in ours.message
    )


def _is_left_by_stock(case: Case, step: Save | Load, stock: Result, ours: Result) -> bool:
    is_partial = isinstance(step, Load) and bool(step.options.get("allow_partial_load"))
    return (
        is_partial
        and not ours.errors
        and "kind='sharded'" in repr(case.state)
        and all(line.endswith("want a NoneType") for line in ours.differences)
    )


ALLOWED = [
    Difference(
        "a container that is stored as one value, and of which every rank has another, is that of another rank",
        _is_of_another_rank,
        "the ranks share out what all of them have in another way",
        "docs/differences.md",
    ),
    Difference(
        "a pending sum is refused",
        _is_pending,
        "torch stores one rank's share of the sum, which is not the tensor",
        "docs/differences.md",
    ),
    Difference(
        "a partial load of a checkpoint that has none of the names is refused",
        _has_nothing_in_common,
        "torch loads nothing and says nothing",
        "docs/differences.md",
    ),
    Difference(
        "values are loaded on a rank without shards",
        _is_left_by_stock,
        "a ShardedTensor without shards lets torch take the folder for one of torch before 2.4",
        "docs/differences.md",
    ),
    Difference(
        "two entries of one name are refused",
        _is_ambiguous,
        "torch merges them, while it looks for ShardedTensors",
        "docs/differences.md",
    ),
]

#: How often each outcome was seen in this process.
tally: Counter[str] = Counter()


def judge(case: Case, patience: float = WATCHDOG) -> None:
    """Runs the case, any step of which may take ``patience`` seconds.

    Raises:
        DisagreementError: with all that is known of it.
    """
    folder = Path(tempfile.mkdtemp(prefix="dcp-rs-differential-"))
    try:
        _run(case, folder, patience)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tally["cases"] += 1


def _run(case: Case, folder: Path, patience: float) -> None:
    def on_ranks(step: Save | Load, function: Any, *args: Any) -> list[Any]:
        outcomes = shared_pool().outcomes(
            step.ranks.size, function, step, case.state, folder, *args, timeout=patience
        )
        for outcome in outcomes:
            if outcome.error is not None:
                raise DisagreementError(
                    f"rank {outcome.rank}: {outcome.error!r}\n{outcome.traceback}\n{_shown(case, step)}"
                )
        return [outcome.value for outcome in outcomes]

    has_stock = has_ours = False
    for number, step in enumerate(case.steps):
        if isinstance(step, Save):
            has_stock, has_ours = _judge_save(case, step, on_ranks(step, save_step, 10 * number))
            if not has_stock:
                return
        else:
            for results in on_ranks(step, load_step, has_ours):
                for result in results[1:]:
                    _compare(case, step, results[0], result)


def _judge_save(case: Case, step: Save, ranks: list[list[Result]]) -> tuple[bool, bool]:
    for stock, ours in ranks:
        _compare(case, step, stock, ours)
    return all(not stock.errors for stock, _ in ranks), all(not ours.errors for _, ours in ranks)


def _compare(case: Case, step: Save | Load, stock: Result, ours: Result) -> None:
    kind = type(step).__name__.lower()
    if stock.errors:
        tally[f"{kind}: stock refuses" + ("" if ours.errors else ", dcp-rs does it")] += 1
        return
    if not ours.errors and not ours.differences:
        tally[f"{kind}: the same"] += 1
        return
    for difference in ALLOWED:
        if difference.applies(case, step, stock, ours):
            tally[f"{kind}: {difference.name}"] += 1
            return
    lines = "\n".join(ours.differences)
    raise DisagreementError(
        f"{ours.who}: {ours.errors} {ours.message}\n{lines}\n{_shown(case, step)}"
    )


def _shown(case: Case, step: Save | Load) -> str:
    return f"at {step}\nin {case}"
