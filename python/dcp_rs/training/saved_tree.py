"""Trees in a checkpoint: the entries below a path, as they were nested in the state dict."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from dcp_rs import _core
from dcp_rs.checkpoint.metadata import planner_data
from dcp_rs.engine.matching import EntryInfo, find_entries
from dcp_rs.tensors.nesting import Container, TreePath, like, name_of, nest, text_path

_INTEGER = re.compile(r"-?[1-9][0-9]*|0")


@dataclass(slots=True)
class SavedTree:
    """The entries of a checkpoint at a path and below.

    Attributes:
        paths: the paths of the leaves from there, by name. An entry at the path itself has an empty
            one.
        positions: the positions of the leaves in the saved state dict, if they are known.
        containers: the containers that the paths do not tell, with paths from there.
        is_exact: whether keys are what they were. DCP stores them as text.
    """

    paths: dict[str, TreePath] = field(default_factory=dict)
    positions: dict[str, int | None] = field(default_factory=dict)
    containers: list[Container] = field(default_factory=list)
    is_exact: bool = True

    def keys(self) -> set[str]:
        """Return the first keys, as text."""
        paths = (*self.paths.values(), *(container.path for container in self.containers))
        return {_first_key(path) for path in paths if path}

    def build(self, values: Mapping[str, Any]) -> Any:
        """Return the tree of the values of its leaves, by name.

        It may be a list or one leaf. Without leaves it is an empty dict.

        Raises:
            PlanError: paths contradict each other.
        """
        # One level down, since a state dict is always a mapping.
        lower = [Container(c.position, ("", *c.path), c.kind) for c in self.containers]
        leaves = (
            (self.positions[name], ("", *path), values[name]) for name, path in self.paths.items()
        )
        return nest(leaves, lower).get("", {})

    def by_key(self) -> dict[str, SavedTree]:
        """Return the trees below the first keys, by key as text."""
        trees: dict[str, SavedTree] = {}

        def below(path: TreePath) -> SavedTree:
            key = _first_key(path)
            if key not in trees:
                trees[key] = SavedTree(positions=self.positions, is_exact=self.is_exact)
            return trees[key]

        for name, path in self.paths.items():
            if path:
                below(path).paths[name] = path[1:]
        for c in self.containers:
            if c.path:
                below(c.path).containers.append(replace(c, path=c.path[1:]))
        return trees


class SavedEntries:
    """The entries of an open checkpoint.

    Args:
        index: its index.

    Attributes:
        index: as given.
        names: the names of all entries.
    """

    def __init__(self, index: _core.Index) -> None:
        self.index = index
        self.names = index.names()
        self._positions = index.positions()
        root, self._containers = planner_data(index)
        self._paths: dict[str, Any] = root if isinstance(root, dict) else {}
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._sorted = sorted(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    def find(self, names: Iterable[str]) -> dict[str, EntryInfo]:
        """Return the entries with these names; it lacks those that the checkpoint lacks."""
        found = find_entries(self.index, {name: name for name in names})
        return {name: entry for name, entry in found.items() if entry is not None}

    def below(self, prefix: str) -> list[str]:
        """Return the names of the entry at a prefix and below, of all entries for an empty one."""
        if not prefix:
            return self.names
        # A slash follows a dot in the order of characters.
        start, end = (bisect_left(self._sorted, prefix + after) for after in "./")
        found = [*self._sorted[start:end], *([prefix] if prefix in self else ())]
        return sorted(found, key=self._numbers.__getitem__)

    def versions(self, path: tuple[str, ...]) -> Mapping[str, Any]:
        """Return the versions of modules that are noted in the mapping at a path."""
        found = (c.versions for c in self._containers or () if as_text(c.path) == path)
        return next((versions for versions in found if versions is not None), {})

    def tree(
        self,
        prefix: tuple[str, ...],
        parameters: Collection[str] = (),
        *,
        may_be_flat: bool = False,
    ) -> SavedTree:
        """Return the entries at a path and below.

        Args:
            prefix: the path, as text.
            parameters: names with dots that are one key below the path.
            may_be_flat: the last key of the path may be part of a longer key with dots, as after
                ``flatten_optimizer_state_dict``. By default such a key is another entry.
        """
        whole, depth = ".".join(prefix), len(prefix)
        tree = SavedTree(is_exact=self._containers is not None)
        for name in self.below(whole):
            number = self._numbers[name]
            path = self.index.planner_path(number) or self._paths.get(name)
            if path is None or not _is_below(path, prefix):
                if path is not None and not may_be_flat and path[:1] == prefix[:1]:
                    continue
                # The state dict was flat (`flatten_optimizer_state_dict`, or another planner).
                rest = name[len(whole) + 1 :] if prefix else name
                path = (*prefix, *_split(rest, parameters))
                tree.is_exact = False
            tree.paths[name], tree.positions[name] = tuple(path[depth:]), self._positions[number]
        tree.containers += [
            replace(c, path=c.path[depth:])
            for c in self._containers or ()
            if _is_below(c.path, prefix)
        ]
        return tree


def as_in(own: Any, saved: Any) -> Any:
    """Return a saved tree with the keys and kinds of mappings of ``own``, which DCP does not store.

    Among keys that are all integers, a saved key that ``own`` lacks is one, too.
    """
    if isinstance(own, Mapping) and type(saved) is dict:
        keys = {str(key): key for key in own}
        if own and all(type(key) is int for key in own):
            keys = {text: int(text) for text in saved if _INTEGER.fullmatch(text)} | keys
        found = ((text if text in own else keys.get(text, text), text) for text in saved)
        return like(own, ((key, as_in(own.get(key), saved[text])) for key, text in found))
    if type(own) is list and type(saved) is list:
        return [as_in(*pair) for pair in zip_longest(own[: len(saved)], saved)]
    return saved


def path_of(key: str) -> tuple[str, ...]:
    """Return the path of a key with dots, which may be empty."""
    return tuple(key.split(".")) if key else ()


def join(key: str, name: str) -> str:
    """Return a name below a key, which may be empty."""
    return f"{key}.{name}" if key else name


def _split(name: str, parameters: Collection[str]) -> list[str]:
    """Return the path of a name that begins with the name of a parameter, which has dots."""
    ends = [at for at, letter in enumerate(name) if letter == "."]
    known = next((end for end in reversed(ends) if name[:end] in parameters), None)
    if known is not None:
        return [name[:known], *name[known + 1 :].split(".")]
    return name.rsplit(".", 1) if name else []


def _first_key(path: TreePath) -> str:
    return path[0] if type(path[0]) is str else name_of(path[:1])


def _is_below(path: TreePath, prefix: tuple[str, ...]) -> bool:
    start = path[: len(prefix)]
    return start == prefix or as_text(start) == prefix


def as_text(path: TreePath) -> tuple[str, ...]:
    """Return a path with the text of its keys, as DCP stores them."""
    return tuple(map(str, text_path(path)))
