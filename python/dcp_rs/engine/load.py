"""Load a checkpoint into a state dict, on all ranks of a process group together."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from dcp_rs import _core, _torch
from dcp_rs._progress import Counts, Progress, watching
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs._url import StorageOptions
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.locate import is_of_all_ranks, is_rank_local, open_index
from dcp_rs.checkpoint.names import LoadNames
from dcp_rs.checkpoint.views import Layout
from dcp_rs.engine import cache_sharing, matching
from dcp_rs.engine.broadcast_read import Offer, is_shared, offer, read_shared, share
from dcp_rs.engine.matching import EntryInfo, LoadOptions, Matching
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.engine.reports import LoadReport, Phases
from dcp_rs.errors import CheckpointNotFoundError, CheckpointReplacedError, PlanError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors import pickles
from dcp_rs.tensors.dtypes import NAMES as DTYPE_NAMES
from dcp_rs.tensors.flatten import Flat, flatten, is_plain_state_dict, set_at, stateful_values
from dcp_rs.tensors.materialize import NewTensors
from dcp_rs.tensors.memory import is_opaque, twins
from dcp_rs.tensors.nesting import unwrap_in
from dcp_rs.tensors.regions import narrow
from dcp_rs.tensors.shards import Layouts, local_pieces
from dcp_rs.transfer.load import Load
from dcp_rs.transfer.target import Target, stored_dtype

__all__ = [
    "MIXED",
    "TRIES",
    "Plan",
    "Reads",
    "Source",
    "again_where_replaced",
    "compare",
    "hand_back",
    "load",
    "plan_rank",
    "plan_reads",
    "take_states",
]

T = TypeVar("T")

#: A load begins again so often where another save replaces the checkpoint that it reads.
TRIES = 10
#: What to say where some ranks plan here, and others as torch does.
MIXED = "some ranks load with a planner or a reader of their own class, and others without: give all ranks the same kind"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a load reads from, and how. :class:`dcp_rs.RsReader` says what each means."""

    path: os.PathLike[str]
    read: ReadOptions = field(default_factory=ReadOptions)
    weights_only: bool = True
    allow_external: bool = False
    replicas: Literal["each", "node", "all"] = "each"
    storage_options: StorageOptions | None = None
    layout: Layout | None = None
    progress: Progress = None

    def __post_init__(self) -> None:
        if self.replicas not in ("each", "node", "all"):
            msg = f"replicas={self.replicas!r}: must be one of 'each', 'node', 'all'"
            raise ValueError(msg)

    def open(self, rank: int | None = None) -> _core.Index:
        """Open the index of all ranks; with ``rank``, the one that this rank wrote in a rank-local save."""
        return open_index(
            self.path,
            rank=rank,
            allow_external=self.allow_external,
            verify=self.read.verify is True,
            storage_options=self.storage_options,
            layout=self.layout,
        )


def load(
    state_dict: dict[str, Any],
    source: Source,
    options: LoadOptions,
    ranks: RankGroup,
    *,
    stateful: bool = False,
    index: _core.Index | None = None,
) -> LoadReport:
    """Fill a state dict from a checkpoint. Every rank calls it.

    It takes three steps, and each ends on all ranks alike:

    1. Every rank plans (:func:`plan_rank`): it finds its entries in the index, and cuts sharded
       tensors into the rectangles that it holds. The plans meet on the coordinator, which compares
       them (:func:`compare`) and answers each rank: a reduce_scatter.
    2. Every rank reads. Tensors that stay as they are get their bytes in place, and that is the
       first write to memory of the caller's. An all_gather of errors ends the step.
    3. New tensors and values go into the state dict, and ``Stateful`` objects are loaded. An
       all_gather of errors ends this step, too.

    Where one rank fails in a step, the others finish theirs, hear of it in the collective that ends
    the step, and raise the same error. After an error in the second step, tensors of the caller's
    may hold new values, but no entry of the state dict was replaced.

    A load that a save overtakes begins again with the new checkpoint, unless it is partial or
    ``index`` is given.

    Args:
        state_dict: what to fill.
        source: where to read.
        options: which entries, and what they become.
        ranks: who loads.
        stateful: call the ``state_dict`` and ``load_state_dict`` of ``Stateful`` values.
        index: of the checkpoint, where it is open already.

    Raises:
        Exception: what a rank raised, on all ranks.
    """
    plan: Plan

    def plan_own() -> _Note:
        nonlocal plan
        plan = plan_rank(
            state_dict,
            source,
            options,
            rank=ranks.rank,
            stateful=stateful,
            index=index,
            ranks=ranks.size,
        )
        return plan.note

    tries = 1 if options.allow_partial_load or index is not None else TRIES
    while True:
        try:
            answer = ranks.reduce_scatter(plan_own, partial(compare, path=source.path))
            plan.clock.end("plan")
            ranks.run(partial(_read, plan, source, ranks, answer))
            ranks.run(partial(_hand_over, plan, state_dict if stateful else None))
        except BaseException:
            tries -= 1
            if tries == 0 or not _is_replaced(ranks):
                raise
        else:
            return plan.reads.report


# --- step 1: plan
# -------------------------------------------------------------------------------------


@dataclass
class Reads:
    """What one rank reads.

    Attributes:
        flat: the entries of the state dict by name, with new tensors in the place of those that are
            replaced; and where they are.
        report: what was found.
        batch: whole tensors that are filled in place, by ``stored`` name.
        names, stored, tensors: the names in the state dict, the stored names, and the tensors that
            the batch was made from.
        not_plain: the places among them that are not in the batch.
        found: what the checkpoint has for those of them that are read.
        new: tensors that replace others.
        targets: regions for all other tensors.
        why_nothing: where there is nothing to load on this rank, and something was asked for, what
            to say.
    """

    flat: Flat
    report: LoadReport
    batch: _core.Batch
    names: list[str]
    stored: list[str]
    tensors: list[torch.Tensor]
    not_plain: list[int]
    found: dict[str, EntryInfo]
    new: NewTensors
    targets: list[Target] = field(default_factory=list)
    why_nothing: str | None = None

    @property
    def blobs(self) -> dict[str, EntryInfo]:
        """Values that are no tensors, by name."""
        return {fqn: entry for fqn, entry in self.found.items() if entry.dtype is None}

    def plain_places(self) -> list[int]:
        """Return the places of what is in the batch."""
        left_out = set(self.not_plain)
        return [place for place in range(len(self.names)) if place not in left_out]

    def filled(self) -> list[torch.Tensor]:
        """Return all tensors that are written to."""
        plain = (
            [self.tensors[place] for place in self.plain_places()]
            if self.not_plain
            else self.tensors
        )
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
            whole.append(
                Target(
                    found[0], (0,) * tensor.dim(), tensor, name, stored_dtype(name, found[1]), place
                )
            )
        return [*self.targets, *whole]


@dataclass(frozen=True)
class _Note:
    """What a rank tells the coordinator of its plan. It does not grow with the model."""

    save_id: str | None
    is_of_all: bool
    replicas: str
    is_empty: bool
    why_nothing: str | None
    demand: cache_sharing.Demand | None


@dataclass
class Plan:
    """What one rank is about to read.

    Attributes:
        index: of the checkpoint.
        values: the state dict to fill, with the states of ``Stateful`` objects in their place.
        holders: those objects.
        reads: what is read.
        sample: what is read of each section, for the other ranks of the machine.
        note: what the coordinator has to know.
        clock: since the index was opened.
        loaded: values that are no tensors, once they are read.
    """

    index: _core.Index
    values: dict[str, Any]
    holders: dict[str, Any]
    reads: Reads
    sample: _core.Wanted | None
    note: _Note
    clock: Phases
    loaded: dict[str, Any] = field(default_factory=dict)


def plan_rank(
    state_dict: dict[str, Any],
    source: Source,
    options: LoadOptions,
    *,
    rank: int,
    ranks: int,
    stateful: bool = False,
    index: _core.Index | None = None,
) -> Plan:
    """Step 1, on every rank: open the checkpoint, and find in it what the state dict wants. Nothing is written."""
    values, holders = take_states(state_dict) if stateful else (state_dict, {})
    clock, is_of_all = Phases(), True
    if index is None:
        try:
            index = source.open()
        except CheckpointNotFoundError as missing:
            index, is_of_all = _open_own(source, rank, missing), False
    clock.end("metadata")
    reads = plan_reads(values, index, options)
    if blobs := reads.blobs:
        matching.warn_of_left_out_state(
            index, [entry.name for entry in blobs.values()], reads.stored
        )
    # Ranks of one machine share its page cache: each tells the others what it reads.
    sample = (
        cache_sharing.sample_of(index, reads.batch, reads.targets, source.read)
        if is_of_all and ranks > 1
        else None
    )
    note = _Note(
        save_id=index.save_id if is_of_all else None,
        is_of_all=is_of_all,
        replicas=source.replicas,
        is_empty=not reads.flat.values,
        why_nothing=reads.why_nothing,
        demand=None if sample is None else cache_sharing.demand_of(sample),
    )
    return Plan(index, values, holders, reads, sample, note, clock)


def take_states(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries of a state dict with the states of ``Stateful`` objects in their place, and those objects."""
    # In one order on all ranks: what is stateful may talk to the others.
    values = {key: state_dict[key] for key in sorted(state_dict, key=str)}
    holders = stateful_values(values)
    values.update({key: holder.state_dict() for key, holder in holders.items()})
    return values, holders


def _open_own(source: Source, rank: int, missing: CheckpointNotFoundError) -> _core.Index:
    """Open what this rank saved alone, where there is no checkpoint of all ranks."""
    if is_of_all_ranks(source.path):  # a link that leads nowhere is one all the same
        raise missing
    try:
        return source.open(rank)
    except Exception as own:  # noqa: BLE001  # one of the two is raised
        raise (own if is_rank_local(source.path) else missing) from None


@torch.no_grad()  # without it, the local tensor of a DTensor costs an autograd node
def plan_reads(
    state_dict: dict[str, Any], index: _core.Index, options: LoadOptions, flat: Flat | None = None
) -> Reads:
    """Find what the checkpoint has for each entry of a state dict. Nothing is written, and nothing is read but the index.

    Args:
        state_dict: what to fill.
        index: of the checkpoint.
        options: which entries, and what they become.
        flat: the state dict, where it is flattened already.

    Raises:
        PlanError: an entry is missing, does not fit, needs a cast that is refused, or the
            checkpoint lacks some of its elements.
        UnsupportedError: a tensor has a dtype that this torch lacks.
    """
    names = LoadNames(options.rename, options.include, options.exclude, index)
    new = NewTensors(options.dtype, options.device)
    if flat is None:
        flat = flatten(
            state_dict
            if is_plain_state_dict(state_dict)
            else _torch.flatten_sharded_tensors(state_dict)
        )
    if flat.containers:
        matching.add_hollow(state_dict, flat, index, names)
    match = Matching(state_dict, flat, index, names, options, new)
    report = match.report
    wanted, report.excluded = names.choose(flat.values)

    # Most tensors are plain: in host memory, of the stored shape and dtype. One call plans them
    # all.
    found: dict[str, EntryInfo] | None = None
    stored, tensors = list(wanted.values()), [flat.values[fqn] for fqn in wanted]
    batch, others = index.plan_plain(stored, tensors, PLAIN_TYPES, DTYPE_NAMES)
    if new.apply_to_any(
        wanted, tensors if new.reaches_plain else [tensors[place] for place in others]
    ):
        found = match.match(wanted)
        flat = match.flat
        filled = [fqn for fqn, entry in found.items() if entry.dtype is not None]
        flat.values.update(
            new.make_all(state_dict, flat.values, flat.paths, [*filled, *report.tied])
        )
        wanted = {fqn: entry.name for fqn, entry in found.items()}
        stored, tensors = list(wanted.values()), [flat.values[fqn] for fqn in wanted]
        batch, others = index.plan_plain(stored, tensors, PLAIN_TYPES, DTYPE_NAMES)
    fqns = list(wanted)
    places = {fqns[place]: place for place in others}
    found = (
        match.match({fqn: wanted[fqn] for fqn in places})
        if found is None
        else {f: found[f] for f in places}
    )
    flat = match.flat
    if report.dtype_mismatched:
        match.warn_of_casts()

    # The others become targets: of a sharded tensor, one for each rectangle that this rank holds.
    layouts: Layouts = {}
    asked: list[tuple[str, Target]] = []
    for fqn, entry in found.items():
        if entry.dtype is not None:
            asked += [
                (
                    fqn,
                    Target(
                        entry.index,
                        p.offsets,
                        p.tensor,
                        entry.name,
                        entry.dtype,
                        places.get(fqn, len(fqns)),
                    ),
                )
                for p in local_pieces(fqn, flat.values[fqn], layouts)
            ]
    reads = Reads(flat, report, batch, fqns, stored, tensors, others, found, new)
    regions = [(target.index, target.offsets, target.tensor.shape) for _, target in asked]
    # This looks at the data files, too: whether they are there, and of the right size.
    holes = index.check_regions(
        regions, [entry.index for entry in found.values() if entry.dtype is None]
    )
    left_on_meta = match.note_holes(
        [(asked[at][0], offsets, sizes) for at, offsets, sizes in holes]
    )
    in_part = {at for at, _, _ in holes}
    for at, (fqn, target) in enumerate(asked):
        if fqn not in left_on_meta:
            reads.targets += _held_of(index, target) if at in in_part else [target]

    report.entries = len(flat.values)
    report.entries_loaded = (
        len(fqns) - len(others) + len(found) - len(left_on_meta) + len(report.tied)
    )
    reads.why_nothing = match.why_nothing()
    return reads


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


def compare(notes: list[_Note], path: str | os.PathLike[str]) -> list[cache_sharing.Answer | None]:
    """Compare the plans of all ranks, on the coordinator. Return an answer for each rank.

    Raises:
        CheckpointReplacedError: two ranks opened different saves.
        PlanError: the ranks do not load in one way; or there is nothing to load on any rank, and
            something was asked for.
    """
    if not all(isinstance(note, _Note) for note in notes):
        raise PlanError(MIXED, path=path)
    if len({note.replicas for note in notes}) > 1:
        msg = f"the ranks give replicas= different values: {sorted({note.replicas for note in notes})}"
        raise PlanError(msg, path=path)
    if len({note.is_of_all for note in notes}) > 1:
        msg = f"a save of all ranks replaced those of single ranks while the ranks were opening it: {path}"
        raise CheckpointReplacedError(msg, path=path)
    if len({note.save_id for note in notes}) > 1:
        msg = f"the checkpoint was replaced by another save while the ranks were opening it: {path}"
        raise CheckpointReplacedError(msg, path=path)
    reasons = [note.why_nothing for note in notes if note.why_nothing is not None]
    if reasons and all(note.is_empty or note.why_nothing is not None for note in notes):
        raise PlanError(reasons[0])
    return cache_sharing.answers_to([note.demand for note in notes]) if notes[1:] else [None]


# --- step 2: read
# -------------------------------------------------------------------------------------


def _read(
    plan: Plan, source: Source, ranks: RankGroup, answer: cache_sharing.Answer | None
) -> None:
    """Step 2, on every rank: read into the tensors, first what other ranks read too, where they share the work."""
    index, reads = plan.index, plan.reads
    how = source.read if plan.note.is_of_all else source.read.alone()
    with watching(source.progress, "loading") as watch:
        counts = Counts(watch=watch)
        sample = plan.sample
        common = (
            None
            if sample is None or answer is None
            else cache_sharing.in_common(sample, answer, ranks.size)
        )
        job = Load(index, how, reads.batch, counts, common)
        prepare = partial(_prepare, plan, source, job, counts)
        try:
            if plan.note.is_of_all and source.replicas != "each" and ranks.size > 1:
                turns = _read_together(reads, index, source, ranks, job, prepare, counts)
            else:
                turns = prepare()
            for turn in range(turns):  # tensors that share memory take turns
                job.run(turn)
        # What failed may have filled some, and autograd refuses gradients that need the old values
        finally:
            torch.autograd.graph.increment_version(reads.filled())
        if (
            watch is not None and counts.expected
        ):  # of what lies under other tensors nothing was read
            watch(counts.expected, counts.expected)
    plan.clock.end("read")
    reads.report.path = os.fspath(source.path)
    reads.report._take(counts, io=source.read.io)
    plan.clock.tell(reads.report)


def _prepare(plan: Plan, source: Source, job: Load, counts: Counts) -> int:
    """Do what can fail before the first tensor is written to. Return how many turns the reading takes."""
    index, reads = plan.index, plan.reads
    blobs = reads.blobs
    chunks = [index.first_chunk(entry.index) for entry in blobs.values()]
    stored = index.read_bytes(chunks, **source.read.engine()) if chunks else []
    nbytes = sum(map(len, stored))
    if counts.watch is not None:
        counts.expected = reads.nbytes() + nbytes
    counts.add(Counts(nbytes, nbytes))
    plan.loaded = {
        fqn: pickles.load(fqn, data, weights_only=source.weights_only)
        for fqn, data in zip(blobs, stored, strict=True)
    }
    job.add(reads.targets)
    turns = job.arrange()
    at_once = job.at_once()
    if len(at_once) < len(reads.names) - len(reads.not_plain) + len(
        {target.place for target in reads.targets}
    ):
        _warn_of_ties(plan, source, at_once)
    return turns


def _warn_of_ties(plan: Plan, source: Source, first: Collection[int]) -> None:
    """Warn of names that are one tensor in the state dict, and two that differ in the checkpoint. The one that is filled last wins.

    Args:
        plan: of this rank.
        source: of the load.
        first: the places that are filled first and that no later one hides.
    """
    reads = plan.reads
    planned = {*reads.plain_places(), *(target.place for target in reads.targets)}
    late = [
        reads.names[place]
        for place in sorted(planned.difference(first))
        if place < len(reads.names)
    ]
    early = [reads.names[place] for place in first if place < len(reads.names)]
    stored = dict(zip(reads.names, reads.stored, strict=True))
    for fqn, other in twins(late, early, reads.flat.values).items():
        if not matching.begin_alike(plan.index, stored[fqn], stored[other], source.read.alone()):
            warn_caller(
                f"{fqn!r} and {other!r} are one tensor in the state dict, and two that differ in {source.path}: the tensor gets the values "
                f"of {other!r}. Leave the other out with exclude={fqn!r}, or load into a model that does not tie them"
            )


def _read_together(
    reads: Reads,
    index: _core.Index,
    source: Source,
    ranks: RankGroup,
    job: Load,
    prepare: Callable[[], int],
    counts: Counts,
) -> int:
    """Prepare on all ranks, then fill what several ranks need: each reads a part, and sends it to the others.

    Return how many turns are left for this rank alone: none where another rank failed, which ends
    the step.
    """
    turns, own = 0, Offer()

    def begin() -> tuple[int, list[bytes]]:
        nonlocal turns, own
        turns = prepare()
        at_once = set(job.at_once())
        targets = [
            target
            for target in reads.whole_targets(index)
            if target.place in at_once and not target.of_chunk and not is_opaque(target.tensor)
        ]
        shapes = [index.tensor(target.index).shape for target in targets]
        own = offer(
            targets, shapes, "node" if source.replicas == "node" else "all", ranks.process_group
        )
        return own.told()

    offers = ranks.all_gather(begin)
    if not is_shared(offers):
        return turns
    shared = share(own, offers, ranks.process_group)
    read, is_whole = read_shared(index, shared, source.read.alone(), ranks)
    counts.add(read)
    job.leave_out(target.place for group in shared for target in group.targets)
    return turns if is_whole else 0


# --- step 3: hand over
# --------------------------------------------------------------------------------


def _hand_over(plan: Plan, state_dict: dict[str, Any] | None) -> None:
    """Step 3, once every rank has read all: put values and new tensors into the state dict, and load ``Stateful`` objects.

    Args:
        plan: of this rank.
        state_dict: the caller's, where ``plan.values`` is a copy.
    """
    for fqn, value in (plan.loaded | plan.reads.new.new).items():
        set_at(plan.values, plan.reads.flat.paths[fqn], value)
    if state_dict is not None:
        hand_back(state_dict, plan.values, plan.holders, source=plan.index.source)


def hand_back(
    state_dict: dict[str, Any], values: dict[str, Any], holders: dict[str, Any], *, source: str
) -> None:
    """Load the objects from what was read, and put all other entries into the state dict.

    Args:
        state_dict: the caller's.
        values, holders: what :func:`take_states` returned, ``values`` filled.
        source: of the index. This package marks mappings that it saved whole.
    """
    loaded = unwrap_in(values) if source == "dcp-rs" else values
    for key, holder in holders.items():
        holder.load_state_dict(loaded.pop(key))
    state_dict.update(loaded)


# --- overtaken by a save
# ------------------------------------------------------------------------------


def again_where_replaced(ranks: RankGroup, work: Callable[[], T], *, tries: int = TRIES) -> T:
    """Return what the work gives. Begin again, on all ranks, where another save replaced the checkpoint that one of them was reading."""
    for _ in range(tries - 1):
        try:
            return work()
        except BaseException:
            if not _is_replaced(ranks):
                raise
    return work()


def _is_replaced(ranks: RankGroup) -> bool:
    """Return whether the checkpoint was replaced. Every rank knows the same failures, so all begin again, or none."""
    return any(isinstance(error, CheckpointReplacedError) for error in ranks.failures.values())
