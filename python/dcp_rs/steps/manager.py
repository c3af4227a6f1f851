"""The checkpoint manager: save steps, remove old ones, and resume from the newest whole step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex, Unpack

import torch.distributed as dist

from dcp_rs import api, optim
from dcp_rs._arguments import check_arguments, no_attribute, suggest_option
from dcp_rs._url import StoreArguments, StrPath
from dcp_rs._warnings import warn_caller
from dcp_rs.engine.background import SaveFuture
from dcp_rs.engine.ranks import RankGroup, check_group
from dcp_rs.engine.reports import LoadReport, SavedMetadata
from dcp_rs.engine.reuse import Frozen
from dcp_rs.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptDataError,
    CorruptIndexError,
    DcpRsError,
    PlanError,
    RankLostError,
    UnsupportedError,
)
from dcp_rs.options import (
    Globs,
    LoadArguments,
    SelectArguments,
    TrainingArguments,
    WriteArguments,
    WriteOptions,
    check_choice,
    check_function,
    check_positive,
    given,
    repeatable,
    split_options,
    take_options,
)
from dcp_rs.steps.coordinator import (
    Coordinator,
    ExtraFiles,
    Prepared,
    check_step,
    step_number,
)
from dcp_rs.steps.node_load import Choice, NodeLoad
from dcp_rs.steps.nodes import (
    Nodes,
    NodeStepStore,
    TierReport,
    name_of_node,
    names_of_nodes,
)
from dcp_rs.steps.object_store import step_store_at
from dcp_rs.steps.preemption import Preemption
from dcp_rs.steps.ranks import ManagerRanks, save_of_others
from dcp_rs.steps.retention import Policies, PolicyArguments
from dcp_rs.steps.step_store import SkippedStep, Step, StepStore


@dataclass(frozen=True)
class _Past:
    """The past of a manager: the run that it began, the step that it loaded, and the last step."""

    run: str | None = None
    since: float = 0.0
    resumed: int | None = None
    went_back: bool = False
    done: int | None = None


#: A load of the latest step that fails with one of these goes on with the step before.
_DAMAGED = (CorruptDataError, CorruptIndexError, CheckpointNotFoundError)


class ManagerArguments(PolicyArguments, WriteArguments, total=False):
    """Keyword arguments of :class:`CheckpointManager` for retention and for writes."""


class CheckpointManager:
    """The checkpoints of a training run: a folder ``step-N`` for each step, under one root.

    Every rank makes a manager, and makes the same calls in the same order. Calls that only look
    (:meth:`steps`, :meth:`latest_step`, :meth:`best_step`) may be made by one rank alone. An error
    on one rank is raised on every rank.

    The latest step is the newest that is committed and whole. No file points to it: the manager
    looks. It removes steps that the policies do not keep, after a newer step is durable. It never
    removes the latest step, the best step, the step that the run resumed from, and a step that is
    being saved.

    Args:
        root: the folder, which the first save creates; or its URL on a store, such as
            ``s3://bucket/run``.
        save_every: :meth:`should_save` is true for multiples of this.
        keep_last: keep this number of newest steps.
        keep_every: keep the first step at or after each multiple of this. Alone, it removes the
            steps between the multiples.
        keep_within: keep steps saved within this time (a ``timedelta``, or seconds) of the newest.
        keep_best: keep this number of best steps by ``metric``. A step that none of the ``keep_*``
            keeps is removed. If none of them is given, all steps stay.
        max_bytes: bound on the size of all steps. The oldest are removed first, even if another
            policy keeps them, before a save that is as large as the latest step. Steps that are
            never removed may exceed it.
        metric: the name of the metric of the best step.
        mode: the best step has the lowest (``"min"``) or the highest (``"max"``) metric.
        keep: a function of a step's number and metrics. Steps for which it is true stay, beside
            those that a ``keep_*`` keeps. Alone, it removes nothing.
        latest: let ``latest`` in the root lead to the newest step, for other programs: a link, or
            on a store a file with the name of the step. The manager does not read it.
        on_saved: called once for each step, on the coordinator, with its path, after the commit. If
            it fails, a warning says so. After :meth:`async_save` it is called in another thread.
        on_error: ``"warn"``: go on after a save that failed for want of space, of access or of
            storage, with a warning. The step before stays.
        max_failures: raise the error of this many failed saves in a row.
        retry_after: after a failed save, :meth:`should_save` is true again so many steps later.
        preemption: a signal, whose handler is replaced until :meth:`close`; or a function without
            arguments that returns whether this process is to stop. The ranks agree on it in
            :meth:`should_save`.
        preemption_every: ask for ``preemption`` at multiples of this only.
        verify_before_prune: remove nothing unless a step that stays was read and matched its
            digests. If none was, the manager reads one.
        reuse: do not write again what the step before holds, bit for bit. Its files are linked, or
            copied by the store, so that each step is whole without the others. ``True`` finds
            unchanged entries by their digests. Pass globs over names for tensors that do not
            change: of those that this manager saved before, and did not load since, only the first
            MiB of each is compared.
        verify_reuse: read the reused data, and write again what does not match its digests.
        process_group: the ranks that save and load together. Default: all ranks. The manager makes
            gloo groups of these ranks. If ranks come and go while the job runs, pass their group
            to each call.
        no_dist: this process saves and loads by itself.
        step_name: the name of a step's folder, with ``{}`` for its number. Only such folders are
            steps.
        storage_options: for a URL, see :class:`dcp_rs.RsReader`.
        local: a folder on a disk of this node. Saves go there, and are done once each node has its
            part. The root gets steps later, from a thread of the first rank of each node. A load
            takes each file from the nearest place that has it: this node, another one, the root.
            ``reuse`` and ``max_bytes`` do not go with it.
        upload_every: every n-th save of this manager goes to the root as well, the first included.
        keep_local: the number of newest steps that stay on each node. Steps that are still to go to
            the root stay as well. The other policies are for the root.
        copies: the number of other nodes that get a copy of each file before the save is done: 0
            or 1.
        node: the name of this node, the same on all of its ranks. Default: ``LOCAL_WORLD_SIZE``
            consecutive ranks are a node; if that is not set, all ranks of a host.
        on_uploaded: called once for each step that is at the root, on the coordinator, with its
            path, in another thread or in :meth:`close`. With ``local``, ``on_saved`` is called once
            it is on the nodes.
        io, threads, fsync, max_inflight_bytes: see :class:`dcp_rs.options.WriteOptions`.

    Attributes:
        passed_over: newer steps that the last :meth:`load` did not load, and why.
        resumed: the step that the last :meth:`load` loaded, or None.
        report: the :class:`dcp_rs.LoadReport` of the last :meth:`load` on this rank, or None.
        preempted: whether a rank is to stop, as the ranks agreed in :meth:`should_save`.

    Raises:
        ValueError: an invalid argument, even on one rank only.
        TypeError: an unknown option; ``keep`` or ``on_saved`` is not a function.
        UnsupportedError: a URL of an unknown scheme; ``storage_options`` for a path of the file
            system.

    Example:
        ```python
        with dcp_rs.CheckpointManager(
            "run", save_every=500, keep_last=3, preemption=signal.SIGTERM
        ) as manager:
            first = manager.load(state)
            for step in range((first or 0) + 1, steps + 1):
                loss = train_one_step()
                if manager.should_save(step):
                    manager.async_save(step, state, metrics={"loss": loss})
                if manager.preempted:
                    break
        ```
    """

    _policies: Policies
    _write: WriteOptions
    _store: StepStore

    @suggest_option
    def __init__(
        self,
        root: StrPath,
        *,
        save_every: int | None = None,
        latest: bool = False,
        on_saved: Callable[[Path], object] | None = None,
        on_error: Literal["raise", "warn"] = "raise",
        max_failures: int = 3,
        retry_after: int | None = None,
        preemption: signal.Signals | Callable[[], bool] | None = None,
        preemption_every: int = 1,
        verify_before_prune: bool = False,
        reuse: bool | str | Iterable[str] = False,
        verify_reuse: bool = False,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        step_name: str = "step-{}",
        storage_options: StoreArguments = None,
        local: StrPath | None = None,
        upload_every: int = 1,
        keep_local: int = 2,
        copies: int = 0,
        node: str | None = None,
        on_uploaded: Callable[[Path], object] | None = None,
        **options: Unpack[ManagerArguments],
    ) -> None:
        self._frozen: Globs = None if isinstance(reuse, bool) else repeatable(reuse)

        def configure() -> str | None:
            given_options = take_options(CheckpointManager.__init__, options)
            of_policies, of_write = split_options(given_options, Policies)
            self._policies, self._write = Policies(**of_policies), WriteOptions(**of_write)
            for name, value in [
                *(("save_every", save_every), ("preemption_every", preemption_every)),
                *(("max_failures", max_failures), ("retry_after", retry_after)),
                *(("upload_every", upload_every), ("keep_local", keep_local)),
            ]:
                check_positive(name, value)
            if copies not in (0, 1):
                raise UnsupportedError(f"copies={copies!r}: must be one of 0, 1")
            if local is not None and (reuse is not False or self._policies.max_bytes):
                raise ValueError("local= goes with neither reuse= nor max_bytes=")
            if local is None and (copies or node is not None or on_uploaded is not None):
                msg = "copies=, node= and on_uploaded= need local=, a folder on each node"
                raise ValueError(msg)
            check_choice("on_error", on_error, "raise", "warn")
            check_function("on_saved", on_saved, "of a step's path")
            check_function("on_uploaded", on_uploaded, "of a step's path")
            Frozen(self._frozen)  # raise for an invalid argument now, and not at the first save
            self._store = step_store_at(root, storage_options, step_name, fsync=self._write.fsync)
            self._preemption = Preemption(preemption)
            return None if local is None else name_of_node(self._ranks, local, node)

        self._ranks = ManagerRanks(process_group, no_dist=no_dist)
        self._preemption = Preemption(None)
        try:
            names = names_of_nodes(self._ranks, configure)
        except BaseException:
            self._ranks.close()
            self._preemption.close()
            raise
        self._coordinator = Coordinator(
            self._store,
            self._policies,
            verify=verify_before_prune,
            latest=latest,
            on_saved=on_saved if local is None else on_uploaded,
        )
        self._on_error, self._max_failures, self._retry_after = on_error, max_failures, retry_after
        self._failures = 0  # in a row
        self._retry_at: int | None = None
        self._begun: tuple[int, str] | None = None  # the last save that began: its step, its id
        self._reuse, self._verify_reuse, self._no_dist = reuse is not False, verify_reuse, no_dist
        self._save_every, self._preemption_every = save_every, preemption_every
        self.resumed: int | None = None
        self.report: LoadReport | None = None
        self.preempted = False
        self.passed_over: list[SkippedStep] = []
        self._closed = False
        self._is_running = False  # this manager loaded or saved to go on with the run
        self._done: int | None = None  # the last step that was saved or loaded, or is being saved
        self._is_named = False  # a call named its process group
        self._lost: tuple[int, str] | None = None  # the save that lost a rank: as _begun
        self._coordinators = [self._coordinator]
        self._nodes: Nodes | None = None
        if local is not None:
            self._nodes = Nodes(
                self._ranks,
                names,
                NodeStepStore(local, step_name, fsync=self._write.fsync),
                self._coordinator,
                self._store,
                upload_every=upload_every,
                keep_local=keep_local,
                copies=copies,
                on_saved=on_saved,
            )
            self._coordinators.append(self._nodes.own)
        else:
            self._share_past(None)

    def __repr__(self) -> str:
        return f"CheckpointManager({os.fspath(self.root)!r})"

    if not TYPE_CHECKING:  # where types are checked, an unknown name is an error

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name)

    # --- what there is

    @property
    def root(self) -> Path:
        """The folder of the run, or its URL."""
        return self._store.path

    def path(self, step: SupportsIndex) -> Path:
        """Return the folder of a step, or its URL. It need not exist.

        Args:
            step: its number.

        Returns:
            The path.

        Raises:
            ValueError: ``step`` is not a number from 0 on.

        Example:
            ```python
            manager = dcp_rs.CheckpointManager("run")
            assert manager.path(7) == manager.root / "step-7"
            ```
        """
        number = step_number(step)
        check_step(number)
        return self._store.folder(number)

    def steps(self) -> list[Step]:
        """Return the steps that are committed and whole, as this rank sees them now.

        With ``local``, these are the steps at the root, and those of this node that are not there:
        their ``path`` is on the node.

        Returns:
            The steps, oldest first.

        Raises:
            OSError: the root cannot be listed.

        Example:
            ```python
            for step in dcp_rs.CheckpointManager("run").steps():
                print(step.number, step.nbytes, step.metrics)
            ```
        """
        steps = self._store.look().steps
        if self._nodes is not None:
            known = {step.number for step in steps}
            steps += [s for s in self._nodes.store.look().steps if s.number not in known]
        return sorted(steps, key=lambda step: step.age)

    def latest_step(self) -> int | None:
        """Return the newest step that is committed and whole.

        Returns:
            Its number; None if there is none.

        Raises:
            OSError: the root cannot be listed.

        Example:
            ```python
            assert dcp_rs.CheckpointManager("run").latest_step() == 2
            ```
        """
        newest = self._store.latest() if self._nodes is None else self._nodes.latest()
        return None if newest is None else newest.number

    def tiers(self) -> TierReport:
        """Look at the steps of this node and at the root, and return how far behind the root is.

        Returns:
            The newest steps, as this rank sees them now.

        Raises:
            ValueError: the manager was made without ``local``.

        Example:
            ```python
            with dcp_rs.CheckpointManager("run", local="node") as manager:
                manager.save(3, {"model": model})
                manager.tiers()
            ```
        """
        if self._nodes is None:
            raise ValueError("tiers() needs local=, a folder on each node")
        return self._nodes.report()

    def best_step(self) -> int | None:
        """Return the best step by ``metric``.

        With ``local``, it is the best at the root. A step on the nodes alone goes soon.

        Returns:
            Its number; None if no step has the metric.

        Raises:
            ValueError: the manager was made without ``metric``.

        Example:
            ```python
            assert dcp_rs.CheckpointManager("run", metric="loss").best_step() == 1
            ```
        """
        if self._policies.metric is None:
            msg = "best_step() needs metric=, the name of the metric to compare"
            raise ValueError(msg)
        return self._policies.best(self._store.look().steps)

    # --- saves

    @suggest_option
    def should_save(
        self, step: SupportsIndex, *, process_group: dist.ProcessGroup | None = None
    ) -> bool:
        """Return whether to save this step: a multiple of ``save_every``, or a rank is to stop.

        It is false for a step that was just saved or loaded. At multiples of ``preemption_every``,
        the ranks agree in one exchange of two integers whether one of them is to stop
        (``preemption``), and whether the save in the background failed.

        Args:
            step: its number.
            process_group: as for :meth:`save`.

        Returns:
            Whether to save it; the same on all ranks.

        Raises:
            ValueError: ``step`` is not a number from 0 on.
            Exception: as the save that failed in the background.

        Example:
            ```python
            manager = dcp_rs.CheckpointManager("run", save_every=500)
            assert manager.should_save(1000)
            assert not manager.should_save(1001)
            ```
        """
        self._meet(process_group)
        number = step_number(step)
        check_step(number)
        asks = self._preemption.is_set_up or self._ranks.pending is not None
        if asks and number % self._preemption_every == 0:
            stops, failed = self._ranks.agree(self._preemption.noticed)
            self.preempted = self.preempted or stops
            if failed:
                self._settle()
        due = self._save_every is not None and number % self._save_every == 0
        again = self._retry_at is not None and number >= self._retry_at
        return number != self._done and bool(due or self.preempted or again)

    @suggest_option
    def save(
        self,
        step: SupportsIndex,
        state_dict: dict[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
        extra_files: ExtraFiles | None = None,
        process_group: dist.ProcessGroup | None = None,
        **select_options: Unpack[SelectArguments],
    ) -> SavedMetadata | None:
        """Save a step. Then remove the steps that the policies do not keep.

        Args:
            step: its number; the same on all ranks.
            state_dict: as for :func:`dcp_rs.save`.
            metrics: numbers to store with the step. Those of the first rank count.
            force: replace a whole checkpoint of this step, which stays until the new one is whole.
                A damaged or unfinished checkpoint is always replaced.
            extra_files: files for the folder of the step, such as a tokenizer: bytes, or the path
                of a file, by name. Those of the first rank count. They are removed with the step.
                Files of a step that ``force`` replaces go once the new one is whole.
            include, exclude, dtype: as for :func:`dcp_rs.save`.
            process_group: the ranks that make this call. Pass a new group whenever ranks come or
                go, and a group to each call from then on. If a save in the background began in the
                group before, the call first waits for its end. If it lost a rank, a warning says
                that its step was not saved.

        Returns:
            The metadata of the checkpoint, as :func:`dcp_rs.save`; None if the save failed, and
            ``on_error`` lets it.

        Raises:
            CheckpointExistsError: this step has a checkpoint.
            SaveInProgressError: another process is saving it.
            RunTakenOverError: another job resumed this run.
            PlanError: the ranks save different steps.
            ValueError: ``step`` is not a number from 0 on, metrics are not numbers, or names of
                files are invalid; or an earlier call named a ``process_group``, and this one does
                not.
            UnsupportedError: ``process_group`` is another group, and the manager has ``local``.
            Exception: as :func:`dcp_rs.save`; or the error of an earlier save in the background.

        Example:
            ```python
            with dcp_rs.CheckpointManager("run", keep_last=3) as manager:
                manager.save(3, {"model": model}, metrics={"loss": 0.25})
            ```
        """
        check_arguments(CheckpointManager.save, select_options)
        number = step_number(step)
        self._meet(process_group)
        self._settle()
        metadata: SavedMetadata | None = None
        with self._may_fail(number):
            path, options, committed = self._begin(number, metrics, extra_files, force=force)
            with self._coordinators[-1].explaining():
                metadata = api.save(state_dict, path, **options, **select_options)
                if self._nodes is not None:
                    committed(self._ranks.saving_ranks())
            self._done = number

            def finish() -> None:
                if self._nodes is None:
                    committed(self._ranks)
                self._warn()

            self._ranks.run(finish)
        return metadata

    @suggest_option
    def async_save(
        self,
        step: SupportsIndex,
        state_dict: dict[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
        async_staging: bool = False,
        extra_files: ExtraFiles | None = None,
        process_group: dist.ProcessGroup | None = None,
        **select_options: Unpack[SelectArguments],
    ) -> SaveFuture:
        """Save a step in the background, after the save before it.

        The state may change once this returns, or with ``async_staging`` once ``future.staged`` is
        done.

        Args:
            step, state_dict, metrics, force, extra_files, process_group: as for :meth:`save`.
            include, exclude, dtype: as for :func:`dcp_rs.save`.
            async_staging: as for :func:`dcp_rs.async_save`.

        Returns:
            A future of the result of :meth:`save`. It is done once the step is durable and older
            steps are removed. If it fails, the next call on the manager raises its error on every
            rank: a save, a load, :meth:`should_save`, :meth:`wait` or :meth:`close`.

        Raises:
            Exception: as :meth:`save`, for errors before the state is copied.

        Example:
            ```python
            with dcp_rs.CheckpointManager("run") as manager:
                manager.async_save(3, {"model": model})
                model(torch.ones(2)).sum().backward()  # training goes on
            ```
        """
        check_arguments(CheckpointManager.async_save, select_options)
        number = step_number(step)
        self._meet(process_group)
        self._settle()
        begun = failed = SaveFuture()
        with self._may_fail(number, failed):
            path, options, committed = self._begin(number, metrics, extra_files, force=force)
            options |= select_options
            options["async_staging"] = async_staging
            self._done = number
            begun = self._ranks.save(state_dict, path, committed, **options)
        return begun  # noqa: RET504  # the context may have ended the call

    @suggest_option
    def wait(self, *, process_group: dist.ProcessGroup | None = None) -> None:
        """Wait for the save in the background, if there is one.

        Args:
            process_group: as for :meth:`save`.

        Raises:
            Exception: the error of the save.

        Example:
            ```python
            manager = dcp_rs.CheckpointManager("run")
            manager.async_save(3, {"model": model})
            manager.wait()
            ```
        """
        self._meet(process_group)
        self._settle()

    @suggest_option
    def delete(
        self, step: SupportsIndex, *, process_group: dist.ProcessGroup | None = None
    ) -> None:
        """Remove a step, whatever the policies say.

        Args:
            step: its number.
            process_group: as for :meth:`save`.

        Raises:
            CheckpointNotFoundError: there is no such step.
            PlanError: the ranks name different steps.
            ValueError: ``step`` is not a number from 0 on.
            OSError: it cannot be removed.

        Example:
            ```python
            manager = dcp_rs.CheckpointManager("run")
            manager.delete(2)
            assert manager.latest_step() == 1
            ```
        """
        number = step_number(step)
        self._meet(process_group)
        self._settle()
        self._ranks.run(partial(check_step, number))

        def remove() -> None:
            self._coordinator.delete(number)

        if self._nodes is None:
            self._ranks.decide(number, remove)
        else:
            self._nodes.delete(number, remove)
        self._ranks.run(self._warn)

    @suggest_option
    def annotate(self, step: SupportsIndex, metrics: Mapping[str, float]) -> None:
        """Add metrics to a step that is saved, such as those of an evaluation that ended later.

        They count for ``keep_best`` and :meth:`best_step`. One process alone may call this. With
        ``local``, call it on the first rank: a step that is on the nodes and not yet at the root
        takes its metrics there.

        Args:
            step: its number.
            metrics: numbers by name. They replace those of the same name.

        Raises:
            CheckpointNotFoundError: there is no such step.
            ValueError: ``step`` is not a number from 0 on, or metrics are not numbers.
            OSError: they cannot be stored.

        Example:
            ```python
            manager = dcp_rs.CheckpointManager("run", metric="accuracy", mode="max")
            manager.annotate(2, {"accuracy": 0.5})
            assert manager.best_step() == 2
            ```
        """
        number = step_number(step)
        check_step(number)
        (self._coordinator if self._nodes is None else self._nodes).annotate(number, metrics)

    # --- loads

    @suggest_option
    def load(
        self,
        state_dict: dict[str, Any],
        step: SupportsIndex | None = None,
        *,
        take_over: bool = True,
        process_group: dist.ProcessGroup | None = None,
        **read_options: Unpack[LoadArguments],
    ) -> int | None:
        """Load a step into ``state_dict``.

        Args:
            state_dict: as for :func:`dcp_rs.load`.
            step: default: the newest that is committed and whole. If it turns out to be damaged,
                the step before is loaded (``verify=True`` reads every byte). Steps that were not
                loaded are in ``passed_over``, and a warning names them.
            rename, include, exclude, dtype, device: as for :func:`dcp_rs.load`.
            allow_partial_load, assign, dtype_policy: as for :func:`dcp_rs.load`.
            io, threads, verify, shared, max_inflight_bytes, weights_only: as for
                :func:`dcp_rs.load`.
            allow_external, storage_options, tiers, dequantize, views, replicas, progress: as for
                :func:`dcp_rs.load`.
            take_over: this process continues the run. A job that ran before then gets a
                ``RunTakenOverError`` from its next save, and removes no steps any more. Pass
                ``False`` to evaluate beside training.
            process_group: as for :meth:`save`.

        Returns:
            The step that was loaded; None if there are no steps, and ``state_dict`` is unchanged.

        Raises:
            CheckpointNotFoundError: there is no such step; or, without ``step``, all steps are
                damaged.
            UnsupportedError: nothing tells whether a newer step is whole, such as one of a later
                version, or one that lost its index. No older one is loaded.
            CorruptDataError: a partial load (``allow_partial_load``) found the step damaged. An
                older step may lack what was read by then. Make a new state, and name the step to
                load.
            OSError: a newer step cannot be looked at, after several tries. It may be whole, so no
                older one is loaded.
            Exception: as :func:`dcp_rs.load`.

        Example:
            ```python
            state = {"model": model, "step": 0}
            manager = dcp_rs.CheckpointManager("run")
            first = manager.load(state)  # None in a new run
            ```
        """
        return self._load(
            CheckpointManager.load,
            partial(api.load, state_dict),
            step,
            take_over=take_over,
            process_group=process_group,
            **read_options,
        )

    @suggest_option
    def load_training_state(
        self,
        model: optim.Models,
        optimizers: optim.Optimizers | None = (),
        extra: dict[str, Any] | None = None,
        step: SupportsIndex | None = None,
        *,
        take_over: bool = True,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[TrainingArguments],
    ) -> int | None:
        """Load a step that was saved with :func:`dcp_rs.optim.training_state`.

        Args:
            model, optimizers, extra: as for :func:`dcp_rs.optim.load_training_state`.
            names, partial, keep_settings, rename, include, exclude, dtype: as for
                :func:`dcp_rs.optim.load_training_state`.
            io, threads, verify, shared, max_inflight_bytes, weights_only: as for
                :func:`dcp_rs.load`.
            allow_external, storage_options, tiers, dequantize, views, replicas, progress: as for
                :func:`dcp_rs.load`.
            step, take_over, process_group: as for :meth:`load`.

        Returns:
            As :meth:`load`.

        Raises:
            Exception: as :meth:`load` and :func:`dcp_rs.optim.load_training_state`.

        Example:
            ```python
            manager = dcp_rs.CheckpointManager("training")
            manager.save(1, dcp_rs.optim.training_state(model, optimizer))
            manager.load_training_state(model, optimizer)
            ```
        """
        model, optimizers = repeatable(model), repeatable(optimizers)

        def load(path: Path, **options: Any) -> LoadReport | None:
            return optim.load_training_state(path, model, optimizers, extra, **options)

        return self._load(
            CheckpointManager.load_training_state,
            load,
            step,
            take_over=take_over,
            process_group=process_group,
            **options,
        )

    def _load(
        self,
        caller: Callable[..., object],
        load: Callable[..., LoadReport | None],
        wanted: SupportsIndex | None,
        *,
        take_over: bool,
        process_group: dist.ProcessGroup | None,
        **options: Any,
    ) -> int | None:
        """Load the step ``wanted``; or the newest whole one that the load does not find damaged."""

        def check() -> None:
            check_arguments(caller, options)
            if "storage_options" in options and "storage_options" in self._store.access:
                raise TypeError("give storage_options= to CheckpointManager, not to a load")
            if "tiers" in options and self._nodes is not None:
                msg = "leave tiers= out: a manager with local= reads from the folders of its nodes"
                raise TypeError(msg)
            if isinstance(wanted, Mapping):
                raise TypeError("the state dict comes first, then the step")

        self._meet(process_group)
        step = None if wanted is None else step_number(wanted)
        self._settle()
        self._ranks.run(check)
        is_partial = bool(options.get("allow_partial_load") or options.get("partial"))
        # Each attempt iterates over globs and views.
        options = {name: repeatable(value) for name, value in options.items()}
        load = partial(load, **self._ranks.options, **options)
        # If the run goes back, no later step may reach the root meanwhile.
        uploads = self._nodes.uploads if self._nodes is not None and take_over else None
        with nullcontext() if uploads is None else uploads.paused():
            return self._load_now(step, load, take_over=take_over, is_partial=is_partial)

    def _load_now(
        self,
        step: int | None,
        load: Callable[..., LoadReport | None],
        *,
        take_over: bool,
        is_partial: bool,
    ) -> int | None:
        places = None if self._nodes is None else NodeLoad(self._nodes)
        nodes = places if take_over else None  # else nothing is written, to nodes neither
        damaged: dict[int, str] = {}
        # A load of a step that is nowhere fails here. It must not end the run of another job.
        choice = None if step is None else self._choose(step, damaged, nodes)
        if nodes is not None:
            nodes.take_over()
        elif take_over:
            self._store.run, self._store.since = self._ranks.broadcast(self._take_over)
        self.report = None
        is_last = step is not None or is_partial
        while True:
            choice = choice or self._choose(step, damaged, nodes)
            self.passed_over = choice.skipped
            if choice.step is None:
                break
            # A step that one rank finds damaged, no rank takes.
            attempt = partial(self._attempt, load, choice, places, is_last=is_last)
            reasons = [why for why in self._ranks.all_gather(attempt) if why is not None]
            if not reasons:
                break
            if nodes is None or choice.save_id is None:
                damaged[choice.step] = reasons[0]
            elif not nodes.repair(choice, reasons[0]) and is_partial:
                raise CorruptDataError(reasons[0], path=self.path(choice.step))
            choice = None
        self._end_load(choice.step, went_back=step is not None, take_over=take_over)
        self._ranks.run(partial(self._warn_of, choice.skipped))
        if nodes is not None and choice.step is not None:
            nodes.resume_uploads(choice.step)
        return choice.step

    def _attempt(
        self,
        load: Callable[..., LoadReport | None],
        choice: Choice,
        places: NodeLoad | None,
        *,
        is_last: bool,
    ) -> str | None:
        """Load a step. Return why it is damaged; None if it is not.

        If it ``is_last``, no other step takes its place: the caller named it, or a partial load of
        it may leave in the state what was read by then.
        """
        assert choice.step is not None  # noqa: S101  # there is a step
        path, access = self.path(choice.step), self._store.access
        if places is not None:
            path, access = places.access(choice)
        try:
            self.report = load(path, **access)
        except PlanError as error:  # the caller may not know which step it is
            error.path = error.path or str(path)
            error.add_note(f"This is step {choice.step}: {path}")
            raise
        except _DAMAGED as error:
            # Of a save on nodes, another node may have what this one lacks.
            if is_last and choice.save_id is None:
                error.add_note(
                    "No older step takes the place of this one. After a partial load, the state "
                    "may have some of it: make the state anew, and name the step to load."
                )
                raise
            return str(error)
        return None

    def _end_load(self, step: int | None, *, went_back: bool, take_over: bool) -> None:
        self.resumed = step
        self._is_running = self._is_running or take_over
        if take_over or not self._is_running:  # else the run goes on from where it is
            self._done = step
            for coordinator in self._coordinators:
                coordinator.resumed, coordinator.went_back = step, went_back

    def _warn_of(self, skipped: Sequence[SkippedStep]) -> None:
        if self._ranks.is_coordinator:
            for step in skipped:
                warn_caller(f"not resumed from {step}")
        self._warn()

    def _choose(
        self,
        step: int | None,
        damaged: Mapping[int, str],
        nodes: NodeLoad | None,
    ) -> Choice:
        """Return the step to load: ``step``, or the newest that is not damaged."""

        def choose() -> Choice:
            found, skipped = self._coordinator.choose(step, damaged)
            return Choice(None if found is None else found.number, skipped)

        return self._ranks.decide(step, choose) if nodes is None else nodes.choose(step, damaged)

    def _take_over(self) -> tuple[str | None, float]:
        self._coordinator.take_over()
        return self._store.run, self._store.since

    # --- the end

    @suggest_option
    def close(self) -> None:
        """Wait for the save in the background and for uploads, and restore signal handlers.

        A second call does nothing. It is made by the ranks of the call before.

        Raises:
            StorageError: with ``local``: steps are not at the root. They stay on the nodes, and the
                next run that loads goes on with their upload.
            ValueError: outside of the main thread a handler cannot be restored. All else is done.
            Exception: the error of the save.

        Example:
            ```python
            manager = dcp_rs.CheckpointManager("run")
            manager.close()
            ```
        """
        if self._closed:
            return
        try:
            self._settle()
            if self._nodes is not None:
                self._nodes.close()
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            # The other ranks may not come here, so there is no collective.
            pending = self._ranks.pending
            if pending is not None and (failure := pending.exception()) is not None:
                error.add_note(f"besides, the save in the background failed: {failure}")
            self._release()

    def _release(self) -> None:
        self._closed = True
        if self._nodes is not None:
            self._nodes.uploads.end()
        try:
            self._preemption.close()
        finally:
            self._ranks.close()

    def _check_open(self) -> None:
        if self._closed:
            msg = f"the checkpoint manager of {self.root} is closed"
            raise DcpRsError(msg, path=self.root)

    # --- the ranks

    def _meet(self, process_group: dist.ProcessGroup | None) -> None:
        """Let the ranks of ``process_group`` make this call and those after it.

        The groups of the ranks before may be dead: nothing is sent there any more. The ranks that
        stay tell the others what they did.
        """
        self._check_open()
        if process_group is None:
            if self._is_named:
                msg = "earlier calls named a process_group=: pass the present one to this call, too"
                raise ValueError(msg)
            return
        check_group(process_group)
        if self._no_dist:
            raise ValueError("no_dist=True and process_group= exclude each other")
        self._is_named = True
        if process_group is self._ranks.parent:
            return
        if self._nodes is not None:
            msg = (
                "with local=, the ranks of a manager stay the same, since the steps on the nodes "
                "belong to them: close this manager, and make one of the new process_group="
            )
            raise UnsupportedError(msg)
        failed = self._ranks.retire()
        if failed is not None and isinstance(failed.exception(), RankLostError):
            failed, self._lost = None, self._begun
        self._ranks = ManagerRanks(process_group, no_dist=False)
        names_of_nodes(self._ranks, lambda: None)  # as ranks do that join
        self._share_past(failed)

    def _share_past(self, failed: SaveFuture | None) -> None:
        """Take over what ranks did in earlier groups. A rank that joins did nothing.

        If a save lost a rank, the coordinator looks whether it was committed.

        Args:
            failed: a save in the background that failed on this rank. The next call raises its
                error on all ranks.
        """
        own, store = self._coordinator, self._store
        past = _Past(store.run, store.since, own.resumed, own.went_back, self._done)
        told = self._ranks.all_gather(
            lambda: (past, self._lost, self.preempted, failed is not None)
        )
        pasts, losses, preempted, failures = zip(*told, strict=True)
        past = next((each for each in pasts if each != _Past()), past)
        store.run, store.since, own.went_back = past.run, past.since, past.went_back
        self.resumed = own.resumed = past.resumed
        self._done, self.preempted = past.done, any(preempted)
        self._is_running = past.run is not None
        self._lost, self._failures, self._retry_at = None, 0, None
        if any(failures):
            self._ranks.pending = failed or save_of_others()
        lost = next((each for each in losses if each is not None), None)
        if lost is not None:
            step, save_id = lost

            def is_committed() -> bool:
                found = store.look_at(step)
                if isinstance(found, Step) and found.save_id == save_id:
                    return True
                own.problems.append(f"step {step} was not saved: its save lost a rank")
                return False

            self._done = step if self._ranks.broadcast(is_committed) else None
            self._ranks.run(self._warn)

    # --- parts of a save

    def _begin(
        self,
        step: int,
        metrics: Mapping[str, float] | None,
        files: ExtraFiles | None,
        *,
        force: bool,
    ) -> tuple[Path, dict[str, Any], Callable[[RankGroup], None]]:
        """Create the folder of a step.

        Returns:
            The path to save to, options of the save, and what every rank calls after it.
        """
        self._begun, self._is_running = None, True
        options = {**given(self._write), **self._ranks.options}
        if self._nodes is not None:
            with self._coordinators[-1].explaining():
                path, more, commit = self._nodes.begin(
                    step, metrics or {}, files or {}, force=force
                )
            return path, {**options, **more}, commit

        def prepare() -> Prepared:
            prepared = self._coordinator.prepare(
                step, metrics or {}, files or {}, force=force, reuse=self._reuse
            )
            self._warn()
            return prepared

        with self._coordinators[-1].explaining():
            prepared = self._ranks.decide(step, prepare)
        # On all ranks, which then know why a save fails.
        self._store.run, self._store.since = prepared.run, prepared.since
        self._begun = (step, prepared.save_id)

        def committed(ranks: RankGroup) -> None:
            if ranks.is_coordinator:
                self._coordinator.committed(step, prepared.save_id)

        options |= {
            **self._store.access,
            "save_id": prepared.save_id,
            "overwrite": prepared.overwrite,
            "guard": self._store.holding,
            "parent": prepared.parent,
            "reuse": Frozen(self._frozen, trusted=prepared.is_trusted),
            "verify_reuse": self._verify_reuse,
        }
        return self.path(step), options, committed

    def _settle(self) -> None:
        """Wait for the save in the background. Raise on every rank if it failed on one."""
        self._check_open()
        if self._ranks.pending is not None:
            with self._may_fail(self._done), self._coordinators[-1].explaining():
                self._ranks.settle(self._warn)

    @contextmanager
    def _may_fail(self, step: int | None, failed: SaveFuture | None = None) -> Iterator[None]:
        """Save within this context. Warn of an error in place of raising it, if all ranks may.

        Args:
            step: the step that is saved.
            failed: a future that gets an error that is not raised.
        """
        try:
            yield
        except BaseException as error:
            self._done = None
            if isinstance(error, RankLostError):
                self._lost = self._begun
            if self._on_error == "raise" or not isinstance(error, Exception):
                raise
            may_pass = isinstance(error, (OSError, CorruptDataError)) and not isinstance(
                error, (CheckpointExistsError, CheckpointNotFoundError)
            )
            if not all(self._ranks.all_gather(lambda: may_pass)):
                raise
            self._failures += 1
            self._retry_at = None
            if step is not None and self._retry_after is not None:
                self._retry_at = step + self._retry_after
            if self._failures >= self._max_failures:
                error.add_note(f"{self._failures} saves in a row failed (max_failures)")
                raise
            warn_caller(f"{self.root}: step {step} was not saved: {error}")
            if failed is not None:
                failed.staged.set_result(None)
                failed.set_exception(error)
        else:
            if failed is None:  # else the save only began
                self._failures, self._retry_at = 0, None

    def _warn(self) -> None:
        """Warn of problems, in a step: a warning may be an error on all ranks."""
        for coordinator in self._coordinators:
            coordinator.warn()
