"""Extra entries of a training checkpoint: schedulers, data loaders, random number generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from dcp_rs import _torch
from dcp_rs._arguments import type_of
from dcp_rs._log import current_rank
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.names import some
from dcp_rs.engine.matching import EntryInfo
from dcp_rs.errors import PlanError, UnsafePickleError
from dcp_rs.tensors import pickles
from dcp_rs.tensors.flatten import flatten, is_stateful
from dcp_rs.tensors.memory import check_has_shape, clone
from dcp_rs.tensors.pickles import plain_numbers
from dcp_rs.tensors.shards import global_shape
from dcp_rs.training.names import unwrapper
from dcp_rs.training.partial_load import PartialLoad
from dcp_rs.training.saved_tree import SavedTree, as_in, as_text, join
from dcp_rs.training.schedulers import GroupPlaces

#: The key of these entries in the checkpoint.
EXTRA = "extra"
#: Prefix of the names of values without a key of :class:`PerRank`.
_RANK = "rank"
#: The same, of those with a key.
_KEY = "key"

#: A function of the saved states by key, the key of this rank, and the keys of all ranks.
Reshard = Callable[[dict[Any, Any], Any, list[Any]], Any]


class PerRank:
    """A value that differs between ranks, such as the position of a data loader.

    DCP keeps the value of one rank under a name. In this wrapper, each rank's value is saved, and
    after a restart each rank gets the value that was saved under its key. A load raises if the keys
    of all ranks are not the saved ones, unless ``reshard`` makes new states of the saved ones.

    Args:
        value: an object with ``state_dict`` and ``load_state_dict``.
        key: names the owner of the value; for a data loader, the data-parallel rank. Ranks with
            the same key have the same value, and one of them saves it. Default: the global rank,
            which only fits a restart on the same ranks.
        reshard: called on each rank as ``reshard(states, key, keys)`` if the keys differ. It gets
            the saved states by key, the key of this rank, and the keys of all ranks. It returns
            the state for ``value.load_state_dict``.

    Example:
        ```python
        extra = {"loader": dcp_rs.optim.PerRank(loader, key=mesh["dp"].get_local_rank())}
        ```

    Raises:
        TypeError: the value has no ``state_dict`` or no ``load_state_dict``.
    """

    def __init__(
        self, value: Any, key: int | str | None = None, reshard: Reshard | None = None
    ) -> None:
        if not is_stateful(value):
            msg = (
                "PerRank takes an object with state_dict() and load_state_dict(), "
                f"not {type(value).__name__}"
            )
            raise TypeError(msg)
        self.value = value
        self.key = key
        self.reshard = reshard

    @property
    def _owner(self) -> int | str:
        """Return the key, by default the global rank."""
        return current_rank() or 0 if self.key is None else self.key

    @property
    def _saved_key(self) -> str:
        """Return the name of the value in the checkpoint."""
        return f"{_RANK if self.key is None else _KEY}{self._owner}"

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
    its own, with a warning. Give a ``DataLoader`` a ``generator`` of its own: else ``iter(loader)``
    after a load draws from the random state that was just restored.

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
    if isinstance(value, type) and is_stateful(value):
        raise TypeError(f"extra has {type_of(value)}: pass an instance of it")
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
    names = set[str]()
    for model in models:
        names.update(map(unwrapper(model), dict(model.named_buffers(remove_duplicate=False))))
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


class SavedValue:
    """Saved state at one path. All of it is loaded, or nothing.

    Args:
        whole: the name of the path.
        tree: what is saved there.
        own: the caller's value.
        partial_load: what is left alone.
        as_saved: load tensors in the shapes and dtypes that they have in the checkpoint, for an
            object that takes its state as it is. Otherwise they have to be those of ``own``.

    Attributes:
        template: memory for the state, by name in the checkpoint.
        is_saved: the checkpoint has it.
        is_loaded: the load takes it.
    """

    def __init__(
        self,
        whole: str,
        tree: SavedTree,
        own: Any,
        partial_load: PartialLoad,
        *,
        as_saved: bool,
    ) -> None:
        self._tree, self._own = tree, own
        self.template: dict[str, torch.Tensor | None] = {}
        # DCP stores nothing for an empty dict.
        is_empty = not tree.is_exact and isinstance(own, dict) and not own
        self.is_saved = bool(tree.paths or tree.containers or is_empty)
        self.is_loaded = self.is_saved and partial_load.takes(list(tree.paths) or [whole])
        if not self.is_loaded:
            return
        tensors = _tensors(own)
        for key, entry in partial_load.part.entries.find(tree.paths).items():
            tensor = tensors.get(as_text(tree.paths[key]))
            if tensor is not None:
                check_has_shape(key, tensor, "load into")
            if entry.dtype is not None and tensor is not None and not as_saved:
                shape = tuple(global_shape(tensor))
                if shape != entry.shape:
                    partial_load.refuse_shape(key, shape, entry.shape, "extra")
                    self.is_loaded = False
                    continue
            self.template[key] = _memory(entry, tensor, as_saved=as_saved)
        if not self.is_loaded:
            partial_load.report.excluded += self.template
            self.template.clear()

    def build(self, loaded: Mapping[str, Any]) -> Any:
        """Return the state, of loaded values by name in the checkpoint."""
        state = self._tree.build(loaded)
        return state if self._tree.is_exact else as_in(self._own, state)


class SavedExtra:
    """Saved state of one entry of ``extra``.

    Args:
        extra: the caller's entries.
        name: the name of this one.
        owners: the keys of all ranks, if it is a :class:`PerRank`: ``_owner`` by ``_saved_key``.
        partial_load: what is left alone.
        places: for a scheduler, the saved groups of its optimizer's groups.

    Attributes:
        template: memory for the entry, by name in the checkpoint.

    Raises:
        PlanError: the checkpoint lacks the entry, or has it for other ranks, and that is an error.
    """

    def __init__(
        self,
        extra: dict[str, Any],
        name: str,
        owners: Mapping[str, Any],
        partial_load: PartialLoad,
        places: GroupPlaces | None = None,
    ) -> None:
        self._extra, self._name = extra, name
        self._owners, self._places = owners, places
        value, part = extra[name], partial_load.part
        whole, tree = part.prefix, part.entries.tree(part.path)
        # DCP stores nothing for an empty dict, and keys as text: what it lacks may be an entry.
        self._keeps = partial_load.may_leave or not tree.is_exact
        own, trees = value.state_dict() if is_stateful(value) else value, {"": tree}
        self._takes_all = False
        if isinstance(value, PerRank):
            keys, whole = tree.by_key(), f"{whole}.{value._saved_key}"
            trees = {"": keys.get(value._saved_key, SavedTree(is_exact=tree.is_exact))}
            if partial_load.includes(whole) and not partial_load.is_partial:
                self._takes_all = _takes_all(part.prefix, value, keys, owners)
            if self._takes_all:
                own, trees = None, keys  # these take memory of their own
        self._values = {
            key: SavedValue(whole, one, own, partial_load, as_saved=is_stateful(value))
            for key, one in trees.items()
        }
        values = self._values.values()
        self.template = {key: memory for one in values for key, memory in one.template.items()}
        if any(one.is_saved for one in values):
            return
        if isinstance(value, RngState) and partial_load.includes(whole):  # it has warned
            partial_load.report.missing.append(whole)
        else:
            advice = (
                ". To keep the entry as it is, pass partial={'extra'}; if it has another name "
                f"there, names={{{name!r}: ...}}"
            )
            partial_load.miss(whole, advice)

    def put(self, loaded: Mapping[str, Any]) -> None:
        """Put the loaded values, by name in the checkpoint, into the entry."""
        if not all(one.is_loaded for one in self._values.values()):
            return
        states = {key: one.build(loaded) for key, one in self._values.items()}
        value = self._extra[self._name]
        if self._takes_all:
            owners = list(self._owners.values())
            is_text = all(isinstance(owner, str) for owner in owners)
            by_owner = {_owner_of(key, is_text=is_text): state for key, state in states.items()}
            value.load_state_dict(value.reshard(by_owner, value._owner, owners))
        elif is_stateful(value):
            state = states[""]
            value.load_state_dict(self._places.arrange(state) if self._places else state)
        else:
            self._extra[self._name] = merge(value, states[""], keep=self._keeps)


def _takes_all(name: str, value: PerRank, keys: Collection[str], owners: Mapping[str, Any]) -> bool:
    """Compare the saved keys of a value with those of all ranks.

    Args:
        name: the name of the entry in the checkpoint.
        value: the caller's value.
        keys: the saved keys.
        owners: the keys of the ranks that load.

    Returns:
        Whether the value is made of the states of all keys, by its ``reshard``.

    Raises:
        PlanError: they differ, and the value has no ``reshard``.
    """
    if isinstance(value, RngState):
        if value._saved_key not in keys:
            warn_caller(
                f"{name}: this rank keeps the random number generators that it has: "
                "the checkpoint has none of it"
            )
        return False
    if not keys or set(owners) == set(keys):
        return False
    if value.reshard is not None:
        return True
    msg = (
        f"{name!r} was saved for {some(keys)}, and the ranks that load it are {some(owners)}. To "
        "divide the saved states anew, pass PerRank(value, key, reshard=function). If the state is "
        "not of a rank but of a data-parallel rank, say so in the save and the load: "
        "PerRank(value, key=data_parallel_rank)"
    )
    raise PlanError(msg, tensor=name)


def _owner_of(key: str, *, is_text: bool) -> int | str:
    """Return the owner that a saved key names: a number, if owners are no text."""
    owner = key.removeprefix(_RANK if key.startswith(_RANK) else _KEY)
    return int(owner) if owner.isdecimal() and not is_text else owner


def split_extra_state(state: dict[str, Any], partial_load: PartialLoad) -> dict[str, SavedValue]:
    """Take what ``get_extra_state`` of modules returned out of a state dict.

    It may have any length, and be empty before a load. So the saved state comes back as it is.

    Args:
        state: the state dict of a model.
        partial_load: its place in the checkpoint, and what is left alone.

    Returns:
        What is saved of it, by key in ``state``.

    Raises:
        PlanError: the checkpoint lacks some, and that is an error.
    """
    found: dict[str, SavedValue] = {}
    part = partial_load.part
    for key in [key for key in state if f".{key}".endswith("._extra_state")]:
        own, whole = state.pop(key), join(part.prefix, key)
        tree = part.entries.tree((*part.path, key))
        value = SavedValue(whole, tree, own, partial_load, as_saved=True)
        if value.is_loaded:
            found[key] = value
        elif not value.is_saved:
            partial_load.miss(whole)
    return found


def new_memory(entry: EntryInfo) -> torch.Tensor | None:
    """Return a new tensor on the host for an entry; None for a value."""
    return (
        None if entry.dtype is None else torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    )


def _memory(entry: EntryInfo, own: Any, *, as_saved: bool) -> torch.Tensor | None:
    """Return memory for an entry: the caller's own tensor, if it fits; None for a value."""
    if entry.dtype is None or not isinstance(own, torch.Tensor):
        return new_memory(entry)
    fits = tuple(global_shape(own)) == entry.shape
    if not as_saved or (fits and own.dtype == entry.dtype):
        return own
    if fits:
        return _torch.empty_like(own.detach(), dtype=entry.dtype, device=own.device)
    if type(own) in _torch.PLAIN_TYPES:
        return torch.empty(entry.shape, dtype=entry.dtype, device=own.device)
    return own  # it is sharded: the load raises


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
