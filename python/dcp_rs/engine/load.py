"""Load of a checkpoint into a state dict, by all ranks of a process group."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from dcp_rs import _core
from dcp_rs._progress import Counts, watching
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs._url import StrPath
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.folders import checkpoint_path
from dcp_rs.checkpoint.locate import FindRoutes, LoadSource
from dcp_rs.checkpoint.names import LoadNames
from dcp_rs.engine import cache_sharing, matching
from dcp_rs.engine.broadcast_read import (
    Offer,
    Offered,
    any_shared,
    match_offers,
    offer,
    read_shared,
)
from dcp_rs.engine.matching import EntryInfo, LoadOptions, Matching
from dcp_rs.engine.peer_reads import PeerReads
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.engine.reports import LoadReport, Mismatch, Phases
from dcp_rs.errors import CheckpointReplacedError, PlanError
from dcp_rs.tensors import pickles
from dcp_rs.tensors.dtypes import NAMES as DTYPE_NAMES
from dcp_rs.tensors.flatten import Flat, flatten, is_stateful, set_at
from dcp_rs.tensors.materialize import NewTensors
from dcp_rs.tensors.memory import find_tied, is_opaque, on_meta
from dcp_rs.tensors.regions import narrow
from dcp_rs.tensors.shards import ShardCache, local_pieces
from dcp_rs.transfer.copy_stream import current_streams, on_streams
from dcp_rs.transfer.load import Load, as_tensor, copy_value, fill, read_values
from dcp_rs.transfer.target import Target, stored_dtype

T = TypeVar("T")

#: Attempts of a load whose checkpoint is replaced by another save while it reads.
_TRIES = 10


def load(
    ranks: RankGroup,
    make_request: Callable[[], LoadRequest],
) -> LoadReport:
    """Fill a state dict from a checkpoint. Every rank calls it.

    It takes three steps. Each succeeds on all ranks, or raises on all:

    1. Every rank plans (:func:`plan_rank`): it looks its entries up in the index, and cuts sharded
       tensors into the rectangles that it holds. The coordinator compares the plans
       (:func:`compare`) and replies to each rank: a reduce_scatter.
    2. Every rank reads. Tensors that the state dict keeps are filled in place, and that is the
       first write to the caller's memory. An all_gather of errors ends the step.
    3. New tensors and values go into the state dict, and ``Stateful`` objects are loaded. An
       all_gather of errors ends this step, too.

    If a rank fails in a step, the other ranks end their part of it, and all ranks raise when the
    step ends. After an error in step 2, tensors of the caller may hold new values, but no entry of
    the state dict was replaced. After one in step 3, some may be.

    Args:
        ranks: the ranks that load.
        make_request: returns the request of this rank. It is called in step 1, so that its error
            is raised on all ranks.

    Returns:
        The report of this rank.

    Raises:
        CheckpointReplacedError: another save replaced the checkpoint. :func:`retry` loads again.
        Exception: the error of any rank, on all ranks.
    """
    plan: Plan

    def plan_own() -> _PlanSummary:
        nonlocal plan
        plan = plan_rank(make_request(), ranks)
        return plan.summary

    def hand_over() -> None:
        for fqn, value in (plan.values | plan.reads.new.new).items():
            set_at(plan.state_dict, plan.reads.flat.paths[fqn], value)
        if plan.request.stateful:
            load_stateful(plan)

    reply = ranks.reduce_scatter(plan_own, compare)
    plan.clock.end("plan")
    ranks.run(partial(_read, plan, ranks, reply))
    ranks.run(hand_over)
    return plan.reads.report


@dataclass(frozen=True)
class LoadRequest:
    """Request of one rank.

    Attributes:
        state_dict: the state dict to fill.
        source: the checkpoint.
        options: which entries to load, and into which dtype and device.
        is_part: another request loads the rest, so that nothing is said of what this one leaves.
        stateful: call ``state_dict`` and ``load_state_dict`` of ``Stateful`` values.
        index: the index of the checkpoint, if it is open.
    """

    state_dict: dict[str, Any]
    source: LoadSource
    options: LoadOptions = field(default_factory=LoadOptions)
    is_part: bool = False
    stateful: bool = False
    index: _core.Index | None = None


# --- step 1: plan ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PlanSummary:
    """Summary of a rank's plan for the coordinator. Its size does not depend on the model.

    Attributes:
        path: the checkpoint, for messages.
        save_id: the save that the rank opened; None for a rank-local save.
        is_of_all: it is a save of all ranks.
        replicas: the option of the load.
        nothing_to_load: as in :class:`Reads`.
        sample: a sample of the rank's reads, for the other ranks of the machine.
    """

    path: str
    save_id: str | None
    is_of_all: bool
    replicas: str
    nothing_to_load: str | None
    sample: cache_sharing.ReadSample | None


@dataclass
class Plan:
    """Plan of one rank.

    Attributes:
        request: the request of this rank.
        index: the index of the checkpoint.
        state_dict: the state dict to fill, with the states of ``Stateful`` objects.
        stateful: these objects.
        reads: what this rank reads.
        sample: a sample of that, for the other ranks of the machine.
        summary: what the coordinator gets.
        clock: measures the phases of the load.
        values: values that are no tensors. Step 2 reads them.
        fills: tensors of the state dict that these fill, as their class does it.
    """

    request: LoadRequest
    index: _core.Index
    state_dict: dict[str, Any]
    stateful: dict[str, Any]
    reads: Reads
    sample: _core.Sample | None
    summary: _PlanSummary
    clock: Phases
    values: dict[str, Any] = field(default_factory=dict)
    fills: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def value_chunks(self) -> list[int]:
        """The chunks of the values, in their order."""
        return [self.index.first_chunk(entry.index) for entry in self.reads.values.values()]


def plan_rank(request: LoadRequest, ranks: RankGroup) -> Plan:
    """Open the checkpoint, and plan the reads of this rank. Nothing is written."""
    source, state_dict, holders = request.source, request.state_dict, dict[str, Any]()
    if request.stateful:
        state_dict, holders = call_state_dicts(state_dict)
    clock, index, is_of_all = Phases(), request.index, True
    if index is None:
        index, is_of_all = source.open(ranks.rank)
    clock.end("metadata")
    reads = plan_reads(state_dict, index, request.options)
    if reads.values and not request.is_part:
        names = [entry.name for entry in reads.values.values()]
        matching.warn_of_left_out_state(index, names, reads.stored)
    sample = None
    if is_of_all and not ranks.is_alone:
        sample = cache_sharing.sample_of(index, source.read, reads.regions, reads.batch)
    summary = _PlanSummary(
        path=os.fspath(source.path),
        save_id=index.save_id if is_of_all else None,
        is_of_all=is_of_all,
        replicas=source.replicas,
        nothing_to_load=reads.nothing_to_load,
        sample=None if sample is None else cache_sharing.share(sample),
    )
    return Plan(request, index, state_dict, holders, reads, sample, summary, clock)


def call_state_dicts(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replace ``Stateful`` objects by their states, in a copy. Return it, and the objects."""
    # In the same order on all ranks: a state_dict() may contain collectives.
    states = {key: state_dict[key] for key in sorted(state_dict, key=str)}
    others = [(key, value) for key, value in states.items() if not isinstance(value, torch.Tensor)]
    stateful = {key: value for key, value in others if is_stateful(value)}
    states.update({key: holder.state_dict() for key, holder in stateful.items()})
    return states, stateful


@dataclass
class Reads:
    """Reads of one rank.

    Attributes:
        flat: the flattened state dict, with new tensors in the place of those that are replaced.
        report: the report of the load, as far as it is known.
        batch: whole tensors that are filled in place. Their numbers are places in ``stored``.
        names: the entries to load, by their names in the state dict.
        stored: their names in the checkpoint, in the same order.
        tensors: their values in the state dict, in the same order. A place is an index into these
            three lists.
        plain: the places of the tensors in ``batch``.
        found: the stored entries that are not in ``batch``, by their names in the state dict.
        values: the entries in ``found`` that are no tensors.
        new: tensors that replace tensors of the state dict.
        targets: regions of the other tensors.
        nothing_to_load: a message, if there is nothing to load though there are entries; an empty
            one without entries.
    """

    flat: Flat
    report: LoadReport
    batch: _core.Batch
    names: list[str]
    stored: list[str]
    tensors: list[torch.Tensor]
    plain: Sequence[int]
    found: dict[str, EntryInfo]
    values: dict[str, EntryInfo]
    new: NewTensors
    targets: list[Target]
    nothing_to_load: str | None

    def nbytes(self) -> int:
        """Return the bytes of all tensors, as they are stored."""
        plain = sum(self.tensors[place].nbytes for place in self.plain)
        return plain + sum(target.nbytes for target in self.targets)

    def regions(self) -> list[cache_sharing.Region]:
        """Return the regions of the targets."""
        return [(t.index, t.of_chunk, t.offsets, t.tensor.shape) for t in self.targets]

    def whole_targets(self, index: _core.Index) -> list[Target]:
        """Return targets for all tensors, those in the batch too."""
        whole = []
        described = index.describe([self.stored[place] for place in self.plain])
        for place, described_entry in zip(self.plain, described, strict=True):
            assert described_entry is not None  # noqa: S101  # it was planned
            number, dtype_name, _ = described_entry
            name, tensor = self.stored[place], self.tensors[place].detach()
            dtype = stored_dtype(name, dtype_name)
            whole.append(Target(number, (0,) * tensor.dim(), tensor, name, dtype, place))
        return [*self.targets, *whole]


@torch.no_grad()  # otherwise each local tensor of a DTensor costs an autograd node
def plan_reads(
    state_dict: dict[str, Any], index: _core.Index, options: LoadOptions, flat: Flat | None = None
) -> Reads:
    """Look the entries of a state dict up in a checkpoint. Nothing is written.

    Args:
        state_dict: the state dict to fill.
        index: the index of the checkpoint.
        options: which entries to load, and into which dtype and device.
        flat: the flattened state dict, if the caller has it.

    Raises:
        PlanError: an entry is missing, does not fit, needs a cast that is refused, or the
            checkpoint lacks some of its elements.
        UnsupportedError: this torch lacks the dtype of a tensor, or a tensor has no shape.
    """
    names = LoadNames(options.rename, options.include, options.exclude, index.names)
    new = NewTensors(options.dtype, options.device, assign=options.assign)
    if flat is None:
        flat = flatten(state_dict)
    if flat.containers:
        matching.add_hollow(state_dict, flat, index, names)
    match = Matching(state_dict, flat, index, names, options, new)
    report = match.report
    wanted, report.excluded = names.choose(flat.values)

    fqns, stored = list(wanted), list(wanted.values())
    tensors = [flat.values[fqn] for fqn in fqns]
    if replaced := new.names_of(fqns, tensors):
        fitting = matching.fitting(index, {fqn: wanted[fqn] for fqn in replaced}, flat.values)
        new.make_all(state_dict, flat, fitting)
        tensors = [new.new.get(fqn, tensor) for fqn, tensor in zip(fqns, tensors, strict=True)]

    # Most tensors are plain: in host memory, of the stored shape and dtype. One call plans them.
    batch, others = index.plan_plain(stored, tensors, PLAIN_TYPES, DTYPE_NAMES)
    places = {fqns[place]: place for place in others}
    found = match.match({fqn: wanted[fqn] for fqn in places})
    if options.allow_partial_load:
        found = match.complete(found)
    flat = match.flat
    for fqn, entry in found.items():
        if fqn not in places:  # a value of a checkpoint that is flattened otherwise
            places[fqn] = len(fqns)
            fqns.append(fqn)
            stored.append(entry.name)
            tensors.append(flat.values[fqn])
    if replaced:
        new.make_all(state_dict, flat, filter(replaced.__contains__, report.tied))
        flat.values.update(new.new)
    if report.dtype_mismatched:
        matching.warn_of_casts(report.dtype_mismatched, options)

    targets = _make_targets(flat, index, found, places)
    report.entries = len(flat.values)
    report.entries_loaded = len(fqns) - len(places) + len(found) + len(report.tied)
    plain: Sequence[int] = range(len(fqns))
    if places:
        plain = sorted(set(plain).difference(places.values()))
    values = {fqn: entry for fqn, entry in found.items() if entry.dtype is None}
    if new.new or options.dtype is not None or options.device is not None:
        loaded = [*(fqns[place] for place in plain), *found]
        match.warn_of_replaced({fqn: flat.values[fqn] for fqn in loaded})
    return Reads(
        *(flat, report, batch, fqns, stored, tensors, plain, found, values, new, targets),
        nothing_to_load=match.explain_nothing(),
    )


def _make_targets(
    flat: Flat, index: _core.Index, found: dict[str, EntryInfo], places: dict[str, int]
) -> list[Target]:
    """Make targets of tensors that are not plain: one for each rectangle of a sharded tensor.

    A target is not a read: :class:`~dcp_rs.transfer.load.Load` looks up the chunks that hold it.

    Args:
        flat: the flattened state dict.
        index: the index of the checkpoint.
        found: the stored entries.
        places: the places of the entries in the load.

    Raises:
        PlanError: the checkpoint lacks elements of a tensor.
    """
    layouts: ShardCache = {}
    targets: list[Target] = []
    values: list[int] = []
    for fqn, entry in found.items():
        if entry.dtype is None:
            values.append(entry.index)
            continue
        at = entry.name, entry.dtype, places[fqn]
        targets += [
            Target(entry.index, piece.offsets, piece.tensor, *at)
            for piece in local_pieces(fqn, flat.values[fqn], layouts)
        ]
    # This checks the data files, too: that they exist and have the right size.
    holes = index.check_regions([(t.index, t.offsets, t.tensor.shape) for t in targets], values)
    if holes:
        number, offsets, sizes = holes[0]
        name = targets[number].name
        msg = (
            f"tensor {name!r}: the checkpoint does not hold {list(sizes)} elements "
            f"at {list(offsets)}"
        )
        raise PlanError(msg, tensor=name)
    return targets


def _stored_parts(index: _core.Index, target: Target) -> list[Target]:
    """Return targets for the parts of a region that chunks hold."""
    return [
        Target(
            part.chunk,
            part.chunk_offsets,
            narrow(target.tensor, part.region_offsets, part.sizes),
            target.name,
            target.dtype,
            target.place,
            of_chunk=True,
        )
        for part in index.touching(target.index, target.offsets, target.tensor.shape)
    ]


def compare(summaries: list[_PlanSummary]) -> list[cache_sharing.CommonReads | None]:
    """Compare the plans of all ranks, on the coordinator. Return the reply for each rank.

    Raises:
        CheckpointReplacedError: two ranks opened different saves.
        PlanError: the ranks do not load in the same way; or no rank has anything to load, though
            there are entries.
    """
    path = summaries[0].path
    if len(summaries) == 1:
        check_something([summaries[0].nothing_to_load], path)
        return [None]
    if len(replicas := {summary.replicas for summary in summaries}) > 1:
        msg = f"the ranks give replicas= different values: {sorted(replicas)}"
        raise PlanError(msg, path=path)
    check_same_save(((each.is_of_all, each.save_id) for each in summaries), path)
    check_something((each.nothing_to_load for each in summaries), path)
    return cache_sharing.compare_samples([summary.sample for summary in summaries])


def check_same_save(saves: Iterable[tuple[bool, str | None]], path: StrPath) -> None:
    """Raise unless all ranks opened the same save.

    Args:
        saves: of each rank, whether it opened a save of all ranks, and the id of it.
        path: the checkpoint, for messages.

    Raises:
        CheckpointReplacedError: two ranks opened different saves.
    """
    if len(set(saves)) > 1:
        msg = f"the checkpoint was replaced by another save while the ranks were opening it: {path}"
        raise CheckpointReplacedError(msg, path=path)


def check_something(nothing_to_load: Iterable[str | None], path: StrPath | None = None) -> None:
    """Raise if no rank has anything to load, though there are entries.

    Args:
        nothing_to_load: of each rank, as in :class:`Reads`.
        path: the checkpoint, if it is known.

    Raises:
        PlanError: with the first message.
    """
    messages = list(nothing_to_load)
    if any(messages) and None not in messages:
        raise PlanError(next(filter(None, messages)), path=path)


# --- step 2: read ---------------------------------------------------------------------------------


def _read(plan: Plan, ranks: RankGroup, reply: cache_sharing.CommonReads | None) -> None:
    """Read into the tensors. With ``replicas``, ranks first read together what several need."""
    source, reads, is_of_all = plan.request.source, plan.reads, plan.summary.is_of_all
    with watching(source.progress, "loading") as watch:
        counts = Counts(watch=watch)
        common = None if reply is None else cache_sharing.common_reads(plan.sample, reply)
        options = source.read if is_of_all else source.read.alone()
        job = Load(plan.index, options, reads.batch, counts, common)
        try:
            if ranks.is_alone or not is_of_all:
                _prepare(plan, job)
                job.run()
            elif (find_routes := source.find_routes) is not None:
                _read_with_peers(plan, job, ranks, find_routes)
            else:
                if source.replicas == "each":
                    _prepare(plan, job)
                else:
                    _read_together(plan, job, ranks)
                job.run()
            for fqn, tensor in plan.fills.items():
                copy_value(fqn, tensor, plan.values.pop(fqn))
        finally:
            # A failed read may have filled some. Autograd refuses gradients of changed tensors.
            plain = [reads.tensors[place] for place in reads.plain]
            other = [target.tensor for target in reads.targets]
            torch.autograd.graph.increment_version(plain + other)
        if watch is not None and counts.expected:
            watch(counts.expected, counts.expected)  # hidden tensors were not read
    plan.clock.end("read")
    reads.report._finish(os.fspath(source.path), counts, plan.clock, plan.index)


def _prepare(plan: Plan, job: Load, received: Mapping[int, bytes] | None = None) -> None:
    """Read the values, arrange the reads of tensors, and look at ties. No tensor is written to.

    Args:
        plan: the plan of this rank.
        job: its reads of tensors.
        received: values that other ranks read. Ties are not looked at then: the stored tensors may
            be on other nodes.
    """
    index, reads, source = plan.index, plan.reads, plan.request.source
    if job.counts.watch is not None:
        job.counts.expected = reads.nbytes()
    if reads.values:
        stored, chunks = dict(received or {}), plan.value_chunks
        own = [chunk for chunk in chunks if chunk not in stored]
        stored.update(zip(own, read_values(index, own, source.read, job.counts), strict=True))
        path = checkpoint_path(index)
        plan.values = {
            fqn: pickles.load(fqn, stored[chunk], weights_only=source.weights_only, path=path)
            for fqn, chunk in zip(reads.values, chunks, strict=True)
        }
        if any(isinstance(reads.flat.values[fqn], torch.Tensor) for fqn in reads.values):
            _match_tensors(plan)
    if reads.targets:
        job.add(reads.targets)
    job.arrange()
    if received is None:
        _warn_of_ties(plan)


def _match_tensors(plan: Plan) -> None:
    """Find the tensors that values fill, and convert these values.

    The ``load_state_dict`` of an object gets what was saved, and decides by itself.

    Raises:
        PlanError: the value of a tensor cannot fill it, and the load is not partial.
    """
    reads, report, options = plan.reads, plan.reads.report, plan.request.options
    casts: list[Mismatch] = []
    for fqn, value in list(plan.values.items()):
        tensor, key = reads.flat.values[fqn], reads.flat.paths[fqn][0]
        is_of_object = (key[0] if type(key) is tuple else key) in plan.stateful
        if is_of_object or not isinstance(tensor, torch.Tensor):
            continue
        try:
            plan.values[fqn] = found = as_tensor(fqn, tensor, value)
        except PlanError:
            if not options.allow_partial_load:
                raise
            del plan.values[fqn]
            report.shape_mismatched.append(Mismatch(fqn, type(tensor), type(value)))
            report.entries_loaded -= 1
            continue
        if on_meta(tensor):
            report.replaced += 1
            continue
        if found.dtype != tensor.dtype:
            casts.append(matching.cast_of(fqn, tensor.dtype, found.dtype, options))
        plan.fills[fqn] = tensor
    report.dtype_mismatched += casts
    matching.warn_of_casts(casts, options)


def _warn_of_ties(plan: Plan) -> None:
    """Warn of two names that are one tensor in the state dict, and differ in the checkpoint."""
    reads, source = plan.reads, plan.request.source
    first = reads.batch.at_once()  # filled in the first pass, and overwritten by no later one
    places = {*reads.plain, *(target.place for target in reads.targets)}.difference(first)
    if not places:
        return
    late, early = ([reads.names[i] for i in several] for several in (sorted(places), first))
    stored = dict(zip(reads.names, reads.stored, strict=True))
    for fqn, other in find_tied(late, early, reads.flat.values).items():
        if not matching.begin_alike(plan.index, stored[fqn], stored[other], source.read.alone()):
            warn_caller(
                f"{fqn!r} and {other!r} are one tensor in the state dict, and two that differ in "
                f"{source.path}: the tensor gets the values of {other!r}. Leave the other out with "
                f"exclude={fqn!r}, or load into a model that does not tie them"
            )


def _read_together(plan: Plan, job: Load, ranks: RankGroup) -> None:
    """Prepare on all ranks. Then read together what several ranks need, a part on each rank."""
    index, source = plan.index, plan.request.source
    own, parts = Offer(), Counter[int]()

    def prepare() -> Offered:
        nonlocal own, parts
        _prepare(plan, job)
        at_once = set(plan.reads.batch.at_once())
        targets = plan.reads.whole_targets(index)
        parts = Counter(target.place for target in targets)
        targets = [
            target
            for target in targets
            if target.place in at_once and not target.of_chunk and not is_opaque(target.tensor)
        ]
        shapes = [index.tensor(target.index).shape for target in targets]
        # Entries have numbers of their own in each save, and under other views.
        limit = source.read.max_inflight_bytes
        same = index.save_id or os.fspath(source.path), source.views, limit
        scope: Literal["node", "all"] = "node" if source.replicas == "node" else "all"
        own = offer(targets, shapes, repr(same).encode(), scope, ranks.process_group)
        return own.offered

    offers = ranks.all_gather(prepare)
    if not any_shared(offers):
        return
    groups = match_offers(own, offers, ranks.process_group)
    job.counts.add(read_shared(index, groups, source.read.alone(), ranks, offers))
    sent = Counter(target.place for group in groups for target in group.targets)
    # A tensor of which the ranks share only a part is read whole by each of them.
    plan.reads.batch.leave_out([p for p, count in sent.items() if count == parts[p]])


def _read_with_peers(plan: Plan, job: Load, ranks: RankGroup, find_routes: FindRoutes) -> None:
    """Prepare on all ranks. Then read, while other ranks read what this rank does not see."""
    index, reads, options = plan.index, plan.reads, plan.request.source.read.alone()
    chunks: list[int] = []

    def look() -> list[str]:
        nonlocal chunks
        chunks = plan.value_chunks
        return [] if index.is_view else index.lacking()

    routes = ranks.reduce_scatter(look, find_routes)
    if not routes.most:
        _prepare(plan, job)
        job.run()
        return
    peers = PeerReads(index, ranks, routes, options)

    def prepare() -> list[Target]:
        _prepare(plan, job, peers.values(chunks))
        targets = reads.whole_targets(index) if routes.sources else []
        may_be_sent = set(reads.batch.at_once())
        may_be_sent -= {target.place for target in targets if is_opaque(target.tensor)}
        parts = [
            part
            for target in targets
            if target.place in may_be_sent
            for part in ([target] if target.of_chunk else _stored_parts(index, target))
        ]
        sent = {part.place for part in parts if peers.source_of(part.index) is not None}
        reads.batch.leave_out(sorted(sent))
        return [part for part in parts if part.place in sent]

    parts = ranks.run(prepare)
    streams = current_streams({part.tensor.device for part in parts})

    def exchange() -> None:
        with on_streams(streams):  # after the caller's work on these tensors
            peers.fill(parts)

    with ThreadPoolExecutor(1) as pool:  # it ends first, so that no rank waits for this one
        sending = pool.submit(exchange)
        fill(index, [p for p in parts if peers.source_of(p.index) is None], options, job.counts)
        job.run()
        sending.result()
    job.counts.add(peers.counts)


# --- step 3: hand over ----------------------------------------------------------------------------


def load_stateful(plan: Plan) -> None:
    """Call ``load_state_dict`` of ``Stateful`` objects, and update the caller's state dict."""
    assign, loaded = plan.request.options.assign, plan.state_dict
    for key, holder in plan.stateful.items():
        more = {"assign": True} if assign and isinstance(holder, torch.nn.Module) else {}
        holder.load_state_dict(loaded.pop(key), **more)
    plan.request.state_dict.update(loaded)


# --- retries --------------------------------------------------------------------------------------


def retry(ranks: RankGroup, load: Callable[[], T], may_retry: Callable[[], bool]) -> T:
    """Load again while another save replaces the checkpoint, up to nine times.

    Args:
        ranks: the ranks that load.
        load: the load. It consists of steps of all ranks.
        may_retry: this rank's vote after a failed attempt: against, if it loads in part, as it
            might keep what it read of the old save. All ranks raise if one votes against, as a
            rank that began again alone would wait for the others for ever.

    Raises:
        Exception: what ``load`` raises.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return load()
        except BaseException as error:
            # All ranks have failures of the same ranks.
            errors = ranks.failures.values()
            if attempt == _TRIES or not any(isinstance(e, CheckpointReplacedError) for e in errors):
                raise
            vote = may_retry() and isinstance(error, Exception)  # Ctrl-C ends the load
            if not all(ranks.all_gather(partial(bool, vote))):
                raise
