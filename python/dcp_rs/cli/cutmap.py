"""How a tensor is cut, drawn as a small map. Pure."""

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
        rows: of symbols: the file that holds the element in the middle of the cell; a dot where no
            file does.
        row_starts: the first index of each row, along ``row_dim``.
        row_dim, column_dim: the dimensions drawn; None where there is none.
        hidden: dimensions that are cut as well and could not be drawn: the map is at their index 0.
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
    pieces: Sequence[tuple[int, Sequence[int], Sequence[int]]],
    *,
    width: int = 48,
    height: int = 16,
) -> CutMap:
    """Draws (file, offsets, sizes) of the pieces of a tensor in at most ``height`` rows of ``width`` characters."""
    cut = [d for d in range(len(shape)) if any(sizes[d] != shape[d] for _, _, sizes in pieces)]
    dims = _choose(len(shape), cut)
    row_dim, column_dim = (
        (dims[0], dims[1]) if len(dims) == 2 else (None, dims[0] if dims else None)
    )
    numbers = sorted({file for file, _, _ in pieces})
    # More files than symbols: symbols come again, and the table below the map tells which is which.
    symbols = {file: _SYMBOLS[i % len(_SYMBOLS)] for i, file in enumerate(numbers)}
    row_starts = _starts(1 if row_dim is None else shape[row_dim], height)
    column_starts = _starts(1 if column_dim is None else shape[column_dim], width)
    at = [0] * len(shape)
    rows = []
    for row in row_starts:
        cells = []
        for column in column_starts:
            if row_dim is not None:
                at[row_dim] = row
            if column_dim is not None:
                at[column_dim] = column
            cells.append(next((symbols[f] for f, o, s in pieces if _holds(o, s, at)), _NOTHING))
        rows.append("".join(cells))
    hidden = [d for d in cut if d not in dims]
    return CutMap(
        rows, row_starts, row_dim, column_dim, hidden, {symbols[f]: f for f in reversed(numbers)}
    )


def _choose(ndim: int, cut: list[int]) -> list[int]:
    """The two dimensions to draw: those that are cut, else the last ones."""
    chosen = cut[:2]
    for d in reversed(range(ndim)):
        if len(chosen) == 2:
            break
        if d not in chosen:
            chosen.append(d)
    return sorted(chosen)


def _starts(extent: int, cells: int) -> list[int]:
    count = max(1, min(extent, cells))
    return [extent * i // count for i in range(count)]


def _holds(offsets: Sequence[int], sizes: Sequence[int], at: Sequence[int]) -> bool:
    return all(o <= a < o + s for o, s, a in zip(offsets, sizes, at, strict=True))
