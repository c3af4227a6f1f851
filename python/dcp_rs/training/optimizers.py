"""The state of optimizers by parameter name, for plain, DDP, FSDP1 and FSDP2 modules."""

from __future__ import annotations

import hashlib
import itertools
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from dcp_rs.engine.ranks import RankGroup
from dcp_rs.errors import PlanError
from dcp_rs.tensors.pickles import plain_numbers
from dcp_rs.training.parameters import fsdp1_group, is_fsdp1, names_by_key, sharded_state_dicts, without_compiler

__all__ = ["WHO", "fsdp1_state", "optimizer_state", "text_of"]

#: Keys of a parameter group that say which parameters it has, and not how they are trained.
WHO = ("params", "param_names")


def optimizer_state(
    models: Sequence[torch.nn.Module], optimizers: Sequence[Optimizer], ranks: RankGroup
) -> dict[str, Any]:
    """``{"state": {fqn: {name: value}}, "param_groups": [...]}``, as ``get_optimizer_state_dict`` has it, of all optimizers together.

    Unlike that, it takes no step: an optimizer that has no state is saved without state. (torch steps it with gradients of zero, which
    counts as a step and, with weight decay, leaves traces.)

    Raises:
        PlanError: an optimizer has a parameter that is not in the model, or two optimizers have state for one parameter.
    """
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for number, optimizer in enumerate(optimizers):
        osd = plain_numbers(
            fsdp1_state(models[0], optimizer) if is_fsdp1(models[0]) else _named_state(models, optimizer, number)
        )
        twice = next((fqn for fqn in osd["state"] if fqn in state), None)
        if twice is not None:
            msg = f"two optimizers have state for parameter {twice!r}"
            raise PlanError(msg, tensor=twice)
        state.update(osd["state"])
        groups += osd["param_groups"]
    return {"state": state, "param_groups": _of_all_ranks(groups, ranks)}


def _named_state(models: Sequence[torch.nn.Module], optimizer: Optimizer, number: int) -> dict[str, Any]:
    osd = optimizer.state_dict()
    names = names_by_key(models, optimizer, osd, number)
    return {
        "state": {names.get(key, key): value for key, value in osd["state"].items()},
        "param_groups": [group | {"params": [names[key] for key in group["params"]]} for group in osd["param_groups"]],
    }


def fsdp1_state(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The same of one optimizer of an FSDP1 model. Its ranks talk to each other."""
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


# --- ranks ---------------------------------------------------------------------------------------------


def _of_all_ranks(groups: list[dict[str, Any]], ranks: RankGroup) -> list[dict[str, Any]]:
    """The parameter groups of all ranks. DCP keeps one rank's value of a name, which with pipelines would lose the others'."""
    digests = ranks.all_gather(lambda: hashlib.blake2b(text_of(groups), digest_size=16).digest())
    if len(set(digests)) == 1:
        return groups
    gathered = ranks.all_gather(lambda: groups)
    union: dict[bytes, dict[str, Any]] = {}
    for group in itertools.chain.from_iterable(gathered):
        union.setdefault(text_of(group), group)
    return list(union.values())


def text_of(value: Any) -> bytes:
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
