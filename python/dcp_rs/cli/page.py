"""A checkpoint as one page of HTML that needs nothing else: no network, no library."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from dcp_rs._core import __version__
from dcp_rs.checkpoint.names import natural
from dcp_rs.checkpoint.stats import TensorStats
from dcp_rs.cli.contents import Contents, value_text
from dcp_rs.cli.output import plain

__all__ = ["render", "write"]

#: More pieces of one tensor than this are counted, not drawn.
_MAX_PIECES = 512
#: More values than this are not shown.
_MAX_VALUES = 5_000


def write(contents: Contents, out: Path, statistics: Mapping[str, TensorStats] | None = None) -> int:
    """Writes the page, in one step; returns its length in bytes."""
    data = render(contents, statistics).encode()
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, out)  # noqa: PTH105  # the same
    finally:
        temporary.unlink(missing_ok=True)
    return len(data)


def render(contents: Contents, statistics: Mapping[str, TensorStats] | None = None) -> str:
    """The page; ``statistics``: of tensors by name, to be shown with them."""
    template = resources.files("dcp_rs.cli").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(plain(_data(contents, statistics or {})), ensure_ascii=False, separators=(",", ":"))
    # Names are anyone's: nothing in them may end the script, or begin another.
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return template.replace("/*DATA*/null", data, 1)


def _data(contents: Contents, statistics: Mapping[str, TensorStats]) -> dict[str, Any]:
    """Columns, as a row for each of 100,000 tensors would repeat its keys."""
    entries = sorted(contents.entries, key=lambda entry: natural(entry.name))
    dtypes = sorted({entry.dtype or "value" for entry in entries})
    number = {dtype: i for i, dtype in enumerate(dtypes)}
    # [file, bytes] for an entry in one piece; else [file, bytes, offsets, sizes] for each of its pieces.
    pieces: list[Any] = []
    for entry in entries:
        stored = contents.pieces(entry)
        if len(stored) == 1:
            pieces.append(stored[0].file)
        else:
            pieces.append([[p.file, p.nbytes, p.offsets, p.sizes] for p in stored[:_MAX_PIECES]])
    values = [(i, entry) for i, entry in enumerate(entries) if entry.dtype is None][:_MAX_VALUES]
    return {
        "path": os.fspath(contents.path),
        "format": contents.format,
        "tool": f"dcp-rs {__version__}",
        "facts": contents.facts,
        "files": [[name, nbytes] for name, nbytes in contents.files],
        "dtypes": dtypes,
        "names": [entry.name for entry in entries],
        "dtype": [number[entry.dtype or "value"] for entry in entries],
        "shape": [entry.shape for entry in entries],
        "bytes": [entry.nbytes for entry in entries],
        "chunks": [entry.chunks for entry in entries],
        "pieces": pieces,
        "stats": {i: _row(statistics[entry.name]) for i, entry in enumerate(entries) if entry.name in statistics},
        "values": {i: value_text(contents, entry, 400) for i, entry in values},
    }


def _row(one: TensorStats) -> list[Any]:
    return [one.min, one.max, one.mean, one.std, one.zeros, one.nan, one.inf]
