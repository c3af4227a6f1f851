"""Experts of a mixture for servers: one tensor each, and those of one rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dcp_rs.checkpoint.fused_experts import views_for
from dcp_rs.checkpoint.views import View
from dcp_rs.errors import UnsupportedError

_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")
#: The tensors of an expert that a rank may skip. Scales are small, and vLLM takes the maximum over
#: those of all experts.
_SKIPPED = (".weight", ".weight_packed")
_FUSED = re.compile(r"model\.layers\.\d+\..+\.experts\.gate_up_proj")


def names_of_rank(
    names: Iterable[str], *, rank: int, size: int, experts: int, placement: str
) -> set[str]:
    """Return the names that a rank has to read under expert parallelism.

    All tensors but the weights of experts that other ranks hold are read. A layer without exactly
    ``experts`` experts is read whole: it is not placed as the others are.

    Args:
        names: of the tensors of a model, with one tensor for each expert.
        rank, size: of the expert-parallel group.
        experts: how many the model has in a layer.
        placement: ``"linear"`` or ``"round_robin"``, as in vLLM. Others skip nothing.
    """
    every = set(names)
    layers: dict[str, dict[int, list[str]]] = {}
    for name in every:
        if (match := _EXPERT.search(name)) is not None:
            layers.setdefault(name[: match.start(1)], {}).setdefault(int(match[1]), []).append(name)
    share, more = divmod(experts, size)
    begin = rank * share + min(rank, more)
    own = set(range(begin, begin + share + (rank < more)))
    if placement == "round_robin":
        # Without groups of experts, vLLM falls back to "linear", and only its log says so.
        own.update(range(rank, experts, size))
    elif placement != "linear":
        return every
    for layer in layers.values():
        if set(layer) == set(range(experts)):
            foreign = (name for number in layer.keys() - own for name in layer[number])
            every.difference_update(name for name in foreign if name.endswith(_SKIPPED))
    return every


def single_experts(names: Mapping[str, str], config: Any) -> list[View]:
    """Return the views that split the fused experts of transformers 5 into one tensor each.

    Args:
        names: the name in transformers of each stored tensor.
        config: as for :func:`dcp_rs.views_for`.

    Returns:
        The views; none if nothing is fused, or if names differ from transformers' by more than a
        prefix.
    """
    fused = [(stored, name) for stored, name in names.items() if _FUSED.fullmatch(name)]
    prefixes = {stored.removesuffix(name) for stored, name in fused}
    if len(prefixes) != 1 or not all(stored.endswith(name) for stored, name in fused):
        return []
    try:
        return views_for(config, fuse=False, prefix=prefixes.pop())
    except UnsupportedError:
        return []
