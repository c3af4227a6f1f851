"""``tree``: sizes by module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcp_rs.checkpoint.names import natural
from dcp_rs.checkpoint.views import Layout
from dcp_rs.cli.contents import Entry, open_contents
from dcp_rs.cli.output import bar, line, print_json, printable, size

__all__ = ["tree"]


@dataclass
class Module:
    """What names have in common up to a dot: entries of its own, and modules within it."""

    name: str
    entries: list[Entry] = field(default_factory=list)
    modules: dict[str, Module] = field(default_factory=dict)
    nbytes: int = 0
    count: int = 0

    def add(self, parts: list[str], entry: Entry) -> None:
        """Adds an entry, whose name goes on with ``parts``."""
        self.nbytes += entry.nbytes
        self.count += 1
        if len(parts) == 1:
            self.entries.append(entry)
        else:
            self.modules.setdefault(parts[0], Module(parts[0])).add(parts[1:], entry)

    def to_json(self, depth: int | None) -> dict[str, Any]:
        """For ``--json``."""
        known: dict[str, Any] = {"name": self.name, "bytes": self.nbytes, "entries": self.count}
        if depth == 0:
            return known
        less = None if depth is None else depth - 1
        return known | {"modules": [module.to_json(less) for module in self.modules.values()]}


def build(entries: list[Entry], sort: str) -> Module:
    """All entries under one root; modules in the order of their names, as a person counts, or of their sizes."""
    root = Module("")
    for entry in entries:
        root.add(entry.name.split("."), entry)
    _sort(root, sort)
    return root


def _sort(module: Module, sort: str) -> None:
    def key(inner: Module) -> Any:
        return (-inner.nbytes, natural(inner.name)) if sort == "size" else natural(inner.name)

    module.modules = {inner.name: inner for inner in sorted(module.modules.values(), key=key)}
    for inner in module.modules.values():
        _sort(inner, sort)


def tree(
    path: Path,
    chosen: Callable[[str], bool] | None,
    *,
    depth: int,
    sort: str,
    as_json: bool,
    rank: int | None,
    layout: Layout | None = None,
) -> None:
    """A line a module, down to ``depth`` (0: all)."""
    contents = open_contents(path, rank=rank, layout=layout)
    entries = [entry for entry in contents.entries if chosen is None or chosen(entry.name)]
    root = build(entries, sort)
    deepest = None if depth == 0 else depth
    if as_json:
        print_json({"path": str(path), "format": contents.format, **root.to_json(deepest)})
        return
    whole = max(1, root.nbytes)
    rows = [(printable(str(path)), root), *_lines(root, "", deepest)]
    width = max(len(f"{root.count:,}"), len("entries"))
    line((f"{'size':>9}  {'':10}  {'entries':>{width}}  module", "dim"))
    for text, module in rows:
        share = bar(module.nbytes / whole, 10)
        line(
            f"{size(module.nbytes):>9}  ",
            (f"{share:10}", "blue"),
            f"  {module.count:>{width},}  {text}",
        )


def _lines(module: Module, indent: str, depth: int | None) -> Iterator[tuple[str, Module]]:
    """(branches and name, module) below a module. One that is alone in another shares its line."""
    if depth == 0:
        return
    inner = list(module.modules.values())
    for number, one in enumerate(inner):
        last = number == len(inner) - 1
        name, deepest = one.name, one
        while len(deepest.modules) == 1 and not deepest.entries:
            (deepest,) = deepest.modules.values()
            name = f"{name}.{deepest.name}"
        yield f"{indent}{'└─ ' if last else '├─ '}{printable(name)}", deepest
        yield from _lines(
            deepest, indent + ("   " if last else "│  "), None if depth is None else depth - 1
        )
