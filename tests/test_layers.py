"""Which way imports go: from the rooms that people see down to those that know nothing of the others, and never in a circle."""

import ast
from collections.abc import Collection
from graphlib import TopologicalSorter
from pathlib import Path

import dcp_rs

PACKAGE = Path(dcp_rs.__file__).parent
#: Floors from the top. A module imports from floors below its own, and from its own room.
FLOORS: tuple[frozenset[str], ...] = tuple(
    map(
        frozenset,
        (
            {"__main__"},
            {"cli"},
            {"__init__"},
            {"integrations"},
            {"conversion", "steps"},
            {"optim"},
            {"training"},
            {"api"},
            {"dcp"},
            {"engine"},
            {"checkpoint"},
            {"transfer"},
            {"tensors"},
            {"options", "_torch", "_warnings"},
            {"_progress"},
            {"_log", "_reports"},
            {"_url"},
            {"errors", "_arguments"},
            {"_core"},
        ),
    )
)


def room(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def imports(path: Path) -> dict[str, set[str]]:
    """What a module imports of the package as soon as it is imported, and (under "later") what it imports when something is called."""
    found: dict[str, set[str]] = {"now": set(), "later": set()}
    tree = ast.parse(path.read_text())
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    within = {
        id(inner) for function in functions for inner in ast.walk(function) if inner is not function
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dcp_rs":
            base = (node.module or "").partition(".")[2]
            names = [f"{base}.{alias.name}" if base else alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [
                alias.name.partition(".")[2]
                for alias in node.names
                if alias.name.split(".")[0] == "dcp_rs"
            ]
        found["later" if id(node) in within else "now"].update(filter(None, names))
    return found


def modules() -> dict[str, Path]:
    paths = PACKAGE.rglob("*.py")
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
    }


def home(name: str, known: Collection[str]) -> str:
    """The module that a name is of."""
    while name not in known:
        name = name.rpartition(".")[0] or "__init__"
    return name


def upward(module: str, path: Path) -> list[str]:
    """Return the imports of a module from its own floor or from one above."""
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    here, found = room(module), []
    for when, names in imports(path).items():
        for name in names:
            there = room(name)
            if there not in floor:  # what __init__ gives by name: `from dcp_rs import load`
                there = "__init__"
            # The package's own __init__ brings in what it gives when that is first asked for.
            if (
                there != here
                and not (here == "__init__" and when == "later")
                and floor[here] >= floor[there]
            ):
                found.append(f"{module} imports {name} ({when})")
    return found


def test_imports_go_down():
    assert [
        wrong for module, path in sorted(modules().items()) for wrong in upward(module, path)
    ] == []


def test_nothing_is_imported_in_a_circle():
    known = modules()
    graph = {}
    for module, path in known.items():
        found = imports(path)
        homes = {home(name, known) for name in found["now"] | found["later"]}
        graph[module] = homes - {module, "__init__"}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
