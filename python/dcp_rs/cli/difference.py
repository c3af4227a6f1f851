"""``diff``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dcp_rs._progress import watching
from dcp_rs.checkpoint.names import natural, selector
from dcp_rs.checkpoint.views import Layout
from dcp_rs.cli.contents import open_contents
from dcp_rs.cli.listing import put_page, statistics_of
from dcp_rs.cli.output import count, entries, line, print_json, printable, size

if TYPE_CHECKING:
    from dcp_rs.checkpoint.compare import Comparison, Difference  # they need torch

__all__ = ["diff"]

#: What differs, in the order in which it is printed.
_KINDS = ("only in a", "only in b", "kind", "path", "shape", "dtype", "value", "elements")
#: Lines of one kind that are printed without ``--all``, and the width of a column of names.
_SOME, _WIDTH = 10, 60


def diff(
    a: Path,
    b: Path,
    *,
    include: Sequence[str],
    exclude: Sequence[str],
    show_all: bool,
    tolerance: float,
    html: Path | None,
    with_stats: bool,
    layout: Layout,
    allow_external: bool,
    threads: int | None,
    as_json: bool,
) -> int:
    """Compare and print, or write a page. Return 1 if something differs."""
    from dcp_rs.checkpoint.compare import compare
    from dcp_rs.cli import page

    with watching(True, "comparing") as progress:
        found = compare(
            a,
            b,
            include=list(include) or None,
            exclude=list(exclude) or None,
            tolerance=tolerance,
            threads=threads,
            allow_external=allow_external,
            layout=layout,
            progress=progress,
        )
    differences = found.differences
    if html is not None:
        sides = [
            open_contents(path, allow_external=allow_external, layout=layout) for path in (a, b)
        ]
        held = [
            statistics_of(path, rank=None, allow_external=allow_external, layout=layout)
            if with_stats
            else {}
            for path in (a, b)
        ]
        passes = selector(list(include) or None, list(exclude) or None)
        for side in sides:
            side.entries = [entry for entry in side.entries if passes is None or passes(entry.name)]
        put_page(
            page.render_both(sides[0], sides[1], differences, held[0], held[1]),
            html,
            as_json=as_json,
        )
        if str(html) == "-":
            return 1 if differences else 0
    if as_json:
        print_json(
            {
                "a": str(a),
                "b": str(b),
                "same": not differences,
                "entries": found.entries,
                "bytes": found.bytes,
                "differences": [asdict(difference) for difference in differences],
            }
        )
        return 1 if differences else 0
    if differences:
        if html is None:
            _list(differences, show_all=show_all)
        line(
            (_verdict(found), "bold red"),
            f" ({_counts(differences)}; {size(found.bytes)} compared)",
        )
        return 1
    line(("the same", "green"), f": {entries(found.entries)}, {size(found.bytes)}")
    return 0


def _list(differences: Sequence[Difference], *, show_all: bool) -> None:
    """Print a line for each difference, grouped by what differs."""
    groups = _grouped(differences)
    shown = {kind: group if show_all else group[:_SOME] for kind, group in groups.items()}
    width = max(len(printable(one.name)) for group in shown.values() for one in group)
    for kind, group in shown.items():
        style = "yellow" if kind in ("elements", "dtype") else "red"
        for one in group:
            name = f"{printable(one.name):<{min(width, _WIDTH)}}"
            line((f"{kind:<9}  ", style), f"{name}  ", (printable(_details(one)), "dim"))
        if len(groups[kind]) > len(group):
            line((f"{'':9}  and {len(groups[kind]) - len(group):,} more (--all)", "dim"))


def _grouped(differences: Sequence[Difference]) -> dict[str, list[Difference]]:
    groups: dict[str, list[Difference]] = {kind: [] for kind in _KINDS}
    for one in sorted(differences, key=lambda one: natural(one.name)):
        groups[one.kind].append(one)
    return {kind: group for kind, group in groups.items() if group}


def _details(one: Difference) -> str:
    details = [" | ".join(filter(None, (one.a, one.b)))]
    if one.elements is not None:
        details.append(
            count(one.elements, "element") + (" differs" if one.elements == 1 else " differ")
        )
    if one.max_abs is not None and one.elements:
        details.append(f"by at most {one.max_abs:.3g}")
    return ", ".join(filter(None, details))


def _counts(differences: Sequence[Difference]) -> str:
    return ", ".join(f"{kind}: {len(group):,}" for kind, group in _grouped(differences).items())


def _verdict(found: Comparison) -> str:
    """How many differ, each name once: of the entries that ``ls`` lists, and of the containers that it does not."""
    names = {difference.name for difference in found.differences if not difference.container}
    containers = {difference.name for difference in found.differences if difference.container}
    more = f", and {count(len(containers), 'container')}" if containers else ""
    return f"{len(names):,} of {entries(found.entries)} differ{more}"
