"""Optimizer state by parameter name: from optimizers, and back into them, for plain, DDP, FSDP1 and FSDP2 modules."""

from __future__ import annotations

import copy
import hashlib
import itertools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim.named_optimizer import _NamedOptimizer
from torch.optim import Optimizer

from dcp_rs import _torch
from dcp_rs.dcp.together import Ranks
from dcp_rs.errors import PlanError
from dcp_rs.tensors.shards import global_shape
from dcp_rs.training.fsdp1 import fsdp1_group, is_fsdp1, sharded_state_dicts
from dcp_rs.training.parameters import compiler_names, is_named, names_by_key, parameter_names, without_compiler

__all__ = ["SavedOptimizers", "optimizer_state"]

#: Keys of a parameter group that say which parameters it has, and not how they are trained.
_WHO = ("params", "param_names")


def optimizer_state(model: torch.nn.Module, optimizers: Sequence[Optimizer], ranks: Ranks) -> dict[str, Any]:
    """``{"state": {fqn: {name: value}}, "param_groups": [...]}``, as ``get_optimizer_state_dict`` has it, of all optimizers together.

    Unlike that, it takes no step: an optimizer that has no state is saved without state. (torch steps it with gradients of zero, which
    counts as a step and, with weight decay, leaves traces.)

    Raises:
        PlanError: an optimizer has a parameter that is not in the model, or two optimizers have state for one parameter.
    """
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for number, optimizer in enumerate(optimizers):
        osd = _fsdp1_state(model, optimizer) if is_fsdp1(model) else _named_state(model, optimizer, number)
        twice = next((fqn for fqn in osd["state"] if fqn in state), None)
        if twice is not None:
            msg = f"two optimizers have state for parameter {twice!r}"
            raise PlanError(msg, tensor=twice)
        state.update(osd["state"])
        groups += osd["param_groups"]
    return {"state": state, "param_groups": _of_all_ranks(groups, ranks)}


def _named_state(model: torch.nn.Module, optimizer: Optimizer, number: int) -> dict[str, Any]:
    osd = optimizer.state_dict()
    names = names_by_key(model, optimizer, osd, number)
    return {
        "state": {names.get(key, key): value for key, value in osd["state"].items()},
        "param_groups": [group | {"params": [names[key] for key in group["params"]]} for group in osd["param_groups"]],
    }


def _fsdp1_state(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    with sharded_state_dicts(model):
        osd = FullyShardedDataParallel.optim_state_dict(
            model, optimizer, optimizer.state_dict(), group=fsdp1_group(model)
        )
    plain = without_compiler
    return {
        "state": {plain(key): value for key, value in osd["state"].items()},
        "param_groups": [
            group | {"params": [plain(key) for key in group["params"]]} for group in osd.get("param_groups", [])
        ],
    }


class SavedOptimizers:
    """The optimizer state in a checkpoint: what is there, memory to load it into, and the way of it into optimizers.

    Args:
        metadata: of the checkpoint.
        key: of the entry that holds it; empty where the checkpoint holds nothing else.
        groups: the parameter groups that were saved.

    Raises:
        PlanError: there is no optimizer state under this key.
    """

    def __init__(self, metadata: Metadata, key: str, groups: list[dict[str, Any]]) -> None:
        self._metadata = metadata
        self._groups = groups
        self._key = key
        # Parameter (name, or number as text) to the paths of its entries and their names in the checkpoint.
        self._entries: dict[str, dict[tuple[Any, ...], str]] = {}
        prefix = (*key.split("."), "state") if key else ("state",)
        for name, path in stored_paths(metadata, prefix):
            rest = path[len(prefix) :]
            self._entries.setdefault(str(rest[0]), {})[tuple(rest[1:])] = name
        #: Whether parameters go by their number among those of the optimizer.
        self.by_id = any(isinstance(param, int) for group in groups for param in group["params"])
        #: Parameters of the optimizers that :meth:`template` was given, and that no saved optimizer has.
        self.missing: list[str] = []
        # What was loaded: name in the checkpoint to value.
        self._values: dict[str, Any] = {}

    def template(self, model: torch.nn.Module, optimizers: Sequence[Optimizer], *, partial: bool) -> dict[str, Any]:
        """Memory for all state of the parameters of these optimizers, by name in the checkpoint. To be filled, and kept by the caller.

        Raises:
            PlanError: unless ``partial``, an optimizer has a parameter that the saved ones had not.
        """
        fsdp1 = is_fsdp1(model)
        shards = get_model_state_dict(model) if fsdp1 else {}
        self._values = {}
        self.missing = []
        for number, optimizer in enumerate(optimizers):
            names = parameter_names(model, optimizer, number)
            keys = self._saved_keys(model, optimizer, names, shards)
            unknown = self._unknown_params(keys)
            if unknown and not partial:
                more = f" (and {len(unknown) - 1} more)" if unknown[1:] else ""
                msg = f"optimizer {number} has parameter {unknown[0]!r}{more}, which no saved optimizer has"
                raise PlanError(msg, tensor=unknown[0])
            self.missing += unknown
            for param, fqns in names:
                for fqn in fqns:
                    own = {} if fsdp1 else optimizer.state.get(param, {})
                    like = shards.get(fqn, param)
                    for path, name in self._entries.get(keys[fqn], {}).items():
                        self._values[name] = self._memory(name, path, like, own)
        return self._values

    def fill(self, values: Mapping[str, Any]) -> None:
        """Takes what was loaded, by name in the checkpoint."""
        self._values = {name: values[name] for name in self._values}

    def apply(self, model: torch.nn.Module, optimizers: Sequence[Optimizer], *, partial: bool) -> None:
        """Puts what was loaded into the optimizers.

        Raises:
            PlanError: unless ``partial``, parameters of one group were saved in groups that differ.
        """
        fsdp1 = is_fsdp1(model)
        shards = get_model_state_dict(model) if fsdp1 and self.by_id else {}
        for number, optimizer in enumerate(optimizers):
            names = parameter_names(model, optimizer, number)
            keys = self._saved_keys(model, optimizer, names, shards)
            state = {
                fqn: nest({path: self._values[name] for path, name in self._entries[key].items()})
                for fqn, key in keys.items()
                if key in self._entries
            }
            groups = self._matching_groups(optimizer, names, keys, number, partial=partial)
            if fsdp1:
                self._apply_fsdp1(model, optimizer, state, groups)
                continue
            _prepare(optimizer)
            osd = optimizer.state_dict()
            by_key = names_by_key(model, optimizer, osd, number)
            optimizer.load_state_dict(
                {
                    "state": {key: state[fqn] for key, fqn in by_key.items() if fqn in state},
                    "param_groups": [
                        group | {who: mine[who] for who in _WHO if who in mine}
                        for group, mine in zip(groups, osd["param_groups"], strict=True)
                    ],
                }
            )

    def _apply_fsdp1(
        self, model: torch.nn.Module, optimizer: Optimizer, state: dict[str, Any], groups: list[dict[str, Any]]
    ) -> None:
        names = compiler_names(model)
        osd = {
            "state": {names.get(fqn, fqn): value for fqn, value in state.items()},
            "param_groups": [group | {"params": [names.get(fqn, fqn) for fqn in group["params"]]} for group in groups],
        }
        _prepare(optimizer)
        with sharded_state_dicts(model):
            flat = FullyShardedDataParallel.optim_state_dict_to_load(
                model,
                optimizer,
                osd,
                is_named_optimizer=is_named(optimizer.state_dict()),
                group=fsdp1_group(model),
            )
        optimizer.load_state_dict(flat)

    def _saved_keys(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        names: list[tuple[torch.Tensor, list[str]]],
        shards: Mapping[str, Any],
    ) -> dict[str, str]:
        """The names of an optimizer's parameters, and what they go by in the checkpoint."""
        fqns = [fqn for _, group in names for fqn in group]
        if not self.by_id:
            return {fqn: fqn for fqn in fqns}
        if any(len(group) > 1 for _, group in names):
            # Flat parameters: numbers were given before they were flattened, in the order of the model.
            order = {fqn: at for at, fqn in enumerate(shards)}
            fqns.sort(key=lambda fqn: order.get(fqn, len(order)))
        ids = [param for group in self._groups for param in group["params"]]
        if len(ids) != len(fqns):
            msg = f"the saved optimizer has {len(ids)} parameters, which go by number, and this one has {len(fqns)}"
            raise PlanError(msg)
        return {fqn: str(number) for fqn, number in zip(fqns, ids, strict=True)}

    def _unknown_params(self, keys: dict[str, str]) -> list[str]:
        """The parameters that no saved optimizer has."""
        saved = {str(param) for group in self._groups for param in group["params"]}
        return [fqn for fqn, key in keys.items() if key not in saved]

    def _matching_groups(
        self,
        optimizer: Optimizer,
        names: list[tuple[torch.Tensor, list[str]]],
        keys: dict[str, str],
        number: int,
        *,
        partial: bool,
    ) -> list[dict[str, Any]]:
        """For each group of the optimizer its parameters, and the settings that they were saved with."""
        group_of = {str(param): group for group in self._groups for param in group["params"]}
        fqns_of = {id(param): fqns for param, fqns in names}
        empty = [group for group in self._groups if not group["params"]]
        matched = []
        for at, group in enumerate(optimizer.param_groups):
            fqns = [fqn for param in group["params"] for fqn in fqns_of[id(param)]]
            found = {id(g): g for g in (group_of.get(keys[fqn]) for fqn in fqns) if g is not None}
            saved = list(found.values()) or ([] if fqns else empty[:1])
            settings = [{k: v for k, v in g.items() if k not in _WHO} for g in saved]
            if not partial and any(_text(other) != _text(settings[0]) for other in settings[1:]):
                msg = f"the parameters of group {at} of optimizer {number} were saved in groups with different settings"
                raise PlanError(msg, tensor=fqns[0])
            own = {k: v for k, v in group.items() if k not in _WHO}
            # Each has settings of its own: a learning rate that is a tensor is changed in place.
            matched.append(own | (copy.deepcopy(settings[0]) if settings else {}) | {"params": fqns})
        return matched

    def _memory(self, name: str, path: tuple[Any, ...], like: Any, own: Any) -> Any:
        """What an entry of a parameter's state is loaded into."""
        stored = self._metadata.state_dict_metadata[name]
        if not isinstance(stored, TensorStorageMetadata):
            return None
        shape, dtype = tuple(stored.size), stored.properties.dtype
        for key in path:
            own = own.get(key) if isinstance(own, Mapping) else None
        if isinstance(own, torch.Tensor) and global_shape(own) == shape:
            return own
        if path != ("step",) and isinstance(like, torch.Tensor) and global_shape(like) == shape:
            device = _torch.default_device() if like.device.type == "meta" else like.device
            return _torch.empty_like(like, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype)


# --- names ---------------------------------------------------------------------------------------------


def stored_paths(metadata: Metadata, prefix: tuple[str, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The entries below a path, and the path of each: as it was saved, else as its name says."""
    known = metadata.planner_data
    start = "".join(f"{key}." for key in prefix)
    for name in metadata.state_dict_metadata:
        if not name.startswith(start):
            continue
        path = known.get(name) if isinstance(known, Mapping) else None
        if path is None or len(path) <= len(prefix) or tuple(path[: len(prefix)]) != prefix:
            # Flat when it was saved (`flatten_optimizer_state_dict`, or no planner's data). Names of parameters have dots, those of
            # their states have none.
            path = (*prefix, *name[len(start) :].rsplit(".", 1))
        yield name, tuple(path)


def nest(flat: dict[tuple[Any, ...], Any]) -> Any:
    """A tree from its leaves by path. Numbers in paths are places in lists."""
    if () in flat:
        return flat[()]
    children: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for path, value in flat.items():
        children.setdefault(path[0], {})[path[1:]] = value
    if children and all(type(key) is int for key in children):
        return [nest(children[key]) for key in sorted(children)]
    return {key: nest(child) for key, child in children.items()}


def _prepare(optimizer: Optimizer) -> None:
    """Optimizers that load only into state that they have (torch's ``_NamedOptimizer``) make it: by a step, of which nothing else is to stay."""
    if optimizer.state or not isinstance(optimizer, _NamedOptimizer):
        return
    groups = [group for group in cast(list[dict[str, Any]], optimizer.param_groups) if "lr" in group]
    rates = [group["lr"] for group in groups]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params]
    for group in groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    try:
        optimizer.init_state()
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient


# --- ranks ---------------------------------------------------------------------------------------------


def _of_all_ranks(groups: list[dict[str, Any]], ranks: Ranks) -> list[dict[str, Any]]:
    """The parameter groups of all ranks. DCP keeps one rank's value of a name, which with pipelines would lose the others'."""
    digests = ranks.all(lambda: hashlib.blake2b(_text(groups), digest_size=16).digest())
    if len(set(digests)) == 1:
        return groups
    gathered = ranks.all(lambda: groups)
    union: dict[bytes, dict[str, Any]] = {}
    for group in itertools.chain.from_iterable(gathered):
        union.setdefault(_text(group), group)
    return list(union.values())


def _text(value: Any) -> bytes:
    """Equal values give equal bytes, which tensors do not under ``==``."""
    return pickle.dumps(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), value.tolist())
    if isinstance(value, Mapping):
        return sorted((str(key), _plain(entry)) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return repr(value)
