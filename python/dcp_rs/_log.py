"""Log of this package, ``dcp_rs``. Each line names the rank that wrote it."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("dcp_rs")


def current_rank() -> int | None:
    """Return the rank of this process; None without a process group."""
    dist = sys.modules.get("torch.distributed")  # without it, there is no process group
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return int(dist.get_rank())


def _add_rank(record: logging.LogRecord) -> bool:
    """Add the rank to a record, as ``record.rank`` and in front of the message."""
    record.rank = rank = current_rank()
    if rank is not None:
        record.msg = f"rank {rank}: {record.msg}"
    return True


log.addFilter(_add_rank)
