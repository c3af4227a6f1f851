"""The containers of a state dict: what DCP's names and paths lose of them, and how they are made again.

A path's parts are text (a key of a mapping), an integer (a place in a list), or a tuple of one (a
key of a mapping that is no text).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dcp_rs.errors import PlanError

__all__ = [
    "WHOLE",
    "Container",
    "StandIn",
    "TreePath",
    "is_plain",
    "kind_of",
    "like",
    "name_of",
    "nest",
    "remaining",
    "shown",
    "storable",
    "text_path",
    "unwrap",
    "unwrap_in",
]

TreePath = tuple[Any, ...]

#: Tags a mapping without tensors that DCP's flattening would change: it makes every key text, and
#: drops empty dicts. The mapping is saved whole, as the tuple ``(WHOLE, mapping)``, because DCP
#: never enters tuples.
WHOLE = "dcp_rs.whole"

_FACTORIES = {
    kind.__name__: kind for kind in (bool, bytes, dict, float, int, list, set, str, tuple)
}
#: How each kind of section 5 of the format is made. Whatever is none of them comes back as a
#: ``dict``.
_KINDS: dict[str, Callable[[], dict[Any, Any]]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": defaultdict,
    **{
        f"defaultdict({name})": partial(defaultdict, factory)
        for name, factory in _FACTORIES.items()
    },
}
#: At most so many places of lists may be empty: what a checkpoint says must not take memory beyond
#: its own size.
_MAX_GAPS = 1 << 16
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True)
class Container:
    """A mapping that the paths of entries do not tell: it is empty, or no plain ``dict``.

    Attributes:
        position: how many entries of the state dict come before it.
        path: where it is; empty for the state dict itself.
        kind: section 5 of the format.
    """

    position: int
    path: TreePath
    kind: str


class StandIn(dict[Any, Any]):
    """A dict that counts as another mapping, whose items it has."""

    def __init__(self, stands_for: Mapping[Any, Any]) -> None:
        super().__init__(stands_for)
        self.stands_for = stands_for


def kind_of(mapping: Mapping[Any, Any]) -> str:
    """What is written down of a mapping's class."""
    if isinstance(mapping, StandIn):
        return kind_of(mapping.stands_for)
    kind = type(mapping)
    if kind is defaultdict:
        name = next(
            (name for name, factory in _FACTORIES.items() if factory is mapping.default_factory),
            None,
        )  # type: ignore[attr-defined]
        return "defaultdict" if name is None else f"defaultdict({name})"
    return kind.__name__ if kind in (OrderedDict, Counter) else "dict"


def like(mapping: Mapping[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A mapping of the same kind with these items."""
    make = _KINDS[kind_of(mapping)]
    if make is dict:
        return dict(pairs)
    made = make()
    for key, value in pairs:
        made[key] = value
    return made


def text_path(path: TreePath) -> TreePath:
    """The path as DCP has it: every key is text."""
    return tuple(str(part[0]) if type(part) is tuple else part for part in path)


def name_of(path: TreePath) -> str:
    """The name that DCP gives to what is at a path."""
    return ".".join(map(str, text_path(path)))


def shown(path: TreePath) -> str:
    """The path as Python has it: ``['optim']['state'][0]``."""
    return "".join(f"[{part[0]!r}]" if type(part) is tuple else f"[{part!r}]" for part in path)


def storable(path: TreePath) -> tuple[TreePath, list[Any]]:
    """The path with text in place of keys that the format cannot hold, and those keys."""
    lost = [part[0] for part in path if type(part) is tuple and not _is_storable(part[0])]
    if not lost:
        return path, lost
    return tuple(
        str(part[0]) if type(part) is tuple and not _is_storable(part[0]) else part for part in path
    ), lost


def _is_storable(key: Any) -> bool:
    kind = type(key)
    if kind is tuple:
        return all(type(item) is str or _is_storable(item) for item in key)
    if kind is float:
        return math.isfinite(key)
    return key is None or kind is bool or (kind is int and key in _INT64)


def remaining(
    containers: Sequence[Container], leaves: Iterable[TreePath], passes: Callable[[str], bool]
) -> list[Container]:
    """The containers of a state dict of which only some leaves are left: those that hold one of them, and of the others those whose name ``passes``."""
    if not containers:
        return []
    paths = {container.path for container in containers}
    depths = {len(path) for path in paths}
    holding = {
        path[:depth]
        for path in leaves
        for depth in depths
        if depth < len(path) and path[:depth] in paths
    }
    return [c for c in containers if not c.path or c.path in holding or passes(name_of(c.path))]


def nest(
    leaves: Iterable[tuple[int | None, TreePath, Any]], containers: Iterable[Container] = ()
) -> dict[Any, Any]:
    """The state dict of these leaves (position, path, value) and containers.

    Entries stand in the order of their positions; those without one come last, in the order in
    which they are given. Of a list that lacks entries, these are ``None``.

    Raises:
        PlanError: paths contradict each other.
    """
    tree = _Tree({container.path: container.kind for container in containers})
    entries: list[tuple[float, int, TreePath, Any]] = [
        (c.position, 0, c.path, None) for c in containers
    ]
    entries += [
        (math.inf if position is None else position, 1, path, value)
        for position, path, value in leaves
    ]
    entries.sort(key=lambda entry: entry[:2])
    for _, is_leaf, path, value in entries:
        if is_leaf:
            tree.put(path, value)
        elif path:
            tree.enter(path, len(path))
    return tree.finished()


def unwrap(value: Any) -> Any:
    """Return the mapping of ``(WHOLE, mapping)``; any other value as it is.

    Only what is not plain was ever wrapped: a user's ``(WHOLE, 3)`` is a value.
    """
    is_whole = (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[0], str)
        and value[0] == WHOLE
    )
    return value[1] if is_whole and not is_plain(value[1]) else value


def is_plain(tree: Any) -> bool:
    """Return whether a tree without tensors comes back from DCP as it is."""
    if isinstance(tree, list):
        return all(map(is_plain, tree))
    if not isinstance(tree, Mapping):
        return unwrap(tree) is tree  # a tuple that looks like a wrapped one would be unwrapped
    return (
        type(tree) is dict
        and bool(tree)
        and all(type(key) is str and is_plain(tree[key]) for key in tree)
    )


def unwrap_in(tree: Any) -> Any:
    """Unwrap every value of a nested state dict, in place. Returns the state dict."""
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    if not any(issubclass(kind, dict | list | tuple) for kind in set(map(type, values))):
        return tree  # mostly tensors: this spares one question for each of twenty thousand
    places = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(places):
        if isinstance(value, dict | list):
            unwrap_in(value)
        elif isinstance(value, tuple) and unwrap(value) is not value:
            tree[key] = unwrap(value)
    return tree


class _Gap:
    """The place of an entry of a list that was not there yet."""


class _Tree:
    """A state dict in the making."""

    def __init__(self, kinds: Mapping[TreePath, str]) -> None:
        self._kinds = kinds
        self._depths = {
            len(path) for path in kinds
        }  # hashing every start of a path would be quadratic in its length
        self._root = self._mapping(())
        self._own = {id(self._root)}  # containers; what else is a dict or a list is a value
        self._lists: list[list[Any]] = []
        self._gaps = 0

    def enter(self, path: TreePath, depth: int) -> Any:
        """The container at the first ``depth`` parts of a path, made where there is none yet."""
        at: Any = self._root
        for end in range(1, depth + 1):
            child = self._get(at, path[end - 1], path)
            if child is _Gap:
                if end < len(path) and type(path[end]) is int:
                    child = []
                    self._lists.append(child)
                else:
                    child = self._mapping(path[:end]) if end in self._depths else {}
                self._own.add(id(child))
                self._set(at, path[end - 1], child, path)
            elif id(child) not in self._own:
                raise _contradiction(path)
            at = child
        return at

    def put(self, path: TreePath, value: Any) -> None:
        """Sets a leaf."""
        at = self.enter(path, len(path) - 1)
        if self._get(at, path[-1], path) is not _Gap:
            raise _contradiction(path)
        self._set(at, path[-1], value, path)

    def finished(self) -> dict[Any, Any]:
        """The state dict."""
        if self._gaps:
            for entries in self._lists:
                entries[:] = [None if entry is _Gap else entry for entry in entries]
        return self._root

    def _mapping(self, path: TreePath) -> dict[Any, Any]:
        return _KINDS.get(self._kinds.get(path, "dict"), dict)()

    def _get(self, at: Any, part: Any, path: TreePath) -> Any:
        if isinstance(at, list):
            if type(part) is not int or part < 0:
                raise _contradiction(path)
            return at[part] if part < len(at) else _Gap
        if type(part) is int and at is not self._root:
            raise _contradiction(path)
        return at.get(part[0] if type(part) is tuple else part, _Gap)

    def _set(self, at: Any, part: Any, child: Any, path: TreePath) -> None:
        if not isinstance(at, list):
            at[part[0] if type(part) is tuple else part] = child
            return
        missing = part - len(at)
        if missing > 0:
            self._gaps += missing
            if self._gaps > _MAX_GAPS:
                msg = f"a list with {part + 1} places, of which most are empty: {shown(path)}"
                raise PlanError(msg, tensor=name_of(path))
            at.extend([_Gap] * missing)
        if part < len(at):
            at[part] = child
        else:
            at.append(child)


def _contradiction(path: TreePath) -> PlanError:
    return PlanError(
        f"two entries contradict each other in what is at {shown(path)}", tensor=name_of(path)
    )
