"""What was read of an open checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from dcp_rs._shown import Report, size

__all__ = ["ReadReport"]


@dataclass(frozen=True, repr=False)
class ReadReport(Report):
    """What was read of an open checkpoint since it was opened. What is used where it lies in a mapping of its file is not read, and not counted.

    Attributes:
        path: the checkpoint.
        bytes_wanted: of the tensors, slices and values that were asked for.
        bytes_read: of files, or of a store: more where gaps were read through.
        bytes_direct: of those, past the page cache.
        bytes_mapped: of those, copied from mappings.
        requests: pieces of files that were read, each in one go; from a store, a request for each.
    """

    path: str = ""
    bytes_wanted: int = 0
    bytes_read: int = 0
    bytes_direct: int = 0
    bytes_mapped: int = 0
    requests: int = 0

    def __str__(self) -> str:
        return (
            f"read {size(self.bytes_read)} of {self.path} for {size(self.bytes_wanted)}, in {self.requests:,} requests"
        )
