"""``tree``: the size of each module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from dcp_rs.checkpoint.names import natural
from dcp_rs.checkpoint.views import Layout
from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.contents import Entry, open_contents
from dcp_rs.cli.output import bar, line, print_json, printable, size


@dataclass
class Module:
    """The entries whose names share a prefix up to a dot."""

    name: str
    has_entries: bool = False
    modules: dict[str, Module] = field(default_factory=dict)
    nbytes: int = 0
    count: int = 0

    def add(self, parts: list[str], entry: Entry) -> None:
        """Add an entry. ``parts`` is the rest of its name."""
        self.nbytes += entry.nbytes
        self.count += 1
        if len(parts) == 1:
            self.has_entries = True
        else:
            self.modules.setdefault(parts[0], Module(parts[0])).add(parts[1:], entry)

    def sorted(self, by: str) -> list[Module]:
        """Return the inner modules, by name as a person counts, or by size."""
        return sorted(
            self.modules.values(),
            key=lambda inner: (-inner.nbytes if by == "size" else 0, natural(inner.name)),
        )

    def to_json(self, depth: int, by: str) -> dict[str, Any]:
        """Return the module for ``--json``."""
        known: dict[str, Any] = {"name": self.name, "bytes": self.nbytes, "entries": self.count}
        if depth != 0:
            known["modules"] = [inner.to_json(depth - 1, by) for inner in self.sorted(by)]
        return known

    def lines(self, indent: str, depth: int, by: str) -> Iterator[tuple[str, Module]]:
        """Yield (branches and name, module) for inner modules. An only child shares a line."""
        if depth == 0:
            return
        inner = self.sorted(by)
        for one in inner:
            is_last = one is inner[-1]
            name, deepest = one.name, one
            while len(deepest.modules) == 1 and not deepest.has_entries:
                (deepest,) = deepest.modules.values()
                name = f"{name}.{deepest.name}"
            yield f"{indent}{'└─ ' if is_last else '├─ '}{printable(name)}", deepest
            yield from deepest.lines(indent + ("   " if is_last else "│  "), depth - 1, by)


@command("tree", "dcp-rs tree ckpt/", "dcp-rs tree ckpt/ 'model.*' --depth 0 --sort size")
@options.any_checkpoint
@options.selection
@click.option(
    "--depth",
    type=click.IntRange(min=0),
    default=3,
    metavar="N",
    help="Show N levels of modules; 0 for all.",
)
@click.option("--sort", type=click.Choice(["name", "size"]), default="name", help="Sort by this.")
@options.layout
@options.rank
@options.storage
@options.json
def _tree(
    path: Path,
    chosen: Callable[[str], bool] | None,
    depth: int,
    sort: str,
    layout: Layout,
    rank: int | None,
    as_json: bool,
) -> None:
    """Show the size of each module."""
    contents = open_contents(path, rank=rank, layout=layout)
    root = Module("")
    for entry in contents.entries:
        if chosen is None or chosen(entry.name):
            root.add(entry.name.split("."), entry)
    depth = depth or -1  # which never gets to 0
    if as_json:
        print_json({"path": str(path), "format": contents.format, **root.to_json(depth, sort)})
        return
    width = max(len(f"{root.count:,}"), len("entries"))
    line((f"{'size':>9}  {'':10}  {'entries':>{width}}  module", "dim"))
    for text, module in [(printable(str(path)), root), *root.lines("", depth, sort)]:
        line(
            f"{size(module.nbytes):>9}  ",
            (f"{bar(module.nbytes / max(1, root.nbytes), 10):10}", "blue"),
            f"  {module.count:>{width},}  {text}",
        )
