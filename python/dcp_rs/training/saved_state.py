"""The state of an optimizer's parameters in a checkpoint: entries by parameter and path, and the trees that they are of."""

from __future__ import annotations

import ast
import contextlib
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_rs import _torch
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.open import containers_of
from dcp_rs.engine.metadata import index_of
from dcp_rs.errors import UnsupportedError
from dcp_rs.tensors.flatten import flatten
from dcp_rs.tensors.nesting import Container, TreePath, name_of, nest, remaining, text_path
from dcp_rs.training.choice import Choice

__all__ = ["Branch", "Made", "SavedState", "branch_at", "join", "made_state", "tree_of"]


@dataclass(frozen=True, slots=True)
class Branch:
    """What a checkpoint holds below a path.

    Attributes:
        paths: of the leaves, from there on, by name.
        positions: of the leaves among all that was saved, where that is known.
        containers: those that paths do not tell, with paths from there on.
        is_exact: whether keys are what they were. DCP itself keeps them as text, and what was flat
            has no others.
    """

    paths: dict[str, TreePath]
    positions: dict[str, int | None]
    containers: list[Container]
    is_exact: bool


def branch_at(
    metadata: Metadata, prefix: tuple[str, ...], parameters: Collection[str] = ()
) -> Branch:
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
    below = [
        Container(c.position, c.path[depth:], c.kind)
        for c in containers or ()
        if _is_below(c.path, prefix)
    ]
    return Branch(paths, positions, below, is_exact)


def tree_of(
    leaves: Iterable[tuple[int | None, TreePath, Any]], containers: Iterable[Container] = ()
) -> Any:
    """The tree of these leaves (position, path, value) and containers, which may be a list or one leaf; an empty dict where there is nothing.

    Raises:
        PlanError: paths contradict each other.
    """
    # One level down: a state dict is a mapping always.
    lower = [
        Container(container.position, ("", *container.path), container.kind)
        for container in containers
    ]
    return nest(((position, ("", *path), value) for position, path, value in leaves), lower).get(
        "", {}
    )


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


class SavedState:
    """What a checkpoint has below the ``state`` of optimizers.

    Args:
        metadata: of the checkpoint.
        prefix: the name of what it is below.
        parameters: what the saved optimizers call theirs.
        choice: what of it is loaded.
    """

    def __init__(
        self, metadata: Metadata, prefix: str, parameters: Collection[str], choice: Choice
    ) -> None:
        branch = branch_at(metadata, tuple(prefix.split(".")), parameters)
        self._prefix = prefix
        self._choice = choice
        self._positions, self._is_exact = branch.positions, branch.is_exact
        # Parameter (name, or number as text) to the paths of its entries and their names in the
        # checkpoint.
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

    def trees(
        self, keys: Mapping[str, str], value: Callable[[str, TreePath, str], Any]
    ) -> dict[str, Any]:
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
            leaves += [
                (self._positions[name], (fqn, *path), value(fqn, path, name))
                for path, name in entries.items()
            ]
            containers += [
                Container(c.position, (fqn, *c.path), c.kind) for c in self._chosen(key, entries)
            ]
        return nest(leaves, containers)

    def _chosen(self, key: str, leaves: Iterable[TreePath]) -> list[Container]:
        return remaining(
            self._containers.get(key, ()), leaves, partial(self._wants, f"{self._prefix}.{key}")
        )

    def _wants(self, above: str, name: str) -> bool:
        return self._choice.wants(join(above, name))


# --- what the optimizer makes, and what it calls it
# ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Made:
    """The state that an optimizer makes for a parameter.

    Attributes:
        tensors: by path.
        keys: as :func:`keys_of` gives them.
    """

    tensors: Mapping[TreePath, torch.Tensor] = field(default_factory=dict)
    keys: Mapping[TreePath, Any] = field(default_factory=dict)


def made_state(optimizer: Optimizer) -> dict[torch.Tensor, Made]:
    """Return the state that an optimizer without state makes for its parameters, as torch's ``get_optimizer_state_dict`` has it made.

    That is by a step with gradients and learning rates of zero. Afterwards the optimizer is as it
    was. One that cannot take such a step tells nothing: one that needs a closure, say.
    """
    if optimizer.state:
        return {}
    rates = [group.get("lr") for group in optimizer.param_groups]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params]
    with (
        contextlib.suppress(Exception),
        warnings.catch_warnings(),
    ):  # whatever goes wrong in the code of others
        warnings.simplefilter("ignore")
        for param in params:
            param.grad = None
        _torch.init_optimizer_state(optimizer)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = rate
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    made = {}
    for param, state in optimizer.state.items():
        flat = flatten(state)
        leaves = ((flat.paths[name], value) for name, value in flat.values.items())
        tensors = {
            path: v for path, v in leaves if isinstance(v, torch.Tensor) and not _is_partial(v)
        }
        made[param] = Made(tensors, keys_of(state))
    optimizer.state.clear()
    return made


def _is_partial(tensor: torch.Tensor) -> bool:
    """Whether its values are yet to be summed: nothing can be loaded into that."""
    return isinstance(tensor, DTensor) and any(
        placement.is_partial() for placement in tensor.placements
    )


def keys_of(tree: Any) -> dict[TreePath, Any]:
    """The last part of the path to whatever is in a tree, by the path as text."""
    found: dict[TreePath, Any] = {}
    _collect(tree, (), found)
    return found


def with_keys(path: TreePath, keys: Mapping[TreePath, Any]) -> TreePath:
    """The path with the keys that are known in place of the text that stands for them."""
    text = text_path(path)
    return tuple(
        keys.get(text[:end], part) if type(part) is str else part
        for end, part in enumerate(path, 1)
    )


def unclear_in(path: TreePath, keys: Mapping[TreePath, Any]) -> str | None:
    """The first part of a path of text that is not among the known keys, and reads as if it was a number, a tuple or None; None if no part does."""
    text = text_path(path)
    for end, part in enumerate(path, 1):
        if type(part) is str and text[:end] not in keys and _reads_as_no_text(part):
            return part
    return None


def _collect(tree: Any, path: TreePath, found: dict[TreePath, Any]) -> None:
    if isinstance(tree, Mapping):
        for key, child in tree.items():
            here = (*path, str(key))
            if type(key) is str:
                found[here] = key
            else:
                found.setdefault(here, (key,))
            _collect(child, here, found)
    elif isinstance(tree, list):
        for place, child in enumerate(tree):
            _collect(child, (*path, place), found)


def _reads_as_no_text(text: str) -> bool:
    if text.isidentifier() and text not in ("None", "True", "False"):
        return False
    try:
        return not isinstance(ast.literal_eval(text), str)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
