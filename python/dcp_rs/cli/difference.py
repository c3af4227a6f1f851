"""``diff``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dcp_rs._progress import watching
from dcp_rs.checkpoint.names import selector
from dcp_rs.cli.contents import open_contents
from dcp_rs.cli.listing import put_page, statistics_of
from dcp_rs.cli.output import count, entries, line, print_json, printable, size

if TYPE_CHECKING:
    from dcp_rs.checkpoint.compare import Comparison  # it needs torch

__all__ = ["diff"]


def diff(
    a: Path,
    b: Path,
    *,
    include: Sequence[str],
    exclude: Sequence[str],
    tolerance: float,
    html: Path | None,
    with_stats: bool,
    allow_external: bool,
    threads: int | None,
    as_json: bool,
) -> int:
    """1 where something differs. With ``html`` as a page, and not as text."""
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
            progress=progress,
        )
    differences = found.differences
    if html is not None:
        sides = [open_contents(path, allow_external=allow_external) for path in (a, b)]
        held = [statistics_of(path, rank=None, allow_external=allow_external) if with_stats else {} for path in (a, b)]
        passes = selector(list(include) or None, list(exclude) or None)
        for side in sides:
            side.entries = [entry for entry in side.entries if passes is None or passes(entry.name)]
        put_page(page.render_both(sides[0], sides[1], differences, held[0], held[1]), html, as_json=as_json)
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
    for difference in differences if html is None else ():
        style = "yellow" if difference.kind in ("elements", "dtype") else "red"
        line((f"{difference.kind:<9}  ", style), printable(difference.name))
        details = []
        if difference.a and difference.b:
            details.append(f"{difference.a} | {difference.b}")
        elif difference.a or difference.b:
            details.append(difference.a or difference.b)
        if difference.elements is not None:
            details.append(
                count(difference.elements, "element") + (" differs" if difference.elements == 1 else " differ")
            )
        if difference.max_abs is not None and difference.elements:
            details.append(f"by at most {difference.max_abs:.3g}")
        if details:
            line((f"{'':11}{', '.join(map(printable, details))}", "dim"))
    if differences:
        line((_verdict(found), "bold red"), f" ({size(found.bytes)} compared)")
        return 1
    line(("the same", "green"), f": {entries(found.entries)}, {size(found.bytes)}")
    return 0


def _verdict(found: Comparison) -> str:
    """How many differ, each name once: of the entries that ``ls`` lists, and of the containers that it does not."""
    names = {difference.name for difference in found.differences if not difference.container}
    containers = {difference.name for difference in found.differences if difference.container}
    more = f", and {count(len(containers), 'container')}" if containers else ""
    return f"{len(names):,} of {entries(found.entries)} differ{more}"
