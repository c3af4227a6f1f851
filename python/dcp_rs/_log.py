"""Log of this package, ``dcp_rs``. Each line names the rank that wrote it."""

from __future__ import annotations

import logging

import torch.distributed as dist

__all__ = ["log"]

log = logging.getLogger("dcp_rs")


def _add_rank(record: logging.LogRecord) -> bool:
    """Add the rank to a record, as ``record.rank`` and in front of the message."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else None
    record.rank = rank
    if rank is not None:
        record.msg = f"rank {rank}: {record.msg}"
    return True


log.addFilter(_add_rank)
