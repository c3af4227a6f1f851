"""Load as ``dcp.load`` does it, with errors that reach all ranks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader

from dcp_rs._arguments import type_of
from dcp_rs.dcp.reader import RsReader
from dcp_rs.engine import load as engine_load
from dcp_rs.engine.load import call_state_dicts, load_stateful, retry
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.engine.reports import LoadReport
from dcp_rs.errors import CheckpointNotFoundError, PlanError

#: State dict, reader and planner of a load.
LoadArguments = tuple[dict[str, Any], StorageReader, Any]


def load(
    ranks: RankGroup,
    make_arguments: Callable[[], LoadArguments],
    *,
    stateful: bool = False,
) -> LoadReport | None:
    """Load on all ranks with a reader and a planner, which are called as torch calls them.

    If another save replaces the checkpoint, the load starts again. A partial load raises instead.

    Args:
        ranks: the ranks that load.
        make_arguments: returns the state dict, the reader and the planner of this rank. It is
            called in the first step, so that its error is raised on all ranks.
        stateful: call ``state_dict`` and ``load_state_dict`` of ``Stateful`` values.

    Returns:
        The report of an :class:`RsReader`; None for other readers.

    Raises:
        Exception: the error of any rank, on all ranks.
    """
    given: dict[str, Any]
    state_dict: dict[str, Any]
    stateful_objects: dict[str, Any] = {}
    reader: StorageReader
    planner: LoadPlanner
    is_partial = False

    def plan_own() -> LoadPlan:
        nonlocal given, state_dict, stateful_objects, reader, planner, is_partial
        given, reader, planner = make_arguments()
        is_partial = getattr(planner, "allow_partial_load", False)
        state_dict = given
        if stateful:
            state_dict, stateful_objects = call_state_dicts(given)
        metadata, is_of_all = _read_metadata(reader, ranks.rank)
        planner.set_up_planner(state_dict, metadata, ranks.is_coordinator)
        more = {"rank": ranks.rank, "use_collectives": is_of_all}
        if isinstance(reader, RsReader) and is_of_all:
            more = {}  # it takes them for a call of torch's, and asks for the process group
        set_up = reader.set_up_storage_reader
        set_up(metadata, ranks.is_coordinator, **(more if _takes_kwargs(set_up) else {}))
        return reader.prepare_local_plan(planner.create_local_plan())

    def plan_all(plans: list[LoadPlan]) -> list[LoadPlan]:
        if not all(isinstance(plan, LoadPlan) for plan in plans):
            raise PlanError(engine_load.MIXED_PLANNERS)
        return reader.prepare_global_plan(planner.create_global_plan(plans))

    def hand_over() -> None:
        load_stateful(given, state_dict, stateful_objects)

    def read(plan: LoadPlan) -> None:
        reader.read_data(planner.finish_plan(plan), planner).wait()

    def load_once() -> LoadReport | None:
        ranks.run(partial(read, ranks.reduce_scatter(plan_own, plan_all)))
        if stateful:
            ranks.run(hand_over)
        return reader.report if isinstance(reader, RsReader) else None

    return retry(ranks, load_once, lambda: not is_partial)


def _read_metadata(reader: StorageReader, rank: int) -> tuple[Metadata, bool]:
    """Read the metadata of the checkpoint, or of the rank-local save of this rank.

    Returns:
        The metadata, and true if it is of all ranks.
    """
    try:
        return reader.read_metadata(), True
    except Exception as error:
        # Readers of others may raise anything if there is no checkpoint of all ranks.
        is_missing = isinstance(error, CheckpointNotFoundError) or not isinstance(reader, RsReader)
        if not is_missing or not _takes_kwargs(reader.read_metadata):
            raise
        try:
            return reader.read_metadata(rank=rank), False
        except Exception as own:  # noqa: BLE001  # one of the two is raised
            raise (own if isinstance(reader, RsReader) else error) from None


def _takes_kwargs(method: Callable[..., Any]) -> bool:
    """Return true if torch would pass ``rank`` and ``use_collectives`` to a method."""
    return "kwargs" in inspect.signature(method).parameters


# --- arguments ------------------------------------------------------------------------------------


def check_planner(called: Literal["load", "save"], planner: Any) -> None:
    """Raise a ``TypeError`` with advice unless this is None or a planner for ``called``."""
    takes: type
    takes, example, resolve = (
        (LoadPlanner, "RsLoadPlanner", "resolve_tensor")
        if called == "load"
        else (SavePlanner, "RsSavePlanner", "resolve_data")
    )
    if planner is None or isinstance(planner, takes):
        return
    # torch accepts a wrapper of any class that forwards every method.
    needed = ("set_up_planner", "create_local_plan", resolve)
    if not isinstance(planner, type) and all(hasattr(planner, name) for name in needed):
        return
    why = ""
    if isinstance(planner, LoadPlanner | SavePlanner):
        why = f", which plans a {'save' if called == 'load' else 'load'}"
    msg = (
        f"planner= of a {called} takes a planner such as {example}(...), "
        f"not {type_of(planner)}{why}"
    )
    raise TypeError(msg)


def check_reader(reader: Any) -> None:
    """Raise a ``TypeError`` with advice unless this is a storage reader."""
    if isinstance(reader, StorageReader):
        return
    if isinstance(reader, str | os.PathLike):
        msg = (
            f"storage_reader= is a path: pass RsReader({os.fspath(reader)!r}), "
            "or call dcp_rs.load(state_dict, path)"
        )
    else:
        msg = f"storage_reader= takes a reader such as RsReader(path), not {type_of(reader)}"
    raise TypeError(msg)
