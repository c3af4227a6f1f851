"""A checkpoint as one page of HTML without a network or a library."""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

from dcp_rs import _core
from dcp_rs.cli.contents import SORTS, Contents
from dcp_rs.cli.output import line, plain, size

#: Chunks of one tensor that are drawn. The page says how many there are.
_MAX_PIECES = 512
#: Values that are shown.
_MAX_VALUES = 5_000


def write(page: str, out: Path, *, as_json: bool) -> int:
    """Write a page to a file, and say so unless JSON is printed. Return its length in bytes.

    The file gets all of the page, or stays as it was.
    """
    data = page.encode()
    if out.exists() and not out.is_file():  # a pipe or a device
        out.write_bytes(data)
    else:
        target = out.resolve()  # replace the target of a link
        _core.publish(target.parent, target.name, data, False)
    if not as_json:
        wrote = f"wrote {out} ({size(len(data))})"
        line(f"{wrote}: open it in a browser, it needs no other files")
    return len(data)


def render(contents: Contents) -> str:
    """Return the page of a checkpoint."""
    template = resources.files("dcp_rs.cli").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(plain(_data(contents)), separators=(",", ":"))
    # A name may contain any text: it must not end the script, or begin another.
    return template.replace("/*DATA*/null", data.replace("<", "\\u003c"), 1)


def _data(contents: Contents) -> dict[str, Any]:
    """Return columns, as a row for each of 100,000 tensors would repeat its keys."""
    entries = sorted(contents.entries, key=SORTS["name"])
    dtypes = sorted({entry.dtype or "value" for entry in entries})
    number = {dtype: i for i, dtype in enumerate(dtypes)}
    # The file of an entry of one chunk; else [file, bytes, offsets, sizes] of each chunk.
    pieces: list[Any] = []
    for entry in entries:
        stored = contents.stored_chunks(entry)
        if len(stored) == 1:
            pieces.append(stored[0].file)
        else:
            pieces.append([[c.file, c.length, c.offsets, c.sizes] for c in stored[:_MAX_PIECES]])
    values = [(i, e) for i, e in enumerate(entries) if e.dtype is None]
    return {
        "path": os.fspath(contents.path),
        "format": contents.format,
        "tool": f"dcp-rs {_core.__version__}",
        "facts": contents.facts,
        "files": contents.files,
        "nodes": contents.nodes,
        "dtypes": dtypes,
        "names": [entry.name for entry in entries],
        "dtype": [number[entry.dtype or "value"] for entry in entries],
        "shape": [entry.shape for entry in entries],
        "bytes": [entry.nbytes for entry in entries],
        "chunks": [entry.chunks for entry in entries],
        "pieces": pieces,
        "values": {str(i): contents.value_text(entry, 400) for i, entry in values[:_MAX_VALUES]},
    }
