"""Plan what one rank reads: a state dict against an index, before the first byte."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch

from dcp_rs import _core, _torch
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.renaming import Rename
from dcp_rs.engine.matching import CastRule, EntryInfo, IndexEntries, LoadNames, Matching, add_hollow, why_nothing
from dcp_rs.engine.reports import LoadReport
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.dtypes import NAMES as DTYPE_NAMES
from dcp_rs.tensors.flatten import flatten, is_plain_state_dict
from dcp_rs.tensors.materialize import NewTensors
from dcp_rs.tensors.memory import twins
from dcp_rs.tensors.nesting import TreePath
from dcp_rs.tensors.regions import narrow
from dcp_rs.tensors.shards import Layouts, local_pieces
from dcp_rs.transfer.target import Target, fills, stored_dtype

__all__ = ["LoadOptions", "Reads", "differing_ties", "plan_reads", "warn_of_left_out_state"]

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


#: Entries that are one tensor in the state dict are compared by so many bytes.
_HEAD_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Which entries a load fills, and what tensors become. :func:`dcp_rs.load` says what each means."""

    rename: Rename = None
    include: str | Iterable[str] | None = None
    exclude: str | Iterable[str] | None = None
    allow_partial_load: bool = False
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    dtype_policy: Literal["warn", "error", "cast"] = "warn"


@dataclass
class Reads:
    """What one rank reads.

    Attributes:
        state_dict: the state dict to load into.
        values: its entries by name, with new tensors in the place of those that are replaced.
        paths: where each entry is.
        report: what was found.
        batch: whole tensors that are filled in place, by ``stored`` name.
        names, stored, tensors: the names in the state dict, the stored names, and the tensors that the batch was made from.
        not_plain: the places among them that are not in the batch.
        targets: regions for all other tensors.
        blobs: values that are no tensors: their number in the index, and their name in the state dict.
        new: tensors that replace others.
        why_nothing: where there is nothing to load on this rank, and something was asked for, what to say.
    """

    state_dict: dict[str, Any]
    values: dict[str, Any]
    paths: Mapping[str, TreePath]
    report: LoadReport
    batch: _core.Batch
    names: list[str]
    stored: list[str]
    tensors: list[torch.Tensor]
    not_plain: list[int]
    new: NewTensors
    targets: list[Target] = field(default_factory=list)
    blobs: list[tuple[int, str]] = field(default_factory=list)
    why_nothing: str | None = None

    def plain_places(self) -> list[int]:
        """Return the places of what is in the batch."""
        if not self.not_plain:
            return list(range(len(self.names)))
        left_out = set(self.not_plain)
        return [place for place in range(len(self.names)) if place not in left_out]

    def filled(self) -> list[torch.Tensor]:
        """Return all tensors that are written to."""
        plain = self.tensors
        if self.not_plain:
            plain = [plain[place] for place in self.plain_places()]
        return [*plain, *(target.tensor for target in self.targets)]

    def nbytes(self) -> int:
        """Return the size of all tensors, as they are stored."""
        plain = sum(self.tensors[place].nbytes for place in self.plain_places())
        return plain + sum(target.nbytes for target in self.targets)

    def whole_targets(self, index: _core.Index) -> list[Target]:
        """Return all that is filled, as targets."""
        places = self.plain_places()
        described = index.describe([self.stored[place] for place in places])
        whole = []
        for place, found in zip(places, described, strict=True):
            assert found is not None  # noqa: S101  # it was planned
            name, tensor = self.stored[place], self.tensors[place].detach()
            whole.append(Target(found[0], (0,) * tensor.dim(), tensor, name, stored_dtype(name, found[1]), place))
        return [*self.targets, *whole]

    def stored_names(self, index: _core.Index) -> tuple[list[str], Iterable[str]]:
        """Return the stored names of values, and those of tensors."""
        regions = (index.name(target.index) for target in self.targets if not target.of_chunk)
        return [index.name(number) for number, _ in self.blobs], chain(self.stored, regions)


@torch.no_grad()  # without it, the local tensor of a DTensor costs an autograd node
def plan_reads(state_dict: dict[str, Any], index: _core.Index, options: LoadOptions) -> Reads:
    """Find what the checkpoint has for each entry of a state dict. Nothing is written, and nothing is read but the index.

    Raises:
        PlanError: an entry is missing, does not fit, needs a cast that is refused, or the checkpoint lacks some of its elements.
        UnsupportedError: a tensor has a dtype that this torch lacks.
    """
    report, entries = LoadReport(), IndexEntries(index)
    casts = CastRule(options.dtype, options.dtype_policy)
    names = LoadNames(options.rename, options.include, options.exclude)
    device = None if options.device is None else torch.device(options.device)
    new = NewTensors(options.dtype, device)
    flat = flatten(state_dict if is_plain_state_dict(state_dict) else _torch.flatten_sharded_tensors(state_dict))
    if flat.containers:
        add_hollow(state_dict, flat, entries, names)
    wanted, report.excluded = names.choose(flat.values, entries)
    partial = options.allow_partial_load
    matching = Matching(state_dict, flat, entries, names, casts, report, new, partial=partial)

    # Most tensors are plain: in host memory, of the stored shape and dtype. One call plans them all.
    found: dict[str, EntryInfo] | None = None
    stored, tensors = list(wanted.values()), [flat.values[fqn] for fqn in wanted]
    batch, others = index.plan_plain(stored, tensors, PLAIN_TYPES, DTYPE_NAMES)
    if new.apply_to_any(wanted, tensors if new.reaches_plain else [tensors[place] for place in others]):
        found = matching.match(wanted)
        flat = matching.flat
        filled = [fqn for fqn, entry in found.items() if not entry.is_bytes]
        flat.values.update(new.make_all(state_dict, flat.values, flat.paths, [*filled, *report.tied]))
        wanted = {fqn: entry.name for fqn, entry in found.items()}
        stored, tensors = list(wanted.values()), [flat.values[fqn] for fqn in wanted]
        batch, others = index.plan_plain(stored, tensors, PLAIN_TYPES, DTYPE_NAMES)
    fqns = list(wanted)
    places = {fqns[place]: place for place in others}
    found = matching.match({fqn: wanted[fqn] for fqn in places}) if found is None else {f: found[f] for f in places}
    flat = matching.flat
    if report.dtype_mismatched:
        casts.warn(report)

    reads = Reads(state_dict, flat.values, flat.paths, report, batch, fqns, stored, tensors, others, new)
    layouts: Layouts = {}
    asked: list[tuple[str, Target]] = []
    for fqn, entry in found.items():
        if entry.dtype is None:
            reads.blobs.append((entry.index, fqn))
            continue
        place = places.get(fqn, len(fqns))
        asked += [
            (fqn, Target(entry.index, piece.offsets, piece.tensor, entry.name, entry.dtype, place))
            for piece in local_pieces(fqn, flat.values[fqn], layouts)
        ]
    _add_held(reads, index, asked, matching)

    left_on_meta = sum(fqn in new.old and fqn not in new.new for fqn in report.partly_filled)
    report.entries = len(flat.values)
    report.entries_loaded = len(fqns) - len(others) + len(found) - left_on_meta + len(report.tied)
    if flat.values and len(flat.values) == len(report.missing) + len(report.excluded) and len(entries):
        given = {"include": options.include, "exclude": options.exclude}
        reads.why_nothing = why_nothing(report, flat.values, entries, names, given)
    return reads


def _add_held(reads: Reads, index: _core.Index, asked: list[tuple[str, Target]], matching: Matching) -> None:
    """Add targets, as far as the checkpoint holds their elements. Look whether the data files are there, and of the right size."""
    regions = [(target.index, target.offsets, target.tensor.shape) for _, target in asked]
    holes = index.check_regions(regions, [number for number, _ in reads.blobs])
    in_part = {at for at, _, _ in holes}
    left_alone: set[str] = set()
    for at, offsets, sizes in holes:
        fqn = asked[at][0]
        tied = [name for name, other in reads.report.tied.items() if other == fqn]
        matching.note_hole(fqn, offsets, sizes)
        if fqn in reads.new.new and reads.new.old[fqn].is_meta:
            # There are no values for the elements that the checkpoint lacks.
            reads.values.update({name: reads.new.give_up(name) for name in [fqn, *tied]})
            left_alone.add(fqn)
        elif fqn in reads.new.new:
            reads.new.copy_old(fqn)
    for at, (fqn, target) in enumerate(asked):
        if fqn in left_alone:
            continue
        reads.targets += [target] if at not in in_part else _held_of(index, target)


def _held_of(index: _core.Index, target: Target) -> list[Target]:
    """Return targets for what chunks hold of a region."""
    return [
        Target(
            held.chunk,
            held.chunk_offsets,
            narrow(target.tensor, held.region_offsets, held.sizes),
            target.name,
            target.dtype,
            target.place,
            of_chunk=True,
        )
        for held in index.touching(target.index, target.offsets, target.tensor.shape)
    ]


def differing_ties(index: _core.Index, reads: Reads, first: Collection[int], options: ReadOptions) -> dict[str, str]:
    """Return names whose tensor is that of another name, where the checkpoint has two that differ.

    The other name is the one that is filled last. The first MiB of each is compared: weights that were trained apart differ everywhere.

    Args:
        index: of the checkpoint.
        reads: of this rank.
        first: the places that are filled first and that no later one hides.
        options: how to read.
    """
    plain = reads.plain_places()
    if len(first) == len(plain) + len({target.place for target in reads.targets}):
        return {}  # no two share memory
    planned = {*plain, *(target.place for target in reads.targets)}
    late = [reads.names[place] for place in sorted(planned.difference(first)) if place < len(reads.names)]
    if not late:
        return {}
    stored = dict(zip(reads.names, reads.stored, strict=True))
    tied = twins(late, [reads.names[place] for place in first if place < len(reads.names)], reads.values)
    return {fqn: other for fqn, other in tied.items() if not _same_head(index, stored[fqn], stored[other], options)}


def _same_head(index: _core.Index, one: str, other: str, options: ReadOptions) -> bool:
    """Return whether two stored tensors begin with the same elements."""
    if one == other:
        return True
    heads = []
    for found in index.describe([one, other]):
        assert found is not None  # noqa: S101  # it was planned
        number, name, shape = found
        dtype = stored_dtype(one, name)
        flat = torch.empty(min(math.prod(shape), _HEAD_BYTES // dtype.itemsize), dtype=dtype, device="cpu")
        index.read_regions(fills(number, shape, 0, flat), **options.engine())
        heads.append(flat)
    a, b = heads
    return a.dtype != b.dtype or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
