"""What a checkpoint holds below a path, and the tree that it is of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from dcp_rs.checkpoint.open import containers_of
from dcp_rs.engine.metadata import index_of
from dcp_rs.errors import UnsupportedError
from dcp_rs.tensors.nesting import Container, TreePath, nest, text_path

__all__ = ["Branch", "branch_at", "join", "tree_of"]


@dataclass(frozen=True, slots=True)
class Branch:
    """What a checkpoint holds below a path.

    Attributes:
        paths: of the leaves, from there on, by name.
        positions: of the leaves among all that was saved, where that is known.
        containers: those that paths do not tell, with paths from there on.
        is_exact: whether keys are what they were. DCP itself keeps them as text, and what was flat has no others.
    """

    paths: dict[str, TreePath]
    positions: dict[str, int | None]
    containers: list[Container]
    is_exact: bool


def branch_at(metadata: Metadata, prefix: tuple[str, ...], parameters: Collection[str] = ()) -> Branch:
    """The entries below a path, each where it was when it was saved, else where its name says.

    Args:
        metadata: of the checkpoint.
        prefix: the path, as text.
        parameters: names that have dots, and that paths may go on with.

    Raises:
        UnsupportedError: the metadata is not that of a reader of this package.
    """
    index = index_of(metadata)
    if index is None:
        raise UnsupportedError("the metadata of a training load has to come from RsReader")
    start, depth = "".join(f"{key}." for key in prefix), len(prefix)
    more, places, containers = metadata.planner_data, index.positions(), containers_of(index)
    paths: dict[str, TreePath] = {}
    positions: dict[str, int | None] = {}
    is_exact = containers is not None
    for number, name in enumerate(index.names()):
        if not name.startswith(start):
            continue
        path = index.planner_path(number) or (more.get(name) if isinstance(more, Mapping) else None)
        if path is None or len(path) <= depth or not _is_below(path, prefix):
            # Flat when it was saved (`flatten_optimizer_state_dict`, or no planner's data).
            path, is_exact = (*prefix, *_split(name[len(start) :], parameters)), False
        paths[name], positions[name] = tuple(path[depth:]), places[number]
    below = [Container(c.position, c.path[depth:], c.kind) for c in containers or () if _is_below(c.path, prefix)]
    return Branch(paths, positions, below, is_exact)


def tree_of(leaves: Iterable[tuple[int | None, TreePath, Any]], containers: Iterable[Container] = ()) -> Any:
    """The tree of these leaves (position, path, value) and containers, which may be a list or one leaf; an empty dict where there is nothing.

    Raises:
        PlanError: paths contradict each other.
    """
    # One level down: a state dict is a mapping always.
    lower = [Container(container.position, ("", *container.path), container.kind) for container in containers]
    return nest(((position, ("", *path), value) for position, path, value in leaves), lower).get("", {})


def join(key: str, name: str) -> str:
    """A name below a key, which may be empty."""
    return f"{key}.{name}" if key else name


def _split(name: str, parameters: Collection[str]) -> list[str]:
    """The path of a name that begins with that of a parameter, which has dots, as what is below has not."""
    ends = [at for at, letter in enumerate(name) if letter == "."]
    known = next((end for end in reversed(ends) if name[:end] in parameters), None)
    return name.rsplit(".", 1) if known is None else [name[:known], *name[known + 1 :].split(".")]


def _is_below(path: TreePath, prefix: tuple[str, ...]) -> bool:
    return tuple(map(str, text_path(path[: len(prefix)]))) == prefix
