"""Reuse of entries that the parent of a checkpoint holds already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs._url import StrPath, absolute, location, options_for
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.names import globs
from dcp_rs.engine.destination import Destination
from dcp_rs.engine.local_plan import Writes
from dcp_rs.errors import DcpRsError
from dcp_rs.options import WriteOptions
from dcp_rs.tensors.dtypes import NAMES
from dcp_rs.tensors.memory import identity
from dcp_rs.tensors.regions import BLOCK_BYTES
from dcp_rs.transfer.save import write_entries


class Frozen:
    """Tensors that do not change from save to save.

    Args:
        reuse: globs over names; or a module, for its parameters without gradient. The state dict
            has to hold these parameters themselves, and not copies. None: no tensors.
        trusted: the tensors did not change since the parent was saved, either. If they were frozen
            in the parent too, only the first MiB of each is compared.
        names: names of a module's parameters, if they are known.

    Raises:
        TypeError: ``reuse`` is something else.
    """

    def __init__(
        self,
        reuse: str | Iterable[str] | torch.nn.Module | None,
        *,
        trusted: bool = True,
        names: frozenset[str] | None = None,
    ) -> None:
        self.trusted = trusted
        self._names = names
        self._module = reuse if isinstance(reuse, torch.nn.Module) else None
        patterns = None if reuse is None or isinstance(reuse, torch.nn.Module) else reuse
        if patterns is not None and not isinstance(patterns, str):
            patterns = tuple(patterns) if isinstance(patterns, Iterable) else (patterns,)
            if not all(isinstance(pattern, str) for pattern in patterns):
                msg = f"reuse={reuse!r}: globs over names, or a module"
                raise TypeError(msg)
        self._globs = globs(patterns)

    def __bool__(self) -> bool:
        return self._module is not None or self._names is not None or self._globs is not None

    def resolve(self, values: Mapping[str, Any]) -> Frozen:
        """Find the names of the module's parameters, for a save of a copy of ``values``."""
        if self._module is None:
            return self
        names = self.find_names(values)
        return Frozen(None, trusted=self.trusted, names=names)

    def find_names(self, values: Mapping[str, Any]) -> frozenset[str]:
        """Return the names of the module's frozen parameters in a flattened state dict."""
        if self._module is None:
            return self._names or frozenset()
        memory: dict[bool, set[Any]] = {True: set(), False: set()}
        with torch.no_grad():
            for parameter in self._module.parameters():
                if parameter.numel():
                    memory[parameter.requires_grad].add(identity(parameter.detach()))
            frozen = memory[False] - memory[True]
            tensors = (
                (name, value) for name, value in values.items() if isinstance(value, torch.Tensor)
            )
            return frozenset(name for name, value in tensors if identity(value.detach()) in frozen)

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
        reuse: str | Iterable[str] | torch.nn.Module | Frozen | None,
        *,
        verify: bool,
    ) -> None:
        self.path = None if path is None else location(path)
        self._frozen = reuse if isinstance(reuse, Frozen) else Frozen(reuse)
        self._verify = verify

    def __bool__(self) -> bool:
        return self.path is not None or bool(self._frozen)

    def resolve(self, values: Mapping[str, Any]) -> Parent:
        """Return the parent for a save of a copy of the entries of a state dict."""
        parent = self.at_absolute_path()
        return Parent(parent.path, self._frozen.resolve(values), verify=self._verify)

    def at_absolute_path(self) -> Parent:
        """Return the parent for a save after the current folder may have changed."""
        path = None if self.path is None else absolute(self.path)
        return Parent(path, self._frozen, verify=self._verify)

    def find_reuse(
        self,
        writes: Writes,
        to: Destination,
        values: Mapping[str, Any],
        *,
        rank: int | None,
        options: WriteOptions,
    ) -> _core.Reuse:
        """Compare a rank's writes with the parent. Warn if the parent cannot be reused.

        Args:
            writes: what the rank writes.
            to: the destination of the save.
            values: the flattened state dict.
            rank: the rank whose index of the parent to open, in a rank-local save.
            options: how to read and write.
        """
        names = self._frozen.find_names(values)
        index = self._open(to, rank)
        kept = writes.plan.kept_names(writes.keep)
        lengths = [entry.nbytes for entry in writes.entries]
        frozen = [name in names or self._frozen.matches(name) for name in kept]
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

    def _open(self, to: Destination, rank: int | None) -> _core.Index | None:
        if self.path is None:
            return None
        if (reason := to.why_no_shared_files(self.path)) is not None:
            self.warn(to, [reason])
            return None
        try:
            index = _core.Index.open(self.path, rank, False, options_for(self.path, to.options))
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
