"""``ls``: the entries of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dcp_rs._url import Url
from dcp_rs.checkpoint.locate import checkpoints_in
from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.commands.runs import list_if_run
from dcp_rs.cli.contents import FORMATS, SORTS, Contents, to_json
from dcp_rs.cli.output import count, for_command_line, line, print_json, show_shape, size, table
from dcp_rs.errors import CheckpointNotFoundError, DcpRsError


@command(
    "ls",
    "dcp-rs ls ckpt/",
    "dcp-rs ls ckpt/ 'model.layers.0.*' --sort size",
    "dcp-rs ls hf_model/ --json",
)
@options.checkpoint
@options.selection
@options.sort
@click.option("--values", is_flag=True, help="Show the values of entries that are not tensors.")
@options.views
@options.rank
@options.storage
@options.json
def _ls(
    path: Path,
    chosen: Callable[[str], bool],
    sort: str,
    values: bool,
    as_json: bool,
    **how: Any,
) -> None:
    """List the entries of a checkpoint with dtype, shape, chunks and size.

    For the folder of a run, list its steps, and for a folder of checkpoints list these.
    """
    if list_if_run(path, as_json=as_json):
        return
    try:
        contents = Contents(path, chosen, **how)
    except CheckpointNotFoundError:
        if isinstance(path, Url) or not (inner := checkpoints_in(path)):
            raise
        _list_checkpoints(path, inner, as_json=as_json)
        return
    entries = sorted(contents.entries, key=SORTS[sort])
    if as_json:
        print_json(
            {
                "path": str(path),
                "format": contents.format,
                "tensors": contents.tensors,
                "values": contents.values,
                "bytes": contents.nbytes,
                "entries": [
                    to_json(entry) | (contents.value_json(entry) if values else {})
                    for entry in entries
                ],
            }
        )
        return
    columns = ["<dtype", "<shape", ">chunks", ">size", "<name"]
    rows = [
        [
            entry.dtype or "value",
            "" if entry.dtype is None else show_shape(entry.shape),
            f"{entry.chunks:,}",
            size(entry.nbytes),
            entry.name,
            *([contents.value_text(entry, 60)] if values else []),
        ]
        for entry in entries
    ]
    table([*columns, "<value"] if values else columns, rows)
    total = contents.index.tensor_count
    of = "" if len(entries) == total else f" of {total:,} entries"
    if total and not entries:
        line("no name matches: a pattern covers a whole name, as '*norm*' does")
    line((f"{contents.counted()}{of}, {size(contents.nbytes)}", "bold"), contents.decoded_text())


def _list_checkpoints(path: Path, folders: list[Path], *, as_json: bool) -> None:
    """Print a line for each checkpoint in a folder: what it is, or why it does not open."""
    found: list[dict[str, Any]] = []
    for folder in folders:
        try:
            opened = Contents(folder)
        except (DcpRsError, OSError) as error:
            found.append({"path": str(folder), "error": for_command_line(str(error))})
        else:
            entries, nbytes = len(opened.entries), opened.nbytes
            kind = {"format": opened.format, "entries": entries, "bytes": nbytes}
            found.append({"path": str(folder), **kind})
    if as_json:
        print_json({"path": str(path), "checkpoints": found})
        return
    whole = [one for one in found if "error" not in one]
    rows = [
        [FORMATS[one["format"]], f"{one['entries']:,}", size(one["bytes"]), Path(one["path"]).name]
        for one in whole
    ]
    table(["<format", ">entries", ">size", "<name"], rows)
    for one in found:
        if "error" in one:
            line(("does not open  ", "red"), one["error"])
    line((count(len(found), "checkpoint"), "bold"))
