"""DCP's protocol: what torch's own ``dcp.load`` and ``dcp.save`` call of planner and storage, in that order, in steps in which errors meet."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from dcp_rs.checkpoint.locate import is_rank_local
from dcp_rs.dcp.attempts import Attempts
from dcp_rs.dcp.reader import RsReader
from dcp_rs.engine.ranks import Ranks
from dcp_rs.errors import CheckpointNotFoundError, CheckpointReplacedError

__all__ = ["again_where_replaced", "load", "save"]

StateDict = dict[str, Any]

#: A load that finds the checkpoint replaced under it begins again, so often.
_ATTEMPTS = 10


def again_where_replaced(ranks: Ranks, work: Callable[[Attempts], None]) -> None:
    """Does it, and begins again with the new checkpoint where another save replaced the one that was being read."""
    with Attempts.of_load() as attempts:
        for _ in range(_ATTEMPTS - 1):
            try:
                return work(attempts)
            except BaseException:
                # Every rank knows the same failures, so all of them begin again, or none.
                if not any(isinstance(error, CheckpointReplacedError) for error in ranks.failures.values()):
                    raise
        return work(attempts)


def load(
    ranks: Ranks,
    begin: Callable[[], tuple[StateDict, StorageReader, LoadPlanner]],
    attempts: Attempts,
    unseen: Collection[str] = (),
) -> None:
    """Loads on all ranks.

    Args:
        ranks: who loads.
        begin: gives the state dict to load into (without ``Stateful`` values), the reader and the planner. What it raises on one rank, all raise.
        attempts: those before this one, which it then is among.
        unseen: names in the state dict of what the caller does not see before the load is over.

    Raises:
        CorruptDataError: it would leave alone what an attempt before it may have filled.
    """
    reader: StorageReader
    planner: LoadPlanner
    own: LoadPlan
    is_filled = False

    def plan_own() -> LoadPlan:
        nonlocal reader, planner, own
        state_dict, reader, planner = begin()
        if isinstance(reader, RsReader):
            reader.read_with(ranks)
        metadata, of_all_ranks = _metadata(reader, ranks.rank)
        planner.set_up_planner(state_dict, metadata, ranks.is_coordinator)
        _set_up(
            reader.set_up_storage_reader, metadata, ranks.is_coordinator, rank=ranks.rank, use_collectives=of_all_ranks
        )
        own = planner.create_local_plan()
        attempts.check(_path(reader), own, planner)
        return reader.prepare_local_plan(own)

    def plan_all(plans: list[LoadPlan]) -> list[LoadPlan]:
        return reader.prepare_global_plan(planner.create_global_plan(plans))

    def read() -> None:
        nonlocal is_filled
        reader.read_data(planner.finish_plan(plan), planner).wait()
        is_filled = True

    plan = ranks.divided(plan_own, plan_all)
    try:
        ranks.together(read)
    except BaseException:
        attempts.failed(_path(reader), own, planner, unseen, is_filled=is_filled)
        raise


def save(ranks: Ranks, begin: Callable[[], tuple[StateDict, StorageWriter, SavePlanner]]) -> Metadata:
    """Saves from all ranks. Returns the metadata of the checkpoint, once it is committed.

    Args:
        ranks: who saves.
        begin: as that of :func:`load`, with a writer.
    """
    writer: StorageWriter
    planner: SavePlanner
    metadata: Metadata

    def plan_own() -> SavePlan:
        nonlocal writer, planner
        state_dict, writer, planner = begin()
        planner.set_up_planner(state_dict, writer.storage_meta(), ranks.is_coordinator)
        _set_up(writer.set_up_storage_writer, ranks.is_coordinator, rank=ranks.rank, use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(plans)

    def write() -> list[WriteResult]:
        written = writer.write_data(planner.finish_plan(plan), planner)
        written.wait()
        return written.value()

    def commit(results: list[list[WriteResult]]) -> Metadata:
        writer.finish(metadata, results)
        return metadata

    plan = ranks.divided(plan_own, plan_all)
    return ranks.joined(write, commit)


def _path(reader: StorageReader) -> Any:
    """Where a reader reads, for a message."""
    return reader.path if isinstance(reader, RsReader) else getattr(reader, "checkpoint_id", type(reader).__name__)


def _metadata(reader: StorageReader, rank: int) -> tuple[Metadata, bool]:
    """The metadata of the checkpoint, and whether they are of all ranks: a rank may have saved its own alone.

    Of a reader of this package only that there is none of all ranks leads to those. Others say that in whatever way.
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
            raise (own if isinstance(reader, RsReader) and is_rank_local(reader.path) else error) from None


def _set_up(method: Callable[..., None], *arguments: Any, **more: Any) -> None:
    """Calls it, with what newer torch tells those who take it."""
    method(*arguments, **(more if _takes_more(method) else {}))


def _takes_more(method: Callable[..., Any]) -> bool:
    return "kwargs" in inspect.signature(method).parameters
