"""``dcp_rs.clean``: what killed saves and conversions left behind."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dcp_rs import _core
from dcp_rs._arguments import suggest_option
from dcp_rs._reports import Report
from dcp_rs._url import StorageOptions, Url, location, options_for
from dcp_rs._warnings import warn_caller
from dcp_rs.errors import CheckpointNotFoundError, DcpRsError

__all__ = ["CleanReport", "Leftover", "clean", "leftovers"]

Kind = Literal["data", "temporary index", "rank index", "conversion"]
Verdict = Literal["left", "in use", "young", "whole"]

_WHY_KEPT = {
    "in use": "a process is at work on it",
    "young": "it was written to not long ago, and here nothing else says whether a process is at work on it",
    "whole": "it is complete and only lacks its index, which dcp_rs.index(path) makes",
}
_WHY_ASIDE = "the checkpoint that was being replaced is in it, and there is no other: rename that"


@dataclass(frozen=True)
class Leftover:
    """A file that no checkpoint needs, or the folder of a conversion that did not finish.

    Attributes:
        path: where it is.
        nbytes: its length; for a folder, the length of all files in it.
        kind: ``"data"`` (a data file that no index names), ``"temporary index"``, ``"rank index"``
            (of a rank-local save that a save of all ranks replaced), or ``"conversion"``.
        verdict: ``"left"``: nothing needs it. ``"in use"``: a process is writing it. ``"young"``:
            it changed a short time ago, and nothing tells whether a process is writing it.
            ``"whole"``: it is a checkpoint that lacks its index, or its name.
    """

    path: str
    nbytes: int
    kind: Kind
    verdict: Verdict

    @property
    def why_kept(self) -> str | None:
        """Why :func:`clean` does not remove it, if it does not."""
        if self.verdict == "whole" and self.kind == "conversion":
            return _WHY_ASIDE
        return _WHY_KEPT.get(self.verdict)

    def __str__(self) -> str:
        why = "" if self.why_kept is None else f" ({self.why_kept})"
        return f"{self.path}: {self.nbytes:,} bytes{why}"


@dataclass(frozen=True, repr=False)
class CleanReport(Report):
    """What :func:`clean` found.

    Attributes:
        found: what can be removed; without ``yes``, it is all still there.
        removed: what is gone.
        kept: what was left alone; see :attr:`Leftover.why_kept`.
        failed: what could not be removed, and why.
    """

    found: list[Leftover] = field(default_factory=list)
    removed: list[Leftover] = field(default_factory=list)
    kept: list[Leftover] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Of all that can be removed, or was."""
        return sum(leftover.nbytes for leftover in self.found)


def leftovers(
    path: str | os.PathLike[str],
    *,
    older_than: float | None = None,
    storage_options: Mapping[str, Any] | Any | None = None,
) -> list[Leftover]:
    """What killed saves left in the folder at ``path``, and killed conversions to ``path`` beside it. Changes nothing.

    Args:
        path: the folder of a checkpoint, or its URL; or the file that was converted to.
        older_than, storage_options: see :func:`clean`.

    Raises:
        CheckpointNotFoundError: there is nothing.
        CorruptIndexError: an index there cannot be read, so that nobody knows which files it needs.
    """
    where, store = _where(path, storage_options)
    find = _core.leftovers if store is None else store.leftovers
    return [_leftover(found, store) for found in find(where, _seconds(older_than))]


@suggest_option
def clean(
    path: str | os.PathLike[str],
    *,
    yes: bool = False,
    older_than: float | None = None,
    storage_options: Mapping[str, Any] | Any | None = None,
) -> CleanReport:
    """List what killed saves and conversions left at ``path``. With ``yes``, remove it.

    That is files in the folder, and folders of conversions beside it.

    It never removes files that an index names, files of a save or conversion that is under way,
    and a whole save that lost its index. While files are removed, no save to the folder commits. A
    warning names what could not be removed.

    On a store only the age of an object protects a save that is under way: by default a day. Parts
    of uploads that did not finish are not listed. The store's own rule removes them
    (``AbortIncompleteMultipartUpload``).

    Args:
        path: the folder of a checkpoint, or its URL; or the output of a conversion.
        yes: remove what was found.
        older_than: keep files that changed in the last so many seconds. Default: 0; a day on
            stores, and on file systems that do not know locks of other machines.
        storage_options: for a URL, see :class:`dcp_rs.RsReader`.

    Returns:
        A :class:`CleanReport`: what was found, removed and kept, and what could not be removed.

    Raises:
        CheckpointNotFoundError: there is nothing at ``path``.
        CorruptIndexError: an index cannot be read, so its files are not known. Nothing was
            removed.
        SaveInProgressError: another process keeps the folder locked.
        OSError: the folder cannot be read, or not be written to.
        StorageError: of a store; see :mod:`dcp_rs.errors`.

    Example:
        ```python
        report = dcp_rs.clean("ckpt")  # changes nothing
        print(report.nbytes, [leftover.path for leftover in report.found])
        dcp_rs.clean("ckpt", yes=True)
        ```
    """
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


def seen_beside(path: str | os.PathLike[str]) -> list[Leftover]:
    """:func:`leftovers`, to be mentioned beside other findings: none where they cannot be told, or only a store could tell them."""
    if isinstance(location(path), Url):
        return []
    try:
        return leftovers(path)
    except (CheckpointNotFoundError, DcpRsError, OSError):
        return []


def _where(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | Any | None
) -> tuple[str, _core.Store | None]:
    where = location(path)
    # What is secret gets no name here: tools show the variables of a traceback.
    reach = options_for(where, StorageOptions.of(storage_options))
    if isinstance(where, Url):
        return os.fspath(where), _core.Store(os.fspath(where), reach or {})
    return os.path.abspath(where), None  # noqa: PTH100  # Path.resolve would follow links


def _seconds(older_than: float | None) -> float | None:
    if older_than is not None and not 0 <= older_than < float("inf"):
        msg = f"older_than={older_than!r}: seconds, not negative"
        raise ValueError(msg)
    return None if older_than is None else float(older_than)


def _leftover(found: _core.Leftover, store: _core.Store | None) -> Leftover:
    path = found.path if store is None else Url(found.path)
    return Leftover(os.fspath(path), found.nbytes, found.kind, found.verdict)
