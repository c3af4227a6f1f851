"""What rode along in a checkpoint, on its way into the entries of ``extra``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_rs._warnings import warn_caller
from dcp_rs.errors import PlanError
from dcp_rs.tensors.flatten import flatten, is_stateful
from dcp_rs.tensors.nesting import TreePath, remaining, text_path
from dcp_rs.training.choice import Choice
from dcp_rs.training.extra import PerRank, RngState, merge, pack, state_of, unpack, why_not_found
from dcp_rs.training.saved_state import branch_at, join, tree_of

__all__ = ["EXTRA", "SavedExtra"]

#: Where these entries are in the checkpoint.
EXTRA = "extra"


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
        self._paths, self._positions, self._containers = branch.paths, branch.positions, branch.containers
        if whole in metadata.state_dict_metadata:
            self._paths = {whole: ()}
        #: Whether it gets a state: else it is left alone.
        is_empty = not isinstance(value, PerRank) and state_of(value) in ({}, [])
        self._is_loaded = bool(self._paths) or (bool(self._containers) and choice.wants(whole)) or is_empty
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
        self._containers = remaining(self._containers, leaves, lambda name: choice.wants(join(whole, name)))
        own = _leaves(value.state_dict() if is_stateful(value) else value)
        for key, path in self._paths.items():
            entry = metadata.state_dict_metadata[key]
            if isinstance(entry, TensorStorageMetadata):
                mine = own.get(_text(path))
                self.template[key] = (
                    mine if mine is not None else torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
                )
            else:
                self.template[key] = None

    def put(self, extra: dict[str, Any], loaded: Mapping[str, Any]) -> None:
        """Puts what was loaded, by name in the checkpoint, into the entry."""
        if not self._is_loaded:
            return
        kept = [(None, path, leaf) for path, leaf in self._kept.items()]
        leaves = [(self._positions.get(key), path, loaded[key]) for key, path in self._paths.items()]
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
        in_list = any(leaf is own and any(type(key) is int for key in path) for path, leaf in gone.items())
        if in_list:  # there is no list without one of its entries
            choice.report.excluded += self._paths
            self._paths = {}
        self._is_loaded = bool(self._paths)


def _check_ranks(metadata: Metadata, name: str, value: PerRank, choice: Choice) -> None:
    """Warn or raise where the value of this rank would not go on where it was.

    Raises:
        PlanError: there is none for it, or the value of a rank that is no more would be left behind.
    """
    above = branch_at(metadata, (EXTRA, name))
    saved = {str(path[0]) for path in [*above.paths.values(), *(c.path for c in above.containers)] if path}
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
    pairs = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    return {leaf: tensor for key, value in pairs for leaf, tensor in _leaves(value, (*path, str(key))).items()}
