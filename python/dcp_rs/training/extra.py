"""What is saved beside a model: schedulers, positions of data loaders, random number generators, as a state dict that loses nothing."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_rs import _torch
from dcp_rs._warnings import warn_caller
from dcp_rs.errors import PlanError, UnsafePickleError
from dcp_rs.tensors import pickles
from dcp_rs.tensors.flatten import flatten, is_stateful
from dcp_rs.tensors.nesting import WHOLE, TreePath, is_plain, remaining, text_path, unwrap
from dcp_rs.tensors.pickles import plain_numbers
from dcp_rs.training.choice import Choice
from dcp_rs.training.saved_state import branch_at, join, tree_of

__all__ = [
    "EXTRA",
    "PerRank",
    "RngState",
    "SavedExtra",
    "check_values",
    "pack",
    "state_of",
    "unpack",
    "with_buffers_copied",
]

#: Where these entries are in the checkpoint.
EXTRA = "extra"
#: The keys of a mapping that holds tensors, where some are not text.
_KEYS = "dcp_rs.keys"
#: The prefix of keys of :class:`PerRank`.
_KEY, _RANK = "key", "rank"


class PerRank:
    """A value that differs between ranks, such as the position of a data loader.

    DCP keeps the value of one rank under a name. In this wrapper, each rank's value is saved, and
    after a restart each rank gets the value that was saved under its key.

    Args:
        value: an object with ``state_dict`` and ``load_state_dict``.
        key: whose value it is; for a data loader, the data-parallel rank. Ranks with the same key
            have the same value, and one of them saves it. Default: the global rank, which only
            fits a restart on the same ranks.

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
            return f"{_KEY}{self.key}"
        return f"{_RANK}{dist.get_rank() if dist.is_initialized() else 0}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's value.

        Returns:
            What its ``state_dict()`` returns.
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
            name, keys, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
            state["numpy"] = (name, keys.tolist(), int(position), int(has_gauss), float(gauss))
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

            np.random.set_state(state["numpy"])  # noqa: NPY002  # the state of the global generator is what is restored


def state_of(value: Any) -> Any:
    """What is saved for an entry of ``extra``."""
    if isinstance(value, PerRank):
        return {value._saved_key: pack(plain_numbers(value.state_dict()))}
    return pack(plain_numbers(value.state_dict() if is_stateful(value) else value))


def check_values(name: str, tree: Any) -> None:
    """Raise where a value of a state would not load back under ``weights_only=True``.

    Args:
        name: of what is above it.
        tree: the state, as it is saved.

    Raises:
        UnsafePickleError: such a value.
        UnsupportedError: a value that does not pickle.
    """
    for fqn, value in flatten({name: tree}).values.items():
        if isinstance(value, torch.Tensor):
            continue
        why = pickles.why_not_loadable(fqn, value)
        if why is not None:
            msg = (
                f"{why}. Save plain types in its place (numbers, text, lists, dicts, tensors): this is the state that a restart needs. "
                "Or pass strict_values=False, and weights_only=False to the load"
            )
            raise UnsafePickleError(msg, tensor=fqn)


def with_buffers_copied(state: dict[str, Any], models: Iterable[torch.nn.Module]) -> dict[str, Any]:
    """Return a state dict of models with copies of their buffers: a forward pass may write to those.

    Args:
        state: as torch's ``get_model_state_dict`` gives it.
        models: whose it is.
    """
    names = {
        name
        for model in models
        for key, _ in model.named_buffers(remove_duplicate=False)
        for name in _torch.fqns(model, key)
    }
    with torch.no_grad():
        return {key: value.clone() if key in names else value for key, value in state.items()}


def why_not_found(name: str, value: PerRank, saved: Iterable[str]) -> str | None:
    """Return why a value of which each rank has its own does not go on where it was; None where it does.

    Args:
        name: of the entry of ``extra``.
        value: that of this rank.
        saved: the keys that it was saved under, by all ranks.
    """
    keys = set(saved)
    ranks = [int(key.removeprefix(_RANK)) for key in keys if key.removeprefix(_RANK).isdecimal()]
    size = dist.get_world_size() if dist.is_initialized() else 1
    if value._saved_key in keys and (value.key is not None or all(rank < size for rank in ranks)):
        return None
    there = (
        f"it was saved under {', '.join(sorted(keys)[:8])}" if keys else "the checkpoint has none"
    )
    if value.key is not None:
        return f"{name!r} has no state for key={value.key!r}: {there}"
    return (
        f"{name!r} was saved by other ranks than load it: {there}, and this is rank {dist.get_rank() if size > 1 else 0} of {size}. "
        "Give it the key that tells whose it is, PerRank(value, key=data_parallel_rank), when you save and when you load"
    )


def pack(tree: Any) -> Any:
    """The tree, so that DCP's flattening loses none of it.

    Raises:
        PlanError: two keys of a mapping with tensors are the same as text.
    """
    if not isinstance(tree, Mapping | list):
        return tree if is_plain(tree) else (WHOLE, tree)
    if not _has_tensors(tree):
        return tree if is_plain(tree) else (WHOLE, tree)
    if isinstance(tree, list):
        return [pack(entry) for entry in tree]
    packed = {str(key): pack(value) for key, value in tree.items()}
    if len(packed) != len(tree):
        msg = (
            f"a mapping with tensors has keys that are the same as text: {sorted(map(repr, tree))}"
        )
        raise PlanError(msg)
    if not all(type(key) is str for key in tree):
        packed[_KEYS] = (_KEYS, list(tree))
    return packed


def unpack(tree: Any) -> Any:
    """What :func:`pack` was given, but for the types of mappings that hold tensors."""
    if isinstance(tree, tuple):
        return unwrap(tree)
    if isinstance(tree, list):
        return [unpack(entry) for entry in tree]
    if not isinstance(tree, Mapping):
        return tree
    keys = {str(key): key for key in tree[_KEYS][1]} if _KEYS in tree else {}
    return {keys.get(key, key): unpack(value) for key, value in tree.items() if key != _KEYS}


def merge(old: Any, new: Any) -> Any:
    """``new``, but nested dicts of ``old`` are kept and updated, as a load does it."""
    if type(old) is dict and isinstance(new, Mapping):
        for key, value in new.items():
            old[key] = merge(old.get(key), value)
        return old
    return new


def _has_tensors(tree: Any) -> bool:
    if isinstance(tree, torch.Tensor):
        return True
    if isinstance(tree, Mapping):
        return any(_has_tensors(value) for value in tree.values())
    return isinstance(tree, list) and any(_has_tensors(value) for value in tree)


class SavedExtra:
    """The state of one entry of ``extra``, and where it goes.

    Args:
        metadata: of the checkpoint.
        name: of the entry.
        value: what is there now.
        choice: what of it is loaded.

    Attributes:
        template: memory for it, by name in the checkpoint.

    Raises:
        PlanError: the checkpoint lacks it, and that is an error.
    """

    def __init__(self, metadata: Metadata, name: str, value: Any, choice: Choice) -> None:
        self._name = name
        self.template: dict[str, Any] = {}
        prefix = (EXTRA, name, value._saved_key) if isinstance(value, PerRank) else (EXTRA, name)
        whole = ".".join(prefix)
        # The names of its leaves in the checkpoint, and where in it they belong.
        branch = branch_at(metadata, prefix)
        self._paths, self._positions, self._containers = (
            branch.paths,
            branch.positions,
            branch.containers,
        )
        if whole in metadata.state_dict_metadata:
            self._paths = {whole: ()}
        #: Whether it gets a state: else it is left alone.
        is_empty = not isinstance(value, PerRank) and state_of(value) in ({}, [])
        self._is_loaded = (
            bool(self._paths) or (bool(self._containers) and choice.wants(whole)) or is_empty
        )
        self._kept: dict[TreePath, Any] = {}  # leaves that stay as they are
        if isinstance(value, PerRank) and choice.wants(whole):
            _check_ranks(metadata, name, value, choice)
        if not self._is_loaded and choice.wants(whole):
            if not isinstance(value, PerRank) and not choice.is_partial:
                msg = f"the checkpoint has no {EXTRA}.{name}"
                raise PlanError(msg, tensor=f"{EXTRA}.{name}")
            choice.report.missing.append(whole)
        left = choice.left_out(self._paths)
        left |= choice.held_in_part(key for key in self._paths if key not in left)
        if left:
            self._keep(value, left, choice)
        leaves = self._paths.values()
        self._containers = remaining(
            self._containers, leaves, lambda name: choice.wants(join(whole, name))
        )
        own = _leaves(value.state_dict() if is_stateful(value) else value)
        for key, path in self._paths.items():
            entry = metadata.state_dict_metadata[key]
            if isinstance(entry, TensorStorageMetadata):
                mine = own.get(_text(path))
                self.template[key] = (
                    mine
                    if mine is not None
                    else torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
                )
            else:
                self.template[key] = None

    def put(self, extra: dict[str, Any], loaded: Mapping[str, Any]) -> None:
        """Puts what was loaded, by name in the checkpoint, into the entry."""
        if not self._is_loaded:
            return
        kept = [(None, path, leaf) for path, leaf in self._kept.items()]
        leaves = [
            (self._positions.get(key), path, loaded[key]) for key, path in self._paths.items()
        ]
        state = unpack(tree_of(kept + leaves, self._containers))
        value = extra[self._name]
        if is_stateful(value):
            value.load_state_dict(state)
        else:
            extra[self._name] = merge(value, state)

    def _keep(self, value: Any, left: set[str], choice: Choice) -> None:
        """Leaves these names alone. What they stand for stays as it is: in the state that an object gets, too."""
        packed = pack(value.state_dict() if is_stateful(value) else value)
        # One level down, as what is packed need not be a mapping.
        flat = flatten({"": packed})
        own = {_text(path[1:]): flat.values[name] for name, path in flat.text_paths().items()}
        gone = {path: own.get(_text(path), own) for key, path in self._paths.items() if key in left}
        self._paths = {key: path for key, path in self._paths.items() if key not in left}
        self._kept = {path: leaf for path, leaf in gone.items() if leaf is not own}
        in_list = any(
            leaf is own and any(type(key) is int for key in path) for path, leaf in gone.items()
        )
        if in_list:  # there is no list without one of its entries
            choice.report.excluded += self._paths
            self._paths = {}
        self._is_loaded = bool(self._paths)


def _check_ranks(metadata: Metadata, name: str, value: PerRank, choice: Choice) -> None:
    """Warn or raise where the value of this rank would not go on where it was.

    Raises:
        PlanError: there is none for it, or the value of a rank that is no more would be left
            behind.
    """
    above = branch_at(metadata, (EXTRA, name))
    saved = {
        str(path[0])
        for path in [*above.paths.values(), *(c.path for c in above.containers)]
        if path
    }
    why = why_not_found(f"{EXTRA}.{name}", value, saved)
    if why is None or choice.is_partial:
        return
    if not isinstance(value, RngState):
        raise PlanError(why, tensor=f"{EXTRA}.{name}")
    if value._saved_key not in saved:
        warn_caller(
            f"{EXTRA}.{name}: this rank keeps the random number generators that it has: the checkpoint has none of it"
        )


def _text(path: TreePath) -> tuple[str, ...]:
    return tuple(map(str, text_path(path)))


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], torch.Tensor]:
    """The tensors of a tree by path."""
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    pairs = (
        tree.items()
        if isinstance(tree, Mapping)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    return {
        leaf: tensor
        for key, value in pairs
        for leaf, tensor in _leaves(value, (*path, str(key))).items()
    }
