"""Reuse of entries that the parent of a checkpoint holds already."""

from __future__ import annotations

from collections.abc import Iterable

from dcp_rs import _core
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs._url import StrPath, absolute, location, options_for
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.names import globs
from dcp_rs.engine.destination import Destination
from dcp_rs.engine.writes import Writes, write_entries
from dcp_rs.errors import DcpRsError
from dcp_rs.options import Globs, WriteOptions
from dcp_rs.tensors.dtypes import NAMES
from dcp_rs.tensors.regions import BLOCK_BYTES


class Frozen:
    """Tensors that do not change from save to save.

    Args:
        reuse: globs over their names; None: no tensors.
        trusted: the tensors did not change since the parent was saved, either. If they were frozen
            in the parent too, only the first MiB of each is compared.

    Raises:
        TypeError: ``reuse`` is something else.
    """

    def __init__(self, reuse: Globs, *, trusted: bool = True) -> None:
        self.trusted = trusted
        self._globs = globs(reuse)

    def __bool__(self) -> bool:
        return self._globs is not None

    def matches(self, name: str) -> bool:
        """Return true if a glob matches the name."""
        return self._globs is not None and self._globs.match(name) is not None


class Parent:
    """Earlier checkpoint whose data files a save may reuse.

    Args:
        path: the folder or URL of the checkpoint, if there is one.
        reuse: tensors that do not change, as for :class:`Frozen`.
        verify: read what would be reused, and reuse only what matches its digests.
    """

    def __init__(
        self,
        path: StrPath | None,
        reuse: Globs | Frozen,
        *,
        verify: bool,
    ) -> None:
        # Until the save begins, the current folder may change.
        self.path = None if path is None else absolute(location(path))
        self._frozen = reuse if isinstance(reuse, Frozen) else Frozen(reuse)
        self._verify = verify

    def __bool__(self) -> bool:
        return self.path is not None or bool(self._frozen)

    def find_reuse(self, writes: Writes, to: Destination, options: WriteOptions) -> _core.Reuse:
        """Compare a rank's writes with the parent. Warn if the parent cannot be reused.

        Args:
            writes: what the rank writes.
            to: the destination of the save.
            options: how to read and write.
        """
        index = self._open(to)
        kept = writes.plan.kept_names(writes.keep)
        lengths = [entry.nbytes for entry in writes.entries]
        frozen = list(map(self._frozen.matches, kept))
        reuse = writes.plan.reuse(writes.keep, lengths, index, frozen, self._frozen.trusted)
        self.warn(to, reuse.problems())
        reuse.write_plain(writes.tensors, PLAIN_TYPES, NAMES)
        first, probed = len(kept) - len(lengths), reuse.probed()
        entries = [
            entry.head(BLOCK_BYTES) if probed[number] else entry
            for number, entry in enumerate(writes.entries, first)
        ]
        write_entries(reuse, entries, options, first, only=reuse.wanted())
        if self._verify:
            try:
                self.warn(to, reuse.verify(options.threads or 0))
            except (DcpRsError, OSError) as error:
                self.warn(to, [str(error)])
                return writes.plan.reuse(writes.keep, lengths, None, frozen, self._frozen.trusted)
        return reuse

    def _open(self, to: Destination) -> _core.Index | None:
        if self.path is None:
            return None
        if (reason := to.why_no_shared_files(self.path)) is not None:
            self.warn(to, [reason])
            return None
        try:
            index = _core.Index.open(self.path, to.rank, False, options_for(self.path, to.options))
        except (DcpRsError, OSError) as error:
            self.warn(to, [str(error)])
            return None
        if index.source != "dcp-rs":
            self.warn(to, [f"it was not written by this package ({index.source})"])
            return None
        return index

    def warn(self, to: Destination, problems: Iterable[str]) -> None:
        """Warn that data is written, though the parent holds it."""
        for problem in problems:
            warn_caller(f"what could be reused of {self.path} is written to {to.folder}: {problem}")
