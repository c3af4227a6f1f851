"""The state of an optimizer's parameters in a checkpoint: entries by parameter and path, and the trees that they are of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from dcp_rs._warnings import warn_caller
from dcp_rs.tensors.nesting import Container, TreePath, name_of, nest, remaining
from dcp_rs.training.choice import Choice
from dcp_rs.training.keys import keys_of, unclear_in, with_keys
from dcp_rs.training.made import Made
from dcp_rs.training.stored import branch_at, join

__all__ = ["SavedState"]


class SavedState:
    """What a checkpoint has below the ``state`` of optimizers.

    Args:
        metadata: of the checkpoint.
        prefix: the name of what it is below.
        parameters: what the saved optimizers call theirs.
        choice: what of it is loaded.
    """

    def __init__(self, metadata: Metadata, prefix: str, parameters: Collection[str], choice: Choice) -> None:
        branch = branch_at(metadata, tuple(prefix.split(".")), parameters)
        self._prefix = prefix
        self._choice = choice
        self._positions, self._is_exact = branch.positions, branch.is_exact
        # Parameter (name, or number as text) to the paths of its entries and their names in the checkpoint.
        self._entries: dict[str, dict[TreePath, str]] = {}
        self._containers: dict[str, list[Container]] = {}
        self._unclear: list[tuple[str, str]] = []
        for name, path in branch.paths.items():
            self._entries.setdefault(name_of(path[:1]), {})[path[1:]] = name
        for container in branch.containers:
            if container.path:
                key = name_of(container.path[:1])
                self._entries.setdefault(key, {})
                below = Container(container.position, container.path[1:], container.kind)
                self._containers.setdefault(key, []).append(below)

    def __contains__(self, key: str) -> bool:
        """Whether the parameter has a state, be it empty."""
        return key in self._entries

    def of(self, key: str) -> dict[TreePath, str]:
        """The entries of a parameter: their names in the checkpoint, by path."""
        return self._entries.get(key, {})

    def take_keys(self, key: str, own: Mapping[Any, Any], makes: Made) -> None:
        """Give a parameter's entries the keys that the optimizer has, where text stands for them.

        Args:
            key: what the parameter goes by in the checkpoint.
            own: the state that it has.
            makes: the state that the optimizer makes for it.
        """
        entries = self.of(key)
        if not entries or (self._is_exact and all(len(path) == 1 for path in entries)):
            return
        keys: Mapping[TreePath, Any] = {**makes.keys, **keys_of(own)}
        self._entries[key] = {with_keys(path, keys): name for path, name in entries.items()}
        containers = self._containers.get(key, [])
        containers[:] = [Container(c.position, with_keys(c.path, keys), c.kind) for c in containers]
        if not self._is_exact:
            doubts = ((name, unclear_in(path, keys)) for path, name in entries.items())
            self._unclear += [(name, part) for name, part in doubts if part is not None]

    def warn(self) -> None:
        """Says which text may have stood for another key, where nothing tells."""
        if self._unclear:
            (name, key), more = self._unclear[0], len(self._unclear) - 1
            warn_caller(
                f"optimizer state {name!r}{f' (and {more} more)' if more else ''}: the checkpoint has all keys as text, and neither the state that the "
                f"optimizer has nor what it makes for a parameter tells what {key!r} was; it is loaded as text"
            )

    def trees(self, keys: Mapping[str, str], value: Callable[[str, TreePath, str], Any]) -> dict[str, Any]:
        """The states of parameters, by FQN; none for those that have none.

        Args:
            keys: what they go by in the checkpoint, by FQN.
            value: of an entry, by FQN, path and name.

        Raises:
            PlanError: paths contradict each other.
        """
        leaves: list[tuple[int | None, TreePath, Any]] = []
        containers: list[Container] = []
        for fqn, key in keys.items():
            entries = self.of(key)
            leaves += [(self._positions[name], (fqn, *path), value(fqn, path, name)) for path, name in entries.items()]
            containers += [Container(c.position, (fqn, *c.path), c.kind) for c in self._chosen(key, entries)]
        return nest(leaves, containers)

    def _chosen(self, key: str, leaves: Iterable[TreePath]) -> list[Container]:
        return remaining(self._containers.get(key, ()), leaves, partial(self._wants, f"{self._prefix}.{key}"))

    def _wants(self, above: str, name: str) -> bool:
        return self._choice.wants(join(above, name))
