"""``tree``: the size of each module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from dcp_rs.checkpoint.entries import TensorInfo
from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.contents import SORTS, Contents
from dcp_rs.cli.output import bar, line, print_json, size


@dataclass
class Module:
    """The entries whose names share a prefix up to a dot."""

    name: str
    has_entries: bool = False
    modules: dict[str, Module] = field(default_factory=dict)
    nbytes: int = 0
    count: int = 0

    def add(self, parts: list[str], entry: TensorInfo) -> None:
        """Add an entry. ``parts`` is the rest of its name."""
        self.nbytes += entry.nbytes
        self.count += 1
        if len(parts) == 1:
            self.has_entries = True
        else:
            self.modules.setdefault(parts[0], Module(parts[0])).add(parts[1:], entry)

    def sort(self, by: str) -> None:
        """Sort the inner modules, by name as a person counts, or by size."""
        inner = sorted(self.modules.values(), key=SORTS[by])
        self.modules = {one.name: one for one in inner}
        for one in inner:
            one.sort(by)

    def to_json(self, depth: int) -> dict[str, Any]:
        """Return the module for ``--json``."""
        known: dict[str, Any] = {"name": self.name, "bytes": self.nbytes, "entries": self.count}
        if depth != 0:
            known["modules"] = [inner.to_json(depth - 1) for inner in self.modules.values()]
        return known

    def lines(self, indent: str, depth: int) -> Iterator[tuple[str, Module]]:
        """Yield (branches and name, module) for inner modules. An only child shares a line."""
        if depth == 0:
            return
        for number, one in enumerate(self.modules.values(), 1):
            is_last = number == len(self.modules)
            name, deepest = one.name, one
            while len(deepest.modules) == 1 and not deepest.has_entries:
                (deepest,) = deepest.modules.values()
                name = f"{name}.{deepest.name}"
            yield f"{indent}{'└─ ' if is_last else '├─ '}{name}", deepest
            yield from deepest.lines(indent + ("   " if is_last else "│  "), depth - 1)


@command("tree", "dcp-rs tree ckpt/", "dcp-rs tree ckpt/ 'model.*' --depth 0 --sort size")
@options.checkpoint
@options.selection
@click.option(
    "--depth",
    type=click.IntRange(min=0),
    default=3,
    metavar="N",
    help="Show N levels of modules; 0 for all.",
)
@options.sort
@options.views
@options.rank
@options.storage
@options.json
def _tree(
    path: Path,
    chosen: Callable[[str], bool],
    depth: int,
    sort: str,
    as_json: bool,
    **how: Any,
) -> None:
    """Show the size of each module."""
    contents = Contents(path, chosen, **how)
    root = Module("")
    for entry in contents.entries:
        root.add(entry.name.split("."), entry)
    root.sort(sort)
    depth = depth or -1  # which never gets to 0
    if as_json:
        print_json({"path": str(path), "format": contents.format, **root.to_json(depth)})
        return
    width = max(len(f"{root.count:,}"), len("entries"))
    line((f"{'size':>9}  {'':10}  {'entries':>{width}}  module", "dim"))
    for text, module in [(str(path), root), *root.lines("", depth)]:
        line(
            f"{size(module.nbytes):>9}  ",
            (f"{bar(module.nbytes / max(1, root.nbytes), 10):10}", "blue"),
            f"  {module.count:>{width},}  {text}",
        )
