"""Trees in a checkpoint: the entries below a path, and trees made of their leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["MISSING", "at", "join", "nest", "stored_paths"]

#: Stands for what is not in a tree.
MISSING: Any = object()


def stored_paths(metadata: Metadata, prefix: tuple[str, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The entries below a path, and the path of each: as it was saved, else as its name says."""
    known = metadata.planner_data
    start = "".join(f"{key}." for key in prefix)
    for name in metadata.state_dict_metadata:
        if not name.startswith(start):
            continue
        path = known.get(name) if isinstance(known, Mapping) else None
        if path is None or len(path) <= len(prefix) or tuple(path[: len(prefix)]) != prefix:
            # Flat when it was saved (`flatten_optimizer_state_dict`, or no planner's data). Names of parameters have dots, those of
            # their states have none.
            path = (*prefix, *name[len(start) :].rsplit(".", 1))
        yield name, tuple(path)


def nest(flat: dict[tuple[Any, ...], Any]) -> Any:
    """A tree from its leaves by path. Numbers in paths are places in lists."""
    if () in flat:
        return flat[()]
    children: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for path, value in flat.items():
        children.setdefault(path[0], {})[path[1:]] = value
    if children and all(type(key) is int for key in children):
        return [nest(children[key]) for key in sorted(children)]
    return {key: nest(child) for key, child in children.items()}


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    """What is at a path of a tree; :data:`MISSING` where nothing is."""
    for key in path:
        if isinstance(tree, Mapping):
            tree = tree.get(key, MISSING)
        elif isinstance(tree, list) and type(key) is int and key < len(tree):
            tree = tree[key]
        else:
            return MISSING
    return tree


def join(key: str, name: str) -> str:
    """A name below a key, which may be empty."""
    return f"{key}.{name}" if key else name
