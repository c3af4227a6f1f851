"""A checkpoint, or two side by side, as one page of HTML without a network or a library."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp_rs._core import __version__
from dcp_rs.checkpoint.names import natural
from dcp_rs.checkpoint.stats import TensorStats
from dcp_rs.cli.contents import Contents, Entry
from dcp_rs.cli.output import line, plain, printable, size
from dcp_rs.errors import PlanError

if TYPE_CHECKING:
    from dcp_rs.checkpoint.compare import Difference  # it needs torch

__all__ = ["put", "render", "render_both", "write"]

#: Statistics of tensors, by name.
Statistics = Mapping[str, TensorStats]

#: Chunks of one tensor that are drawn. The page says how many there are.
_MAX_PIECES = 512
#: Values that are shown.
_MAX_VALUES = 5_000


def put(text: str, out: Path, *, as_json: bool) -> int:
    """Write a page to a file, or to standard output for ``-``. Return its length in bytes."""
    if str(out) == "-":
        if as_json:
            raise PlanError("--html - and --json both print: choose one of them")
        sys.stdout.write(text)
        return len(text)
    nbytes = write(text, out)
    if not as_json:
        wrote = f"wrote {printable(str(out))} ({size(nbytes)})"
        line(f"{wrote}: open it in a browser, it needs no other files")
    return nbytes


def write(page: str, out: Path) -> int:
    """Write a page in one step, or into a pipe or a device. Return its length in bytes."""
    data = page.encode()
    if out.exists() and not out.is_file():
        out.write_bytes(data)
        return len(data)
    out = out.resolve()  # replace the target of a link: /dev has links
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, out)  # noqa: PTH105  # atomic
    finally:
        temporary.unlink(missing_ok=True)
    return len(data)


def render(contents: Contents, statistics: Statistics | None = None) -> str:
    """Return the page of a checkpoint, with statistics of its tensors if they are given."""
    return _fill(_data(contents, contents.entries, statistics or {}))


def render_both(
    a: Contents,
    b: Contents,
    differences: Sequence[Difference],
    statistics_a: Statistics | None = None,
    statistics_b: Statistics | None = None,
) -> str:
    """Return the page of two checkpoints: the entries of ``b`` and those of ``a`` alone."""
    in_a, in_b = ({entry.name: entry for entry in side.entries} for side in (a, b))
    entries = [*b.entries, *(entry for name, entry in in_a.items() if name not in in_b)]
    known = {**in_a, **in_b}
    # A container that differs, such as a dict, is no entry.
    entries += [
        Entry(name, -1, None, (), 0, 0)
        for name in {d.name: None for d in differences if d.name not in known}
    ]
    data = _data(b, entries, statistics_b or {}, own=in_b)
    number = {name: i for i, name in enumerate(data["names"])}
    kinds = ["same", *dict.fromkeys(difference.kind for difference in differences)]
    kind = [0] * len(entries)
    more: dict[int, list[Any]] = {}
    for one in differences:
        i = number[one.name]
        kind[i] = kind[i] or kinds.index(one.kind)
        more.setdefault(i, []).append([one.kind, one.a, one.b, one.elements, one.max_abs])
    data["diff"] = {
        "path": os.fspath(a.path),
        "format": a.format,
        "facts": a.facts,
        "files": len(a.files),
        "tensors": a.tensors,
        "entries": len(a.entries),
        "bytes": [in_a[name].nbytes if name in in_a else 0 for name in data["names"]],
        "kinds": kinds,
        "kind": kind,
        "more": more,
        "stats": {
            number[name]: _row(one) for name, one in (statistics_a or {}).items() if name in number
        },
    }
    return _fill(data)


def _fill(page: dict[str, Any]) -> str:
    template = resources.files("dcp_rs.cli").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(plain(page), ensure_ascii=False, separators=(",", ":"))
    # A name may contain any text: it must not end the script, or begin another.
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return template.replace("/*DATA*/null", data, 1)


def _data(
    contents: Contents,
    unsorted: Sequence[Entry],
    statistics: Statistics,
    own: Mapping[str, Entry] | None = None,
) -> dict[str, Any]:
    """Return columns, as a row for each of 100,000 tensors would repeat its keys.

    If ``own`` is given, these entries alone have chunks, values and bytes.
    """
    entries = sorted(unsorted, key=lambda entry: natural(entry.name))
    dtypes = sorted({entry.dtype or "value" for entry in entries})
    number = {dtype: i for i, dtype in enumerate(dtypes)}
    # The file of an entry of one chunk; else [file, bytes, offsets, sizes] of each chunk.
    pieces: list[Any] = []
    for entry in entries:
        stored = contents.stored_chunks(entry) if own is None or entry.name in own else []
        if len(stored) == 1:
            pieces.append(stored[0].file)
        else:
            pieces.append([[c.file, c.length, c.offsets, c.sizes] for c in stored[:_MAX_PIECES]])
    values = [
        (i, entry)
        for i, entry in enumerate(entries)
        if entry.dtype is None and (own is None or entry.name in own)
    ][:_MAX_VALUES]
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
        "bytes": [entry.nbytes if own is None or entry.name in own else 0 for entry in entries],
        "chunks": [entry.chunks for entry in entries],
        "pieces": pieces,
        "stats": {
            i: _row(statistics[entry.name])
            for i, entry in enumerate(entries)
            if entry.name in statistics
        },
        "values": {i: contents.value_text(entry, 400) for i, entry in values},
    }


def _row(one: TensorStats) -> list[Any]:
    return [one.min, one.max, one.mean, one.std, one.zeros, one.nan, one.inf]
