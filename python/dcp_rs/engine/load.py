"""Load a checkpoint into a state dict, on all ranks of a process group together."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from dcp_rs import _core
from dcp_rs._progress import Progress, watching
from dcp_rs._url import StorageOptions
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.locate import is_of_all_ranks, is_rank_local, open_index
from dcp_rs.checkpoint.views import Layout
from dcp_rs.engine.broadcast_read import Offer, is_shared, offer, read_shared, share
from dcp_rs.engine.cache_sharing import Answer, Demand, answers_to, demand_of, in_common, sample_of
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.engine.reads import LoadOptions, Reads, differing_ties, plan_reads, warn_of_left_out_state
from dcp_rs.engine.reports import LoadReport, Phases
from dcp_rs.errors import CheckpointNotFoundError, CheckpointReplacedError, PlanError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors import pickles
from dcp_rs.tensors.flatten import set_at, stateful_values
from dcp_rs.tensors.memory import changing, is_opaque
from dcp_rs.tensors.nesting import unwrap_in
from dcp_rs.transfer.counts import Counts
from dcp_rs.transfer.load import Load

__all__ = [
    "MIXED",
    "TRIES",
    "Plan",
    "Source",
    "again_where_replaced",
    "compare",
    "hand_back",
    "load",
    "plan_rank",
    "take_states",
]


def take_states(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries of a state dict with the states of ``Stateful`` objects in their place, and those objects."""
    # In one order on all ranks: what is stateful may talk to the others.
    values = {key: state_dict[key] for key in sorted(state_dict, key=str)}
    holders = stateful_values(values)
    values.update({key: holder.state_dict() for key, holder in holders.items()})
    return values, holders


def hand_back(state_dict: dict[str, Any], values: dict[str, Any], holders: dict[str, Any], *, source: str) -> None:
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


T = TypeVar("T")

#: A load begins again so often where another save replaces the checkpoint that it reads.
TRIES = 10
#: What to say where some ranks plan here, and others as torch does.
MIXED = (
    "some ranks load with a planner or a reader of their own class, and others without: give all ranks the same kind"
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a load reads from, and how. :class:`dcp_rs.RsReader` says what each means."""

    path: os.PathLike[str]
    read: ReadOptions = field(default_factory=ReadOptions)
    weights_only: bool = True
    allow_external: bool = False
    replicas: Literal["each", "node", "all"] = "each"
    storage_options: StorageOptions | None = None
    layout: Layout = field(default_factory=Layout)
    progress: Progress = None

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


@dataclass(frozen=True)
class _Note:
    """What a rank tells the coordinator of its plan."""

    save_id: str | None
    is_of_all: bool
    replicas: str
    is_empty: bool
    why_nothing: str | None
    demand: Demand | None


@dataclass
class Plan:
    """What one rank is about to read.

    Attributes:
        index: of the checkpoint.
        is_of_all: whether all ranks open the same index, or each that of its own rank-local save.
        values: the state dict to fill, with the states of ``Stateful`` objects in their place.
        holders: those objects.
        reads: what is read.
        sample: what is read of each section, for the other ranks of the machine.
        clock: since the index was opened.
        loaded: values that are no tensors, once they are read.
    """

    index: _core.Index
    is_of_all: bool
    values: dict[str, Any]
    holders: dict[str, Any]
    reads: Reads
    sample: _core.Wanted | None
    clock: Phases
    loaded: dict[str, Any] = field(default_factory=dict)

    def note(self, replicas: str) -> _Note:
        """Return what the coordinator has to know. It does not grow with the model."""
        save_id = self.index.save_id if self.is_of_all else None
        return _Note(
            save_id=save_id,
            is_of_all=self.is_of_all,
            replicas=replicas,
            is_empty=not self.reads.values,
            why_nothing=self.reads.why_nothing,
            demand=demand_of(self.sample),
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

    1. Every rank plans (:func:`plan_rank`): it finds its entries in the index, and cuts sharded tensors into the rectangles that it
       holds. The plans meet on the coordinator, which compares them (:func:`compare`) and answers each rank: a reduce_scatter.
    2. Every rank reads. Tensors that stay as they are get their bytes in place, and that is the first write to memory of the caller's.
       An all_gather of errors ends the step.
    3. New tensors and values go into the state dict, and ``Stateful`` objects are loaded. An all_gather of errors ends this step, too.

    Where one rank fails in a step, the others finish theirs, hear of it in the collective that ends the step, and raise the same error.
    After an error in the second step, tensors of the caller's may hold new values, but no entry of the state dict was replaced.

    A load that a save overtakes begins again with the new checkpoint, unless it is partial or ``index`` is given.

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
    is_final = options.allow_partial_load or index is not None
    return again_where_replaced(
        ranks,
        lambda: _load(state_dict, source, options, ranks, stateful, index),
        tries=1 if is_final else TRIES,
    )


def _load(
    state_dict: dict[str, Any],
    source: Source,
    options: LoadOptions,
    ranks: RankGroup,
    stateful: bool,
    index: _core.Index | None,
) -> LoadReport:
    plan: Plan

    def plan_own() -> _Note:
        nonlocal plan
        plan = plan_rank(state_dict, source, options, rank=ranks.rank, stateful=stateful, index=index)
        return plan.note(source.replicas)

    answer = ranks.reduce_scatter(plan_own, lambda notes: compare(notes, source.path))
    plan.clock.end("plan")
    ranks.run(lambda: _read(plan, source, ranks, answer))
    ranks.run(lambda: _hand_over(plan, state_dict if stateful else None))
    return plan.reads.report


def plan_rank(
    state_dict: dict[str, Any],
    source: Source,
    options: LoadOptions,
    *,
    rank: int,
    stateful: bool = False,
    index: _core.Index | None = None,
) -> Plan:
    """Step 1, on every rank: open the checkpoint, and find in it what the state dict wants. Nothing is written."""
    values, holders = take_states(state_dict) if stateful else (state_dict, {})
    clock, is_of_all = Phases(), True
    if index is None:
        index, is_of_all = _open(source, rank)
    clock.end("metadata")
    reads = plan_reads(values, index, options)
    if reads.blobs:
        warn_of_left_out_state(index, *reads.stored_names(index))
    sample = sample_of(reads, index, source.read) if is_of_all else None
    return Plan(index, is_of_all, values, holders, reads, sample, clock)


def _open(source: Source, rank: int) -> tuple[_core.Index, bool]:
    """Return the index, and whether it is of all ranks. A rank may have saved its own alone."""
    try:
        return source.open(), True
    except CheckpointNotFoundError as missing:
        if is_of_all_ranks(source.path):  # a link that leads nowhere is one all the same
            raise
        try:
            return source.open(rank), False
        except Exception as own:  # noqa: BLE001  # one of the two is raised
            raise (own if is_rank_local(source.path) else missing) from None


def compare(notes: list[_Note], path: str | os.PathLike[str]) -> list[Answer | None]:
    """Compare the plans of all ranks, on the coordinator. Return an answer for each rank.

    Raises:
        CheckpointReplacedError: two ranks opened different saves.
        PlanError: the ranks do not load in one way; or there is nothing to load on any rank, and something was asked for.
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
    return answers_to([note.demand for note in notes])


def _read(plan: Plan, source: Source, ranks: RankGroup, answer: Answer | None) -> None:
    """Step 2, on every rank: read into the tensors, first what other ranks read too, where they share the work."""
    index, reads = plan.index, plan.reads
    with watching(source.progress, "loading") as watch:
        counts = Counts(watch=watch)
        how = source.read if plan.is_of_all else source.read.alone()
        job = Load(index, how, reads.batch, counts, in_common(plan.sample, answer, ranks.size))

        def prepare() -> int:
            """Do what can fail before the first tensor is written to. Return how many turns the reading takes."""
            plan.loaded = _read_values(reads, index, source, counts)
            job.add(reads.targets)
            turns = job.arrange()
            _warn_of_ties(reads, index, job, source)
            return turns

        with changing(reads.filled()):
            if plan.is_of_all and source.replicas != "each" and not ranks.is_alone:
                turns = _read_together(reads, index, source, ranks, job, prepare, counts)
            else:
                turns = prepare()
            for turn in range(turns):  # tensors that share memory take turns
                job.run(turn)
        if watch is not None and counts.expected:  # of what lies under other tensors nothing was read
            watch(counts.expected, counts.expected)
    plan.clock.end("read")
    reads.report.path = os.fspath(source.path)
    reads.report._take(counts, io=source.read.io)
    plan.clock.tell(reads.report)


def _hand_over(plan: Plan, state_dict: dict[str, Any] | None) -> None:
    """Step 3, once every rank has read all: put values and new tensors into the state dict, and load ``Stateful`` objects.

    Args:
        plan: of this rank.
        state_dict: the caller's, where ``plan.values`` is a copy.
    """
    for fqn, value in (plan.loaded | plan.reads.new.new).items():
        set_at(plan.values, plan.reads.paths[fqn], value)
    if state_dict is not None:
        hand_back(state_dict, plan.values, plan.holders, source=plan.index.source)


def _read_values(reads: Reads, index: _core.Index, source: Source, counts: Counts) -> dict[str, Any]:
    """Return the values that are no tensors, by name."""
    chunks = [index.first_chunk(number) for number, _ in reads.blobs]
    stored = index.read_bytes(chunks, **source.read.engine())
    nbytes = sum(map(len, stored))
    if counts.watch is not None:
        counts.expected = reads.nbytes() + nbytes
    counts.add_values(nbytes)
    return {
        fqn: pickles.load(fqn, data, weights_only=source.weights_only)
        for (_, fqn), data in zip(reads.blobs, stored, strict=True)
    }


def _warn_of_ties(reads: Reads, index: _core.Index, job: Load, source: Source) -> None:
    for fqn, other in differing_ties(index, reads, job.at_once(), source.read.alone()).items():
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

    Return how many turns are left for this rank alone: none where another rank failed, which ends the step.
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
        own = offer(targets, shapes, "node" if source.replicas == "node" else "all", ranks.process_group)
        return own.told()

    offers = ranks.all_gather(begin)
    if not is_shared(offers):
        return turns
    shared = share(own, offers, ranks.process_group)
    read, is_whole = read_shared(index, shared, source.read.alone(), ranks)
    counts.add(read)
    job.leave_out(target.place for group in shared for target in group.targets)
    return turns if is_whole else 0


def again_where_replaced(ranks: RankGroup, work: Callable[[], T], *, tries: int = TRIES) -> T:
    """Return what the work gives. Begin again, on all ranks, where another save replaced the checkpoint that one of them was reading."""
    for _ in range(tries - 1):
        try:
            return work()
        except BaseException:
            # Every rank knows the same failures, so all of them begin again, or none.
            if not any(isinstance(error, CheckpointReplacedError) for error in ranks.failures.values()):
                raise
    return work()
