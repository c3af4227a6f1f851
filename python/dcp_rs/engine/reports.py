"""Reports of loads and saves: counts, bytes and seconds."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from dcp_rs import _core
from dcp_rs._log import log as _log
from dcp_rs._progress import Counts
from dcp_rs._reports import Report, size


@dataclass(frozen=True)
class Mismatch:
    """Difference between a state dict and a checkpoint.

    Attributes:
        name: the entry.
        expected: its dtype or shape in the state dict.
        got: the same in the checkpoint.
    """

    name: str
    expected: Any
    got: Any


@dataclass(repr=False)
class _Timed(Report):
    """Attributes of every report."""

    path: str = ""
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    def _speed(self, nbytes: int) -> str:
        return f", {size(nbytes / self.seconds)}/s" if self.seconds and nbytes else ""

    def _phases(self) -> str:
        return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases.items())


@dataclass(repr=False)
class LoadReport(_Timed):
    """Report of a load on this rank. Names are those of the state dict, except in ``unexpected``.

    Attributes:
        path: the checkpoint.
        entries: entries of the state dict; 0 if torch's planner planned the load.
        entries_loaded: entries that the load filled.
        missing: entries that the checkpoint lacks.
        tied: entries that the checkpoint lacks, by name, with the entry whose memory they share
            and which was filled.
        replaced: tensors that were replaced in the state dict: those on ``meta``, and with
            ``assign=True`` those of another dtype or device.
        unexpected: entries of the checkpoint that the state dict lacks; only with
            ``allow_partial_load=True``.
        dtype_mismatched: tensors that were cast.
        shape_mismatched: tensors of another shape, which were left alone.
        incomplete: tensors of which the checkpoint holds only a part, which were left alone.
        excluded: entries that ``include`` and ``exclude`` leave out.
        bytes_wanted: bytes of the tensors and values that this rank filled.
        bytes_read: bytes of files that this rank read: more if it read through gaps, less if ranks
            read together (``replicas``).
        bytes_direct: of these, bytes read past the page cache.
        bytes_mapped: of these, bytes copied from mappings, which ``io="auto"`` takes for files in
            the page cache.
        bytes_verified: bytes of tensors that were hashed and compared with digests.
        requests: contiguous reads of files; for a store, requests.
        bytes_from_tiers: of ``bytes_wanted``, bytes that came from each folder of ``tiers``. The
            others came from the place of the checkpoint, or from other ranks.
        seconds: from the opening of the index to the last byte.
        phases: seconds by phase: ``metadata``, ``plan`` (with the ranks' agreement), ``read``.
    """

    entries: int = 0
    entries_loaded: int = 0
    replaced: int = 0
    missing: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    dtype_mismatched: list[Mismatch] = field(default_factory=list)
    shape_mismatched: list[Mismatch] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    bytes_wanted: int = 0
    bytes_read: int = 0
    bytes_direct: int = 0
    bytes_mapped: int = 0
    bytes_verified: int = 0
    requests: int = 0
    bytes_from_tiers: dict[str, int] = field(default_factory=dict)

    def _finish(self, path: str, counts: Counts, clock: Phases, index: _core.Index) -> None:
        """Take the counts and times of a load that is over, and log them."""
        self.path = path
        self.bytes_wanted, self.bytes_read = counts.wanted, counts.read
        self.bytes_direct, self.bytes_mapped = counts.direct, counts.mapped
        self.bytes_verified, self.requests = counts.verified, counts.requests
        self.bytes_from_tiers = {str(tier): n for tier, n in index.take_delivered() if n}
        clock.report(self)

    def __str__(self) -> str:
        found = {
            "replaced": self.replaced,
            "cast": len(self.dtype_mismatched),
            "missing": len(self.missing),
            "of another shape": len(self.shape_mismatched),
        }
        odd = "".join(f", {number:,} {what}" for what, number in found.items() if number)
        part = ""
        if self.entries_loaded != self.entries:
            part = f"{self.entries_loaded:,} of {self.entries:,} entries, "
        return (
            f"loaded {part}{size(self.bytes_wanted)} from {self.path} in {self.seconds:.3f} s"
            f"{self._speed(self.bytes_wanted)}{odd} ({self._phases()})"
        )


@dataclass(repr=False)
class SaveReport(_Timed):
    """Report of a save on this rank.

    Attributes:
        path: the folder.
        bytes_written: bytes of tensors and values that this rank wrote.
        bytes_reused: bytes of tensors and values of this rank that were taken from the parent.
        requests: requests to a store: parts sent, and files of the parent that it copied, without
            retries. 0 on a disk.
        entries: entries of the checkpoint, on the rank that committed it; 0 on other ranks.
        seconds: from the plan to the commit, or on other ranks to the last byte.
        phases: seconds by phase: ``plan`` (with the ranks' agreement), ``compare`` (with a
            parent), ``write``, and on the rank that commits ``commit`` (with the wait for the
            other ranks).
    """

    bytes_written: int = 0
    bytes_reused: int = 0
    requests: int = 0
    entries: int = 0

    def __str__(self) -> str:
        reused = f", reused {size(self.bytes_reused)}" if self.bytes_reused else ""
        return (
            f"saved {size(self.bytes_written)} to {self.path} in {self.seconds:.3f} s"
            f"{self._speed(self.bytes_written)}{reused} ({self._phases()})"
        )


@dataclass
class SavedMetadata(Metadata):
    """Metadata of a save, as ``dcp.save`` returns it, with a report. Its text is the report's.

    Attributes:
        report: the :class:`SaveReport` of this rank.
    """

    report: SaveReport | None = None

    def __str__(self) -> str:
        return repr(self) if self.report is None else str(self.report)


class Phases:
    """Clock that measures one phase after another."""

    def __init__(self) -> None:
        self._begin = self._last = time.perf_counter()
        self._phases: dict[str, float] = {}

    def end(self, name: str) -> None:
        """End the phase that began with the clock, or with the end of the phase before."""
        now = time.perf_counter()
        self._phases[name] = self._phases.get(name, 0.0) + now - self._last
        self._last = now
        _log.debug("%s took %.6f s", name, self._phases[name])

    def report(self, report: LoadReport | SaveReport) -> None:
        """Write the times into a report. Log the report as a line, on rank 0 at level INFO."""
        report.seconds, report.phases = self._last - self._begin, dict(self._phases)
        is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        _log.log(logging.INFO if is_first else logging.DEBUG, "%s", report)
