"""A state dict against a checkpoint: names, shapes, dtypes, tied tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from dcp_rs import _core, _torch
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.names import explain_missing, selector, some
from dcp_rs.checkpoint.open import Checkpoint
from dcp_rs.checkpoint.renaming import Rename, Renamed
from dcp_rs.engine.reports import LoadReport, Mismatch
from dcp_rs.errors import EntryNotFoundError, PlanError
from dcp_rs.tensors.flatten import Flat, get_at, is_hollow
from dcp_rs.tensors.materialize import NewTensors
from dcp_rs.tensors.memory import twins
from dcp_rs.tensors.nesting import name_of
from dcp_rs.tensors.shards import global_shape
from dcp_rs.transfer.target import stored_dtype

__all__ = [
    "CastRule",
    "Entries",
    "EntryInfo",
    "IndexEntries",
    "LoadNames",
    "Matching",
    "add_hollow",
    "can_copy",
    "check_cast",
    "why_nothing",
]


@dataclass(slots=True)
class EntryInfo:
    """An entry of a checkpoint.

    Attributes:
        name: the stored name.
        dtype: of a tensor; None for a value that is not a tensor.
        shape: of the whole tensor.
        index: its number in the index; -1 in metadata of others.
    """

    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    index: int = -1

    @property
    def is_bytes(self) -> bool:
        """Return whether it is a value and no tensor."""
        return self.dtype is None


class Entries(Collection[str], Protocol):
    """The stored names of a checkpoint, and what stands under each."""

    def describe(self, names: Sequence[str]) -> list[EntryInfo | None]:
        """Return the entry under each name, or None.

        Raises:
            UnsupportedError: a tensor has a dtype that this torch lacks.
        """


class IndexEntries(Collection[str]):
    """The entries of an index."""

    def __init__(self, index: _core.Index) -> None:
        self._index = index

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._index.find(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.names())

    def __len__(self) -> int:
        return self._index.tensor_count

    def describe(self, names: Sequence[str]) -> list[EntryInfo | None]:
        """Return the entry under each name, or None.

        Raises:
            UnsupportedError: a tensor has a dtype that this torch lacks.
        """
        found = zip(names, self._index.describe(names), strict=True)
        return [None if row is None else _entry(name, *row) for name, row in found]


def _entry(name: str, index: int, dtype: str | None, shape: tuple[int, ...]) -> EntryInfo:
    return EntryInfo(name, None if dtype is None else stored_dtype(name, dtype), shape, index)


class LoadNames:
    """The names of a load.

    Args:
        rename: from stored names to those of the state dict.
        include, exclude: globs over names of the state dict.
    """

    def __init__(
        self, rename: Rename, include: str | Iterable[str] | None, exclude: str | Iterable[str] | None
    ) -> None:
        self._rename = rename
        self._passes = selector(include, exclude)
        self._renamed: Renamed | None = None

    @property
    def is_selective(self) -> bool:
        """Whether there is an ``include`` or an ``exclude``."""
        return self._passes is not None

    def wants(self, fqn: str) -> bool:
        """Whether an entry of the state dict is to be loaded."""
        return self._passes is None or self._passes(fqn)

    def choose(self, names: Iterable[str], stored: Collection[str] | None) -> tuple[dict[str, str], list[str]]:
        """Of the names of a state dict those that are to be loaded, with what the checkpoint calls them; and the others.

        Those that no stored name is renamed to are in neither: see :meth:`unnamed`.
        """
        wanted, excluded = list(names), []
        if self._passes is not None:
            excluded = [fqn for fqn in wanted if not self._passes(fqn)]
            wanted = list(filter(self._passes, wanted))
        if self._rename is None or stored is None:
            return dict(zip(wanted, wanted, strict=True)), excluded
        if self._renamed is None:
            self._renamed = Renamed(self._rename, stored)
        return self.named(wanted), excluded

    def stored_name(self, fqn: str) -> str | None:
        """What the checkpoint calls an entry of the state dict; None where nothing is renamed to that."""
        return fqn if self._renamed is None else self._renamed.stored_name(fqn)

    def stored_in(self, checkpoint: Checkpoint, fqn: str) -> str:
        """The same, before or after a load.

        Raises:
            EntryNotFoundError: nothing is renamed to that.
        """
        renamed = self._renamed
        if renamed is None and self._rename is not None:
            renamed = Renamed(self._rename, checkpoint)
        name = fqn if renamed is None else renamed.stored_name(fqn)
        if name is None:
            msg = f"there is no entry {fqn!r} in {checkpoint.path}{'' if renamed is None else renamed.explain(fqn)}"
            raise EntryNotFoundError(msg, path=checkpoint.path, tensor=fqn)
        return name

    def named(self, names: Iterable[str]) -> dict[str, str]:
        """What the checkpoint calls names of the state dict, without those that nothing is renamed to."""
        return {fqn: name for fqn in names if (name := self.stored_name(fqn)) is not None}

    def unnamed(self, names: Iterable[str]) -> list[str]:
        """Those of the names that are to be loaded, and that nothing is renamed to."""
        if self._renamed is None:
            return []
        return [fqn for fqn in names if self.wants(fqn) and self.stored_name(fqn) is None]

    def explain(self, missing: list[str], wanted: Collection[str], stored: Collection[str]) -> str:
        """Why names may be missing, for the end of a message."""
        return explain_missing(missing, wanted, stored) if self._renamed is None else self._renamed.explain(missing[0])


_COPIES: dict[tuple[torch.dtype, torch.dtype], bool] = {}


def can_copy(source: torch.dtype, destination: torch.dtype) -> bool:
    """Whether torch converts the one into the other without losing what kind of number it is."""
    known = _COPIES.get((source, destination))
    if known is None:
        known = not (source.is_complex and not destination.is_complex)  # torch drops the imaginary part
        try:
            if known:
                torch.zeros(1, dtype=torch.uint8, device="cpu").expand(16).clone().view(source)[:1].to(destination)
        except (RuntimeError, NotImplementedError, TypeError):
            known = False
        _COPIES[source, destination] = known
    return known


def check_cast(fqn: str, wanted: torch.dtype, stored: torch.dtype | None) -> None:
    """Raises unless a tensor can be cast.

    Raises:
        PlanError: it cannot be.
    """
    if stored is None or not can_copy(stored, wanted):
        msg = f"tensor {fqn!r} is stored as {stored}, which cannot be cast to {wanted}"
        raise PlanError(msg, tensor=fqn)


class CastRule:
    """What it means that state dict and checkpoint differ in dtype.

    Args:
        wish: what floating-point tensors are to become: such a cast needs no word.
        policy: of all others: ``"warn"`` casts and says so, ``"error"`` refuses, ``"cast"`` casts.

    Raises:
        ValueError: another policy.
    """

    def __init__(self, wish: torch.dtype | None, policy: Literal["warn", "error", "cast"]) -> None:
        if policy not in ("warn", "error", "cast"):
            msg = f"dtype_policy={policy!r}: must be one of 'warn', 'error', 'cast'"
            raise ValueError(msg)
        self._wish = wish
        self._policy = policy

    def check(self, fqn: str, wanted: torch.dtype, stored: torch.dtype | None, report: LoadReport) -> None:
        """Notes in the report that a tensor is cast.

        Raises:
            PlanError: it cannot be, or the policy refuses it.
        """
        check_cast(fqn, wanted, stored)
        is_wish = self._wish is not None and wanted == self._wish
        if self._policy == "error" and not is_wish:
            msg = f"tensor {fqn!r} is {wanted} in the state dict, and {stored} in the checkpoint (dtype_policy='error')"
            raise PlanError(msg, tensor=fqn)
        if not is_wish:
            report.dtype_mismatched.append(Mismatch(fqn, wanted, stored))

    def warn(self, report: LoadReport) -> None:
        """Says what is cast without having been wished for."""
        cast = report.dtype_mismatched
        if cast and self._policy == "warn":
            first = cast[0]
            others = f" and {len(cast) - 1} other tensors" if cast[1:] else ""
            warn_caller(
                f"{first.name!r}{others} are cast on loading ({first.got} in the checkpoint, {first.expected} in the state dict); "
                "say dtype_policy='cast', or dtype=..., if that is meant"
            )


#: A message names so many entries that do not fit.
_NAMED = 10


def add_hollow(state_dict: Mapping[str, Any], flat: Flat, entries: Entries, names: LoadNames) -> None:
    """Add containers without entries that the checkpoint holds as a value: it was not flattened, or torch before 2.4 wrote it.

    Args:
        state_dict: the state dict to load into.
        flat: the same, flattened. What is added goes here.
        entries: the entries of the checkpoint.
        names: what the checkpoint calls them.
    """
    paths = {c.path[:depth]: None for c in flat.containers for depth in range(1, len(c.path) + 1)}
    hollow = {name_of(path): path for path in paths}
    if not hollow:
        return
    names.choose([*flat.values, *hollow], entries)
    stored = names.named(hollow)
    for fqn, found in zip(stored, entries.describe(list(stored.values())), strict=True):
        path = hollow[fqn]
        if found is None or fqn in flat.values or any(p[: len(path)] == path for p in flat.paths.values()):
            continue
        flat.values[fqn], flat.paths[fqn] = get_at(state_dict, path), path


class Matching:
    """Compare a state dict with a checkpoint, for one load.

    Args:
        state_dict: the state dict to load into.
        flat: the same, flattened; or its top level where it is not to be flattened.
        entries: the entries of the checkpoint.
        names: which names are loaded, and what the checkpoint calls them.
        casts: the rule for dtypes that differ.
        report: what is found goes here.
        new: what tensors become before they are filled.
        partial: leave alone what is missing or has another shape.
        is_flat: whether ``flat`` was flattened.

    Attributes:
        flat: as given; flattened as torch before 2.4 did, where the checkpoint has the names of that.
    """

    def __init__(
        self,
        state_dict: dict[str, Any],
        flat: Flat,
        entries: Entries,
        names: LoadNames,
        casts: CastRule,
        report: LoadReport,
        new: NewTensors,
        *,
        partial: bool,
        is_flat: bool = True,
    ) -> None:
        self.flat = flat
        self._state_dict = state_dict
        self._entries = entries
        self._names = names
        self._casts = casts
        self._report = report
        self._new = new
        self._partial = partial
        self._is_flat = is_flat
        self._misfits: list[Mismatch] = []
        self._messages: list[str] = []

    def match(self, wanted: Mapping[str, str]) -> dict[str, EntryInfo]:
        """Return what the checkpoint has for each name that the load fills.

        Args:
            wanted: stored names by names of the state dict.

        Raises:
            PlanError: an entry is missing, has another shape or kind, or needs a cast that is refused.
        """
        found = self._look_up(wanted)
        missing = self._lacking(found)
        if missing and self._is_flat:
            values, paths = _torch.flatten_as_2_3(self._state_dict)
            extra = [fqn for fqn in values if fqn not in self.flat.values and self._has(fqn)]
            if extra:
                self.flat = Flat(values, paths, [])
                found = self._look_up(self._names.named(fqn for fqn in [*wanted, *extra] if fqn in values))
                missing = self._lacking(found)
        if missing or self._partial:
            self._note_missing(missing, found)
        values = self.flat.values
        fitting = {
            fqn: entry for fqn, entry in found.items() if entry is not None and self._fits(fqn, values[fqn], entry)
        }
        if self._misfits:
            self._leave_or_refuse()
        return fitting

    def note_hole(self, fqn: str, offsets: Iterable[int], sizes: Iterable[int]) -> None:
        """Note that the checkpoint lacks elements of a tensor, and so of those that are tied to it.

        Raises:
            PlanError: the load is not partial.
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

    def _look_up(self, wanted: Mapping[str, str]) -> dict[str, EntryInfo | None]:
        return dict(zip(wanted, self._entries.describe(list(wanted.values())), strict=True))

    def _has(self, fqn: str) -> bool:
        return self._names.stored_name(fqn) in self._entries

    def _lacking(self, found: Mapping[str, EntryInfo | None]) -> list[str]:
        values = self.flat.values
        missing = [fqn for fqn, entry in found.items() if entry is None] + self._names.unnamed(values)
        # A save that does not flatten leaves out a container that holds nothing.
        return missing if self._is_flat else [fqn for fqn in missing if not is_hollow(values[fqn])]

    def _note_missing(self, missing: list[str], found: Collection[str]) -> None:
        report = self._report
        report.tied = self._find_tied(missing) if missing else {}
        report.missing = missing = [fqn for fqn in missing if fqn not in report.tied]
        if self._partial:
            known = {self._names.stored_name(fqn) for fqn in self.flat.values}
            report.unexpected = [name for name in self._entries if name not in known]
        elif missing:
            more = f" (and {len(missing) - 1} more: {', '.join(map(repr, missing[1:6]))})" if missing[1:] else ""
            msg = f"the checkpoint has no {missing[0]!r}{more}{self._names.explain(missing, found, self._entries)}"
            raise PlanError(msg, tensor=missing[0])

    def _find_tied(self, missing: list[str]) -> dict[str, str]:
        """Return the names whose tensor is the memory of another one, which the checkpoint has."""
        values, lacking = self.flat.values, set(missing)
        others = [fqn for fqn in values if fqn not in lacking and self._names.wants(fqn)]
        tied = twins(missing, others, values)
        stored = self._look_up(self._names.named(tied.values()))
        held = {
            other
            for other, entry in stored.items()
            if entry is not None and not entry.is_bytes and entry.shape == global_shape(values[other])
        }
        return {fqn: other for fqn, other in tied.items() if other in held}

    def _fits(self, fqn: str, value: Any, entry: EntryInfo) -> bool:
        if entry.is_bytes:
            return True
        if not isinstance(value, torch.Tensor):
            msg = f"{fqn!r} is a tensor in the checkpoint, and of type {type(value).__name__} in the state dict"
            return self._misfit(Mismatch(fqn, type(value).__name__, entry.shape), msg)
        shape = global_shape(value)
        if shape != entry.shape:
            msg = f"tensor {fqn!r} has shape {tuple(shape)} in the state dict, and {entry.shape} in the checkpoint"
            return self._misfit(Mismatch(fqn, tuple(shape), entry.shape), msg)
        dtype = self._new.dtype_of(fqn, value)
        if dtype != entry.dtype:
            self._casts.check(fqn, dtype, entry.dtype, self._report)
        return True

    def _misfit(self, mismatch: Mismatch, message: str) -> bool:
        self._misfits.append(mismatch)
        self._messages.append(message)
        return False

    def _leave_or_refuse(self) -> None:
        """Leave alone what does not fit, or name all of it at once."""
        misfits, messages = self._misfits, self._messages
        if self._partial:
            self._report.shape_mismatched += misfits
            return
        more = len(messages) - _NAMED
        said = messages[:_NAMED] + ([f"and {more:,} more"] if more > 0 else [])
        raise PlanError("; ".join(said), tensor=misfits[0].name)


def why_nothing(
    report: LoadReport, values: Mapping[str, Any], entries: Entries, names: LoadNames, given: Mapping[str, Any]
) -> str:
    """Return what to say where no rank has anything to load.

    Args:
        report: of the match.
        values: the flat state dict.
        entries: the entries of the checkpoint.
        names: of the load.
        given: ``include`` and ``exclude``.
    """
    if not report.missing:
        passed = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
        return f"there is nothing to load: no name of the state dict passes {passed}; it has {some(values)}"
    stored = list(entries)
    return (
        f"there is nothing to load: the checkpoint has none of the names that are wanted ({some(report.missing)}); "
        f"it has {some(stored)}{names.explain(report.missing, report.missing, stored)}"
    )
