"""``ls``: the entries of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dcp_rs.checkpoint.names import natural
from dcp_rs.checkpoint.views import Layout
from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.commands.runs import is_run, list_steps
from dcp_rs.cli.contents import Entry, decoded_text, entries_text, open_contents
from dcp_rs.cli.output import line, print_json, printable, show_shape, size, table

_SORTS: dict[str, Callable[[Entry], Any]] = {
    "name": lambda entry: natural(entry.name),
    "size": lambda entry: (-entry.nbytes, natural(entry.name)),
    "dtype": lambda entry: (entry.dtype or "", natural(entry.name)),
    "chunks": lambda entry: (-entry.chunks, natural(entry.name)),
}


@command(
    "ls",
    "dcp-rs ls ckpt/",
    "dcp-rs ls ckpt/ 'model.layers.0.*' --sort size",
    "dcp-rs ls hf_model/ --json",
)
@options.any_checkpoint
@options.selection
@click.option("--sort", type=click.Choice(list(_SORTS)), default="name", help="Sort by this.")
@click.option("--values", is_flag=True, help="Show the values of entries that are not tensors.")
@options.layout
@options.rank
@options.storage
@options.json
def _ls(
    path: Path,
    chosen: Callable[[str], bool] | None,
    sort: str,
    values: bool,
    layout: Layout,
    rank: int | None,
    as_json: bool,
) -> None:
    """List the entries of a checkpoint with dtype, shape, chunks and size.

    For the folder of a run, list its steps.
    """
    if is_run(path):
        list_steps(path, as_json=as_json)
        return
    contents = open_contents(path, rank=rank, layout=layout)
    entries = [entry for entry in contents.entries if chosen is None or chosen(entry.name)]
    entries.sort(key=_SORTS[sort])
    total = sum(entry.nbytes for entry in entries)
    if as_json:
        tensors = sum(entry.dtype is not None for entry in entries)
        print_json(
            {
                "path": str(path),
                "format": contents.format,
                "tensors": tensors,
                "values": len(entries) - tensors,
                "bytes": total,
                "entries": [
                    entry.to_json() | (contents.value_json(entry) if values else {})
                    for entry in entries
                ],
            }
        )
        return
    columns = [("dtype", "<"), ("shape", "<"), ("chunks", ">"), ("size", ">"), ("name", "<")]
    rows = [
        [
            entry.dtype or "value",
            "" if entry.dtype is None else show_shape(entry.shape),
            f"{entry.chunks:,}",
            size(entry.nbytes),
            printable(entry.name),
            *([contents.value_text(entry, 60)] if values else []),
        ]
        for entry in entries
    ]
    table([*columns, ("value", "<")] if values else columns, rows)
    of = "" if len(entries) == len(contents.entries) else f" of {len(contents.entries):,} entries"
    if contents.entries and not entries:
        line("no name matches: a pattern covers a whole name, as '*norm*' does")
    line((f"{entries_text(entries)}{of}, {size(total)}", "bold"), decoded_text(contents))
