"""Which of several saves an index is to be rebuilt of, in a folder that lost its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dcp_rs.options import uuid_of

__all__ = ["WantedSave"]


@dataclass(frozen=True)
class WantedSave:
    """What was asked for; None is whatever there is.

    Attributes:
        generation: the number in the names of its data files.
        save_id: its id, 16 bytes.
    """

    generation: int | None
    save_id: bytes | None

    @classmethod
    def of(cls, generation: int | None, save_id: str | None) -> WantedSave:
        """From what a caller gave.

        Raises:
            ValueError: a number below 0, or an id that is no UUID.
        """
        if generation is not None and (isinstance(generation, bool) or not 0 <= generation < 1 << 64):
            msg = f"generation={generation!r}: a number from 0 on, as in the names of data files"
            raise ValueError(msg)
        return cls(generation, None if save_id is None else uuid_of(save_id).bytes)

    def check_lost(self, path: Path, *, is_lost: bool) -> None:
        """Raises a ``ValueError`` where there is nothing to choose among: an index of others' data is of all of it."""
        if not is_lost and self != WantedSave(None, None):
            msg = f"generation= and save_id= choose among saves of dcp-rs whose index is to be rebuilt, and {path} holds none"
            raise ValueError(msg)
