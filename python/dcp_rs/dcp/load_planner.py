"""``RsLoadPlanner``: planning over the mapped index, and a say in what tensors become."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_rs import _core, _torch
from dcp_rs._shown import call
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.frameworks import open as open_checkpoint
from dcp_rs.checkpoint.names import explain_missing, globs
from dcp_rs.checkpoint.open import Checkpoint
from dcp_rs.checkpoint.renaming import Rename, Renamed
from dcp_rs.dcp.hooks import Methods
from dcp_rs.dcp.load_report import LoadReport, Mismatch
from dcp_rs.dcp.local_items import LocalItems, check_own, planner_of
from dcp_rs.dcp.read_items import bytes_item, missing_elements, tensor_items
from dcp_rs.dcp.stored import Stored, can_copy, describe, index_of
from dcp_rs.errors import EntryNotFoundError, PlanError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.boxes import narrow
from dcp_rs.tensors.dtypes import NAMES as DTYPE_NAMES
from dcp_rs.tensors.memory import twins
from dcp_rs.tensors.nesting import TreePath, name_of
from dcp_rs.tensors.replacements import Replacements
from dcp_rs.tensors.shards import Layouts, global_shape, local_pieces
from dcp_rs.tensors.trees import Flat, flatten, get_at, holds_only_tensors, is_plain_state_dict, set_at
from dcp_rs.transfer.target import Target

__all__ = ["LocalReads", "RsLoadPlanner", "local_reads"]


@dataclass
class LocalReads:
    """What one rank reads, without items: whole tensors, regions of tensors, and values (index, name).

    ``plain`` is what ``whole`` was made of: stored names, tensors, and the places of those that are not in it.
    """

    index: _core.Index
    whole: _core.Batch | None = None
    plain: tuple[list[str], list[torch.Tensor], list[int]] = field(default_factory=lambda: ([], [], []))
    targets: list[Target] = field(default_factory=list)
    values: list[tuple[int, str]] = field(default_factory=list)

    def tensors(self) -> list[torch.Tensor]:
        """All that is filled."""
        _, plain, others = self.plain
        if others:
            left_out = set(others)
            plain = [tensor for i, tensor in enumerate(plain) if i not in left_out]
        return [*plain, *(target.tensor for target in self.targets)]


class RsLoadPlanner(DefaultLoadPlanner):
    """Plans a load in Rust, over the mapped index, without an object for every item; with any other reader it plans as torch does.

    The plan that crosses the collectives has a constant size. Its items come into being where somebody looks at them: a subclass that overrides
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
        PlanError: a missing key, another shape, a refused or impossible cast, a tensor that the checkpoint does not wholly hold.
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
        if dtype_policy not in ("warn", "error", "cast"):
            msg = f"dtype_policy={dtype_policy!r}: one of 'warn', 'error', 'cast'"
            raise ValueError(msg)
        self._given: dict[str, Any] = {"dtype": dtype, "device": device, "rename": rename, "include": include}
        self._given |= {"exclude": exclude, "allow_partial_load": allow_partial_load or None}
        self.dtype = dtype
        self.device = None if device is None else torch.device(device)
        self.dtype_policy = dtype_policy
        self.report = LoadReport()
        self._rename = rename
        self._renamed: Renamed | None = None
        self._include = globs(include)
        self._exclude = globs(exclude)
        self._checkpoint_path = checkpoint
        self.metadata: Metadata | None = None
        self._paths: dict[str, TreePath] = {}  # with keys as they are, where `mappings` has text
        self._new = Replacements(self.dtype, self.device, self.set_value)
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
        self._renamed = None
        self._new = Replacements(self.dtype, self.device, self.set_value)
        if self.flatten_sharded_tensors and not is_plain_state_dict(state_dict):
            state_dict = _torch.flatten_sharded_tensors(state_dict)
        if self.flatten_state_dict:
            flat = flatten(state_dict)
            self._add_hollow(state_dict, flat)
            self.state_dict, self.mappings, self._paths = flat.values, flat.text_paths(), flat.paths
        else:
            self.state_dict = state_dict

    @torch.no_grad()  # without it, a DTensor's local tensor costs an autograd node
    def create_local_plan(self) -> LoadPlan:
        """Checks everything that can be known before the first byte is read."""
        self.report = LoadReport()
        self._new = Replacements(self.dtype, self.device, self.set_value)
        wanted = self._wanted_names()
        self._items = LocalItems(planner=self, make=self._make_items)
        index = index_of(self.metadata)
        if index is None:
            self._reads = None
            self._plan_items(wanted)
        else:
            self._reads = self._plan_reads(index, wanted)
        self._warn_of_casts()
        # Who plans for all ranks needs the items of all.
        is_whole = index is None or _METHODS.replaced(self, ("create_global_plan",))
        return LoadPlan(list(self._items) if is_whole else self._items)  # type: ignore[arg-type]  # it is as good as one

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
            PlanError: the planner has no checkpoint yet.
        """
        if not isinstance(read_item, str):
            tensor: torch.Tensor = super().resolve_tensor(read_item)
            return tensor
        device = torch.device(device) if device is not None else self.device or torch.device("cpu")
        with self._open(device) as checkpoint:
            value = checkpoint[self._stored_in(checkpoint, read_item)]
            if not isinstance(value, torch.Tensor):
                msg = f"{read_item!r} is not a tensor"
                raise TypeError(msg)
            tensor = value
            wanted = dtype or (self.dtype if tensor.is_floating_point() else None)
            if wanted is not None and wanted != tensor.dtype:
                return tensor.to(wanted)
            # Never a view of the file: the caller owns what it gets.
            return tensor.clone() if device.type == "cpu" else tensor

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

    def _stored_name(self, fqn: str) -> str | None:
        return fqn if self._renamed is None else self._renamed.stored_name(fqn)

    def _stored_in(self, checkpoint: Checkpoint, fqn: str) -> str:
        renamed = self._renamed
        if renamed is None and self._rename is not None:
            renamed = Renamed(self._rename, checkpoint, [fqn])
        name = fqn if renamed is None else renamed.stored_name(fqn)
        if name is None:
            msg = f"there is no {fqn!r} in {checkpoint.path}{'' if renamed is None else renamed.explain(fqn)}"
            raise EntryNotFoundError(msg, path=checkpoint.path, tensor=fqn)
        return name

    def _wanted(self, fqn: str) -> bool:
        included = self._include is None or self._include.match(fqn) is not None
        return included and (self._exclude is None or self._exclude.match(fqn) is None)

    def _wanted_names(self) -> dict[str, str]:
        """The names of the state dict that are to be loaded, and what the checkpoint calls them."""
        wanted = list(self.state_dict)
        if self._include is not None or self._exclude is not None:
            wanted = [fqn for fqn in wanted if self._wanted(fqn)]
            self.report.excluded = [fqn for fqn in self.state_dict if not self._wanted(fqn)]
        if self._rename is None or self.metadata is None:
            return dict(zip(wanted, wanted, strict=True))
        self._renamed = Renamed(self._rename, list(self.metadata.state_dict_metadata), wanted)
        return self._named(wanted)

    def _named(self, wanted: Iterable[str]) -> dict[str, str]:
        """What the checkpoint calls names of the state dict, without those that it has no entry for."""
        return {fqn: name for fqn in wanted if (name := self._stored_name(fqn)) is not None}

    def _add_hollow(self, state_dict: dict[str, Any], flat: Flat) -> None:
        """Adds containers without entries that the checkpoint holds as a value: it was not flattened, or is of torch before 2.4."""
        paths = {c.path[:depth]: None for c in flat.containers for depth in range(1, len(c.path) + 1)}
        names = {name_of(path): path for path in paths}
        if self.metadata is None or not names:
            return
        stored = {fqn: name for fqn in names if (name := self._stored_name(fqn)) is not None}
        for fqn, found in self._look_up(stored).items():
            path = names[fqn]
            if found is None or fqn in flat.values or any(p[: len(path)] == path for p in flat.paths.values()):
                continue
            flat.values[fqn], flat.paths[fqn] = get_at(state_dict, path), path

    def _path(self, fqn: str) -> tuple[Any, ...]:
        return self._paths[fqn] if self.flatten_state_dict else (fqn,)

    def _unnamed(self) -> list[str]:
        """Names that are to be loaded, and that ``rename`` gives to nothing."""
        if self._renamed is None:
            return []
        return [fqn for fqn in self.state_dict if self._wanted(fqn) and self._stored_name(fqn) is None]

    def _match(self, wanted: dict[str, str]) -> dict[str, Stored]:
        """What the checkpoint has for some names of the state dict; what it lacks goes into the report."""
        if self.metadata is None:
            raise PlanError("the planner was not set up with metadata")
        found = self._look_up(wanted)
        missing = [fqn for fqn, stored in found.items() if stored is None] + self._unnamed()
        if missing and self.flatten_state_dict:
            older = _torch.flatten_as_2_3(self.original_state_dict)
            entries = self.metadata.state_dict_metadata
            extra = [fqn for fqn in older[0] if fqn not in self.state_dict and self._stored_name(fqn) in entries]
            if extra:
                # Saved before torch 2.4, which flattened less.
                self.state_dict, self.mappings = older
                self._paths = self.mappings
                found = self._look_up(self._named(fqn for fqn in [*wanted, *extra] if fqn in older[0]))
                missing = [fqn for fqn, stored in found.items() if stored is None] + self._unnamed()
        self.report.tied = self._find_tied(missing)
        missing = [fqn for fqn in missing if fqn not in self.report.tied]
        self.report.missing = missing
        if self.allow_partial_load:
            known = {self._stored_name(fqn) for fqn in self.state_dict}
            self.report.unexpected = [name for name in self.metadata.state_dict_metadata if name not in known]
        elif missing:
            more = f" (and {len(missing) - 1} more: {', '.join(map(repr, missing[1:6]))})" if missing[1:] else ""
            msg = f"the checkpoint has no {missing[0]!r}{more}{self._explain(missing, found)}"
            raise PlanError(msg, tensor=missing[0])
        return {fqn: stored for fqn, stored in found.items() if stored is not None and self._fits(fqn, stored)}

    def _explain(self, missing: list[str], wanted: Collection[str]) -> str:
        """Why names may be missing, for the end of a message."""
        stored = self.metadata.state_dict_metadata if self.metadata is not None else {}
        return explain_missing(missing, wanted, stored) if self._renamed is None else self._renamed.explain(missing[0])

    def _find_tied(self, missing: list[str]) -> dict[str, str]:
        """Those whose tensor is the memory of another one, which the checkpoint has for it."""
        if not missing:
            return {}
        lacking = set(missing)
        others = [fqn for fqn in self.state_dict if fqn not in lacking and self._wanted(fqn)]
        tied = twins(missing, others, self.state_dict)
        stored = self._look_up(self._named(tied.values()))
        held = {other for other, found in stored.items() if found is not None and self._holds(other, found)}
        return {fqn: other for fqn, other in tied.items() if other in held}

    def _holds(self, fqn: str, stored: Stored) -> bool:
        return not stored.is_bytes and stored.shape == global_shape(self.state_dict[fqn])

    def _look_up(self, wanted: dict[str, str]) -> dict[str, Stored | None]:
        return dict(zip(wanted, self._describe(wanted.values()), strict=True))

    def _describe(self, names: Iterable[str]) -> list[Stored | None]:
        if self.metadata is None:
            raise PlanError("the planner was not set up with metadata")
        return describe(self.metadata, list(names))

    def _fits(self, fqn: str, stored: Stored) -> bool:
        """Whether what is stored can go to the state dict's entry; raises where that is an error."""
        value = self.state_dict[fqn]
        if stored.is_bytes:
            return True
        if not isinstance(value, torch.Tensor):
            msg = f"{fqn!r} is a tensor in the checkpoint, and a {type(value).__name__} in the state dict"
            if self.allow_partial_load:
                self.report.shape_mismatched.append(Mismatch(fqn, type(value).__name__, stored.shape))
                return False
            raise PlanError(msg, tensor=fqn)
        shape = global_shape(value)
        if shape != stored.shape:
            if self.allow_partial_load:
                self.report.shape_mismatched.append(Mismatch(fqn, tuple(shape), stored.shape))
                return False
            msg = f"tensor {fqn!r} has shape {tuple(shape)} in the state dict, and {stored.shape} in the checkpoint"
            raise PlanError(msg, tensor=fqn)
        dtype = self._new.dtype_of(value)
        if dtype != stored.dtype:
            self._check_cast(fqn, dtype, stored.dtype)
        return True

    def _check_cast(self, fqn: str, wanted: torch.dtype, stored: torch.dtype | None) -> None:
        if stored is None or not can_copy(stored, wanted):
            msg = f"tensor {fqn!r} is stored as {stored}, which cannot be cast to {wanted}"
            raise PlanError(msg, tensor=fqn)
        is_wish = self.dtype is not None and wanted == self.dtype
        if self.dtype_policy == "error" and not is_wish:
            msg = f"tensor {fqn!r} is {wanted} in the state dict, and {stored} in the checkpoint (dtype_policy='error')"
            raise PlanError(msg, tensor=fqn)
        if not is_wish:
            self.report.dtype_mismatched.append(Mismatch(fqn, wanted, stored))

    def _warn_of_casts(self) -> None:
        cast = self.report.dtype_mismatched
        if cast and self.dtype_policy == "warn":
            first = cast[0]
            others = f" and {len(cast) - 1} other tensors" if cast[1:] else ""
            warn_caller(
                f"{first.name!r}{others} are cast on loading ({first.got} in the checkpoint, {first.expected} in the state dict); "
                "say dtype_policy='cast', or dtype=..., if that is meant"
            )

    # --- what is read ---------------------------------------------------------------------------------

    def _plan_reads(self, index: _core.Index, wanted: dict[str, str]) -> LocalReads:
        """What to read, over the index: plain tensors, which are most, without looking at each here."""
        reads = LocalReads(index)
        stored: dict[str, Stored] | None = None
        if self._replaces(wanted):
            stored = self._match(wanted)
            self._replace(_tensors(stored))
            wanted = {fqn: found.name for fqn, found in stored.items()}
        fqns, names = list(wanted), list(wanted.values())
        tensors = [self.state_dict[fqn] for fqn in fqns]
        reads.whole, others = index.plan_plain(names, tensors, PLAIN_TYPES, DTYPE_NAMES)
        reads.plain = (names, tensors, others)
        rest = {fqns[i]: names[i] for i in others}
        places = dict(zip(rest, others, strict=True))
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
                place = places.get(fqn, len(tensors))
                targets += [
                    (fqn, Target(found.index, piece.offsets, piece.tensor, found.name, found.dtype, place))
                    for piece in local_pieces(fqn, self.state_dict[fqn], layouts)
                ]
        self._check_coverage(reads, targets)
        return reads

    def _check_coverage(self, reads: LocalReads, targets: list[tuple[str, Target]]) -> None:
        """Finds what no chunk holds, and data files that are missing or of another length."""
        index = reads.index
        regions = [(target.index, target.offsets, target.tensor.shape) for _, target in targets]
        holes = index.check_regions(regions, [value for value, _ in reads.values])
        left_alone = {
            targets[at][0] for at, offsets, sizes in holes if not self._fill_partly(targets[at][0], offsets, sizes)
        }
        in_part = {at for at, _, _ in holes}
        for at, (fqn, target) in enumerate(targets):
            if fqn in left_alone:
                continue
            if at not in in_part:
                reads.targets.append(target)
                continue
            for chunk, chunk_offsets, region_offsets, sizes in index.touching(
                target.index, target.offsets, target.tensor.shape
            ):
                part = narrow(target.tensor, region_offsets, sizes)
                reads.targets.append(replace(target, index=chunk, of_chunk=True, offsets=chunk_offsets, tensor=part))

    def _fill_partly(self, fqn: str, offsets: Iterable[int], sizes: Iterable[int]) -> bool:
        """Says that the checkpoint lacks elements of a tensor, and whether the others are to be read."""
        if not self.allow_partial_load:
            msg = f"tensor {fqn!r}: the checkpoint does not hold {list(sizes)} elements at {list(offsets)}"
            raise PlanError(msg, tensor=fqn)
        if fqn not in self.report.partly_filled:
            self.report.partly_filled.append(fqn)
            tied = [name for name, other in self.report.tied.items() if other == fqn]
            self.report.missing += tied
            for name in tied:
                del self.report.tied[name]
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
        self._replace(_tensors(stored))
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
        layouts: Layouts = {}
        items: list[ReadItem] = []
        with torch.no_grad():
            planned = self._look_up({fqn: self._planned[fqn] for fqn in self.state_dict if fqn in self._planned})
            for fqn, found in planned.items():
                if found is None:
                    continue
                if found.is_bytes:
                    items.append(bytes_item(fqn, found.name))
                else:
                    pieces = local_pieces(fqn, self.state_dict[fqn], layouts)
                    items += tensor_items(fqn, found.name, self._entry(found), pieces)
        self._new.wait_for(items)
        return items

    def _entry(self, stored: Stored) -> Any:
        return None if self.metadata is None else self.metadata.state_dict_metadata[stored.name]

    # --- device and dtype -----------------------------------------------------------------------------

    def _replaces(self, wanted: Iterable[str]) -> bool:
        """Whether any of the tensors may not stay as it is."""
        values: Iterable[Any] = map(self.state_dict.__getitem__, wanted)
        if not holds_only_tensors(self.state_dict):
            values = (value for value in values if isinstance(value, torch.Tensor))
        if self.dtype is not None or self.device is not None:
            return any(map(self._new.applies_to, values))
        values = list(values)
        if any(
            isinstance(value, ShardedTensor) for value in values
        ):  # one without shards here knows its device, and not `is_meta`
            return any(value.device.type == "meta" for value in values)
        return any(map(attrgetter("is_meta"), values))

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
            self.state_dict = _TopLevel(self.state_dict)
        dict.__setitem__(self.state_dict, fqn, tensor)


class _TopLevel(dict[str, Any]):
    """A copy of a state dict that is not flattened: what a planner sets in it is set in the caller's."""

    def __init__(self, behind: dict[str, Any]) -> None:
        super().__init__(behind)
        self._behind = behind

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._behind[key] = value


def _tensors(stored: dict[str, Stored]) -> list[str]:
    return [fqn for fqn, found in stored.items() if not found.is_bytes]


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
    if own is None:
        return None
    per_item = _METHODS.names - _PLANNING
    if _METHODS.replaced(own, per_item):
        return None
    if planner is not own and any(getattr(planner, name, None) != getattr(own, name) for name in per_item):
        return None
    return own._reads  # noqa: SLF001  # of this module
