"""The log of this package. Each line says which rank wrote it."""

from __future__ import annotations

import logging

import torch.distributed as dist

__all__ = ["log"]

log = logging.getLogger("dcp_rs")


def _with_rank(record: logging.LogRecord) -> bool:
    """Put the rank in front of a line, and into ``record.rank``. Without a process group there is none."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else None
    record.rank = rank
    if rank is not None:
        record.msg = f"rank {rank}: {record.msg}"
    return True


log.addFilter(_with_rank)
