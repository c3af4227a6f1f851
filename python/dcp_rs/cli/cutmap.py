"""A map of the files that hold a tensor, drawn with characters. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CutMap", "draw"]

_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NOTHING = "·"


@dataclass(frozen=True)
class CutMap:
    """A map of a tensor.

    Attributes:
        rows: strings of symbols. A symbol is the file that holds the element in the middle of the
            cell, or a dot if no file holds it.
        row_starts: the first index of each row, along ``row_dim``.
        row_dim, column_dim: the dimensions drawn, or None.
        hidden: more dimensions that are cut. The map is at their index 0.
        files: symbol to number of the file.
    """

    rows: list[str]
    row_starts: list[int]
    row_dim: int | None
    column_dim: int | None
    hidden: list[int]
    files: dict[str, int]


def draw(
    shape: Sequence[int],
    chunks: Sequence[tuple[int, Sequence[int], Sequence[int]]],
    *,
    width: int = 48,
    height: int = 16,
) -> CutMap:
    """Draw the chunks (file, offsets, sizes) of a tensor, in at most ``height`` rows."""
    cut = [d for d in range(len(shape)) if any(sizes[d] != shape[d] for _, _, sizes in chunks)]
    # Two dimensions that are cut; if there are fewer, the last of the others.
    drawn = sorted([*cut, *(d for d in reversed(range(len(shape))) if d not in cut)][:2])
    row_dim, column_dim = [None, None, *drawn][-2:]
    files = sorted({file for file, _, _ in chunks})
    # More files than symbols share symbols. The table below the map shows which is which.
    symbols = {file: _SYMBOLS[i % len(_SYMBOLS)] for i, file in enumerate(files)}
    row_starts = _starts(1 if row_dim is None else shape[row_dim], height)
    column_starts = _starts(1 if column_dim is None else shape[column_dim], width)

    def symbol(row: int, column: int) -> str:
        at = [0] * len(shape)
        if row_dim is not None:
            at[row_dim] = row
        if column_dim is not None:
            at[column_dim] = column
        for file, offsets, sizes in chunks:
            if all(o <= a < o + s for o, s, a in zip(offsets, sizes, at, strict=True)):
                return symbols[file]
        return _NOTHING

    return CutMap(
        rows=["".join(symbol(row, column) for column in column_starts) for row in row_starts],
        row_starts=row_starts,
        row_dim=row_dim,
        column_dim=column_dim,
        hidden=cut[2:],
        files={symbols[file]: file for file in reversed(files)},
    )


def _starts(extent: int, cells: int) -> list[int]:
    count = max(1, min(extent, cells))
    return [extent * i // count for i in range(count)]
