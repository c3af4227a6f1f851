"""What a checkpoint has for the entries of a state dict, and whether it fits: names, shapes, dtypes, tied tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from dcp_rs.dcp.stored import Stored, describe
from dcp_rs.engine.casts import CastRule
from dcp_rs.engine.load_names import LoadNames
from dcp_rs.engine.reports import LoadReport, Mismatch
from dcp_rs.errors import PlanError
from dcp_rs.tensors.memory import twins
from dcp_rs.tensors.nesting import name_of
from dcp_rs.tensors.replacements import Replacements
from dcp_rs.tensors.shards import global_shape
from dcp_rs.tensors.trees import Flat, get_at

__all__ = ["Matching", "add_hollow"]

#: What does not fit is named up to so many.
_NAMED = 10


def add_hollow(state_dict: Mapping[str, Any], flat: Flat, metadata: Metadata, names: LoadNames) -> None:
    """Adds containers without entries that the checkpoint holds as a value: it was not flattened, or is of torch before 2.4.

    Args:
        state_dict: what is to be loaded.
        flat: the same, flattened; what is added goes here.
        metadata: of the checkpoint.
        names: what the checkpoint calls them.
    """
    paths = {c.path[:depth]: None for c in flat.containers for depth in range(1, len(c.path) + 1)}
    hollow = {name_of(path): path for path in paths}
    if not hollow:
        return
    names.choose([*flat.values, *hollow], metadata.state_dict_metadata)
    stored = names.named(hollow)
    for fqn, found in zip(stored, describe(metadata, list(stored.values())), strict=True):
        path = hollow[fqn]
        if found is None or fqn in flat.values or any(p[: len(path)] == path for p in flat.paths.values()):
            continue
        flat.values[fqn], flat.paths[fqn] = get_at(state_dict, path), path


class Matching:
    """Compares a state dict with a checkpoint, for one plan.

    Args:
        metadata: of the checkpoint.
        names: what is loaded, and what the checkpoint calls it.
        casts: the rule for dtypes that differ.
        report: what is found goes here.
        new: what tensors become before they are filled.
        partial: what is missing, or of another shape, is left alone.
    """

    def __init__(
        self,
        metadata: Metadata,
        names: LoadNames,
        casts: CastRule,
        report: LoadReport,
        new: Replacements,
        *,
        partial: bool,
    ) -> None:
        self._metadata = metadata
        self._names = names
        self._casts = casts
        self._report = report
        self._new = new
        self._partial = partial
        self._misfits: list[tuple[str, str]] = []  # names, and what is wrong with them

    def look_up(self, wanted: Mapping[str, str]) -> dict[str, Stored | None]:
        """What there is for each name, by what the checkpoint calls it."""
        return dict(zip(wanted, describe(self._metadata, list(wanted.values())), strict=True))

    def has(self, fqn: str) -> bool:
        """Whether the checkpoint has an entry for this name of the state dict."""
        return self._names.stored_name(fqn) in self._metadata.state_dict_metadata

    def note_missing(self, missing: list[str], found: Collection[str], state_dict: Mapping[str, Any]) -> None:
        """Notes what the checkpoint lacks, and (in a partial load) what it has that nobody asked for.

        Args:
            missing: names to be loaded that the checkpoint does not have.
            found: all names that were looked for.
            state_dict: all of it.

        Raises:
            PlanError: something is missing, and not tied to what is there.
        """
        report, stored = self._report, self._metadata.state_dict_metadata
        report.tied = self._find_tied(missing, state_dict)
        report.missing = missing = [fqn for fqn in missing if fqn not in report.tied]
        if self._partial:
            known = {self._names.stored_name(fqn) for fqn in state_dict}
            report.unexpected = [name for name in stored if name not in known]
        elif missing:
            more = f" (and {len(missing) - 1} more: {', '.join(map(repr, missing[1:6]))})" if missing[1:] else ""
            msg = f"the checkpoint has no {missing[0]!r}{more}{self._names.explain(missing, found, stored)}"
            raise PlanError(msg, tensor=missing[0])

    def _find_tied(self, missing: list[str], state_dict: Mapping[str, Any]) -> dict[str, str]:
        """Those whose tensor is the memory of another one, which the checkpoint has for it."""
        if not missing:
            return {}
        lacking = set(missing)
        others = [fqn for fqn in state_dict if fqn not in lacking and self._names.wants(fqn)]
        tied = twins(missing, others, state_dict)
        stored = self.look_up(self._names.named(tied.values()))
        held = {
            other
            for other, found in stored.items()
            if found is not None and not found.is_bytes and found.shape == global_shape(state_dict[other])
        }
        return {fqn: other for fqn, other in tied.items() if other in held}

    def fits(self, fqn: str, value: Any, stored: Stored) -> bool:
        """Whether what is stored can go to an entry of the state dict. Where not all may be left alone, :meth:`refuse_misfits` is to be called after the last.

        Raises:
            PlanError: a cast that is refused.
        """
        if stored.is_bytes:
            return True
        if not isinstance(value, torch.Tensor):
            msg = f"{fqn!r} is a tensor in the checkpoint, and a {type(value).__name__} in the state dict"
            return self._leave_alone(Mismatch(fqn, type(value).__name__, stored.shape), msg)
        shape = global_shape(value)
        if shape != stored.shape:
            msg = f"tensor {fqn!r} has shape {tuple(shape)} in the state dict, and {stored.shape} in the checkpoint"
            return self._leave_alone(Mismatch(fqn, tuple(shape), stored.shape), msg)
        dtype = self._new.dtype_of(value)
        if dtype != stored.dtype:
            self._casts.check(fqn, dtype, stored.dtype, self._report)
        return True

    def refuse_misfits(self) -> None:
        """Speaks of all that did not fit at once, so that whoever mends one of them knows of the others.

        Raises:
            PlanError: something has another shape or kind, and is not to be left alone.
        """
        if not self._misfits:
            return
        more = len(self._misfits) - _NAMED
        said = [what for _, what in self._misfits[:_NAMED]] + ([f"and {more:,} more"] if more > 0 else [])
        raise PlanError("; ".join(said), tensor=self._misfits[0][0])

    def note_hole(self, fqn: str, offsets: Iterable[int], sizes: Iterable[int]) -> None:
        """Notes that the checkpoint lacks elements of a tensor: so it does of those that are tied to it.

        Raises:
            PlanError: that is an error.
        """
        if not self._partial:
            msg = f"tensor {fqn!r}: the checkpoint does not hold {list(sizes)} elements at {list(offsets)}"
            raise PlanError(msg, tensor=fqn)
        report = self._report
        if fqn not in report.partly_filled:
            report.partly_filled.append(fqn)
            tied = [name for name, other in report.tied.items() if other == fqn]
            report.missing += tied
            for name in tied:
                del report.tied[name]

    def _leave_alone(self, mismatch: Mismatch, message: str) -> bool:
        """Notes what is left as it is, or refused, and says that it does not fit."""
        if self._partial:
            self._report.shape_mismatched.append(mismatch)
        else:
            self._misfits.append((mismatch.name, message))
        return False
