"""What rides along with a model: schedulers, positions of data loaders, random number generators, as a state dict that loses nothing."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dcp_rs.errors import PlanError
from dcp_rs.tensors.nesting import WHOLE, unwrap
from dcp_rs.tensors.trees import is_stateful
from dcp_rs.training.numbers import plain_numbers

__all__ = ["PerRank", "RngState", "merge", "pack", "state_of", "unpack"]

#: The keys of a mapping that holds tensors, where some are not text.
_KEYS = "dcp_rs.keys"


class PerRank:
    """A value of which every rank has its own: the position of a data loader, a queue, a random number generator.

    DCP keeps one rank's of what all ranks save under the same name, so give such a value to ``extra`` in this wrapper.
    After a restart rank r gets what rank r saved. A rank beyond those that saved keeps what it has.

    Args:
        value: an object with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's value."""
        state: dict[str, Any] = self.value.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hands the state to this rank's value."""
        self.value.load_state_dict(state)


class RngState(PerRank):
    """The random number generators of this rank: Python's, torch's on the CPU and on the current accelerator, and NumPy's if it was imported."""

    def __init__(self) -> None:
        super().__init__(self)

    def state_dict(self) -> dict[str, Any]:
        """All states. They load under ``weights_only=True``."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if torch.accelerator.is_available():
            state["accelerator"] = torch.get_device_module().get_rng_state()
        if "numpy" in sys.modules:
            name, keys, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
            state["numpy"] = (name, keys.tolist(), int(position), int(has_gauss), float(gauss))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets every generator that ``state`` has a state of."""
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
        return {rank_key(): pack(plain_numbers(value.state_dict()))}
    return pack(plain_numbers(value.state_dict() if is_stateful(value) else value))


def rank_key() -> str:
    """The key of this rank's own state."""
    return f"rank{dist.get_rank() if dist.is_initialized() else 0}"


def pack(tree: Any) -> Any:
    """The tree, so that DCP's flattening loses none of it.

    Raises:
        PlanError: two keys of a mapping with tensors are the same as text.
    """
    if not isinstance(tree, Mapping | list):
        return tree
    if not _has_tensors(tree):
        return tree if _is_plain(tree) else (WHOLE, tree)
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


def _is_plain(tree: Any) -> bool:
    """Whether a tree without tensors comes back from DCP as it is."""
    if isinstance(tree, list):
        return all(_is_plain(entry) for entry in tree)
    if not isinstance(tree, Mapping):
        return True
    return type(tree) is dict and bool(tree) and all(type(k) is str and _is_plain(v) for k, v in tree.items())


def _has_tensors(tree: Any) -> bool:
    if isinstance(tree, torch.Tensor):
        return True
    if isinstance(tree, Mapping):
        return any(_has_tensors(value) for value in tree.values())
    return isinstance(tree, list) and any(_has_tensors(value) for value in tree)
