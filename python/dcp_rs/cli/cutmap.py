"""A map of the files that hold a tensor, drawn with characters. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NOTHING = "·"


def symbols_of(files: Sequence[int]) -> dict[int, str]:
    """Return a symbol for each file. Files share them if there are more than symbols."""
    return {file: _SYMBOLS[i % len(_SYMBOLS)] for i, file in enumerate(sorted(set(files)))}


def draw(
    shape: Sequence[int],
    chunks: Sequence[tuple[int, Sequence[int], Sequence[int]]],
    *,
    width: int = 48,
    height: int = 16,
) -> list[str]:
    """Draw the chunks (file, offsets, sizes) of a tensor.

    Each cell is the symbol of the file that holds its first element, or a dot if none does.

    Returns:
        The lines: a frame around at most ``height`` rows, with the first index of each, and notes
        on the dimensions.
    """
    cut = [d for d in range(len(shape)) if any(sizes[d] != shape[d] for _, _, sizes in chunks)]
    # Two dimensions that are cut; if there are fewer, the last of the others.
    drawn = sorted([*cut, *(d for d in reversed(range(len(shape))) if d not in cut)][:2])
    down, across = drawn[-2:-1], drawn[-1:]  # lists, as a tensor may lack them
    rows, columns = _starts(shape, down, height), _starts(shape, across, width)
    symbols = symbols_of([file for file, _, _ in chunks])

    def symbol(at: dict[int, int]) -> str:
        for file, offsets, sizes in chunks:
            extents = enumerate(zip(offsets, sizes, strict=True))
            if all(begin <= at.get(d, 0) < begin + size for d, (begin, size) in extents):
                return symbols[file]
        return _NOTHING

    starts = [f"{start:,}" for row in rows for start in row.values()] or [""]
    margin = max(6, *map(len, starts))
    label = "".join(f"dim {dim}" for dim in down)
    edge = "─" * len(columns)
    return [
        *(f"{'':{margin}}  dim {dim}: 0 … {shape[dim] - 1:,}" for dim in across),
        f"{label:>{margin}} ┌{edge}┐",
        *(
            f"{start:>{margin}} │{''.join(symbol(row | column) for column in columns)}│"
            for start, row in zip(starts, rows, strict=True)
        ),
        f"{'':>{margin}} └{edge}┘",
        *(f"also cut along dim {dim}; drawn at its index 0" for dim in cut[2:]),
    ]


def _starts(shape: Sequence[int], dims: Sequence[int], cells: int) -> list[dict[int, int]]:
    """Return where cells begin along one dimension, if there is one: {dimension: index}."""
    for dim in dims:
        count = max(1, min(shape[dim], cells))
        return [{dim: shape[dim] * i // count} for i in range(count)]
    return [{}]
