"""Saves in torch's checkpoint process, one beside each rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner

from dcp_rs import _torch
from dcp_rs.dcp.commits import SavedMeta
from dcp_rs.dcp.save_planner import RsSavePlanner
from dcp_rs.dcp.together import Ranks
from dcp_rs.dcp.writer import RsWriter
from dcp_rs.errors import RankLostError, UnsupportedError
from dcp_rs.transfer.stage import by_place

__all__ = ["save_in_process"]


def save_in_process(ranks: Ranks, begin: Callable[[], tuple[dict[str, Any], RsWriter, SavePlanner]]) -> Metadata:
    """Saves what was staged in torch's checkpoint process, which is started if need be, and waits for it.

    Args:
        ranks: those of the training processes.
        begin: gives what was staged, the writer and the planner. What it raises on one rank, all raise.

    Raises:
        Exception: on every rank, what a rank raised.
        RankLostError: a rank is gone, or its checkpoint process. The others' are ended then; the next save starts new ones.
    """
    writer: RsWriter | None = None

    def begin_here() -> tuple[dict[str, Any], RsWriter, SavePlanner]:
        nonlocal writer
        staged, writer, planner = begin()
        if isinstance(planner, RsSavePlanner):
            planner = planner.sent_with(staged)
        _check_that_it_pickles(staged, writer, planner)
        _torch.check_process_group_of_process(ranks.process_group)
        return staged, writer, planner

    try:
        staged, its_writer, planner = ranks.together(begin_here)
        with ranks.talking():
            info = _torch.process_group_info(ranks.process_group)
        try:
            metadata = _torch.save_in_process(staged, its_writer, planner, ranks.process_group, info)
        except CheckpointException as failure:
            if not _torch.PROCESS_GOES_ON:
                _torch.end_checkpoint_process()
            ranks.raise_failures({rank: wrapped[0] for rank, wrapped in failure.failures.items()})
        except Exception as error:
            # The ranks' checkpoint processes are out of step: who still waits for this one is to know.
            _torch.end_checkpoint_process()
            reason = str(error).partition("\n")[0]
            msg = f"the checkpoint process of a rank is gone, or could not go on ({reason})"
            raise RankLostError(msg) from error
        if isinstance(metadata.storage_meta, SavedMeta):
            its_writer.report = metadata.storage_meta.report
        return metadata
    finally:
        if writer is not None:
            writer.close()


def _check_that_it_pickles(staged: dict[str, Any], writer: RsWriter, planner: SavePlanner) -> None:
    """Raises what sending it would raise, but before any rank has sent anything."""
    for name, value in {**by_place(staged), "the writer": writer, "the planner": planner}.items():
        try:
            pickle.dumps(value)
        except Exception as reason:
            msg = f"{name!r} cannot be sent to the checkpoint process: {reason}"
            raise UnsupportedError(msg, tensor=name if name in staged else None) from reason
