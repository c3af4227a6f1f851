"""``diff``: two checkpoints, compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcp_rs._progress import watching
from dcp_rs.checkpoint.names import natural
from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.output import count, for_command_line, line, print_json, size

if TYPE_CHECKING:
    from dcp_rs.checkpoint.compare import Difference  # it imports torch

#: The kinds of differences, in the order in which they are printed.
_KINDS = ("only in a", "only in b", "kind", "path", "shape", "dtype", "value", "elements")
#: Lines of one kind that are printed without ``--all``, and the width of a column of names.
_SOME, _WIDTH = 10, 60


@command(
    "diff",
    "dcp-rs diff before/ after/",
    "dcp-rs diff ckpt/ hf_model/ --include 'model.*' --tolerance 1e-3",
    "dcp-rs diff ckpt/ pytorch_model.bin --include 'encoder.*' --rename model=",
)
@options.location_argument("a")
@options.location_argument("b")
@options.include
@options.exclude
@options.rename
@options.show_all
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0.0),
    default=0.0,
    help="Ignore absolute differences up to this.",
)
@options.views
@options.external
@options.threads
@options.storage
@options.json
def _diff(a: Path, b: Path, show_all: bool, as_json: bool, **given: Any) -> int:
    """Compare two checkpoints: names, shapes, dtypes and every element. Exit code 1: they differ.

    A and B are two checkpoints of any kinds, torch.save files and URLs included. How they are
    sharded makes no difference. --rename changes the names of A.
    """
    from dcp_rs.checkpoint.compare import compare

    with watching(True, "comparing") as progress:
        found = compare(a, b, progress=progress, **given)
    differences = found.differences
    status = 1 if differences else 0
    if as_json:
        print_json({"a": str(a), "b": str(b), "same": not differences, **asdict(found)})
    elif differences:
        groups = _grouped(differences)
        _list(groups, show_all=show_all)
        counts = ", ".join(f"{kind}: {len(group):,}" for kind, group in groups.items())
        names = {difference.name for difference in differences}
        verdict = f"{len(names):,} of {count(found.entries, 'entry')} differ"
        line((verdict, "red"), f" ({counts}; {size(found.bytes)} compared)")
        if found.hint:
            line((f"{a}: {for_command_line(found.hint)}", "yellow"))
    else:
        line(("the same", "green"), f": {count(found.entries, 'entry')}, {size(found.bytes)}")
    return status


def _list(groups: dict[str, list[Difference]], *, show_all: bool) -> None:
    """Print a line for each difference, grouped by what differs."""
    printed = {kind: group if show_all else group[:_SOME] for kind, group in groups.items()}
    width = max(len(one.name) for group in printed.values() for one in group)
    for kind, group in printed.items():
        style = "yellow" if kind in ("elements", "dtype") else "red"
        for one in group:
            name = f"{one.name:<{min(width, _WIDTH)}}"
            line((f"{kind:<9}  ", style), f"{name}  ", (_details(one), "dim"))
        more = len(groups[kind]) - len(group)
        if more:
            line((f"{'':9}  and {more:,} more (--all)", "dim"))


def _grouped(differences: Sequence[Difference]) -> dict[str, list[Difference]]:
    """Return the differences of each kind that there is, in the order of _KINDS and of names."""
    by_name = sorted(differences, key=lambda one: natural(one.name))
    groups = {kind: [one for one in by_name if one.kind == kind] for kind in _KINDS}
    return {kind: group for kind, group in groups.items() if group}


def _details(one: Difference) -> str:
    details = [" | ".join(filter(None, (one.a, one.b)))]
    if one.elements is not None:
        verb = "differs" if one.elements == 1 else "differ"
        details.append(f"{count(one.elements, 'element')} {verb}")
    if one.max_abs is not None:
        is_equal = one.kind == "dtype" and one.max_abs == 0
        details.append("equal elements" if is_equal else f"by at most {one.max_abs:.3g}")
    return ", ".join(filter(None, details))
