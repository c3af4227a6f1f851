"""Which entries of a state dict a load fills, and what the checkpoint calls them: ``include``, ``exclude``, ``rename``."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dcp_rs.checkpoint.names import explain_missing, selector
from dcp_rs.checkpoint.open import Checkpoint
from dcp_rs.checkpoint.renaming import Rename, Renamed
from dcp_rs.errors import EntryNotFoundError

__all__ = ["LoadNames"]


class LoadNames:
    """The names of a load.

    Args:
        rename: from stored names to those of the state dict.
        include, exclude: globs over names of the state dict.
    """

    def __init__(
        self, rename: Rename, include: str | Iterable[str] | None, exclude: str | Iterable[str] | None
    ) -> None:
        self._rename = rename
        self._passes = selector(include, exclude)
        self._renamed: Renamed | None = None

    def forget(self) -> None:
        """Another load begins: of another checkpoint, or into another state dict."""
        self._renamed = None

    @property
    def is_selective(self) -> bool:
        """Whether there is an ``include`` or an ``exclude``."""
        return self._passes is not None

    def wants(self, fqn: str) -> bool:
        """Whether an entry of the state dict is to be loaded."""
        return self._passes is None or self._passes(fqn)

    def choose(self, names: Iterable[str], stored: Collection[str] | None) -> tuple[dict[str, str], list[str]]:
        """Of the names of a state dict those that are to be loaded, with what the checkpoint calls them; and the others.

        Those that no stored name is renamed to are in neither: see :meth:`unnamed`.
        """
        wanted, excluded = list(names), []
        if self._passes is not None:
            excluded = [fqn for fqn in wanted if not self._passes(fqn)]
            wanted = list(filter(self._passes, wanted))
        if self._rename is None or stored is None:
            return dict(zip(wanted, wanted, strict=True)), excluded
        if self._renamed is None:
            self._renamed = Renamed(self._rename, stored)
        return self.named(wanted), excluded

    def stored_name(self, fqn: str) -> str | None:
        """What the checkpoint calls an entry of the state dict; None where nothing is renamed to that."""
        return fqn if self._renamed is None else self._renamed.stored_name(fqn)

    def stored_in(self, checkpoint: Checkpoint, fqn: str) -> str:
        """The same, before or after a load.

        Raises:
            EntryNotFoundError: nothing is renamed to that.
        """
        renamed = self._renamed
        if renamed is None and self._rename is not None:
            renamed = Renamed(self._rename, checkpoint)
        name = fqn if renamed is None else renamed.stored_name(fqn)
        if name is None:
            msg = f"there is no entry {fqn!r} in {checkpoint.path}{'' if renamed is None else renamed.explain(fqn)}"
            raise EntryNotFoundError(msg, path=checkpoint.path, tensor=fqn)
        return name

    def named(self, names: Iterable[str]) -> dict[str, str]:
        """What the checkpoint calls names of the state dict, without those that nothing is renamed to."""
        return {fqn: name for fqn in names if (name := self.stored_name(fqn)) is not None}

    def unnamed(self, names: Iterable[str]) -> list[str]:
        """Those of the names that are to be loaded, and that nothing is renamed to."""
        if self._renamed is None:
            return []
        return [fqn for fqn in names if self.wants(fqn) and self.stored_name(fqn) is None]

    def explain(self, missing: list[str], wanted: Collection[str], stored: Collection[str]) -> str:
        """Why names may be missing, for the end of a message."""
        return explain_missing(missing, wanted, stored) if self._renamed is None else self._renamed.explain(missing[0])
