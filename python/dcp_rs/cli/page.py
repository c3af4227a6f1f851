"""A checkpoint as one page of HTML that needs nothing else: no network, no library."""

from __future__ import annotations

import json
import os
import secrets
from importlib import resources
from pathlib import Path
from typing import Any

from dcp_rs._core import __version__
from dcp_rs.cli.contents import Contents
from dcp_rs.cli.output import plain

__all__ = ["render", "write"]

#: More pieces of one tensor than this are counted, not drawn.
_MAX_PIECES = 512


def write(contents: Contents, out: Path) -> int:
    """Writes the page, in one step; returns its length in bytes."""
    data = render(contents).encode()
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, out)  # noqa: PTH105  # the same
    finally:
        temporary.unlink(missing_ok=True)
    return len(data)


def render(contents: Contents) -> str:
    """The page."""
    template = resources.files("dcp_rs.cli").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(plain(_data(contents)), ensure_ascii=False, separators=(",", ":"))
    # Names are anyone's: nothing in them may end the script, or begin another.
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return template.replace("/*DATA*/null", data, 1)


def _data(contents: Contents) -> dict[str, Any]:
    """Columns, as a row for each of 100,000 tensors would repeat its keys."""
    dtypes = sorted({entry.dtype or "value" for entry in contents.entries})
    number = {dtype: i for i, dtype in enumerate(dtypes)}
    # [file, bytes] for an entry in one piece; else [file, bytes, offsets, sizes] for each of its pieces.
    pieces: list[Any] = []
    for entry in contents.entries:
        stored = contents.pieces(entry)
        if len(stored) == 1:
            pieces.append(stored[0].file)
        else:
            pieces.append([[p.file, p.nbytes, p.offsets, p.sizes] for p in stored[:_MAX_PIECES]])
    return {
        "path": os.fspath(contents.path),
        "format": contents.format,
        "tool": f"dcp-rs {__version__}",
        "facts": contents.facts,
        "files": [[name, nbytes] for name, nbytes in contents.files],
        "dtypes": dtypes,
        "names": [entry.name for entry in contents.entries],
        "dtype": [number[entry.dtype or "value"] for entry in contents.entries],
        "shape": [entry.shape for entry in contents.entries],
        "bytes": [entry.nbytes for entry in contents.entries],
        "chunks": [entry.chunks for entry in contents.entries],
        "pieces": pieces,
    }
