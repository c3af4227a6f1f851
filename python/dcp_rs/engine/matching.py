"""Comparison of a state dict with a checkpoint: names, shapes, dtypes and tied tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dcp_rs import _core, _torch
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.names import LoadNames, nothing_passes, some
from dcp_rs.engine.reports import LoadReport, Mismatch
from dcp_rs.errors import PlanError
from dcp_rs.options import Globs, ReadOptions, Rename, check_choice
from dcp_rs.tensors.dtypes import BY_NAME, parse_dtype
from dcp_rs.tensors.flatten import Flat, get_at
from dcp_rs.tensors.materialize import NewTensors
from dcp_rs.tensors.memory import check_has_shape, find_tied, on_meta, parse_device
from dcp_rs.tensors.nesting import name_of
from dcp_rs.tensors.shards import global_shape
from dcp_rs.transfer.target import fills, stored_dtype

#: Number of misfits that a message names.
_NAMED = 10
#: Number of bytes that are compared of two entries that are one tensor in the state dict.
_HEAD_BYTES = 1 << 20
_GROUPS = re.compile(r"(?:^|(?<=\.))param_groups(?:\.|$)")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options for the entries of a load. :func:`dcp_rs.load` describes the attributes."""

    rename: Rename = None
    include: Globs = None
    exclude: Globs = None
    allow_partial_load: bool = False
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    assign: bool = False
    dtype_policy: Literal["warn", "error", "cast"] = "warn"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> LoadOptions:
        """Return the options for arguments of :func:`dcp_rs.load`.

        Raises:
            ValueError: an option has an invalid value.
        """
        made = cls(**{**options, "dtype": parse_dtype(options.get("dtype"))})
        check_choice("allow_partial_load", made.allow_partial_load, True, False)
        check_choice("assign", made.assign, True, False)
        if made.device is not None:
            parse_device(made.device)  # raise for an invalid one now
        check_choice("dtype_policy", made.dtype_policy, "warn", "error", "cast")
        return made


@dataclass(slots=True)
class EntryInfo:
    """Entry of a checkpoint.

    Attributes:
        name: the stored name.
        dtype: the dtype of a tensor; None for a value that is no tensor.
        shape: the shape of the whole tensor.
        index: the number of the entry in the index.
    """

    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    index: int


def find_entries(index: _core.Index, wanted: Mapping[str, str]) -> dict[str, EntryInfo | None]:
    """Look stored names up in an index.

    Args:
        index: the index.
        wanted: stored names by names of the state dict.

    Returns:
        The entries by names of the state dict; None for names that the index lacks.

    Raises:
        UnsupportedError: this torch lacks the dtype of a tensor.
    """
    found: dict[str, EntryInfo | None] = {}
    for (fqn, name), row in zip(wanted.items(), index.describe(list(wanted.values())), strict=True):
        if row is None:
            found[fqn] = None
            continue
        number, dtype, shape = row
        known = None if dtype is None else BY_NAME.get(dtype) or stored_dtype(name, dtype)
        found[fqn] = EntryInfo(name, known, shape, number)
    return found


def fitting(index: _core.Index, wanted: Mapping[str, str], values: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors that the checkpoint has in the same shape.

    Args:
        index: the checkpoint.
        wanted: stored names by names of tensors of the state dict.
        values: the state dict.
    """
    return [
        name
        for name, entry in find_entries(index, wanted).items()
        if entry is not None
        and entry.dtype is not None
        and entry.shape == global_shape(values[name])
    ]


_CASTS: dict[tuple[torch.dtype, torch.dtype], bool] = {}


def can_cast(source: torch.dtype, destination: torch.dtype) -> bool:
    """Return true if torch casts between the dtypes, and keeps imaginary parts."""
    known = _CASTS.get((source, destination))
    if known is None:
        known = destination.is_complex or not source.is_complex
        try:
            if known:
                zeros = torch.zeros(1, dtype=torch.uint8, device="cpu").expand(16).clone()
                zeros.view(source)[:1].to(destination)
        except (RuntimeError, NotImplementedError, TypeError):
            known = False
        _CASTS[source, destination] = known
    return known


def check_cast(fqn: str, wanted: torch.dtype, stored: torch.dtype | None) -> None:
    """Raise a ``PlanError`` unless a stored tensor can be cast."""
    if stored is None or not can_cast(stored, wanted):
        msg = f"tensor {fqn!r} is stored as {stored}, which cannot be cast to {wanted}"
        raise PlanError(msg, tensor=fqn)


def cast_of(fqn: str, wanted: torch.dtype, stored: torch.dtype, options: LoadOptions) -> Mismatch:
    """Return the cast of a tensor, for the report.

    Raises:
        PlanError: the options refuse casts.
    """
    if options.dtype_policy == "error":
        msg = (
            f"tensor {fqn!r} is {wanted} in the state dict, "
            f"and {stored} in the checkpoint (dtype_policy='error')"
        )
        raise PlanError(msg, tensor=fqn)
    return Mismatch(fqn, wanted, stored)


def warn_of_casts(casts: Sequence[Mismatch], options: LoadOptions) -> None:
    """Warn of casts, unless the options ask for them."""
    if casts and options.dtype_policy == "warn":
        first = casts[0]
        others = f" and {len(casts) - 1} more are" if casts[1:] else " is"
        warn_caller(
            f"tensor {first.name!r}{others} cast on loading ({first.got} in the checkpoint, "
            f"{first.expected} in the state dict); pass dtype_policy='cast' if that is meant"
        )


def add_hollow(
    state_dict: Mapping[str, Any], flat: Flat, index: _core.Index, names: LoadNames
) -> None:
    """Add containers without tensors that the checkpoint stores as one value.

    That is the case if the saved state dict was not flattened, or by torch before 2.4.

    Args:
        state_dict: the state dict to fill.
        flat: the same, flattened. The containers are added to it.
        index: the index of the checkpoint.
        names: the names of the load.
    """
    paths = {c.path[:depth]: None for c in flat.containers for depth in range(1, len(c.path) + 1)}
    hollow = {name_of(path): path for path in paths}
    for fqn, found in find_entries(index, names.named(hollow)).items():
        path = hollow[fqn]
        is_entered = any(p[: len(path)] == path for p in flat.paths.values())
        if found is not None and fqn not in flat.values and not is_entered:
            flat.values[fqn], flat.paths[fqn] = get_at(state_dict, path), path


@dataclass
class Matching:
    """Comparison of a state dict with a checkpoint, for one load.

    Attributes:
        state_dict: the state dict to fill.
        flat: the same, flattened. If the checkpoint has the names that torch before 2.4 gives, it
            is flattened in that way.
        index: the index of the checkpoint.
        names: the names of the load.
        options: the options of the load.
        new: new tensors for those that are replaced before they are filled.
        report: the report of the load.
    """

    state_dict: dict[str, Any]
    flat: Flat
    index: _core.Index
    names: LoadNames
    options: LoadOptions
    new: NewTensors
    report: LoadReport = field(default_factory=LoadReport)
    _misfits: list[tuple[Mismatch, str]] = field(default_factory=list)

    def match(self, wanted: Mapping[str, str]) -> dict[str, EntryInfo]:
        """Return the stored entries that fit, by names of the state dict.

        Args:
            wanted: stored names by names of the state dict.

        Raises:
            PlanError: an entry is missing, has another shape or kind, or needs a cast that is
                refused.
            UnsupportedError: a tensor to load into has no shape.
        """
        for fqn in (*wanted, *self.names.unnamed):
            if isinstance(value := self.flat.values[fqn], torch.Tensor):
                check_has_shape(fqn, value, "load into")
        found = find_entries(self.index, wanted)
        missing = [fqn for fqn, entry in found.items() if entry is None] + self.names.unnamed
        if missing and (older := self._flatten_as_older_torch()) is not None:
            whole = [fqn for fqn in older.values if fqn not in self.flat.values]
            whole = list(filter(self.names.wants, whole))
            self.flat = older
            named = {**wanted, **self.names.named(whole)}
            known = {fqn: name for fqn, name in named.items() if fqn in older.values}
            found = find_entries(self.index, known)
            missing = [fqn for fqn, entry in found.items() if entry is None]
            unnamed = dict.fromkeys([*self.names.unnamed, *whole])
            missing += [fqn for fqn in unnamed if fqn in older.values and fqn not in known]
        if missing or self.options.allow_partial_load:
            self._note_missing(missing, found)
        values = self.flat.values
        fitting = {
            fqn: entry
            for fqn, entry in found.items()
            if entry is not None
            and (entry.dtype is None or self._fits(fqn, values[fqn], entry, entry.dtype))
        }
        if self._misfits:
            self._skip_or_refuse_misfits()
        return fitting

    def _flatten_as_older_torch(self) -> Flat | None:
        """Flatten the state dict as torch before 2.4, with containers without tensors as values.

        Returns:
            The flattened state dict; None if the checkpoint stores none of these containers. It
            lacks entries that :attr:`flat` lacks, and containers that are empty and not stored.
        """
        values, paths = _torch.flatten_as_2_3(self.state_dict)
        leaves = [path for fqn, path in self.flat.paths.items() if fqn in self.flat.values]
        filled = {name_of(path[:depth]) for path in leaves for depth in range(1, len(path))}
        empty = [container.path for container in self.flat.containers]
        hollow = {name_of(path[:depth]) for path in empty for depth in range(1, len(path) + 1)}
        whole = filled.union(hollow).difference(self.flat.values).intersection(values)
        named = self.names.named(filter(self.names.wants, whole))
        stored = {fqn for fqn, name in named.items() if self.index.find(name) is not None}
        if not stored:
            return None
        kept = filled.union(stored, self.flat.values)
        values = {fqn: value for fqn, value in values.items() if fqn in kept}
        return Flat(values, {fqn: paths[fqn] for fqn in values}, [])

    def complete(self, found: Mapping[str, EntryInfo]) -> dict[str, EntryInfo]:
        """Return the entries that the checkpoint holds whole, for a partial load.

        The others are left alone. All ranks find the same ones.

        Args:
            found: the stored entries that fit.
        """
        tensors = [(fqn, entry) for fqn, entry in found.items() if entry.dtype is not None]
        wholes = [(entry.index, (0,) * len(entry.shape), entry.shape) for _, entry in tensors]
        holes = self.index.check_regions(wholes, [])
        left = dict.fromkeys(tensors[number][0] for number, _, _ in holes)
        report = self.report
        report.incomplete += left
        report.missing += [name for name, other in report.tied.items() if other in left]
        report.tied = {name: other for name, other in report.tied.items() if other not in left}
        for fqn in left:
            self.new.new.pop(fqn, None)
        return {fqn: entry for fqn, entry in found.items() if fqn not in left}

    def warn_of_replaced(self, loaded: Mapping[str, Any]) -> None:
        """Count replaced tensors. Warn of a load that fills none, and of options without effect.

        Args:
            loaded: the entries that are loaded, with new tensors for those that are replaced.
        """
        options, new = self.options, self.new.new
        self.report.replaced = len(new)
        if options.assign:
            return
        tensors = ((fqn, one) for fqn, one in loaded.items() if isinstance(one, torch.Tensor))
        kept = [(fqn, tensor) for fqn, tensor in tensors if fqn not in new and not on_meta(tensor)]
        if new and not kept:
            warn_caller(
                f"the load fills no tensor of the state dict: {some(new)} are on meta, and are "
                "replaced in the state dict. A model that it came from keeps its own. Pass "
                "assign=True if that is meant, and then the state dict to "
                "model.load_state_dict(state_dict, assign=True)"
            )
        asked = [
            f"{n}={v!r}" for n in ("dtype", "device") if (v := getattr(options, n)) is not None
        ]
        unlike = [fqn for fqn, one in kept if asked and self.new.is_unlike(fqn, one)]
        if unlike:
            warn_caller(
                f"{' and '.join(asked)} does not change tensors that have memory ({some(unlike)}): "
                "they are filled as they are. Pass assign=True to replace them in the state dict"
            )

    def explain_nothing(self) -> str | None:
        """Return a message if all entries are missing or excluded; an empty one without entries."""
        report, values, names = self.report, self.flat.values, self.names
        if not values:
            return ""
        if len(values) != len(report.missing) + len(report.excluded):
            return None
        if not self.index.tensor_count:
            return None
        if not report.missing:
            return nothing_passes("load", self.options.include, self.options.exclude, values)
        stored = list(self.index.names())
        return (
            "there is nothing to load: the checkpoint has none of the names that are wanted "
            f"({some(report.missing)}); "
            f"it has {some(stored)}{names.explain(report.missing, report.missing, stored)}"
        )

    def _note_missing(self, missing: list[str], found: Collection[str]) -> None:
        report, stored = self.report, self.index.names()
        report.tied = self._find_tied(missing) if missing else {}
        report.missing = missing = [fqn for fqn in missing if fqn not in report.tied]
        if self.options.allow_partial_load:
            known = {self.names.stored_name(fqn) for fqn in self.flat.values}
            report.unexpected = [name for name in stored if name not in known]
        elif missing:
            more = f" (nor {some(missing[1:])})" if missing[1:] else ""
            hint = self.names.explain(missing, found, list(stored))
            raise PlanError(f"the checkpoint has no {missing[0]!r}{more}{hint}", tensor=missing[0])

    def _find_tied(self, missing: list[str]) -> dict[str, str]:
        """Return missing names that share the memory of a stored entry, with its name."""
        values, lacking = self.flat.values, set(missing)
        others = [fqn for fqn in values if fqn not in lacking and self.names.wants(fqn)]
        tied = find_tied(missing, others, values)
        stored = set(fitting(self.index, self.names.named(tied.values()), values))
        return {fqn: other for fqn, other in tied.items() if other in stored}

    def _fits(self, fqn: str, value: Any, entry: EntryInfo, stored: torch.dtype) -> bool:
        """Return true if a tensor can be loaded into a value of the state dict.

        Raises:
            PlanError: it needs a cast that is refused.
        """
        if not isinstance(value, torch.Tensor):
            type_name = type(value).__name__
            msg = (
                f"{fqn!r} is a tensor in the checkpoint, and of type {type_name} in the state dict"
            )
            self._misfits.append((Mismatch(fqn, type_name, entry.shape), msg))
            return False
        shape = global_shape(value)
        if shape != entry.shape:
            msg = (
                f"tensor {fqn!r} has shape {tuple(shape)} in the state dict, "
                f"and {entry.shape} in the checkpoint"
            )
            self._misfits.append((Mismatch(fqn, tuple(shape), entry.shape), msg))
            return False
        dtype = self.new.dtype_of(fqn, value)
        if dtype != stored:
            check_cast(fqn, dtype, stored)
            if dtype != self.options.dtype:  # the caller did not ask for it
                self.report.dtype_mismatched.append(cast_of(fqn, dtype, stored, self.options))
        return True

    def _skip_or_refuse_misfits(self) -> None:
        """Report entries that do not fit, or raise an error that names them."""
        if self.options.allow_partial_load:
            self.report.shape_mismatched += [mismatch for mismatch, _ in self._misfits]
            return
        more = len(self._misfits) - _NAMED
        messages = [msg for _, msg in self._misfits[:_NAMED]]
        if more > 0:
            messages.append(f"and {more:,} more")
        raise PlanError("; ".join(messages), tensor=self._misfits[0][0].name)


def warn_of_left_out_state(
    index: _core.Index, values: Iterable[str], tensors: Iterable[str]
) -> None:
    """Warn if ``param_groups`` are loaded without the ``state`` that is stored beside them.

    Args:
        index: the index of the checkpoint.
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
                f"the checkpoint has the state of an optimizer, {prefix}*, and the state dict has "
                "no place for it, as an optimizer has none before its first step: it goes on from "
                "nothing. torch.distributed.checkpoint.state_dict.get_state_dict and "
                "set_state_dict make room, as does dcp_rs.optim.load_training_state"
            )


def begin_alike(index: _core.Index, one: str, other: str, options: ReadOptions) -> bool:
    """Return true if two stored tensors begin with the same elements."""
    if one == other:
        return True
    heads = []
    for found in index.describe([one, other]):
        assert found is not None  # noqa: S101  # it was planned
        number, name, shape = found
        dtype = stored_dtype(one, name)
        count = min(math.prod(shape), _HEAD_BYTES // dtype.itemsize)
        head = torch.empty(count, dtype=dtype, device="cpu")
        index.read_regions(fills(number, shape, 0, head), **options.engine())
        heads.append(head)
    a, b = heads
    return a.dtype != b.dtype or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
