"""What rides along with a model: schedulers, positions of data loaders, random number generators, as a state dict that loses nothing."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from dcp_rs import _torch
from dcp_rs.errors import PlanError, UnsafePickleError
from dcp_rs.tensors import pickles
from dcp_rs.tensors.flatten import flatten, is_stateful
from dcp_rs.tensors.nesting import WHOLE, is_plain, unwrap
from dcp_rs.tensors.pickles import plain_numbers

__all__ = [
    "PerRank",
    "RngState",
    "check_values",
    "merge",
    "pack",
    "state_of",
    "unpack",
    "why_not_found",
    "with_buffers_copied",
]

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
    there = f"it was saved under {', '.join(sorted(keys)[:8])}" if keys else "the checkpoint has none"
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
        msg = f"a mapping with tensors has keys that are the same as text: {sorted(map(repr, tree))}"
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
