"""Optimizers of plain, DDP, FSDP1 and FSDP2 modules: names of parameters, and state by name."""

from __future__ import annotations

import hashlib
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.api import ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_rs import _torch
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.errors import PlanError, UnsupportedError
from dcp_rs.tensors.flatten import flatten
from dcp_rs.tensors.pickles import plain_numbers
from dcp_rs.training.names import unwrapper

#: The parameters of an optimizer with their FQNs, by group. A flat parameter has several.
Names = list[list[tuple[torch.Tensor, list[str]]]]

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)  # noqa: SLF001


def optimizer_state(
    models: Sequence[torch.nn.Module], optimizers: Sequence[Optimizer], ranks: RankGroup
) -> dict[str, Any]:
    """Return the state dict of all optimizers together, as ``get_optimizer_state_dict`` does.

    Unlike that, an optimizer without state makes no step: it is saved without state. A step with
    gradients of zero counts as a step and, with weight decay, changes parameters.

    Returns:
        ``{"state": {fqn: {name: value}}, "param_groups": [...]}``.

    Raises:
        PlanError: an optimizer has a parameter that is not in the model, or two optimizers have
            state for one parameter. Or ranks have different tensors under one name.
        UnsupportedError: the state dict of an optimizer has more than state and groups.
    """
    fsdp1 = is_fsdp1(models[0])
    fqns_of = {} if fsdp1 else fqns_by_parameter(models)
    states = [
        plain_numbers(
            fsdp1_state(models[0], optimizer, number)
            if fsdp1
            else _named_state(fqns_of, optimizer, number)
        )
        for number, optimizer in enumerate(optimizers)
    ]
    groups = [group for osd in states for group in osd["param_groups"]]
    state = joined((osd["state"] for osd in states), "optimizers")
    copies = {} if fsdp1 or ranks.is_alone else _copies(models, state)
    told = ranks.all_gather(lambda: (_digest(to_bytes(groups)), copies))
    _check_copies([of_rank for _, of_rank in told])
    if len({digest for digest, _ in told}) > 1:
        groups = _of_all_ranks(groups, ranks)
    return {"state": state, "param_groups": groups}


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    """Return the state dict of a model, under names without wrappers.

    Unlike torch's ``get_model_state_dict``, it keeps the keys that a hook adds, renames or divides,
    and takes a module without parameters, and a compiled module inside of FSDP1.
    """
    unwrap = unwrapper(model)
    with sharded_state_dicts(model):
        return {unwrap(key): value for key, value in model.state_dict().items()}


def joined(parts: Iterable[Mapping[str, Any]], owners: str) -> dict[str, Any]:
    """Return the state dicts of several modules or optimizers as one.

    Raises:
        PlanError: two have the same name.
    """
    whole: dict[str, Any] = {}
    for part in parts:
        twice = next((name for name in part if name in whole), None)
        if twice is not None:
            msg = f"two of the {owners} have a {twice!r}: names of what they hold have to differ"
            raise PlanError(msg, tensor=twice)
        whole |= part
    return whole


def _named_state(
    fqns_of: Mapping[int, list[str]], optimizer: Optimizer, number: int
) -> dict[str, Any]:
    osd = own_state_dict(optimizer, number)
    names = names_by_key(parameter_names(fqns_of, optimizer, number), osd, number)
    return renamed(osd, lambda key: names.get(key, key))


def fsdp1_state(model: torch.nn.Module, optimizer: Optimizer, number: int) -> dict[str, Any]:
    """Return the state dict of an optimizer of an FSDP1 model. This is a collective."""
    with sharded_state_dicts(model):
        osd = FullyShardedDataParallel.optim_state_dict(
            model, optimizer, own_state_dict(optimizer, number), group=fsdp1_group(model)
        )
    return renamed(osd, without_compiler)


def own_state_dict(optimizer: Optimizer, number: int) -> dict[str, Any]:
    """Return the state dict of an optimizer.

    Raises:
        UnsupportedError: its class or a hook adds entries, which belong to no parameter or group.
    """
    osd = optimizer.state_dict()
    more = sorted(str(key) for key in osd.keys() - {"state", "param_groups"})
    if more:
        msg = (
            f"the state_dict() of optimizer {number} ({type(optimizer).__name__}) has "
            f"{', '.join(more)} beside state and param_groups, which would be lost. Pass the "
            "optimizer in extra= instead: there it is saved as it is"
        )
        raise UnsupportedError(msg)
    return osd


def renamed(osd: Mapping[str, Any], name: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the state dict of an optimizer with other keys of parameters."""
    return {
        "state": {name(key): value for key, value in osd["state"].items()},
        "param_groups": [
            group | {"params": list(map(name, group["params"]))} for group in osd["param_groups"]
        ],
    }


# --- ranks


def _of_all_ranks(groups: list[dict[str, Any]], ranks: RankGroup) -> list[dict[str, Any]]:
    """Return the parameter groups of all ranks, which differ between the stages of a pipeline.

    DCP would keep those of one rank.
    """
    union: dict[bytes, dict[str, Any]] = {}
    for group in itertools.chain.from_iterable(ranks.all_gather(lambda: groups)):
        union.setdefault(to_bytes(group), group)
    return list(union.values())


def _copies(models: Sequence[torch.nn.Module], state: Mapping[str, Any]) -> dict[str, bytes]:
    """Return digests of the plain tensors in the state of sharded parameters, by name.

    DCP saves a plain tensor once, as a copy of all ranks.
    """
    digests = {}
    for model in models:
        unwrap = unwrapper(model)
        for key, param in model.named_parameters():
            fqn = unwrap(key)
            if not isinstance(param, DTensor) or not isinstance(state.get(fqn), Mapping):
                continue
            for name, value in flatten(state[fqn]).values.items():
                # Counters of steps are many.
                if _is_plain(value) and value.numel() > 1:
                    data = value.detach().cpu().contiguous().flatten().view(torch.uint8)
                    digests[f"{fqn}.{name}"] = _digest(data.numpy())
    return digests


def _is_plain(value: Any) -> bool:
    return (
        type(value) in _torch.PLAIN_TYPES
        and value.layout is torch.strided
        and not value.is_meta
        and not hasattr(value, "__create_chunk_list__")
    )


def _check_copies(copies: Sequence[Mapping[str, bytes]]) -> None:
    """Raise if ranks have different tensors under one name.

    Raises:
        PlanError: they have.
    """
    first: dict[str, tuple[int, bytes]] = {}
    for rank, of_rank in enumerate(copies):
        for name, digest in of_rank.items():
            other, expected = first.setdefault(name, (rank, digest))
            if digest != expected:
                msg = (
                    f"the optimizer state {name!r} is a plain tensor that differs on ranks {other} "
                    f"and {rank}, and its parameter is sharded: only one of them would be saved. "
                    "Make it of the parameter, as torch.zeros_like(param) does, so that it is "
                    "sharded as well; or pass the optimizer as PerRank(optimizer) in extra="
                )
                raise PlanError(msg, tensor=name)


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group, such as the learning rate, without parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def to_bytes(value: Any) -> bytes:
    """Return bytes that are equal for equal values, which may hold tensors."""
    return pickle.dumps(_plain(plain_numbers(value)))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), value.tolist())
    if isinstance(value, Mapping):
        return sorted((str(key), _plain(entry)) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return repr(value)


# --- parameters


def is_fsdp1(model: torch.nn.Module) -> bool:
    """Return whether any module of the model is an FSDP1 module."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def fsdp1_group(model: torch.nn.Module) -> dist.ProcessGroup | None:
    """Return the group over which torch's ``get_state_dict`` shards the optimizer state."""
    module = FullyShardedDataParallel.fsdp_modules(model)[0]
    group = None if module.sharding_strategy in _HYBRID else module.process_group
    return None if isinstance(group, tuple) else group


@contextmanager
def sharded_state_dicts(model: torch.nn.Module) -> Iterator[None]:
    """Make state dicts of FSDP1 modules hold shards, whatever the caller has set."""
    if not is_fsdp1(model):
        yield
        return
    with warnings.catch_warnings():
        deprecated = r"FSDP\.(set_)?state_dict_type"
        warnings.filterwarnings("ignore", message=deprecated, category=FutureWarning)
        with FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(),
            ShardedOptimStateDictConfig(),
        ):
            yield


def fqns_by_parameter(models: Sequence[torch.nn.Module]) -> dict[int, list[str]]:
    """Return the FQNs of all parameters by their ids. A flat parameter has several FQNs."""
    # A parameter that several models have goes by its name in the first one.
    fqns_of: dict[int, list[str]] = {}
    for model in reversed(models):
        fsdp1, unwrap = is_fsdp1(model), unwrapper(model)
        for key, param in model.named_parameters():
            fqns = _torch.fqns(model, key) if fsdp1 else [key]
            fqns_of[id(param)] = list(map(unwrap, fqns))
    return fqns_of


def parameter_names(fqns_of: Mapping[int, list[str]], optimizer: Optimizer, number: int) -> Names:
    """Return the parameters of an optimizer with their FQNs, by group.

    Args:
        fqns_of: the FQNs of all parameters of the models.
        optimizer: the optimizer.
        number: its number, for messages.

    Raises:
        PlanError: a parameter is not in the models.
    """
    names: Names = []
    for at, group in enumerate(optimizer.param_groups):
        names.append([])
        for place, param in enumerate(group["params"]):
            fqns = fqns_of.get(id(param))
            if fqns is None:
                msg = (
                    f"optimizer {number} has a parameter that is not in the model: "
                    f"number {place} of group {at}, of shape {tuple(param.shape)}. If it is a copy "
                    "of one (float32 master weights), pass the optimizer and the copies in extra="
                )
                raise PlanError(msg)
            names[-1].append((param, fqns))
    return names


def names_by_key(names: Names, osd: Mapping[str, Any], number: int) -> dict[Any, str]:
    """Return the FQNs of the parameters in an optimizer's own state dict, by key.

    Args:
        names: the parameters of the optimizer with their FQNs.
        osd: its own state dict.
        number: its number, for messages.

    Raises:
        PlanError: it has names that are not those of the model.
    """
    pairs = [
        (key, fqns)
        for group, of_group in zip(osd["param_groups"], names, strict=True)
        for key, (_, fqns) in zip(group["params"], of_group, strict=True)
    ]
    if is_named(osd):
        known = {fqn for _, fqns in pairs for fqn in fqns}
        stranger = next((key for key, _ in pairs if key not in known), None)
        if stranger is not None:
            msg = (
                f"optimizer {number} calls a parameter {stranger!r}, "
                "which no parameter of the model is called"
            )
            raise PlanError(msg, tensor=stranger)
        return {key: key for key, _ in pairs}
    return {key: fqns[0] for key, fqns in pairs}


def is_named(osd: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's state dict has names, as of TorchRec's ``KeyedOptimizer``."""
    return any(isinstance(param, str) for group in osd["param_groups"] for param in group["params"])


def without_compiler(fqn: str) -> str:
    """Return the name without the prefixes of compiled modules."""
    return fqn.replace("_orig_mod.", "")


def compiler_names(model: torch.nn.Module) -> dict[str, str]:
    """Return the names with the prefixes of compiled modules, as FSDP1 has them, by FQN."""
    return {
        without_compiler(fqn): fqn
        for key, _ in model.named_parameters()
        for fqn in _torch.fqns(model, key, skip_compiler_prefix=False)
    }
