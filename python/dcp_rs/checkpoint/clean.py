"""``dcp_rs.clean``: the removal of files that killed saves and conversions left."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dcp_rs import _core
from dcp_rs._arguments import suggest_option
from dcp_rs._reports import Report
from dcp_rs._url import (
    StorageOptions,
    StoreArguments,
    StrPath,
    Url,
    absolute,
    location,
    options_for,
    store_at,
)
from dcp_rs._warnings import warn_caller
from dcp_rs.errors import CheckpointNotFoundError, DcpRsError
from dcp_rs.options import check_choice

LeftoverKind = Literal["data", "temporary index", "rank index", "conversion"]
Verdict = Literal["left", "in use", "young", "whole"]

_WHY_KEPT = {
    "in use": "a process is at work on it",
    "young": (
        "it was written to not long ago, and here nothing else says whether a process is at work "
        "on it"
    ),
    "whole": "it is complete and only lacks its index, which dcp_rs.index(path) makes",
}
_WHY_ASIDE = "the checkpoint that was being replaced is in it, and there is no other: rename that"

#: Seconds beyond the age of any file. The engine cannot count to 1e20.
_LONGEST = 1e18


@dataclass(frozen=True)
class Leftover:
    """A file that no checkpoint needs, or the folder of an unfinished conversion.

    Attributes:
        path: its path.
        nbytes: its length; for a folder, that of all files in it.
        kind: ``"data"`` for a data file that no index names, ``"temporary index"``, ``"rank
            index"`` for that of a replaced rank-local save, or ``"conversion"``.
        verdict: ``"left"`` if nothing needs it, ``"in use"`` if a process writes it, ``"young"`` if
            it changed recently and no lock tells whether a process writes it, or ``"whole"`` if it
            is a checkpoint that lacks only its index or its name.
    """

    path: str
    nbytes: int
    kind: LeftoverKind
    verdict: Verdict

    @property
    def why_kept(self) -> str | None:
        """The reason why :func:`clean` keeps it, or None if it removes it."""
        if self.verdict == "whole" and self.kind == "conversion":
            return _WHY_ASIDE
        return _WHY_KEPT.get(self.verdict)

    def __str__(self) -> str:
        why = "" if self.why_kept is None else f" ({self.why_kept})"
        return f"{self.path}: {self.nbytes:,} bytes{why}"


@dataclass(frozen=True, repr=False)
class CleanReport(Report):
    """Report of :func:`clean`.

    Attributes:
        found: the files that can be removed. Without ``yes`` they still exist.
        removed: the files that were removed.
        kept: the files that must stay; see :attr:`Leftover.why_kept`.
        failed: the files that could not be removed, with the errors.
    """

    found: list[Leftover] = field(default_factory=list)
    removed: list[Leftover] = field(default_factory=list)
    kept: list[Leftover] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The bytes of all files that can be removed, or were."""
        return sum(leftover.nbytes for leftover in self.found)


def leftovers(
    path: StrPath,
    *,
    older_than: float | None = None,
    storage_options: StoreArguments = None,
) -> list[Leftover]:
    """List the files of killed saves in a folder, and of killed conversions beside it.

    Args:
        path: the folder of a checkpoint, or its URL; or the output file of a conversion.
        older_than, storage_options: see :func:`clean`.

    Raises:
        CheckpointNotFoundError: there is nothing at ``path``.
        CorruptIndexError: an index cannot be read, so its files are not known.
    """
    where, store = _where(path, storage_options)
    find = _core.leftovers if store is None else store.leftovers
    return [_leftover(found, store) for found in find(where, _seconds(older_than))]


@suggest_option
def clean(
    path: StrPath,
    *,
    yes: bool = False,
    older_than: float | None = None,
    storage_options: StoreArguments = None,
) -> CleanReport:
    """List the files that killed saves and conversions left at ``path``. With ``yes``, remove them.

    These are files in the folder, and folders of conversions beside it. Files that an index names,
    files of a save or conversion in progress, and a whole save that lost its index always stay. No
    save to the folder commits while files are removed. A warning names files that could not be
    removed.

    On a store only the age of an object protects a save in progress: by default a day. Parts of
    unfinished uploads are not listed. The store's own rule (``AbortIncompleteMultipartUpload``)
    removes them.

    Args:
        path: the folder of a checkpoint, or its URL; or the output of a conversion.
        yes: remove the files.
        older_than: keep files that changed within this many seconds. Default: 0, but a day on
            stores, and on file systems without locks between machines.
        storage_options: for a URL, see :class:`dcp_rs.RsReader`.

    Returns:
        A :class:`CleanReport`.

    Raises:
        CheckpointNotFoundError: there is nothing at ``path``.
        CorruptIndexError: an index cannot be read, so its files are not known. Nothing was
            removed.
        SaveInProgressError: another process keeps the folder locked.
        OSError: the folder cannot be read or written to.
        StorageError: see :mod:`dcp_rs.errors`.

    Example:
        ```python
        report = dcp_rs.clean("ckpt")  # changes nothing
        print(report.nbytes, [leftover.path for leftover in report.found])
        dcp_rs.clean("ckpt", yes=True)
        ```
    """
    check_choice("yes", yes, True, False)
    if not yes:
        all_found = leftovers(path, older_than=older_than, storage_options=storage_options)
        return CleanReport(
            found=[leftover for leftover in all_found if leftover.why_kept is None],
            kept=[leftover for leftover in all_found if leftover.why_kept is not None],
        )
    where, store = _where(path, storage_options)
    remove = _core.clean if store is None else store.clean
    removed, kept, failed = remove(where, _seconds(older_than))
    for reason in failed:
        warn_caller(f"still there: {reason}")
    gone = [_leftover(found, store) for found in removed]
    return CleanReport(
        found=gone,
        removed=gone,
        kept=[_leftover(found, store) for found in kept],
        failed=list(failed),
    )


def seen_beside(path: StrPath) -> list[Leftover]:
    """Return :func:`leftovers` for other reports: none on a store, and none after an error."""
    if isinstance(location(path), Url):
        return []
    try:
        return leftovers(path)
    except (CheckpointNotFoundError, DcpRsError, OSError):
        return []


def _where(path: StrPath, storage_options: StoreArguments) -> tuple[Path, _core.Store | None]:
    where = location(path)
    options = StorageOptions.of(storage_options)
    if isinstance(where, Url):
        return where, store_at(where, options)
    options_for(where, options)  # it raises if there are any
    return absolute(where), None


def _seconds(older_than: float | None) -> float | None:
    is_number = isinstance(older_than, int | float) and 0 <= older_than < float("inf")
    if older_than is not None and not is_number:
        msg = f"older_than={older_than!r}: seconds, not negative"
        raise ValueError(msg)
    return None if older_than is None else float(min(older_than, _LONGEST))


def _leftover(found: _core.Leftover, store: _core.Store | None) -> Leftover:
    path = found.path if store is None else Url(found.path)
    return Leftover(os.fspath(path), found.nbytes, found.kind, found.verdict)
