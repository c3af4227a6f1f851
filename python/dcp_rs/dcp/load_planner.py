"""``RsLoadPlanner``: planning over the mapped index, and a say in what tensors become."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_rs import _core, _torch
from dcp_rs._shown import call
from dcp_rs.checkpoint.frameworks import open as open_checkpoint
from dcp_rs.checkpoint.names import some
from dcp_rs.checkpoint.open import Checkpoint
from dcp_rs.checkpoint.renaming import Rename
from dcp_rs.dcp.hooks import Methods
from dcp_rs.dcp.local_items import LocalItems, check_own, note_of, planner_of
from dcp_rs.dcp.local_reads import LocalReads
from dcp_rs.dcp.matching import Matching, add_hollow
from dcp_rs.dcp.read_items import items_of, missing_elements
from dcp_rs.dcp.stored import Stored, index_of
from dcp_rs.engine.casts import CastRule, check_cast
from dcp_rs.engine.load_names import LoadNames
from dcp_rs.engine.reports import LoadReport
from dcp_rs.errors import PlanError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.nesting import TreePath
from dcp_rs.tensors.replacements import Replacements
from dcp_rs.tensors.shards import Layouts, local_pieces
from dcp_rs.tensors.trees import WriteThrough, flatten, get_at, is_hollow, is_plain_state_dict, set_at
from dcp_rs.transfer.target import Target

__all__ = ["RsLoadPlanner", "local_reads", "names_of"]


#: (the rank's state dict has entries, the checkpoint has one that is asked for): sent with the plan.
_Found = tuple[bool, bool]


class RsLoadPlanner(DefaultLoadPlanner):
    """Plans a load in Rust, over the mapped index, without an object for every item; with any other reader it plans as torch does.

    The plan that crosses the collectives does not grow with the model. Its items come into being where somebody looks at them: a subclass that overrides
    a method of torch's planner, a planner that wraps this one, a reader of others. A subclass that overrides ``create_global_plan`` gets all
    items of all ranks. A planner that wraps this one passes on what it is called with, ``commit_tensor`` too: docs/differences.md.

    Args:
        checkpoint: for :meth:`resolve_tensor` by name before a load has set the planner up.
        dtype: what floating-point tensors become; those of another dtype are replaced in the state dict, once the new ones are filled.
        device: where tensors come into being; those elsewhere (on ``meta`` above all) are replaced in the same way.
        dtype_policy: what it means that state dict and checkpoint differ in dtype, where ``dtype`` was not given: ``"warn"`` casts and says so,
            ``"error"`` refuses, ``"cast"`` casts.
        rename: from stored names to those of the state dict, as that of :func:`dcp_rs.convert`. A mapping is of names, or of what names begin with
            up to a dot: with ``{"model": ""}`` what is stored as ``model.x`` goes to ``x``; what it lacks keeps its name. Or a callable.
        include, exclude: globs over names of the state dict; what is not included, or excluded, is left alone.
        allow_partial_load: leave alone what the checkpoint lacks or has in another shape, and fill what it holds of the rest. See ``report``.
        flatten_state_dict, flatten_sharded_tensors: as in torch's ``DefaultLoadPlanner``.

    Attributes:
        report: what the last load found (:class:`LoadReport`).

    Raises (when planning, before anything is read):
        PlanError: nothing to load on any rank, a missing key, another shape, a refused or impossible cast, a tensor that the checkpoint does not wholly hold.
    """

    def __init__(
        self,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype_policy: Literal["warn", "error", "cast"] = "warn",
        rename: Rename = None,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        allow_partial_load: bool = False,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self._given: dict[str, Any] = {"dtype": dtype, "device": device, "rename": rename, "include": include}
        self._given |= {"exclude": exclude, "allow_partial_load": allow_partial_load or None}
        self.device = None if device is None else torch.device(device)
        self.dtype, self.dtype_policy = dtype, dtype_policy
        self.spared: set[int] = set()  # the `id` of tensors that `dtype` is not for
        self.report = LoadReport()
        self._names = LoadNames(rename, include, exclude)
        CastRule(dtype, dtype_policy)  # a policy that is none is an error here
        self._matching: Matching | None = None
        self._checkpoint_path = checkpoint
        self.metadata: Metadata | None = None
        self._paths: dict[str, TreePath] = {}  # with keys as they are, where `mappings` has text
        self._new = Replacements(self.dtype, self.device, self.set_value, self.spared)
        self._reads: LocalReads | None = None
        self._items = LocalItems()
        self._planned: dict[str, str] = {}  # what is read, and what the checkpoint calls it

    def __repr__(self) -> str:
        return call(type(self).__name__, self._given)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Sees to it that items are counted where a subclass commits in its own way."""
        super().__init_subclass__(**kwargs)
        owner = next(base for base in cls.__mro__ if "commit_tensor" in vars(base))
        if owner is cls or not issubclass(owner, RsLoadPlanner):
            cls.commit_tensor = _counting(cls.commit_tensor)  # type: ignore[assignment,method-assign]

    # --- the protocol ---------------------------------------------------------------------------------

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Flattens the state dict. Nothing in it is replaced before the load has read what takes its place."""
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self._names.forget()
        self._new = Replacements(self.dtype, self.device, self.set_value, self.spared)
        if self.flatten_sharded_tensors and not is_plain_state_dict(state_dict):
            state_dict = _torch.flatten_sharded_tensors(state_dict)
        if self.flatten_state_dict:
            flat = flatten(state_dict)
            if metadata is not None:
                add_hollow(state_dict, flat, metadata, self._names)
            self.state_dict, self.mappings, self._paths = flat.values, flat.text_paths(), flat.paths
        else:
            self.state_dict = state_dict

    @torch.no_grad()  # without it, a DTensor's local tensor costs an autograd node
    def create_local_plan(self) -> LoadPlan:
        """Checks everything that can be known before the first byte is read."""
        self.report = LoadReport()
        self._new = Replacements(self.dtype, self.device, self.set_value, self.spared)
        stored = None if self.metadata is None else self.metadata.state_dict_metadata
        wanted, self.report.excluded = self._names.choose(self.state_dict, stored)
        casts = CastRule(self.dtype, self.dtype_policy)
        self._matching = None
        if self.metadata is not None:
            partial = self.allow_partial_load
            self._matching = Matching(self.metadata, self._names, casts, self.report, self._new, partial=partial)
        self._items = LocalItems(planner=self, make=self._make_items)
        index = index_of(self.metadata)
        if index is None:
            self._reads = None
            self._plan_items(wanted)
        else:
            self._reads = self._plan_reads(index, wanted)
        casts.warn(self.report)
        report = self.report
        report.entries_loaded = len(self._planned) + len(report.tied)
        report.entries = len(self.state_dict)
        if not self.flatten_state_dict:
            left = (value for fqn, value in self.state_dict.items() if fqn not in self._planned)
            report.entries -= sum(map(is_hollow, left))
        there = len(self.state_dict) - len(report.missing) - len(report.excluded)
        found: _Found = (len(self.state_dict) > 0, there > 0)
        self._items.note = found
        # Who plans for all ranks needs the items of all.
        is_whole = index is None or _METHODS.replaced(self, ("create_global_plan",))
        return LoadPlan(list(self._items) if is_whole else self._items)  # type: ignore[arg-type]  # it is as good as one

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return torch's plan: that of each rank as it is.

        Raises:
            PlanError: there is nothing to load on any rank, and something was asked for.
        """
        found: list[_Found | None] = [note_of(plan) for plan in global_plan]
        # None is of a plan that somebody changed. Of an empty checkpoint, stock's partial load takes nothing, too.
        stored = self.metadata is not None and self.metadata.state_dict_metadata
        if (
            stored
            and all(note is not None and not note[1] for note in found)
            and any(note and note[0] for note in found)
        ):
            raise PlanError(self._why_nothing())
        plans: list[LoadPlan] = super().create_global_plan(global_plan)
        return plans

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Takes the plan as it comes back. By now every rank has checked its own."""
        check_own(new_plan, self._items.token)
        if planner_of(new_plan) is not self:
            self._expect(new_plan.items)
        if not self._hears_of_commits():
            self._new.put_unfilled()
        self._new.put_empty()
        finished: LoadPlan = super().finish_plan(new_plan)
        return finished

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Counts what was read: a new tensor goes into the state dict with its last item."""
        self._new.item_is_read(read_item)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Torch's, for keys that are no text, too."""
        self.set_value(read_item.dest_index.fqn, torch.load(value, weights_only=False))

    def finish_reads(self, values: Mapping[str, Any]) -> None:
        """Puts what was read for this planner's own plan into the state dict: non-tensor values, and new tensors."""
        for fqn, value in values.items():
            self.set_value(fqn, value)
        self._new.put_all()

    def replaces(self, fqn: str) -> bool:
        """Whether the tensor of this name is to be replaced in the state dict, and was not yet."""
        return self._new.old(fqn) is not None

    def set_value(self, fqn: str, value: Any) -> None:
        """Puts a value, or a tensor in place of another, into the caller's state dict."""
        set_at(self.original_state_dict, self._path(fqn), value)

    def resolve_tensor(  # torch's signature, and a second use by name
        self,
        read_item: ReadItem | str,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The protocol's: the tensor that ``read_item`` fills, narrowed to its lengths.

        With a name of the state dict in place of an item: that tensor, read now from this planner's checkpoint, whole, onto ``device`` and as
        ``dtype`` (defaults: the planner's, else the CPU and the stored dtype).

        Raises:
            KeyError: the checkpoint has no such name.
            PlanError: the planner has no checkpoint yet, or what is stored cannot be cast.
        """
        if not isinstance(read_item, str):
            tensor: torch.Tensor = super().resolve_tensor(read_item)
            return tensor
        device = torch.device(device) if device is not None else self.device or torch.device("cpu")
        with self._open(device) as checkpoint:
            value = checkpoint[self._names.stored_in(checkpoint, read_item)]
            if not isinstance(value, torch.Tensor):
                msg = f"{read_item!r} is not a tensor"
                raise TypeError(msg)
            wanted = dtype or (self.dtype if value.is_floating_point() else None)
            if wanted is not None and wanted != value.dtype:
                check_cast(read_item, wanted, value.dtype)
                return value.to(wanted)
            # Never a view of the file: the caller owns what it gets.
            return value.clone() if device.type == "cpu" else value

    # --- state dict and checkpoint --------------------------------------------------------------------

    def _open(self, device: torch.device) -> Checkpoint:
        index = index_of(self.metadata)
        if index is not None:
            return Checkpoint(index, device=device, options=ReadOptions())
        if self._checkpoint_path is None:
            raise PlanError(
                "this planner has no checkpoint: pass RsLoadPlanner(checkpoint=path), or load with it first"
            )
        return open_checkpoint(self._checkpoint_path, device=device)

    def _match(self, wanted: dict[str, str]) -> dict[str, Stored]:
        """What the checkpoint has for some names of the state dict; what it lacks goes into the report."""
        match = self._matching
        if match is None:
            raise PlanError("the planner was not set up with metadata")
        found = match.look_up(wanted)
        missing = [fqn for fqn, stored in found.items() if stored is None] + self._names.unnamed(self.state_dict)
        if not self.flatten_state_dict:  # a save leaves out what holds nothing
            missing = [fqn for fqn in missing if not is_hollow(self.state_dict[fqn])]
        if missing and self.flatten_state_dict:
            older = _torch.flatten_as_2_3(self.original_state_dict)
            extra = [fqn for fqn in older[0] if fqn not in self.state_dict and match.has(fqn)]
            if extra:
                # Saved before torch 2.4, which flattened less.
                self.state_dict, self.mappings = older
                self._paths = self.mappings
                found = match.look_up(self._names.named(fqn for fqn in [*wanted, *extra] if fqn in older[0]))
                missing = [fqn for fqn, stored in found.items() if stored is None]
                missing += self._names.unnamed(self.state_dict)
        match.note_missing(missing, found, self.state_dict)
        fitting = {
            fqn: stored
            for fqn, stored in found.items()
            if stored is not None and match.fits(fqn, self.state_dict[fqn], stored)
        }
        match.refuse_misfits()
        return fitting

    def _path(self, fqn: str) -> tuple[Any, ...]:
        return self._paths[fqn] if self.flatten_state_dict else (fqn,)

    def _why_nothing(self) -> str:
        """Return what to say where no rank has anything to load."""
        stored = list(() if self.metadata is None else self.metadata.state_dict_metadata)
        report = self.report
        if not report.missing:
            given = ", ".join(
                f"{name}={self._given[name]!r}" for name in ("include", "exclude") if self._given[name] is not None
            )
            return f"there is nothing to load: no name of the state dict passes {given}; it has {some(self.state_dict)}"
        msg = f"there is nothing to load: the checkpoint has none of the names that are wanted ({some(report.missing)}); it has {some(stored)}"
        return msg + self._names.explain(report.missing, report.missing, stored)

    # --- what is read ---------------------------------------------------------------------------------

    def _plan_reads(self, index: _core.Index, wanted: dict[str, str]) -> LocalReads:
        """What to read, over the index: plain tensors, which are most, without looking at each here."""
        reads = LocalReads(index)
        stored: dict[str, Stored] | None = None
        left = reads.plan_plain(wanted, self.state_dict)
        if self._new.apply_to_any(map(self.state_dict.__getitem__, wanted if self._new.reaches_plain else left)):
            stored = self._match(wanted)
            self._replace(fqn for fqn, found in stored.items() if not found.is_bytes)
            wanted = {fqn: found.name for fqn, found in stored.items()}
            left = reads.plan_plain(wanted, self.state_dict)
        rest = {fqn: wanted[fqn] for fqn in left}
        stored = self._match(rest) if stored is None else {fqn: stored[fqn] for fqn in rest}
        self._planned = wanted
        if rest.keys() != stored.keys():
            found_names = {fqn: found.name for fqn, found in stored.items()}
            self._planned = {fqn: name for fqn, name in wanted.items() if fqn not in rest} | found_names
        layouts: Layouts = {}
        targets: list[tuple[str, Target]] = []
        for fqn, found in stored.items():
            if found.is_bytes:
                reads.values.append((found.index, fqn))
            elif found.dtype is not None:
                place = left.get(fqn, len(wanted))
                targets += [
                    (fqn, Target(found.index, piece.offsets, piece.tensor, found.name, found.dtype, place))
                    for piece in local_pieces(fqn, self.state_dict[fqn], layouts)
                ]
        reads.add_covered(targets, self.state_dict, self._fill_partly)
        return reads

    def _fill_partly(self, fqn: str, offsets: Iterable[int], sizes: Iterable[int]) -> bool:
        """Says that the checkpoint lacks elements of a tensor, and whether the others are to be read."""
        if self._matching is not None:
            self._matching.note_hole(fqn, offsets, sizes)
        if fqn not in self._planned:
            return False
        old = self._new.old(fqn)
        if old is None:
            return True
        if old.is_meta:  # it has no values for the elements that the checkpoint lacks
            self._hold(fqn, self._new.keep(fqn))
            del self._planned[fqn]
            return False
        layouts: Layouts = {}
        for before, piece in zip(
            local_pieces(fqn, old, layouts), local_pieces(fqn, self.state_dict[fqn], layouts), strict=True
        ):
            piece.tensor.copy_(before.tensor)
        return True

    def _plan_items(self, wanted: dict[str, str]) -> None:
        """What to read with a reader of others."""
        stored = self._match(wanted)
        self._replace(fqn for fqn, found in stored.items() if not found.is_bytes)
        self._planned = {fqn: found.name for fqn, found in stored.items()}
        layouts: Layouts = {}
        for fqn, found in stored.items():
            if found.is_bytes:
                continue
            for piece in local_pieces(fqn, self.state_dict[fqn], layouts):
                hole = missing_elements(piece, self._entry(found))
                if hole is not None and not self._fill_partly(fqn, *hole):
                    break

    def _make_items(self, _: None) -> list[ReadItem]:
        """Items of all that was planned, as torch's planner has them."""
        wanted = {fqn: self._planned[fqn] for fqn in self.state_dict if fqn in self._planned}
        found = {} if self._matching is None else self._matching.look_up(wanted)
        with torch.no_grad():
            items = items_of(found, self.state_dict, self._entry)
        self._new.wait_for(items)
        return items

    def _entry(self, stored: Stored) -> Any:
        return None if self.metadata is None else self.metadata.state_dict_metadata[stored.name]

    # --- device and dtype -----------------------------------------------------------------------------

    def _replace(self, names: Iterable[str]) -> None:
        """Makes new tensors for what is going to be filled and may not stay as it is. Nobody else has them before that."""
        with torch.inference_mode(False):
            for fqn in [*names, *self.report.tied]:
                value = self.state_dict[fqn]
                if not self._new.applies_to(value):
                    continue
                if get_at(self.original_state_dict, self._path(fqn)) is not value:
                    msg = f"tensor {fqn!r} cannot be replaced (it is {value.dtype} on {value.device}): it is not under its name in the state dict"
                    raise PlanError(msg, tensor=fqn)
                self._hold(fqn, self._new.make(fqn, value, tied=fqn in self.report.tied))

    def _expect(self, items: list[ReadItem]) -> None:
        """Takes a plan that is not, or not quite, what this planner planned."""
        filled = dict.fromkeys(item.dest_index.fqn for item in items if item.type != LoadItemType.BYTE_IO)
        self._replace(fqn for fqn in filled if isinstance(self.state_dict.get(fqn), torch.Tensor))
        self._new.wait_for(items)

    def _hears_of_commits(self) -> bool:
        """Whether `commit_tensor` counts what is read. One that was set on the object, or patched in the class, need not."""
        return "commit_tensor" not in vars(self) and getattr(type(self).commit_tensor, "counts", False)

    def _hold(self, fqn: str, tensor: torch.Tensor) -> None:
        """Takes a tensor to be filled, where the caller does not see it yet."""
        if self.state_dict is self.original_state_dict:
            self.state_dict = WriteThrough(self.state_dict)
        dict.__setitem__(self.state_dict, fqn, tensor)


def _counting(commit: Callable[[Any, ReadItem, torch.Tensor], None]) -> Callable[[Any, ReadItem, torch.Tensor], None]:
    @functools.wraps(commit)
    def commit_tensor(self: RsLoadPlanner, read_item: ReadItem, tensor: torch.Tensor) -> None:
        commit(self, read_item, tensor)
        self._new.item_is_read(read_item)  # whether or not it went on to this class's own

    commit_tensor.counts = True  # type: ignore[attr-defined]
    return commit_tensor


RsLoadPlanner.commit_tensor.counts = True  # type: ignore[attr-defined]


_METHODS = Methods(RsLoadPlanner, DefaultLoadPlanner)
#: What torch's driver calls; the rest is called, or not, by readers.
_PLANNING = {"set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"}


def local_reads(plan: LoadPlan, planner: LoadPlanner) -> LocalReads | None:
    """What is to be read for the plan, where that needs no items: none was changed, and nobody wants to be called for each."""
    own: RsLoadPlanner | None = planner_of(plan)
    per_item = _METHODS.names - _PLANNING
    if own is None or _METHODS.replaced(own, per_item):
        return None
    if planner is not own and any(getattr(planner, name, None) != getattr(own, name) for name in per_item):
        return None
    return own._reads  # noqa: SLF001  # of this module


def names_of(planner: LoadPlanner) -> LoadNames | None:
    """Which names a planner loads, where it is one of ours."""
    return planner._names if isinstance(planner, RsLoadPlanner) else None  # noqa: SLF001  # of this module
