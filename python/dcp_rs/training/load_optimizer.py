"""Optimizer state of a checkpoint, loaded by parameter: plain, DDP, FSDP1 and FSDP2 modules."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_rs import _torch
from dcp_rs.errors import PlanError
from dcp_rs.options import Rename
from dcp_rs.tensors.flatten import get_at
from dcp_rs.tensors.nesting import Container, TreePath, kind_of, like, nest
from dcp_rs.tensors.shards import global_shape
from dcp_rs.training.extra import RngState
from dcp_rs.training.names import StoredNames
from dcp_rs.training.optimizers import (
    compiler_names,
    fqns_by_parameter,
    fsdp1_group,
    fsdp1_state,
    is_fsdp1,
    is_named,
    names_by_key,
    parameter_names,
    renamed,
    settings_of,
    sharded_state_dicts,
)
from dcp_rs.training.partial_load import PartialLoad
from dcp_rs.training.saved_tree import SavedEntries, build_tree, join, path_of
from dcp_rs.training.settings import (
    GroupSettings,
    KeepSettings,
    check_kept,
    check_kinds,
    check_stateless,
    match_empty,
    warn_of_replaced,
)
from dcp_rs.training.sources import MODEL, Part

__all__ = ["SavedOptimizers", "saved_optimizers"]

_MISSING: Any = object()


@dataclass
class _Target:
    """An optimizer to load into.

    State that belongs to no parameter goes by its own key in place of an FQN.

    Attributes:
        names: its parameters with their FQNs.
        own_keys: the keys of its parameters in its own state dict, by FQN; empty for FSDP1.
        keys: the keys of its parameters in the checkpoint, by FQN.
        groups: the parameters and settings of each of its groups.
        own: the state that it has, by FQN, as its ``state_dict()`` returns it.
        made: that state or, if it has none, the state that its first step makes. Of parameters of
            FSDP1 there is none: they are flat.
        is_converted: its ``state_dict()`` has other dtypes or shapes than its ``state``.
        kept: the FQNs of parameters whose own state stays.
    """

    optimizer: Optimizer
    names: list[tuple[torch.Tensor, list[str]]]
    own_keys: dict[str, Any]
    keys: dict[str, str]
    groups: list[dict[str, Any]]
    own: dict[str, Any]
    made: dict[str, Any]
    is_converted: bool
    kept: set[str]


def saved_optimizers(
    part: Part,
    partial_load: PartialLoad,
    *,
    keep: KeepSettings = False,
    needed: bool = False,
    rename: Rename = None,
) -> SavedOptimizers | None:
    """Return the optimizer state under a key; None if there is none, or the load excludes it.

    Args:
        part: the checkpoint, and the key of the state in it.
        partial_load: what is left alone.
        keep: the settings of the optimizers that stay.
        needed: raise if there is no state, in a partial load too.
        rename: as for :func:`dcp_rs.load`, of names of parameters below ``model``.

    Raises:
        PlanError: there is none, and that is an error. Or what is there has no parameter groups.
    """
    entries, key = part.entries, part.prefix
    base = join(key, "param_groups")
    names = [name for name in entries.below(key) if name != key]
    if not any(map(partial_load.includes, names or [base])):
        partial_load.exclude(names)
        return None
    tree = entries.tree(path_of(base), may_be_flat=True)
    if tree.paths:
        leaves = [
            (tree.positions[name], path, part.reader._read_value(name))
            for name, path in tree.paths.items()
        ]
        groups = _groups(build_tree(leaves, tree.containers), base)
        if not any(map(partial_load.includes, tree.paths)):
            partial_load.report.excluded += tree.paths
            groups = [{"params": group["params"]} for group in groups]
        return SavedOptimizers(entries, key, groups, partial_load, keep, rename)
    if partial_load.is_partial and not needed:
        partial_load.report.missing.append(key)
        return None
    if part.reader.source == "safetensors":
        msg = "the checkpoint holds a model alone: load it without an optimizer"
        raise PlanError(msg, tensor=base)
    msg = f"the checkpoint has no optimizer state under {key!r}: there is no {base!r}"
    above = (f".{name}".partition(".param_groups") for name in entries.names)
    other = next((before.removeprefix(".") for before, found, _ in above if found), None)
    if other is not None:
        msg += (
            f". There is one under {other!r}: pass names={{'optimizer': {other!r}}}, or "
            f"load_optim_state_dict(..., key={other!r})"
        )
    raise PlanError(msg, tensor=base)


def _groups(saved: Any, base: str) -> list[dict[str, Any]]:
    """Return the saved parameter groups as a list.

    Raises:
        PlanError: they are none.
    """
    groups = saved
    if isinstance(saved, Mapping):  # by parameter, from `flatten_optimizer_state_dict`
        groups = [
            {**settings, "params": [fqn]} if isinstance(settings, Mapping) else settings
            for fqn, settings in saved.items()
        ]
    if not isinstance(groups, list) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple)
        for group in groups
    ):
        raise PlanError(f"{base!r} holds no parameter groups", tensor=base)
    return groups


class SavedOptimizers:
    """The optimizer state in a checkpoint, and its way into optimizers.

    Args:
        entries: the checkpoint.
        key: the entry that holds it; empty if the checkpoint holds nothing else.
        groups: the saved parameter groups.
        partial_load: what is left alone.
        keep: the settings of the optimizers that stay.
        rename: a renaming of parameters.
    """

    def __init__(
        self,
        entries: SavedEntries,
        key: str,
        groups: list[dict[str, Any]],
        partial_load: PartialLoad,
        keep: KeepSettings,
        rename: Rename,
    ) -> None:
        self._saved = entries
        self._groups = groups
        self._partial = partial_load
        self._keep = keep
        self._prefix = join(key, "state")
        #: The settings of the group of each saved parameter.
        self._settings: dict[str, dict[str, Any]] = {}
        #: Those of the groups without parameters.
        self._empty = [settings_of(group) for group in groups if not group["params"]]
        for group in groups:
            self._settings |= dict.fromkeys(map(str, group["params"]), settings_of(group))
        self._names = StoredNames(self._settings, rename)
        whole = entries.tree(path_of(self._prefix), self._settings, may_be_flat=True)
        #: The state of each parameter, and of each key that belongs to none.
        self._state = whole.by_key()
        self._takes_groups = any(map(settings_of, groups))
        #: The dtypes of the memory for state, by name. The load may cast to another dtype.
        self._dtypes: dict[str, torch.dtype] = {}
        self._models: Sequence[torch.nn.Module] = ()
        self._targets: list[_Target] = []

    def template(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[Optimizer]
    ) -> dict[str, Any]:
        """Return memory for the state of the optimizers, by name in the checkpoint.

        Raises:
            PlanError: the checkpoint has other parameters, numbers, groups, settings, kinds of
                state or shapes.
        """
        self._models = models
        check_kept([group for one in optimizers for group in one.param_groups], self._keep)
        shards = get_model_state_dict(models[0]) if is_fsdp1(models[0]) else {}
        fqns_of = fqns_by_parameter(models)
        values: dict[str, Any] = {}
        for number, optimizer in enumerate(optimizers):
            names = parameter_names(fqns_of, optimizer, number)
            target = self._target(optimizer, names, number, shards)
            self._targets.append(target)
            others = self._other_keys(target, is_only=len(optimizers) == 1)
            for param, fqns in [*target.names, *((None, [key]) for key in others)]:
                spaces = [self._space(target, fqn, param, shards.get(fqn)) for fqn in fqns]
                found = {name: space[name] for space in spaces if space for name in space}
                if None in spaces:
                    # The state of a flat parameter must not come from two steps: all of it stays.
                    target.kept.update(fqns)
                    self._partial.report.excluded += found
                else:
                    values |= found
        return values

    def put(self, loaded: Mapping[str, Any]) -> None:
        """Put the loaded values, by name in the checkpoint, into the optimizers.

        What was not loaded stays.
        """
        for target in self._targets:
            if not self._takes_groups and target.kept.issuperset(target.keys):
                continue
            state = self._loaded(target, loaded)
            state |= {fqn: target.own[fqn] for fqn in target.kept if fqn in target.own}
            to_load = (
                _fsdp1_state_dict(self._models[0], target, state)
                if is_fsdp1(self._models[0])
                else _plain_state_dict(target, state)
            )
            if _torch.loads_by_itself(target.optimizer):
                # It looks in them for the parameter of each tensor, which is slow in a list. In the
                # end it keeps its own lists.
                for group in to_load["param_groups"]:
                    group["params"] = dict.fromkeys(group["params"])
            target.optimizer.load_state_dict(to_load)
            if target.is_converted:
                continue
            for number, (param, _) in enumerate(target.names):
                if number in to_load["state"]:
                    _undo_casts(target.optimizer.state[param], to_load["state"][number])

    # --- parameters

    def _target(
        self,
        optimizer: Optimizer,
        names: list[tuple[torch.Tensor, list[str]]],
        number: int,
        shards: Mapping[str, Any],
    ) -> _Target:
        """Match an optimizer with the saved parameters and groups.

        Raises:
            PlanError: the checkpoint has other parameters, numbers, groups or kinds of state.
        """
        fsdp1 = is_fsdp1(self._models[0])
        fqns_of = {id(param): fqns for param, fqns in names}
        own_groups = [
            [fqn for param in group["params"] for fqn in fqns_of[id(param)]]
            for group in optimizer.param_groups
        ]
        is_flat = any(len(fqns) > 1 for _, fqns in names)
        keys = self._saved_keys(own_groups, list(shards) if is_flat else [])
        kept = set(self._unknown_params(keys, number))
        matched = self._match_groups(optimizer, own_groups, keys, number)
        is_new = not optimizer.state
        needed = any(self._entries(key) for key in keys.values())
        needed |= any(group.replaced() for group in matched)
        with _with_state(optimizer, needed=needed) as makes_state:
            state: Mapping[Any, Any] = dict(optimizer.state)
            made: dict[str, Any] = {}
            own_keys: dict[str, Any] = {}
            is_converted = False
            if not fsdp1:
                osd = optimizer.state_dict()
                by_key = names_by_key(names, osd, number)
                own_keys = {fqn: key for key, fqn in by_key.items()}
                made = {by_key.get(key, key): value for key, value in osd["state"].items()}
                made = {key: value for key, value in made.items() if isinstance(key, str)}
                is_converted = any(
                    _is_other(state.get(param), made.get(fqns[0])) for param, fqns in names
                )
            kinds = {
                fqn: _kinds(state.get(param, {}) if fsdp1 else made.get(fqn, {}))
                for param, fqns in names
                for fqn in fqns
                if param in state or (is_new and makes_state and param.requires_grad)
            }
        for group, fqns in zip(matched, own_groups, strict=True):
            kept |= self._unfit(optimizer, group, fqns, keys, kinds)
        if self._takes_groups:
            taken = zip(matched, own_groups, strict=True)
            warn_of_replaced(
                [group for group, fqns in taken if not kept.issuperset(fqns)], optimizer
            )
        groups = [
            (group.own if fqns and kept.issuperset(fqns) else group.chosen()) | {"params": fqns}
            for group, fqns in zip(matched, own_groups, strict=True)
        ]
        own = {} if is_new else made
        if fsdp1 and self._partial.may_leave:
            own = fsdp1_state(self._models[0], optimizer)["state"] | own
        return _Target(*(optimizer, names, own_keys, keys, groups, own, made, is_converted, kept))

    def _match_groups(
        self, optimizer: Optimizer, own_groups: list[list[str]], keys: dict[str, str], number: int
    ) -> list[GroupSettings]:
        """Return the settings of each group of an optimizer, and the saved ones.

        Raises:
            PlanError: nothing tells which saved settings a group gets, and that is an error.
        """
        empty = [
            group
            for group, fqns in zip(optimizer.param_groups, own_groups, strict=True)
            if not fqns
        ]
        of_empty = iter(match_empty(empty, self._empty, self._keep))
        groups: list[GroupSettings] = []
        for place, (group, fqns) in enumerate(zip(optimizer.param_groups, own_groups, strict=True)):
            found = [self._settings[keys[fqn]] for fqn in fqns if keys[fqn] in self._settings]
            saved = list({id(one): one for one in found}.values()) if fqns else next(of_empty)
            shown = f"group {place} of optimizer {number}"
            groups.append(GroupSettings(shown, settings_of(group), saved, self._keep))
        problems = [(group, group.contradiction()) for group in groups]
        first: dict[int, GroupSettings] = {}
        for matched in groups:
            others = {
                id(other): other
                for saved in matched.saved
                if (other := first.setdefault(id(saved), matched)) is not matched
            }
            problems += [(matched, other.differs_from(matched)) for other in others.values()]
        for matched, problem in problems:
            if problem is not None and not self._partial.is_partial:
                raise PlanError(problem)
            if problem is not None:
                matched.saved = []
        return groups

    def _unfit(
        self,
        optimizer: Optimizer,
        group: GroupSettings,
        fqns: list[str],
        keys: dict[str, str],
        kinds: dict[str, set[str]],
    ) -> set[str]:
        """Return the parameters of a group whose saved state is of other kinds than its own.

        Args:
            optimizer: the optimizer.
            group: the settings of the group.
            fqns: its parameters.
            keys: their keys in the checkpoint, by FQN.
            kinds: the kinds of state that the optimizer has or makes, as far as they are known.

        Raises:
            PlanError: there are some, and that is an error.
        """
        unfit: set[str] = set()
        is_stateless = not any(self._entries(key) for key in keys.values())
        is_new = not optimizer.state
        # If one side has no state, the settings tell whether the optimizers are of one kind.
        makes_state = is_stateless and any(kinds.get(fqn) for fqn in fqns)
        other_kind = check_stateless(group, optimizer, makes_state=makes_state)
        for fqn in fqns:
            saved = set(self._state[keys[fqn]].by_key()) if keys[fqn] in self._state else set()
            if saved and fqn in kinds:
                problem = check_kinds(fqn, saved, kinds[fqn], group, optimizer, is_new=is_new)
            else:
                problem = other_kind if saved or is_stateless else None
            if problem is None or not self._partial.includes(f"{self._prefix}.{fqn}"):
                continue
            if not self._partial.is_partial:
                raise PlanError(problem, tensor=fqn)
            unfit.add(fqn)
            lacks = sorted(kinds.get(fqn, set()) - saved)
            self._partial.report.missing += [f"{self._prefix}.{fqn}.{kind}" for kind in lacks]
        return unfit

    def _saved_keys(self, groups: list[list[str]], order: list[str]) -> dict[str, str]:
        """Return the keys of an optimizer's parameters in the checkpoint, by FQN.

        Args:
            groups: the FQNs of each of its groups.
            order: the FQNs in the order of the model, if the optimizer has flat parameters.

        Raises:
            PlanError: the keys are numbers, and the saved groups have other sizes.
        """
        saved = [group["params"] for group in self._groups]
        if not any(isinstance(key, int) for keys in saved for key in keys):
            return {fqn: self._names.find(fqn) or fqn for fqns in groups for fqn in fqns}
        if list(map(len, groups)) != list(map(len, saved)):
            msg = (
                f"the saved optimizer has {_sizes(saved)}, which go by number, "
                f"and this one has {_sizes(groups)}"
            )
            raise PlanError(msg)
        # Numbers are older than flat parameters: group by group, in the order of the model.
        place = {fqn: number for number, fqn in enumerate(order)}
        return {
            fqn: str(key)
            for fqns, keys in zip(groups, saved, strict=True)
            for fqn, key in zip(
                sorted(fqns, key=lambda fqn: place.get(fqn, len(place))), keys, strict=True
            )
        }

    def _unknown_params(self, keys: dict[str, str], number: int) -> list[str]:
        """Return the parameters that no saved optimizer has.

        Raises:
            PlanError: there are some, and that is an error.
        """
        unknown = [fqn for fqn, key in keys.items() if key not in self._settings]
        missing = [fqn for fqn in unknown if self._partial.includes(f"{self._prefix}.{fqn}")]
        if missing and not self._partial.is_partial:
            more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
            msg = (
                f"optimizer {number} has parameter {missing[0]!r}{more}, "
                "which no saved optimizer has"
            )
            raise PlanError(msg, tensor=missing[0])
        self._partial.report.missing += [f"{self._prefix}.{fqn}" for fqn in missing]
        return unknown

    # --- memory

    def _other_keys(self, target: _Target, *, is_only: bool) -> list[str]:
        """Add state that belongs to no parameter, such as MADGRAD's ``k``, to a target.

        The only optimizer takes what is saved. One of several takes what it has, or makes in its
        first step.

        Returns:
            The keys of that state.
        """
        # A stock save of a pipeline may list the parameters of one rank alone.
        saved = [
            key
            for key in (self._state if is_only else ())
            if key not in self._settings and join(MODEL, key) not in self._saved
        ]
        keys = [key for key in dict.fromkeys([*saved, *target.made]) if key not in target.keys]
        target.keys |= {key: key for key in keys}
        if self._partial.is_partial:
            target.kept.update(key for key in keys if key not in self._state)
        return keys

    def _space(
        self, target: _Target, fqn: str, param: torch.Tensor | None, shard: Any
    ) -> dict[str, Any] | None:
        """Return memory for a parameter's state, by name; None if the state that it has stays.

        Args:
            target: the optimizer.
            fqn: the name of the parameter.
            param: the parameter, if the state is of one.
            shard: the parameter in the state dict of an FSDP1 model.
        """
        entries = None if fqn in target.kept else self._included(target, fqn)
        if entries is None:
            return None
        space: dict[str, Any] = {}
        infos = self._saved.find(entries)
        for name, path in entries.items():
            stored = infos[name]
            if stored.dtype is None:
                space[name] = None
                continue
            shape = stored.shape
            memory = expected = _tensor_at(target.made.get(fqn), path)
            if shape and shard is not None and type(shard) not in _torch.PLAIN_TYPES:
                expected = shard
            if expected is not None and tuple(global_shape(expected)) != shape:
                shown = tuple(global_shape(expected))
                self._partial.refuse_shape(name, shown, shape, "the optimizer")
                return None
            if memory is None:
                like = param if shard is None else shard
                memory = self._memory(fqn, path, shape, stored.dtype, like)
            if path == ("step",) and not shape and _places_steps(target.optimizer):
                # The saved settings tell where it belongs. load_state_dict only moves it from here.
                memory = torch.empty((), dtype=memory.dtype, device="cpu")
            space[name], self._dtypes[name] = memory, memory.dtype
        return space

    def _included(self, target: _Target, fqn: str) -> dict[str, TreePath] | None:
        """Return the entries of a parameter's state to load; None if the state that it has stays.

        Optimizers need a whole state: if the own state lacks an excluded entry, nothing is loaded.
        """
        entries = self._entries(target.keys[fqn])
        if not entries and not self._partial.includes(f"{self._prefix}.{fqn}"):
            return None
        excluded = self._partial.exclude(entries)
        rest = {name: path for name, path in entries.items() if name not in excluded}
        own = target.own.get(fqn)
        lacks = any(get_at(own, entries[name], _MISSING) is _MISSING for name in excluded)
        if excluded and (lacks or not rest):
            self._partial.report.excluded += rest
            return None
        return None if self._partial.incomplete(rest) else rest

    def _entries(self, key: str) -> dict[str, TreePath]:
        """Return the paths of a parameter's entries, by name."""
        return self._state[key].paths if key in self._state else {}

    def _memory(
        self,
        fqn: str,
        path: TreePath,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        like: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return memory for an entry of which the optimizer has no tensor: like the parameter.

        A scalar, such as a counter, keeps its dtype.
        """
        if like is not None and shape and path != ("step",):
            model = self._saved.find([join(MODEL, fqn)]).get(join(MODEL, fqn))
            if model is None or model.dtype != like.dtype:
                dtype = like.dtype  # state goes with its parameter
            if global_shape(like) == shape:
                return _torch.empty_like(like.detach(), dtype=dtype, device=like.device)
        return torch.empty(shape, dtype=dtype, device="cpu")

    # --- what was loaded

    def _loaded(self, target: _Target, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the loaded states of an optimizer's parameters, by FQN.

        Args:
            target: the optimizer. An entry that was not loaded is the one that it has.
            values: the loaded values, by name.

        Raises:
            PlanError: paths contradict each other.
        """
        leaves: list[tuple[int | None, TreePath, Any]] = []
        containers: list[Container] = []
        for fqn, key in target.keys.items():
            if fqn in target.kept or key not in self._state:
                continue
            tree = self._state[key]
            for name, path in tree.paths.items():
                value = values[name] if name in values else get_at(target.own[fqn], path)
                if name in values and name in self._dtypes:
                    value = value.to(self._dtypes[name])
                # DCP stores every key as text.
                own = path if tree.is_exact else _with_keys_of(target.made.get(fqn), path)
                leaves.append((tree.positions[name], (fqn, *own), value))
            containers += [
                Container(c.position, (fqn, *c.path), c.kind)
                for c in self._partial.remaining(tree, f"{self._prefix}.{key}")
            ]
        return nest(leaves, containers)


def _plain_state_dict(target: _Target, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state, by FQN, as an optimizer's ``load_state_dict`` takes it."""
    own = target.optimizer.state_dict()["param_groups"]
    groups = [old | settings_of(group) for group, old in zip(target.groups, own, strict=True)]
    osd = {"state": state, "param_groups": groups}
    return renamed(osd, lambda fqn: target.own_keys.get(fqn, fqn))


def _fsdp1_state_dict(
    model: torch.nn.Module, target: _Target, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state, by FQN, as an optimizer of an FSDP1 model takes it. A collective."""
    names = compiler_names(model)
    osd = renamed({"state": state, "param_groups": target.groups}, lambda fqn: names.get(fqn, fqn))
    with sharded_state_dicts(model):
        flat: dict[str, Any] = FullyShardedDataParallel.optim_state_dict_to_load(
            model,
            target.optimizer,
            osd,
            is_named_optimizer=is_named(target.optimizer.state_dict()),
            group=fsdp1_group(model),
        )
    return flat


@contextlib.contextmanager
def _with_state(optimizer: Optimizer, *, needed: bool) -> Iterator[bool]:
    """Give an optimizer without state, within this context, the state that its first step makes.

    As in ``get_optimizer_state_dict``, it makes a step with gradients and learning rates of zero.
    Afterwards it is as it was, and so are the random number generators.

    Args:
        optimizer: the optimizer.
        needed: make that state.

    Yields:
        Whether the optimizer has its state: it had some, or could make such a step.
    """
    if optimizer.state or not needed:
        yield needed
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params]
    random_state = RngState().state_dict()
    is_made = False
    try:
        # Any error may come from the code of the optimizer.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for param in params:
                param.grad = None
            _make_state(optimizer, params)
            is_made = True
        if not is_made:
            optimizer.state.clear()
        yield is_made
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        optimizer.state.clear()
        RngState().load_state_dict(random_state)


def _make_state(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> None:
    """Make the state of an optimizer without state, by a step with gradients of zero."""
    try:
        _torch.init_optimizer_state(optimizer)
    except Exception:  # noqa: BLE001  # any, from the code of the optimizer
        # SparseAdam takes sparse gradients alone.
        for param in params:
            if param.requires_grad:
                param.grad = torch.zeros_like(param).to_sparse()
        optimizer.step()


def _kinds(state: Any) -> set[str]:
    return set(map(str, state)) if isinstance(state, Mapping) else set()


def _is_other(state: Any, shown: Any) -> bool:
    """Return whether a parameter's state differs in kind from what ``state_dict()`` has of it."""
    if not isinstance(state, Mapping) or not isinstance(shown, Mapping):
        return False
    return state.keys() != shown.keys() or any(
        isinstance(value, torch.Tensor)
        and isinstance(shown[key], torch.Tensor)
        and (value.dtype != shown[key].dtype or value.shape != shown[key].shape)
        for key, value in state.items()
    )


def _with_keys_of(state: Any, path: TreePath) -> TreePath:
    """Return the path with the keys of the state in place of their text."""
    found: list[Any] = []
    for part in path:
        key = part
        if isinstance(state, Mapping) and type(part) is str and part not in state:
            key = next(((key,) for key in state if str(key) == part), part)
        found.append(key)
        state = get_at(state, (key,))
    return tuple(found)


def _places_steps(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has counters of steps on the device of the parameters."""
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def _tensor_at(state: Any, path: TreePath) -> torch.Tensor | None:
    """Return a tensor of a state that can be loaded into; None if there is none."""
    found = get_at(state, path)
    if not isinstance(found, torch.Tensor):
        return None
    # Values that ranks have yet to sum up cannot be loaded.
    is_partial = isinstance(found, DTensor) and any(p.is_partial() for p in found.placements)
    return None if is_partial else found


def _undo_casts(cast: Any, value: Any) -> Any:
    """Return ``cast`` with what ``Optimizer.load_state_dict`` broke taken from ``value``.

    It casts tensors to the dtype of their parameter, so float32 master weights lose bits. It makes
    a ``dict`` of every kind of dict, and text becomes the text of a generator. Dicts change in
    place, but for those that have to be of another kind.
    """
    if isinstance(cast, torch.Tensor) and isinstance(value, torch.Tensor):
        return cast if cast.dtype == value.dtype else value.to(cast.device)
    if isinstance(cast, dict) and isinstance(value, Mapping):
        for key in cast.keys() & value.keys():
            cast[key] = _undo_casts(cast[key], value[key])
        return cast if kind_of(value) == kind_of(cast) else like(value, cast.items())
    if isinstance(cast, list | tuple) and len(cast) == len(value):
        return type(cast)(map(_undo_casts, cast, value))
    return value if isinstance(value, str | bytes) else cast


def _sizes(groups: list[list[Any]]) -> str:
    counts = ", ".join(str(len(group)) for group in groups)
    return f"{len(groups)} group{'s' if groups[1:] else ''} of {counts} parameters"
