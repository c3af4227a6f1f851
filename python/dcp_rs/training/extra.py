"""Extra entries of a training checkpoint: schedulers, data loaders, random number generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from dcp_rs import _torch
from dcp_rs._log import current_rank
from dcp_rs._warnings import warn_caller
from dcp_rs.engine.matching import EntryInfo
from dcp_rs.errors import PlanError, UnsafePickleError
from dcp_rs.tensors import pickles
from dcp_rs.tensors.flatten import flatten, is_stateful
from dcp_rs.tensors.memory import clone
from dcp_rs.tensors.nesting import TreePath, text_path
from dcp_rs.tensors.pickles import plain_numbers
from dcp_rs.training.partial_load import PartialLoad
from dcp_rs.training.saved_tree import SavedEntries, SavedTree, build_tree

__all__ = [
    "EXTRA",
    "PerRank",
    "RngState",
    "SavedExtra",
    "check_values",
    "state_of",
    "with_buffers_copied",
]

#: The key of these entries in the checkpoint.
EXTRA = "extra"
#: Prefix of the names of values without a key of :class:`PerRank`.
_RANK = "rank"


class PerRank:
    """A value that differs between ranks, such as the position of a data loader.

    DCP keeps the value of one rank under a name. In this wrapper, each rank's value is saved, and
    after a restart each rank gets the value that was saved under its key.

    Args:
        value: an object with ``state_dict`` and ``load_state_dict``.
        key: names the owner of the value; for a data loader, the data-parallel rank. Ranks with
            the same key have the same value, and one of them saves it. Default: the global rank,
            which only fits a restart on the same ranks.

    Example:
        ```python
        extra = {"loader": dcp_rs.optim.PerRank(loader, key=mesh["dp"].get_local_rank())}
        ```
    """

    def __init__(self, value: Any, key: int | str | None = None) -> None:
        self.value = value
        self.key = key

    @property
    def _saved_key(self) -> str:
        """Return the name of the value in the checkpoint."""
        if self.key is not None:
            return f"key{self.key}"
        return f"{_RANK}{current_rank() or 0}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's value.

        Returns:
            The result of its ``state_dict()``.
        """
        state: dict[str, Any] = self.value.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Pass the state to this rank's value.

        Args:
            state: what :meth:`state_dict` returned on a rank with the same key.
        """
        self.value.load_state_dict(state)


class RngState(PerRank):
    """The random number generators of this rank: Python, torch on CPU and accelerator, and NumPy.

    NumPy's is included if NumPy was imported. A rank that finds no state in the checkpoint keeps
    its own, with a warning.

    Example:
        ```python
        extra = {"rng": dcp_rs.optim.RngState(), "step": 7}
        dcp_rs.optim.save_training_state("training", model, optimizer, extra)
        ```
    """

    def __init__(self) -> None:
        super().__init__(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators.

        Returns:
            The states by the name of the library. They load under ``weights_only=True``.
        """
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if torch.accelerator.is_available():
            state["accelerator"] = torch.get_device_module().get_rng_state()
        if "numpy" in sys.modules:
            name, keys, *rest = sys.modules["numpy"].random.get_state()
            state["numpy"] = (name, keys.tolist(), *plain_numbers(rest))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set every generator that ``state`` has a state of.

        Args:
            state: what :meth:`state_dict` returned.
        """
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"].cpu())
        if "accelerator" in state and torch.accelerator.is_available():
            torch.get_device_module().set_rng_state(state["accelerator"].cpu())
        if "numpy" in state:
            import numpy as np

            np.random.set_state(state["numpy"])  # noqa: NPY002  # restores the global generator


def state_of(value: Any) -> Any:
    """Return the state to save for an entry of ``extra``."""
    state = plain_numbers(value.state_dict() if is_stateful(value) else value)
    return {value._saved_key: state} if isinstance(value, PerRank) else state


def check_values(name: str, tree: Any) -> None:
    """Raise if a value of a state would not load under ``weights_only=True``.

    Args:
        name: the name of the state.
        tree: the state, as it is saved.

    Raises:
        UnsafePickleError: a value would not load.
        UnsupportedError: a value cannot be pickled.
    """
    for fqn, value in flatten({name: tree}).values.items():
        if isinstance(value, torch.Tensor):
            continue
        why = pickles.why_not_loadable(fqn, value)
        if why is not None:
            msg = (
                f"value {fqn!r} {why}. Save plain types in its place (numbers, text, lists, "
                "dicts, tensors): this is the state that a restart needs. Or pass "
                "strict_values=False, and weights_only=False to the load"
            )
            raise UnsafePickleError(msg, tensor=fqn)


def with_buffers_copied(state: dict[str, Any], models: Iterable[torch.nn.Module]) -> dict[str, Any]:
    """Return a state dict of ``models`` with copies of their buffers.

    A forward pass may write to buffers while the state dict is saved.
    """
    names = {
        name
        for model in models
        for key, _ in model.named_buffers(remove_duplicate=False)
        for name in _torch.fqns(model, key)
    }
    with torch.no_grad():
        return {key: clone(value) if key in names else value for key, value in state.items()}


def merge(old: Any, new: Any, *, keep: bool) -> Any:
    """Return ``new``. Nested dicts of ``old`` are updated in place, as in a load.

    Args:
        keep: keep the entries of those dicts that ``new`` lacks.
    """
    if type(old) is dict and isinstance(new, Mapping):
        merged = {key: merge(old.get(key), value, keep=keep) for key, value in new.items()}
        if not keep:
            old.clear()
        old.update(merged)
        return old
    return new


class SavedExtra:
    """Saved state of one entry of ``extra``.

    Args:
        entries: the checkpoint.
        extra: the caller's entries.
        name: the name of this one.
        partial_load: what is left alone.

    Attributes:
        template: memory for the entry, by name in the checkpoint.

    Raises:
        PlanError: the checkpoint lacks the entry, and that is an error.
    """

    def __init__(
        self, entries: SavedEntries, extra: dict[str, Any], name: str, partial_load: PartialLoad
    ) -> None:
        self._extra, self._name = extra, name
        value = extra[name]
        whole, tree = f"{EXTRA}.{name}", entries.tree((EXTRA, name))
        is_per_rank = isinstance(value, PerRank)
        keys = tree.by_key()
        if is_per_rank:
            whole = f"{whole}.{value._saved_key}"
            tree = keys.get(value._saved_key, SavedTree(is_exact=tree.is_exact))
        own = value.state_dict() if is_stateful(value) else value
        is_included = partial_load.includes(whole)
        if is_included and is_per_rank and not partial_load.is_partial:
            _check_ranks(f"{EXTRA}.{name}", value, keys)
        # DCP stores nothing for an empty dict, and keys as text: what it lacks may be an entry.
        self._keeps = partial_load.may_leave or not tree.is_exact
        is_empty = isinstance(own, dict) and not own and not (is_per_rank or tree.is_exact)
        self._is_loaded = bool(tree.paths or (tree.containers and is_included) or is_empty)
        if is_included and not self._is_loaded:
            if not is_per_rank and not partial_load.is_partial:
                raise PlanError(f"the checkpoint has no {whole}", tensor=whole)
            partial_load.report.missing.append(whole)
        left = partial_load.exclude(tree.paths)
        left |= partial_load.incomplete(key for key in tree.paths if key not in left)
        self._kept: dict[TreePath, Any] = {}  # leaves that stay
        if left:
            # One level down: the entry itself may be a leaf.
            flat = flatten({name: own})
            leaves = {_text(path[1:]): flat.values[fqn] for fqn, path in flat.paths.items()}
            gone = [tree.paths.pop(key) for key in list(tree.paths) if key in left]
            self._kept = {path: leaves[_text(path)] for path in gone if _text(path) in leaves}
            # A list cannot lack one of its entries.
            if any(type(part) is int for path in gone if path not in self._kept for part in path):
                partial_load.report.excluded += tree.paths
                tree.paths.clear()
            self._is_loaded = bool(tree.paths)
        self._tree = tree
        self._containers = partial_load.remaining(tree, whole)
        tensors = _tensors(own)
        self.template = {
            key: _memory(entry, tensors.get(_text(tree.paths[key])))
            for key, entry in entries.find(tree.paths).items()
        }

    def put(self, loaded: Mapping[str, Any]) -> None:
        """Put the loaded values, by name in the checkpoint, into the entry."""
        if not self._is_loaded:
            return
        leaves = [(None, path, leaf) for path, leaf in self._kept.items()] + [
            (self._tree.positions[key], path, loaded[key]) for key, path in self._tree.paths.items()
        ]
        state = build_tree(leaves, self._containers)
        value = self._extra[self._name]
        if is_stateful(value):
            value.load_state_dict(state)
        else:
            self._extra[self._name] = merge(value, state, keep=self._keeps)


def _check_ranks(name: str, value: PerRank, keys: Collection[str]) -> None:
    """Raise if this rank would not go on with its own state. Warn if it is a random state.

    Args:
        name: the name of the entry in the checkpoint.
        value: the caller's value.
        keys: the saved keys.

    Raises:
        PlanError: there is no state for the key; or without a key, there were more ranks.
    """
    is_found, key = value._saved_key in keys, value.key
    if is_found and (key is not None or isinstance(value, RngState)):
        return
    if isinstance(value, RngState):
        warn_caller(
            f"{name}: this rank keeps the random number generators that it has: "
            "the checkpoint has none of it"
        )
        return
    there = f"it was saved under {', '.join(sorted(keys)[:8])}" if keys else "there is none"
    if key is not None:
        raise PlanError(f"{name!r} has no state for key={key!r}: {there}", tensor=name)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    ranks = [int(key.removeprefix(_RANK)) for key in keys if key.removeprefix(_RANK).isdecimal()]
    if not is_found or max(ranks) >= size:
        msg = (
            f"{name!r} was saved by other ranks than load it: {there}, and this is rank {rank} of "
            f"{size}. Give it the key that tells whose it is, "
            "PerRank(value, key=data_parallel_rank), when you save and when you load"
        )
        raise PlanError(msg, tensor=name)


def _memory(entry: EntryInfo, own: Any) -> torch.Tensor | None:
    """Return memory for an entry: the caller's own tensor, if there is one; None for a value."""
    if entry.dtype is None:
        return None
    if isinstance(own, torch.Tensor):
        return own
    return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")


def _tensors(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], torch.Tensor]:
    """Return the tensors of a tree by path. Of keys of equal text the last one counts."""
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    if isinstance(tree, Mapping):
        pairs: Iterable[tuple[Any, Any]] = tree.items()
    else:
        pairs = enumerate(tree) if isinstance(tree, list) else ()
    return {
        leaf: tensor
        for key, value in pairs
        for leaf, tensor in _tensors(value, (*path, str(key))).items()
    }


def _text(path: TreePath) -> tuple[str, ...]:
    return tuple(map(str, text_path(path)))
