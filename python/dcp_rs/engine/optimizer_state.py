"""A word on what is easily lost: the state of an optimizer that is new has no entries to load into."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dcp_rs import _core
from dcp_rs._warnings import warn_caller

__all__ = ["warn_of_left_out_state"]

_GROUPS = re.compile(r"(?:^|(?<=\.))param_groups(?:\.|$)")


def warn_of_left_out_state(index: _core.Index, values: Iterable[str], tensors: Iterable[str]) -> None:
    """Warns where ``param_groups`` are loaded without the ``state`` beside them that the checkpoint has.

    Args:
        values, tensors: stored names of what is loaded.
    """
    found = {name[: group.start()] for name in values if (group := _GROUPS.search(name))}
    missed = {f"{prefix}state." for prefix in found}
    if not missed:
        return
    for names in (values, tensors):
        for name in names:
            missed -= {prefix for prefix in missed if name.startswith(prefix)}
            if not missed:
                return
    for prefix in sorted(missed):
        if any(name.startswith(prefix) for name in index.names()):
            warn_caller(
                f"the checkpoint has the state of an optimizer, {prefix}*, and the state dict has no place for it, as an optimizer has none before its"
                " first step: it goes on from nothing. torch.distributed.checkpoint.state_dict.get_state_dict and set_state_dict make room, as does"
                " dcp_rs.optim.load_training_state"
            )
