"""Load of training state from the checkpoints of one path."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dcp_rs.checkpoint.names import LoadNames
from dcp_rs.dcp.reader import RsReader
from dcp_rs.engine import load as engine
from dcp_rs.engine.matching import LoadOptions
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.engine.reports import LoadReport
from dcp_rs.errors import PlanError
from dcp_rs.options import Globs, Rename
from dcp_rs.training.extra import EXTRA, PerRank, SavedExtra, new_memory, split_extra_state
from dcp_rs.training.load_optimizer import OptimizerLoad
from dcp_rs.training.names import StoredNames, unwrapper
from dcp_rs.training.optimizers import (
    fqns_by_parameter,
    joined,
    model_state,
    sharded_state_dicts,
)
from dcp_rs.training.partial_load import PartialLoad
from dcp_rs.training.saved_optimizers import SavedOptimizers, saved_optimizers
from dcp_rs.training.saved_tree import join
from dcp_rs.training.settings import KeepSettings
from dcp_rs.training.sources import MODEL, OPTIM, Part, Parts
from dcp_rs.training.versions import Versions, saved_versions, with_versions


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of a load. :func:`dcp_rs.optim.load_training_state` describes the attributes.

    Attributes:
        key: the key of the optimizers' state, if they are loaded alone.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    rename: Rename = None
    include: Globs = None
    exclude: Globs = None
    dtype: torch.dtype | None = None
    partial: Collection[str] = ()
    keep_settings: KeepSettings = False
    key: str | None = None


class TrainingLoad:
    """A load of everything from the save that a path holds now.

    Args:
        path: a checkpoint, or a folder of accelerate.
        open_reader: opens a checkpoint.
        models, optimizers: what is loaded.
        extra: the caller's entries; None to load the optimizers alone.
        options: the options of the load.

    Attributes:
        report: what was loaded, after :meth:`run`.
    """

    def __init__(
        self,
        path: Any,
        open_reader: Callable[[Any], RsReader],
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[Optimizer],
        extra: dict[str, Any] | None,
        options: TrainingOptions,
    ) -> None:
        self._models, self._optimizers, self._extra = models, optimizers, extra
        self._options = options
        self._names = LoadNames(None, options.include, options.exclude)
        self._parts = Parts(path, open_reader, options.names, extra or ())
        self._may_be_sent = open_reader(path)._source.find_routes is not None
        self._puts: list[Callable[[Mapping[str, Any]], None]] = []
        #: Names that no template has: they were read before, or are entries of other ranks.
        self._known: list[str] = []
        self.report = LoadReport()
        if any(param.is_meta for model in models for param in model.parameters()):
            msg = (
                "the model is on the meta device, so that there is no memory to load into: call "
                "model.to_empty(device=...) first"
            )
            raise PlanError(msg)

    def run(self, ranks: RankGroup) -> None:
        """Load. Every rank calls it."""
        if self._may_be_sent:
            self._get_settings(ranks)
        # A step of its own: it reads, which may fail on one rank, and the next has collectives.
        saved = ranks.run(self._read_optimizers)
        owners = self._gather_owners(ranks)
        ranks.run(lambda: self._begin(saved, owners))
        self._read(ranks)
        ranks.run(self._end)

    def _partial(self, part: Part, name: str, usual: str) -> PartialLoad:
        return PartialLoad(part, self._names, self.report, usual, name in self._options.partial)

    # --- templates

    def _get_settings(self, ranks: RankGroup) -> None:
        """Load the values that templates are made by, which other ranks may have to send."""

        def request() -> engine.LoadRequest:
            part = self._parts.optimizer(self._options.key)
            names = part.entries.below(join(part.prefix, "param_groups"))
            for name, entry in part.entries.find(names).items():
                self._parts.sent[name] = new_memory(entry)
            return engine.LoadRequest(self._parts.sent, part.reader._source, is_part=True)

        engine.load(ranks, request)

    def _read_optimizers(self) -> SavedOptimizers | None:
        if not self._optimizers:
            return None
        part = self._parts.optimizer(self._options.key)
        self._known.append(join(part.prefix, "param_groups"))
        left = self._partial(part, "optimizer", OPTIM)
        fqns = itertools.chain.from_iterable(fqns_by_parameter(self._models).values())
        return saved_optimizers(left, fqns, self._options.rename)

    def _gather_owners(self, ranks: RankGroup) -> dict[str, dict[str, Any]]:
        """Return the keys of the values of all ranks, by the names of their entries."""
        owners: dict[str, dict[str, Any]] = {}
        extra = self._extra or {}
        for of_rank in ranks.all_gather(
            lambda: {
                name: (value._saved_key, value._owner)
                for name, value in extra.items()
                if isinstance(value, PerRank)
            }
        ):
            for name, (key, owner) in of_rank.items():
                owners.setdefault(name, {})[key] = owner
        return owners

    def _begin(
        self, saved: SavedOptimizers | None, owners: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Make the templates. Nothing of the caller's changes."""
        of_optimizers = None
        if saved is not None:
            of_optimizers = OptimizerLoad(
                saved, self._models, self._optimizers, self._options.keep_settings
            )
            saved.partial_load.part.template |= of_optimizers.template
            self._puts.append(of_optimizers.put)
        if self._extra is None:
            return
        self._begin_models()
        for name, value in self._extra.items():
            part = self._parts.entry(name)
            left = self._partial(part, "extra", f"{EXTRA}.{name}")
            places = None
            if of_optimizers is not None and isinstance(value, LRScheduler):
                places = of_optimizers.places(value.optimizer)
            entry = SavedExtra(self._extra, name, owners.get(name, {}), left, places)
            part.template |= entry.template
            self._puts.append(entry.put)
            if isinstance(value, PerRank):
                self._known.append(part.prefix)

    def _begin_models(self) -> None:
        states = list(map(model_state, self._models))
        whole = joined(states, "modules")
        part = self._parts.model(whole)
        left = self._partial(part, "model", MODEL)
        values = [split_extra_state(state, left) for state in states]
        for value in (value for of_state in values for value in of_state.values()):
            part.template |= value.template
        start = len(part.prefix) + 1 if part.prefix else 0
        stored = StoredNames(
            (name[start:] for name in part.entries.below(part.prefix)), self._options.rename
        )
        name_of: dict[str, str] = {}
        for fqn, value in (pair for state in states for pair in state.items()):
            name_of[fqn] = join(part.prefix, stored.find(fqn) or fqn)
            if self._names.wants(join(MODEL, fqn)):
                part.template[name_of[fqn]] = value
            else:
                self.report.excluded.append(join(MODEL, fqn))
        versions = saved_versions(part, ((name[start:], fqn) for fqn, name in name_of.items()))

        def put(loaded: Mapping[str, Any]) -> None:
            for model, state, extra in zip(self._models, states, values, strict=True):
                own = {fqn: loaded.get(name_of[fqn], value) for fqn, value in state.items()}
                own |= {key: value.build(loaded) for key, value in extra.items()}
                _load_model(model, own, versions, partial=left.is_partial)

        self._puts.append(put)

    # --- reads

    def _read(self, ranks: RankGroup) -> None:
        """Fill the templates."""
        options = LoadOptions(
            allow_partial_load="model" in self._options.partial, dtype=self._options.dtype
        )

        def requests() -> list[engine.LoadRequest]:
            """Return the requests. Plan all before the first of several reads."""
            found = [
                engine.LoadRequest(template, reader._source, options, index=entries.index)
                for reader, entries, template in self._parts.opened()
            ]
            for request in found if found[1:] else ():
                engine.plan_rank(request, ranks)
            return found

        for request in ranks.run(requests):
            _add_report(self.report, engine.load(ranks, partial(replace, request)))

    def _end(self) -> None:
        """Hand over what was read."""
        loaded: dict[str, Any] = {}
        for _, _, template in self._parts.opened():
            loaded |= template
        for put in self._puts:
            put(loaded)
        report = self.report
        mismatched = (one.name for one in report.shape_mismatched)
        known = {*report.excluded, *report.incomplete, *mismatched}
        above = tuple(f"{name}." for name in self._known)
        report.unexpected = [
            name
            for name in report.unexpected
            if name not in known and not f"{name}.".startswith(above)
        ]


def _add_report(whole: LoadReport, report: LoadReport) -> None:
    """Add the report of one checkpoint to that of a load from several."""
    for one in fields(LoadReport):
        old, new = getattr(whole, one.name), getattr(report, one.name)
        if isinstance(new, str):
            setattr(whole, one.name, old or new)
        elif isinstance(new, dict):
            setattr(whole, one.name, old | new)
        else:
            setattr(whole, one.name, old + new)


def _load_model(
    model: torch.nn.Module,
    own: Mapping[str, Any],
    versions: Versions | None,
    *,
    partial: bool,
) -> None:
    """Load a module from a state dict with names without wrappers."""
    # torch's set_model_state_dict raises if a module is registered under two names, or is compiled
    # inside of FSDP1.
    unwrap = unwrapper(model)
    with sharded_state_dicts(model):
        names = {key: unwrap(key) for key in model.state_dict()}
        found = {key: own[name] for key, name in names.items() if name in own}
        model.load_state_dict(with_versions(found, model, versions), strict=not partial)
