"""DCP's protocol: what torch's own ``dcp.load`` and ``dcp.save`` call of planner and storage, in that order, in steps in which errors meet."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, WriteResult

from dcp_rs.checkpoint.locate import is_rank_local
from dcp_rs.dcp.reader import RsReader
from dcp_rs.dcp.writer import RsWriter
from dcp_rs.engine.destination import commit_outcome
from dcp_rs.engine.load import MIXED, again_where_replaced, hand_back, take_states
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.engine.reports import SavedMetadata
from dcp_rs.engine.save import MIXED as MIXED_SAVE
from dcp_rs.engine.save import SaveRequest
from dcp_rs.errors import CheckpointNotFoundError, PlanError

__all__ = ["load", "save"]

StateDict = dict[str, Any]


def load(
    ranks: RankGroup,
    state_dict: StateDict,
    reader: StorageReader,
    planner: LoadPlanner,
    *,
    stateful: bool = False,
    metadata: Metadata | None = None,
) -> None:
    """Load on all ranks with a reader or a planner of a user's own, called as torch calls them.

    A load that a save overtakes begins again with the new checkpoint, unless it is partial or
    ``metadata`` is given.

    Args:
        ranks: who loads.
        state_dict: what to fill.
        reader, planner: those of the load.
        stateful: call the ``state_dict`` and ``load_state_dict`` of ``Stateful`` values.
        metadata: of the checkpoint, where it was read already.

    Raises:
        Exception: what a rank raised, on all ranks.
    """
    is_final = metadata is not None or getattr(planner, "allow_partial_load", False)
    again_where_replaced(
        ranks,
        lambda: _load(ranks, state_dict, reader, planner, stateful, metadata),
        **({"tries": 1} if is_final else {}),
    )


def _load(
    ranks: RankGroup,
    state_dict: StateDict,
    reader: StorageReader,
    planner: LoadPlanner,
    stateful: bool,
    metadata: Metadata | None,
) -> None:
    values = state_dict
    holders: dict[str, Any] = {}

    def plan_own() -> LoadPlan:
        nonlocal values, holders, metadata
        if stateful:
            values, holders = take_states(state_dict)
        of_all_ranks = True
        if metadata is None:
            if isinstance(reader, RsReader):
                reader.reset()
            metadata, of_all_ranks = _metadata(reader, ranks.rank)
        planner.set_up_planner(values, metadata, ranks.is_coordinator)
        _set_up(
            reader.set_up_storage_reader,
            metadata,
            ranks.is_coordinator,
            rank=ranks.rank,
            use_collectives=of_all_ranks,
        )
        return reader.prepare_local_plan(planner.create_local_plan())

    def plan_all(plans: list[LoadPlan]) -> list[LoadPlan]:
        if not all(isinstance(plan, LoadPlan) for plan in plans):
            raise PlanError(MIXED, path=_path(reader))
        return reader.prepare_global_plan(planner.create_global_plan(plans))

    def read() -> None:
        reader.read_data(planner.finish_plan(plan), planner).wait()

    def hand_over() -> None:
        hand_back(
            state_dict,
            values,
            holders,
            source=reader.source if isinstance(reader, RsReader) else "",
        )

    plan = ranks.reduce_scatter(plan_own, plan_all)
    ranks.run(read)
    if stateful:
        ranks.run(hand_over)


def save(ranks: RankGroup, planner: SavePlanner, ask: Callable[[], SaveRequest]) -> SavedMetadata:
    """Save from all ranks with a planner of the user's, called as torch's own ``dcp.save`` calls it.

    Args:
        ranks: who saves.
        planner: plans, and resolves what is written.
        ask: as for :func:`dcp_rs.engine.save.save`.
    """
    handled = sys.exception()
    made: list[RsWriter] = []
    metadata: Metadata

    def plan_own() -> SavePlan:
        request = ask()
        made.append(writer := RsWriter._of(request.path, request.options))
        planner.set_up_planner(request.state_dict, writer.storage_meta(), ranks.is_coordinator)
        writer.set_up_storage_writer(ranks.is_coordinator, rank=ranks.rank, use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        if not all(isinstance(plan, SavePlan) for plan in plans):
            raise PlanError(MIXED_SAVE, path=made[0].path)
        plans, metadata = planner.create_global_plan(plans)
        return made[0].prepare_global_plan(plans)

    def write() -> list[WriteResult]:
        written = made[0].write_data(planner.finish_plan(plan), planner)
        written.wait()
        return written.value()

    def commit(results: list[list[WriteResult]]) -> Metadata:
        made[0].finish(metadata, results)
        return metadata

    try:
        plan = ranks.reduce_scatter(plan_own, plan_all)
        saved = ranks.all_reduce(write, commit)
    except BaseException:
        if ranks.failures and not any(
            commit_outcome(error, handled) for error in ranks.failures.values()
        ):
            for writer in made:
                writer._discard()  # all ranks know that it failed, so nobody commits
        raise
    finally:
        for writer in made:
            writer.close()
    return SavedMetadata._of(saved, made[0].report)


def _path(reader: StorageReader) -> Any:
    """Where a reader reads, for a message."""
    return (
        reader.path
        if isinstance(reader, RsReader)
        else getattr(reader, "checkpoint_id", type(reader).__name__)
    )


def _metadata(reader: StorageReader, rank: int) -> tuple[Metadata, bool]:
    """The metadata of the checkpoint, and whether they are of all ranks: a rank may have saved its own alone.

    Of a reader of this package only that there is none of all ranks leads to those. Others say that
    in whatever way.
    """
    try:
        return reader.read_metadata(), True
    except Exception as error:
        is_absent = isinstance(error, CheckpointNotFoundError) or not isinstance(reader, RsReader)
        if not is_absent or not _takes_more(reader.read_metadata):
            raise
        try:
            return reader.read_metadata(rank=rank), False
        except Exception as own:  # noqa: BLE001  # one of the two is raised
            raise (
                own if isinstance(reader, RsReader) and is_rank_local(reader.path) else error
            ) from None


def _set_up(method: Callable[..., None], *arguments: Any, **more: Any) -> None:
    """Calls it, with what newer torch tells those who take it."""
    method(*arguments, **(more if _takes_more(method) else {}))


def _takes_more(method: Callable[..., Any]) -> bool:
    return "kwargs" in inspect.signature(method).parameters
