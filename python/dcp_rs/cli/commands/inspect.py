"""``inspect``: how a checkpoint, or one of its entries, is stored."""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dcp_rs.checkpoint.clean import seen_beside
from dcp_rs.checkpoint.names import hint, natural
from dcp_rs.checkpoint.views import Layout
from dcp_rs.cli import cutmap, options
from dcp_rs.cli.app import command
from dcp_rs.cli.commands.clean import mention
from dcp_rs.cli.commands.runs import is_run, list_steps
from dcp_rs.cli.contents import (
    Contents,
    Entry,
    decoded_text,
    entries_text,
    open_contents,
    stats_by_name,
)
from dcp_rs.cli.output import (
    bar,
    count,
    line,
    print_json,
    printable,
    show_shape,
    size,
    table,
    text_argument,
)
from dcp_rs.errors import EntryNotFoundError
from dcp_rs.tensors.nesting import shown

#: Names of data files (section 1.1 of the format).
_DATA_FILE = re.compile(r"g\d+-[0-9a-f]{16}(-r\d+-f\d+\.safetensors)")
#: Lines of a long list that are printed without ``--all``.
_SOME = 10
_FORMATS = {
    "dcp-rs": "dcp-rs",
    "dcp": "stock DCP (.distcp)",
    "safetensors": "safetensors",
    "torch": "a file of torch.save",
}
_COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red", "bright_cyan", "bright_yellow")


@command(
    "inspect",
    "dcp-rs inspect ckpt/",
    "dcp-rs inspect ckpt/ model.embed.weight",
    "dcp-rs inspect ckpt/ --html page.html",
)
@options.any_checkpoint
@click.argument("name", required=False, type=text_argument)
@options.html
@options.with_stats
@options.show_all
@options.layout
@options.rank
@options.external
@options.storage
@options.json
def _inspect(
    path: Path,
    name: str | None,
    html: Path | None,
    with_stats: bool,
    show_all: bool,
    layout: Layout,
    rank: int | None,
    allow_external: bool,
    as_json: bool,
) -> None:
    """Show how a checkpoint is stored: files, dtypes, largest entries.

    With NAME, show how that entry is sharded: its chunks, and a map of the files that hold them.
    """
    options.check_stats(with_stats, html)
    if name is not None and html is not None:
        raise click.UsageError("--html shows the whole checkpoint: leave NAME out")
    if name is None and html is None:
        if is_run(path):
            list_steps(path, as_json=as_json)
            return
        allow_external = False  # an overview opens no data file
    contents = open_contents(path, rank=rank, allow_external=allow_external, layout=layout)
    if html is not None:
        from dcp_rs.cli import page

        text = page.render(contents, stats_by_name(contents) if with_stats else {})
        nbytes = page.put(text, html, as_json=as_json)
        if as_json:
            print_json({"path": str(path), "html": str(html), "bytes": nbytes})
    elif name is not None:
        _show_entry(contents, name, show_all=show_all, as_json=as_json)
    else:
        _show_overview(contents, show_all=show_all, as_json=as_json)


def _show_overview(contents: Contents, *, show_all: bool, as_json: bool) -> None:
    chunks = Counter(
        chunk.file for entry in contents.entries for chunk in contents.stored_chunks(entry)
    )
    files = [(name, nbytes, chunks[file]) for file, (name, nbytes) in enumerate(contents.files)]
    dtypes = _dtypes(contents)
    biggest = sorted(contents.entries, key=lambda entry: (-entry.nbytes, natural(entry.name)))
    leftovers = seen_beside(contents.path)
    some = None if show_all else _SOME
    if as_json:
        number, nbytes = contents.decoded()
        print_json(
            {
                "path": str(contents.path),
                "format": contents.format,
                **contents.facts,
                "tensors": contents.tensors,
                "values": len(contents.entries) - contents.tensors,
                "chunks": contents.chunk_count,
                "bytes": contents.nbytes,
                **({"decoded": {"tensors": number, "stored_bytes": nbytes}} if number else {}),
                "files": [{"name": f, "bytes": b, "chunks": n} for f, b, n in files],
                "dtypes": [{"dtype": d, "tensors": n, "bytes": b} for d, n, b in dtypes],
                "merged_from": contents.merged_from,
                "leftovers": [asdict(leftover) for leftover in leftovers],
                "biggest": [entry.to_json() for entry in biggest[:some]],
            }
        )
        return
    line((printable(str(contents.path)), "bold"))
    for key, value in _facts(contents):
        line((f"  {key:<8}", "dim"), value)
    mention(leftovers)
    line()
    table(
        [("size", ">"), ("chunks", ">"), ("file", "<")],
        [[size(nbytes), f"{number:,}", printable(name)] for name, nbytes, number in files[:some]],
        "  ",
    )
    _more(len(files), some, "file", "files")
    line()
    total = max(1, contents.nbytes)
    table(
        [("dtype", "<"), ("entries", ">"), ("size", ">"), ("share", "<")],
        [[dtype, f"{n:,}", size(nbytes), bar(nbytes / total)] for dtype, n, nbytes in dtypes],
        "  ",
    )
    line()
    table(
        [("size", ">"), ("biggest", "<")],
        [[size(entry.nbytes), printable(entry.name)] for entry in biggest[:some]],
        "  ",
    )
    _more(len(biggest), some, "entry", "entries")


def _facts(contents: Contents) -> list[tuple[str, str]]:
    """Return the lines of an overview that come before its tables."""
    facts, is_native = contents.facts, contents.format == "dcp-rs"
    version = f", version {facts['version']}" if is_native else ""
    rows = [("format", f"{_FORMATS[contents.format]}{version}")]
    if facts and not is_native:
        rows.append(("index", f"beside the data, version {facts['version']}"))
    holds = f"{entries_text(contents.entries)}, {size(contents.nbytes)}{decoded_text(contents)}"
    stored = f"{count(contents.chunk_count, 'chunk')} in {count(len(contents.files), 'file')}"
    rows += [("holds", holds), ("stored", stored)]
    if facts:
        rows.append(("save", f"{facts['save_id']}, generation {facts['generation']}"))
    if facts.get("writer"):
        rows.append(("written", f"by {printable(facts['writer'])}"))
    for one in contents.merged_from:
        save = f", save {printable(str(one['save_id']))}" if one["save_id"] else ""
        rows.append(("merged", f"{one['weight']:g} * {printable(str(one['path']))}{save}"))
    return rows


def _dtypes(contents: Contents) -> list[tuple[str, int, int]]:
    """Return (dtype, entries, bytes), the largest first."""
    number: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for entry in contents.entries:
        number[entry.dtype or "value"] += 1
        nbytes[entry.dtype or "value"] += entry.nbytes
    return sorted(((d, number[d], nbytes[d]) for d in number), key=lambda row: -row[2])


def _more(number: int, some: int | None, one: str, many: str) -> None:
    if some is not None and number > some:
        line((f"  and {number - some:,} {one if number - some == 1 else many} more (--all)", "dim"))


def _show_entry(contents: Contents, name: str, *, show_all: bool, as_json: bool) -> None:
    entry = next((entry for entry in contents.entries if entry.name == name), None)
    if entry is None:
        similar = hint(name, [entry.name for entry in contents.entries])
        msg = f"there is no entry {name!r} in {contents.path}{similar}"
        raise EntryNotFoundError(msg, path=contents.path, tensor=name)
    chunks = contents.stored_chunks(entry)
    state_path = contents.state_path(entry)
    shared = contents.sharing(entry)
    decoded = contents.decoded_from(entry)
    if as_json:
        known: dict[str, Any] = {
            **entry.to_json(),
            **contents.value_json(entry),
            "state_dict_path": None if state_path is None else list(state_path),
            "shares_bytes_with": shared,
        }
        if decoded is not None:
            known["decoded_from"] = {"format": decoded[0], "tensors": decoded[1]}
        known["pieces"] = [
            {
                "offsets": chunk.offsets,
                "sizes": chunk.sizes,
                "file": contents.files[chunk.file][0],
                "offset": chunk.offset,
                "bytes": chunk.length,
            }
            for chunk in chunks
        ]
        print_json(known)
        return
    line((printable(name), "bold"))
    what = "value" if entry.dtype is None else f"{entry.dtype} {show_shape(entry.shape)}"
    files = count(len({chunk.file for chunk in chunks}), "file")
    line(f"  {what}, {size(entry.nbytes)}, {count(len(chunks), 'chunk')} in {files}")
    if state_path is not None:
        line(("  in the state dict  ", "dim"), printable(shown(state_path)))
    if decoded is not None:
        line(("  decoded from  ", "dim"), f"{decoded[0]}: {printable(', '.join(decoded[1]))}")
    if shared:
        line(("  shares its bytes with  ", "dim"), printable(", ".join(shared)))
    if entry.dtype is None:
        line(("  value  ", "dim"), contents.value_text(entry, 400))
    elif len(chunks) == 1:
        file = _short(contents.files[chunks[0].file][0])
        line(("  in the file  ", "dim"), file, f", from byte {chunks[0].offset:,}")
    else:
        _show_chunks(contents, entry, show_all=show_all)


def _show_chunks(contents: Contents, entry: Entry, *, show_all: bool) -> None:
    """Draw a map of the files that hold a tensor, and list its chunks."""
    chunks = contents.stored_chunks(entry)
    drawn = cutmap.draw(entry.shape, [(chunk.file, chunk.offsets, chunk.sizes) for chunk in chunks])
    line()
    if entry.nbytes:
        margin = max(6, len(f"{drawn.row_starts[-1]:,}"))
        if drawn.column_dim is not None:
            last = entry.shape[drawn.column_dim] - 1
            line((f"  {'':{margin}}  dim {drawn.column_dim}: 0 … {last:,}", "dim"))
        label = "" if drawn.row_dim is None else f"dim {drawn.row_dim}"
        edge = "─" * len(drawn.rows[0])
        line(f"  {label:>{margin}} ┌{edge}┐")
        for start, row in zip(drawn.row_starts, drawn.rows, strict=True):
            left = "" if drawn.row_dim is None else f"{start:,}"
            runs = (found[0] for found in re.finditer(r"(.)\1*", row))
            coloured = ((run, _COLOURS[ord(run[0]) % len(_COLOURS)]) for run in runs)
            line((f"  {left:>{margin}} ", "dim"), "│", *coloured, "│")
        line(f"  {'':>{margin}} └{edge}┘")
        for dim in drawn.hidden:
            line((f"  also cut along dim {dim}; drawn at its index 0", "dim"))
        line()
    symbols = {file: symbol for symbol, file in drawn.files.items()}
    some = len(chunks) if show_all else 2 * _SOME
    table(
        [
            ("", "<"),
            ("from", "<"),
            ("elements", "<"),
            ("size", ">"),
            ("at byte", ">"),
            ("file", "<"),
        ],
        [
            [
                symbols.get(chunk.file, " "),
                show_shape(chunk.offsets),
                show_shape(chunk.sizes),
                size(chunk.length),
                f"{chunk.offset:,}",
                _short(contents.files[chunk.file][0]),
            ]
            for chunk in chunks[:some]
        ],
        "  ",
    )
    _more(len(chunks), some, "chunk", "chunks")


def _short(file: str) -> str:
    """Return the name of a data file. On a terminal, leave out what files of one save share."""
    found = _DATA_FILE.fullmatch(file) if sys.stdout.isatty() else None
    return f"…{found[1]}" if found else printable(file)
