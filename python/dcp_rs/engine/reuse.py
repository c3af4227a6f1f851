"""What a save takes over from another checkpoint, its parent, and need not write again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs._url import location, options_for
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.names import globs
from dcp_rs.engine.destination import Destination
from dcp_rs.engine.local_plan import Writes
from dcp_rs.errors import DcpRsError
from dcp_rs.options import WriteOptions
from dcp_rs.tensors.dtypes import NAMES
from dcp_rs.tensors.flatten import flatten
from dcp_rs.tensors.memory import identity
from dcp_rs.tensors.regions import BLOCK_BYTES
from dcp_rs.transfer.save import write_entries

__all__ = ["Frozen", "Parent"]


class Frozen:
    """What the caller says does not change from save to save.

    Args:
        reuse: globs over names; or a module: its parameters that need no gradient are frozen,
            wherever they stand in the state dict, as long as they stand there themselves and not as
            copies. None: nothing is.
        trusted: it did not change since the parent was saved, either. Of what was frozen there,
            too, only the first MiB is compared then.
        names: of a module's parameters, where they were looked up before.

    Raises:
        TypeError: something else.
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

    def __getstate__(self) -> dict[str, Any]:
        # For a save in another process: what its names are was looked up here.
        return {**self.__dict__, "_module": None}

    def looked_up(self, state_dict: Mapping[str, Any]) -> Frozen:
        """Return the same for a copy of ``state_dict``: the module's parameters are not in that, so their names are looked up here."""
        if self._module is None:
            return self
        return Frozen(None, trusted=self.trusted, names=self.names_in(flatten(state_dict).values))

    def names_in(self, values: Mapping[str, Any]) -> frozenset[str]:
        """Return the names of the module's frozen parameters in a flattened state dict that holds them."""
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

    def has(self, name: str) -> bool:
        """Whether a glob is for the name."""
        return self._globs is not None and self._globs.match(name) is not None


class Parent:
    """The checkpoint that a save may reuse, and what the caller says of it.

    Args:
        path: where it is, if there is one: a folder, or a URL.
        reuse: what does not change: as for :class:`Frozen`, or that.
        verify: read what would be reused, and reuse only what is as its digests say.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        reuse: str | Iterable[str] | torch.nn.Module | Frozen | None,
        *,
        verify: bool,
    ) -> None:
        self.path = None if path is None else location(path)
        self._frozen = reuse if isinstance(reuse, Frozen) else Frozen(reuse)
        self._verify = verify

    def __bool__(self) -> bool:
        return self.path is not None or bool(self._frozen)

    def looked_up(self, state_dict: Mapping[str, Any]) -> Parent:
        """Return the same for a save of a copy of ``state_dict``."""
        return Parent(self.path, self._frozen.looked_up(state_dict), verify=self._verify)

    def find_reuse(
        self,
        writes: Writes,
        to: Destination,
        values: Mapping[str, Any],
        *,
        rank: int | None,
        options: WriteOptions,
    ) -> _core.Reuse:
        """Return what of a rank's writes is held by the parent, or known not to change.

        Warns of what could be reused and cannot.

        Args:
            writes, options: of the save.
            to: where it goes.
            values: the flattened state dict that is saved.
            rank: whose index of the parent, in a rank-local save.
        """
        names = self._frozen.names_in(values)
        index = self._open(to, rank)
        kept = writes.plan.kept_names(writes.keep)
        lengths = [entry.nbytes for entry in writes.entries]
        told = [name in names or self._frozen.has(name) for name in kept]
        reuse = writes.plan.reuse(writes.keep, lengths, index, told, self._frozen.trusted)
        self.warn(to, reuse.problems())
        reuse.write_plain(writes.tensors, PLAIN_TYPES, NAMES)
        first, probed = len(kept) - len(lengths), reuse.probed()
        entries = [
            entry.head(BLOCK_BYTES) if probed[i] else entry
            for i, entry in enumerate(writes.entries, first)
        ]
        write_entries(reuse, entries, options, first, only=reuse.wanted())
        if self._verify:
            try:
                self.warn(to, reuse.verify(options.threads or 0))
            except (DcpRsError, OSError) as error:
                self.warn(to, [str(error)])
                return writes.plan.reuse(writes.keep, lengths, None, told, self._frozen.trusted)
        return reuse

    def _open(self, to: Destination, rank: int | None) -> _core.Index | None:
        if self.path is None:
            return None
        if (reason := to.why_apart_from(self.path)) is not None:
            self.warn(to, [reason])
            return None
        try:
            index = _core.Index.open(
                os.fspath(self.path), rank, False, options_for(self.path, to.options)
            )
        except (DcpRsError, OSError) as error:
            self.warn(to, [str(error)])
            return None
        if index.source != "dcp-rs":
            self.warn(to, [f"it was not written by this package ({index.source})"])
            return None
        return index

    def warn(self, to: Destination, problems: Iterable[str]) -> None:
        """Warns of what is written though it could be reused."""
        for problem in problems:
            warn_caller(f"what could be reused of {self.path} is written to {to.folder}: {problem}")
