"""``RsReader``: DCP's ``StorageReader`` over an index."""

from __future__ import annotations

import dataclasses
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_rs import _core
from dcp_rs._progress import Progress, watching
from dcp_rs._shown import call
from dcp_rs._url import StorageOptions, location
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.locate import is_of_all_ranks, open_index
from dcp_rs.checkpoint.open import Checkpoint
from dcp_rs.dcp.item_reads import ItemReads
from dcp_rs.dcp.load_planner import RsLoadPlanner, local_reads
from dcp_rs.dcp.local_items import planner_of
from dcp_rs.dcp.local_reads import Begun, LocalReads
from dcp_rs.dcp.opened import Opened, answered, check_one_save, opened_of
from dcp_rs.dcp.stock_arguments import one_of, say_ignored
from dcp_rs.dcp.torchs_ranks import TorchsRanks
from dcp_rs.dcp.wanted import common, tell, wanted_of
from dcp_rs.engine.metadata import make_metadata
from dcp_rs.engine.optimizer_state import warn_of_left_out_state
from dcp_rs.engine.ranks import Ranks
from dcp_rs.engine.reports import LoadReport, Phases
from dcp_rs.errors import CheckpointNotFoundError, PlanError, UnsupportedError
from dcp_rs.options import ReadOptions, checks_pickles
from dcp_rs.tensors import objects
from dcp_rs.tensors.memory import changing, is_opaque
from dcp_rs.transfer.counts import Counts
from dcp_rs.transfer.exchange import read_shared
from dcp_rs.transfer.load import Load
from dcp_rs.transfer.replicas import Offer, is_shared, offer, share, whole_targets

__all__ = ["RsReader"]


_ReadData = Callable[["RsReader", LoadPlan, LoadPlanner], Future[None]]


def _reported(read_data: _ReadData) -> _ReadData:
    """``read_data``, with a report of the load that ends with it."""

    @wraps(read_data)
    def reported(self: RsReader, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        clock: Phases = getattr(self._local, "clock", None) or Phases()
        clock.end("plan")
        with watching(self.progress, "loading") as watch:
            counts = self._local.counts = Counts(watch=watch)
            future = read_data(self, plan, planner)
            if watch is not None and counts.expected:  # of what lies under other destinations nothing was read
                watch(counts.expected, counts.expected)
        clock.end("read")
        own = planner if isinstance(planner, RsLoadPlanner) else planner_of(plan)
        report = own.report if isinstance(own, RsLoadPlanner) else LoadReport()
        report.path = os.fspath(self.path)
        report.take(counts, io=self.options.io)
        clock.tell(report)
        self.report = report
        return future

    return reported


class RsReader(StorageReader):
    """Reads a checkpoint under DCP's load protocol: ``dcp.load(state_dict, storage_reader=RsReader(path))``.

    Args:
        path: a checkpoint: a folder of this package, of Hugging Face, of stock DCP, a ``.safetensors`` file, or a file of ``torch.save``;
            or the URL of one of the first four on a store: ``s3://``, ``gs://``, ``az://``, ``http://``, ``https://``.
        io, threads, verify, shared, max_inflight_bytes: see :class:`dcp_rs.options.ReadOptions`.
        weights_only: check that every non-tensor value loads under ``torch.load(weights_only=True)`` before a planner gets it (stock
            planners unpickle freely), as ``None`` does. ``False`` is for checkpoints you wrote yourself.
        allow_external: open data files outside the checkpoint's folder, if its index names any.
        replicas: who reads what several ranks need (all of the model under DDP, a shard under HSDP): ``"each"`` rank for itself; the ranks
            of a ``"node"`` together (``LOCAL_WORLD_SIZE`` of them); or ``"all"``. Together, every rank reads a part and sends it to
            the others, in pieces that ``max_inflight_bytes`` bounds. It takes effect in loads with :class:`dcp_rs.RsLoadPlanner`.
        storage_options: for a URL, how to reach the store: names and values as the Rust crate ``object_store`` has them (``aws_endpoint``, ``aws_region``,
            ``aws_access_key_id``, ...), and ``max_retries``, ``retry_timeout`` and ``read_timeout`` (seconds); or a store of ``obstore``, whose options are
            taken. What is not given comes from the environment. Secrets are not pickled with the reader.
        progress: ``True`` draws a bar for the first rank, on a terminal and in notebooks; a callable hears on its rank, now and then and at the end, of the bytes
            that it has and of all that it wants.
        process_group: that of the load, for ``replicas`` under torch's ``dcp.load``: nothing else tells a reader. ``dcp_rs.load`` does.
        thread_count: ``threads``, as torch's ``HuggingFaceStorageReader`` calls it. Its ``token`` (torch 2.8) and ``FileSystemReader``'s
            ``_extension_registry`` are taken and have no use here, which is warned of once.

    Attributes:
        bytes_read: read from storage by this rank in its last load, as far as ``replicas`` had a say in it.

        report: what the last load through this reader found and took (:class:`dcp_rs.LoadReport`); None before it. The log ``dcp_rs`` has it as a line.

    Raises (from a load, on every rank):
        CheckpointNotFoundError, CorruptIndexError, UnsupportedError: from reading the metadata.
        CheckpointReplacedError: another save replaced the checkpoint since its metadata was read, and removed the data files of the old
            one; ``dcp_rs.load`` and ``dcp_rs.load_state_dict`` then load the new one.
        CorruptDataError: a data file is missing, has another length than the index says, or (``verify=True``) does not match its digest.
        UnsafePickleError: a non-tensor value does not load under ``weights_only=True``.
        StorageError: a store could not be reached, or refused; below it what there is to do about it.
        PlanError: a plan asks for what the checkpoint does not hold.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        io: Literal["auto", "mmap", "direct", "buffered"] = "auto",
        threads: int | None = None,
        verify: bool = False,
        shared: bool | None = None,
        max_inflight_bytes: int | None = None,
        weights_only: bool | None = True,
        allow_external: bool = False,
        replicas: Literal["each", "node", "all"] = "each",
        storage_options: Mapping[str, Any] | Any | None = None,
        progress: Progress = None,
        process_group: dist.ProcessGroup | None = None,
        thread_count: int | None = None,
        token: str | None = None,
        _extension_registry: Any = None,
    ) -> None:
        super().__init__()
        if _extension_registry is not None:
            say_ignored("RsReader", "_extension_registry", "data that was stored through extensions is refused")
        if token is not None:
            say_ignored("RsReader", "token", "nothing is read from the Hub; stores take storage_options=")
        threads = one_of("threads", threads, "thread_count", thread_count)
        if replicas not in ("each", "node", "all"):
            msg = f"replicas={replicas!r}: one of 'each', 'node', 'all'"
            raise ValueError(msg)
        self.path = location(path)
        self.storage_options = StorageOptions.of(storage_options)
        self.options = ReadOptions(
            io=io, threads=threads, verify=verify, shared=shared, max_inflight_bytes=max_inflight_bytes
        )
        self.weights_only = checks_pickles(weights_only)
        self.allow_external = allow_external
        self.replicas = replicas
        self.progress = progress
        self.bytes_read = 0
        self.report: LoadReport | None = None
        self._process_group = process_group
        self.load_id = str(uuid.uuid4())
        # Each thread that loads through this reader reads the index that its own `read_metadata` opened.
        self._local = threading.local()

    def __repr__(self) -> str:
        replicas = None if self.replicas == "each" else self.replicas
        shown = {"path": os.fspath(self.path), **self.options.given(), "replicas": replicas}
        return call("RsReader", {**shown, "storage_options": self.storage_options})

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new load, of another path where one is given."""
        if checkpoint_id:
            self.path = location(checkpoint_id)
        self.load_id = str(uuid.uuid4())
        self._local = threading.local()

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The path, under DCP's name for it."""
        return self.path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Opens the index. With ``rank=r`` it is that rank's own index of a rank-local save (``use_collectives=False``).

        Raises (with ``rank``, beside the errors of a load):
            CheckpointNotFoundError: there is one of all ranks, which comes before those of single ranks, be they left there from a save before.
        """
        self._local.clock = Phases()
        rank = kwargs.get("rank")
        metadata: Metadata | None = self._local.__dict__.pop("kept", None)
        if metadata is None:
            index = self._open_of_all() if rank is None else self._open_own(rank)
            self._local.index = index
            metadata = make_metadata(
                index,
                rank=rank,
                checkpoint_id=os.fspath(self.path),
                load_id=self.load_id,
                storage_options=self.storage_options,
            )
        self._local.clock.end("metadata")
        return metadata

    def keep(self, metadata: Metadata) -> None:
        """Has the next :meth:`read_metadata` of this thread return what the one before did: values that were read before a load are of its save then."""
        self._local.kept = metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes the index from the metadata that :meth:`read_metadata` returned, in whichever thread or process this is."""
        index = getattr(metadata.state_dict_metadata, "index", None)
        if index is not None:
            self._local.index = index
        self._local.of_all_ranks = kwargs.get("use_collectives", True)

    def read_with(self, ranks: Ranks) -> None:
        """Says who takes part in the load that begins, until :meth:`reset`. torch's own driver does not: there ``process_group`` tells."""
        self._local.ranks = ranks

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Notes in the plan which save it is for, and what it wants; but for rank-local ones: there each rank has a save of its own."""
        index, self._local.wanted = self._index(), None
        if not self._is_of_all_ranks():
            return dataclasses.replace(plan, storage_data=Opened(None, of_all_ranks=False, ranks=1))
        self._local.wanted = wanted_of(plan, index, self.options)
        return dataclasses.replace(plan, storage_data=Opened(index.save_id, wants=tell(self._local.wanted)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises unless all ranks opened the same save, or each its own: one that is committed meanwhile must not be mixed with the one before.

        Raises:
            CheckpointReplacedError: they did not.
            PlanError: ``replicas`` among other ranks than those of the load.
        """
        of_all_ranks = check_one_save(plans, self.path)
        if of_all_ranks and self.replicas != "each" and len(plans) > 1 and self._ranks(len(plans)).size != len(plans):
            msg = f"RsReader(replicas={self.replicas!r}) has to be told the process_group of the load, of {len(plans)} ranks"
            raise PlanError(msg, path=self.path)
        return answered(plans) if of_all_ranks else plans

    @_reported
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills what ``planner`` resolves for the items of ``plan``, and commits it. The future is done when this returns."""
        local: Begun | None = None
        is_whole = True

        def begin() -> Any:
            nonlocal local
            reads = local_reads(plan, planner)
            if reads is None:
                names = [item.storage_index.fqn for item in plan.items]
                warn_of_left_out_state(self._index(), names, ())
            else:
                warn_of_left_out_state(reads.index, *reads.stored_names())
            local = None if reads is None else self._begin_local(reads, planner_of(plan).state_dict, ranks, known)
            return Offer().told() if local is None else local.offer.told()

        opened = opened_of(plan)
        answer, count = (None, None) if opened is None else (opened.answer, opened.ranks)
        known = common(getattr(self._local, "wanted", None), answer, count or 1)
        ranks = self._ranks(count)
        offers = ranks.all(begin)
        if local is None:
            index, counts, check = self._index(), self._local.counts, self.weights_only
            if is_shared(offers):  # by others: that is a step of all ranks
                read_shared(index, [], self.options.alone(), ranks)
            ItemReads(index, self._options(), counts, planner, weights_only=check, common=known).read(plan)
        else:
            is_whole = self._read_local(local, ranks, offers)
        if is_whole and (own := planner_of(plan)) is not None:
            own.finish_reads({} if local is None else local.values)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read_value(self, fqn: str) -> Any:
        """The value or, in host memory, the tensor ``fqn``, read now and without a planner.

        Raises:
            KeyError: there is none.
        """
        return Checkpoint(self._index(), weights_only=self.weights_only, options=self.options)[fqn]

    @property
    def source(self) -> str:
        """What the data files are: ``dcp-rs``, ``safetensors``, ``dcp`` or ``torch``. Opens the checkpoint, where no load of this thread has."""
        return self._index().source

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id can be a path of the local file system, or a URL of a store."""
        try:
            location(checkpoint_id)
        except UnsupportedError:
            return False
        return True

    def _open_of_all(self) -> _core.Index:
        self._local.has_none_of_all = False
        try:
            return self._open(None)
        except CheckpointNotFoundError:
            # A link that leads nowhere is one all the same.
            self._local.has_none_of_all = not is_of_all_ranks(self.path)
            raise

    def _open_own(self, rank: int) -> _core.Index:
        """What a rank saved alone, where it is known for sure that there is nothing of all ranks."""
        if not getattr(self._local, "has_none_of_all", False):
            try:
                self._open_of_all()
            except CheckpointNotFoundError:
                if not self._local.has_none_of_all:
                    raise
            else:
                msg = f"the checkpoint is one of all ranks, and none of rank {rank} alone: {self.path}"
                raise CheckpointNotFoundError(msg, path=self.path)
        return self._open(rank)

    def _open(self, rank: int | None) -> _core.Index:
        return open_index(
            self.path,
            rank=rank,
            allow_external=self.allow_external,
            verify=self.options.verify,
            storage_options=self.storage_options,
        )

    def _is_of_all_ranks(self) -> bool:
        """Whether the save is; a rank-local one has files that only this rank reads."""
        return getattr(self._local, "of_all_ranks", True)

    def _index(self) -> _core.Index:
        index = getattr(self._local, "index", None)
        if index is None:
            index = self._local.index = self._open(None)
        return index

    def _options(self) -> ReadOptions:
        return self.options if self._is_of_all_ranks() else self.options.alone()

    def _ranks(self, count: int | None) -> Ranks:
        """Who reads together, of the ``count`` ranks of the load; None where the plan does not say any more.

        Raises:
            PlanError: nothing else says it, either.
        """
        told: Ranks | None = getattr(self._local, "ranks", None)
        if self.replicas == "each" or count == 1 or not self._is_of_all_ranks():
            return Ranks(no_dist=True)
        if count is None and told is None and dist.is_initialized():
            msg = f"RsReader(replicas={self.replicas!r}) needs the storage_data of the plan, which the planner has left out: keep it, as dataclasses.replace(plan, items=...) does"
            raise PlanError(msg, path=self.path)
        return TorchsRanks(self._process_group) if told is None else told

    def _begin_local(
        self, reads: LocalReads, state_dict: Mapping[str, Any], ranks: Ranks, known: _core.Common | None
    ) -> Begun:
        """Does what can fail before the first tensor is filled."""
        index = reads.index
        stored = index.read_bytes([index.first_chunk(i) for i, _ in reads.values], **self.options.engine())
        values = {
            fqn: objects.load(fqn, data, weights_only=self.weights_only)
            for (_, fqn), data in zip(reads.values, stored, strict=True)
        }
        reads.follow(state_dict)
        load = Load(index, self._options(), reads.whole, self._local.counts, known)
        load.add(reads.targets)
        turns = load.arrange()
        for fqn, other in reads.untied(state_dict, load.at_once(), self.options.alone()).items():
            warn_caller(
                f"{fqn!r} and {other!r} are one tensor in the state dict, and two that differ in {self.path}: the tensor gets the values "
                f"of {other!r}. Leave the other out with exclude={fqn!r}, or load into a model that does not tie them"
            )
        if self._local.counts.watch is not None:
            self._local.counts.expected = reads.nbytes + sum(map(len, stored))
        self._local.counts.add_values(sum(map(len, stored)))
        return Begun(reads, load, turns, values, Offer() if ranks.is_alone else self._offer(reads, load, ranks))

    def _offer(self, reads: LocalReads, load: Load, ranks: Ranks) -> Offer:
        index, at_once = reads.index, set(load.at_once())
        targets = [
            target
            for target in (*reads.targets, *whole_targets(index, *reads.plain))
            if target.place in at_once and not target.of_chunk and not is_opaque(target.tensor)
        ]
        shapes = [index.tensor(target.index).shape for target in targets]
        return offer(targets, shapes, "node" if self.replicas == "node" else "all", ranks.process_group)

    def _read_local(self, local: Begun, ranks: Ranks, offers: list[Any]) -> bool:
        """Fills tensors, first what is shared with other ranks. Returns whether all are: not where another rank failed."""
        load, is_whole = local.load, True
        self.bytes_read = 0
        with changing(local.reads.tensors()):
            if is_shared(offers):
                shared = share(local.offer, offers, ranks.process_group)
                counts, is_whole = read_shared(local.reads.index, shared, self.options.alone(), ranks)
                self._local.counts.add(counts)
                self.bytes_read = counts.read
                load.leave_out(target.place for reads in shared for target in reads.targets)
            for turn in range(local.turns if is_whole else 0):
                self.bytes_read += load.run(turn)
        return is_whole

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_local", "_process_group", "progress")
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._process_group = None
        self.progress = None
        self._local = threading.local()
