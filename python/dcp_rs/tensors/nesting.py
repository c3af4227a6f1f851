"""Paths and containers of a nested state dict, and how they are written down and rebuilt.

The parts of a path are strings (keys of a mapping), integers (positions in a list), or tuples of
one key that is not a string.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dcp_rs.errors import PlanError

TreePath = tuple[Any, ...]

_FACTORIES = {
    factory.__name__: factory for factory in (bool, bytes, dict, float, int, list, set, str, tuple)
}
#: The constructor of each kind in section 5 of the format. Other mappings come back as a ``dict``.
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
#: The most empty positions in lists. A forged index must not take memory beyond its own size.
_MAX_GAPS = 1 << 16
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True)
class Container:
    """A mapping that the paths of entries do not describe: an empty one, or no plain ``dict``.

    Attributes:
        position: the number of entries before it in the state dict.
        path: its path; empty for the state dict itself.
        kind: its kind (section 5 of the format).
        versions: the versions of modules that ``Module.state_dict`` noted in it: a dict such as
            ``{"version": 2}`` by the name of the module.
    """

    position: int
    path: TreePath
    kind: str
    versions: Mapping[str, Any] | None = field(default=None, compare=False)


def kind_of(mapping: Mapping[Any, Any]) -> str:
    """Return the kind of a mapping, as an index stores it."""
    cls = type(mapping)
    if cls is defaultdict:
        make = mapping.default_factory  # type: ignore[attr-defined]
        name = next((name for name, factory in _FACTORIES.items() if factory is make), None)
        return "defaultdict" if name is None else f"defaultdict({name})"
    return cls.__name__ if cls in (OrderedDict, Counter) else "dict"


def like(mapping: Mapping[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a mapping of the same kind with other items."""
    made = _KINDS[kind_of(mapping)]()
    for key, value in pairs:
        made[key] = value
    return made


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of nested mappings, lists and tuples, with ``change`` applied to each leaf."""
    if isinstance(value, Mapping):
        return like(value, ((key, map_leaves(entry, change)) for key, entry in value.items()))
    if type(value) in (list, tuple):
        return type(value)(map_leaves(entry, change) for entry in value)
    return change(value)


def text_path(path: TreePath) -> TreePath:
    """Return a path as DCP stores it, with text for every key."""
    return tuple(str(part[0]) if type(part) is tuple else part for part in path)


def name_of(path: TreePath) -> str:
    """Return the name that DCP gives to the entry at a path."""
    return ".".join(map(str, text_path(path)))


def shown(path: TreePath) -> str:
    """Return a path in Python's notation: ``['optim']['state'][0]``."""
    return "".join(f"[{part[0]!r}]" if type(part) is tuple else f"[{part!r}]" for part in path)


def storable(path: TreePath) -> tuple[TreePath, list[Any]]:
    """Return a path with text for the keys that the format cannot hold, and those keys."""
    lost: list[Any] = []

    def stored(part: Any) -> Any:
        if type(part) is not tuple or _is_storable(part[0]):
            return part
        lost.append(part[0])
        return str(part[0])

    return tuple(map(stored, path)), lost


def _is_storable(key: Any) -> bool:
    cls = type(key)
    if cls is tuple:
        return all(type(item) is str or _is_storable(item) for item in key)
    if cls is float:
        return math.isfinite(key)
    return key is None or cls is bool or (cls is int and key in _INT64)


def remaining(
    containers: Sequence[Container], leaves: Iterable[TreePath], passes: Callable[[str], bool]
) -> list[Container]:
    """Return the containers that are left if only some leaves are.

    Args:
        containers: all containers of the state dict.
        leaves: the paths of the leaves that are left. Their containers are left, too.
        passes: whether a container without such leaves is left, by its name.
    """
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


def moved_versions(
    versions: Mapping[str, Any], names: Iterable[tuple[str, str]]
) -> OrderedDict[str, Any]:
    """Return the versions of modules by their new names.

    Args:
        versions: the versions by the old names.
        names: the old and the new name of each parameter and buffer.
    """
    moved: OrderedDict[str, Any] = OrderedDict()
    for old_name, new_name in names:
        old, new = old_name.split("."), new_name.split(".")
        while old and new:
            own, now = old.pop(), new.pop()
            above = ".".join(old)
            if above in versions:
                moved.setdefault(".".join(new), versions[above])
            if own != now:  # what is above has another name
                break
    return moved


def nest(
    leaves: Iterable[tuple[int | None, TreePath, Any]], containers: Iterable[Container] = ()
) -> dict[Any, Any]:
    """Build the state dict of some leaves and containers.

    Args:
        leaves: (position, path, value) of each. Leaves are sorted by position. Those without one
            come last, in the given order. Missing entries of a list become ``None``.
        containers: the mappings that the paths do not describe.

    Raises:
        PlanError: two paths contradict each other.
    """
    tree = _Tree({container.path: container for container in containers})
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


class _List(dict[int, Any]):
    """A list under construction: its entries by position."""


class _Tree:
    """A state dict under construction."""

    def __init__(self, containers: Mapping[TreePath, Container]) -> None:
        self._containers = containers
        # Hashing every prefix of a path would be quadratic in its length.
        self._depths = {len(path) for path in containers}
        self._root = self._mapping(())
        #: Ids of the containers. Other dicts and lists are values.
        self._own = {id(self._root)}
        #: The lists: the container and the key of each, the list, and a path through it.
        self._lists: list[tuple[dict[Any, Any], Any, _List, TreePath]] = []

    def enter(self, path: TreePath, depth: int) -> dict[Any, Any]:
        """Return the container at the first ``depth`` parts of a path. Make it if necessary."""
        at = self._root
        for end in range(1, depth + 1):
            key = self._key(at, path, end - 1)
            if key not in at:
                if end < len(path) and type(path[end]) is int:
                    at[key] = _List()
                    self._lists.append((at, key, at[key], path))
                else:
                    at[key] = self._mapping(path[:end]) if end in self._depths else {}
                self._own.add(id(at[key]))
            at = at[key]
            if id(at) not in self._own:
                raise _contradiction(path)
        return at

    def put(self, path: TreePath, value: Any) -> None:
        """Set a leaf."""
        at = self.enter(path, len(path) - 1)
        key = self._key(at, path, -1)
        if key in at:
            raise _contradiction(path)
        at[key] = value

    def finished(self) -> dict[Any, Any]:
        """Return the state dict."""
        gaps = 0
        for at, key, entries, path in reversed(self._lists):  # inner ones first
            size = max(entries) + 1
            gaps += size - len(entries)
            if gaps > _MAX_GAPS:
                msg = f"a list with {size} places, of which most are empty: {shown(path)}"
                raise PlanError(msg, tensor=name_of(path))
            at[key] = [entries.get(position) for position in range(size)]
        return self._root

    def _mapping(self, path: TreePath) -> dict[Any, Any]:
        container = self._containers.get(path)
        if container is None:
            return {}
        made = _KINDS.get(container.kind, dict)()
        if container.versions is not None and isinstance(made, OrderedDict):
            from dcp_rs import _torch  # a command that imports this module may not need torch

            _torch.set_module_versions(made, container.versions)
        return made

    def _key(self, at: dict[Any, Any], path: TreePath, number: int) -> Any:
        """Return the key in a container for a part of a path."""
        part = path[number]
        if isinstance(at, _List):
            fits = type(part) is int and part >= 0
        else:
            fits = type(part) is not int or at is self._root
        if not fits:
            raise _contradiction(path)
        return part[0] if type(part) is tuple else part


def _contradiction(path: TreePath) -> PlanError:
    return PlanError(
        f"two entries contradict each other in what is at {shown(path)}", tensor=name_of(path)
    )
