"""``inspect``: how a checkpoint, or one of its entries, is stored."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dcp_rs.checkpoint.clean import seen_beside
from dcp_rs.checkpoint.entries import TensorInfo
from dcp_rs.checkpoint.folders import local_path
from dcp_rs.checkpoint.metadata import merged_from
from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.commands.clean import mention
from dcp_rs.cli.commands.runs import list_if_run
from dcp_rs.cli.contents import FORMATS, SORTS, Contents, to_json
from dcp_rs.cli.output import bar, count, line, print_json, show_shape, size, table
from dcp_rs.tensors.nesting import shown

#: Lines of a long list that are printed without ``--all``.
_SOME = 10


def _page(_context: click.Context, _parameter: click.Parameter, out: Path | None) -> Path | None:
    if out == Path("-"):
        raise click.BadParameter("a page goes to a file, not to '-'")
    return out


@command(
    "inspect",
    "dcp-rs inspect ckpt/",
    "dcp-rs inspect ckpt/ model.embed.weight",
    "dcp-rs inspect ckpt/ --html page.html",
    "dcp-rs inspect run/step-30 --local node0/run --local node1/run",
)
@options.checkpoint
@click.argument("name", required=False)
@click.option(
    "--html",
    metavar="FILE",
    type=local_path,
    callback=_page,
    shell_complete=click.Path().shell_complete,
    help="Write an HTML page in place of text.",
)
@options.local("show which of them have each file.")
@options.show_all
@options.views
@options.rank
@options.external
@options.storage
@options.json
def _inspect(
    path: Path,
    name: str | None,
    html: Path | None,
    show_all: bool,
    as_json: bool,
    **how: Any,
) -> None:
    """Show how a checkpoint is stored: files, dtypes, largest entries.

    With NAME, show how that entry is sharded: its chunks, and the files that hold them.
    """
    if name is not None and html is not None:
        raise click.UsageError("--html shows the whole checkpoint: leave NAME out")
    if name is None and html is None:
        if list_if_run(path, as_json=as_json):
            return
        how["allow_external"] = False  # an overview opens no data file
    contents = Contents(path, **how)
    if html is not None:
        from dcp_rs.cli import page

        nbytes = page.write(page.render(contents), html, as_json=as_json)
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
    nodes = contents.nodes
    files: list[dict[str, Any]] = [
        {"name": name, "bytes": nbytes, "chunks": chunks[file]}
        | ({} if nodes is None else {"nodes": nodes[file]})
        for file, (name, nbytes) in enumerate(contents.files)
    ]
    sizes: dict[str, list[int]] = {}
    for entry in contents.entries:
        sizes.setdefault(entry.dtype or "value", []).append(entry.nbytes)
    dtypes = [(dtype, len(each), sum(each)) for dtype, each in sizes.items()]
    dtypes.sort(key=lambda row: -row[2])
    biggest = sorted(contents.entries, key=SORTS["size"])
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
                "values": contents.values,
                "chunks": contents.index.chunk_count,
                "bytes": contents.nbytes,
                **({"decoded": {"tensors": number, "stored_bytes": nbytes}} if number else {}),
                "files": files,
                "dtypes": [{"dtype": d, "tensors": n, "bytes": b} for d, n, b in dtypes],
                "merged_from": merged_from(contents.index),
                "leftovers": [asdict(leftover) for leftover in leftovers],
                "biggest": [to_json(entry) for entry in biggest[:some]],
            }
        )
        return
    line((str(contents.path), "bold"))
    for key, value in _facts(contents):
        line((f"  {key:<8}", "dim"), value)
    mention(leftovers)
    line()
    _table(
        [">size", ">chunks", "<file", *(["<on"] if nodes else [])],
        [
            [
                size(file["bytes"]),
                f"{file['chunks']:,}",
                file["name"],
                *([", ".join(file["nodes"]) or "no node"] if nodes else []),
            ]
            for file in files
        ],
        some,
        "file",
    )
    line()
    total = max(1, contents.nbytes)
    _table(
        ["<dtype", ">entries", ">size", "<share"],
        [[dtype, f"{n:,}", size(nbytes), bar(nbytes / total)] for dtype, n, nbytes in dtypes],
    )
    line()
    rows = [[size(entry.nbytes), entry.name] for entry in biggest]
    _table([">size", "<biggest"], rows, some, "entry")


def _facts(contents: Contents) -> list[tuple[str, str]]:
    """Return the lines of an overview that come before its tables."""
    facts, is_native = contents.facts, contents.format == "dcp-rs"
    version = f", version {facts['version']}" if is_native else ""
    rows = [("format", f"{FORMATS[contents.format]}{version}")]
    if facts and not is_native:
        rows.append(("index", f"beside the data, version {facts['version']}"))
    holds = f"{contents.counted()}, {size(contents.nbytes)}{contents.decoded_text()}"
    stored = f"{count(contents.index.chunk_count, 'chunk')} in {count(len(contents.files), 'file')}"
    rows += [("holds", holds), ("stored", stored)]
    if facts:
        rows.append(("save", f"{facts['save_id']}, generation {facts['generation']}"))
    if facts.get("writer"):
        rows.append(("written", f"by {facts['writer']}"))
    for one in merged_from(contents.index):
        save = f", save {one['save_id']}" if one["save_id"] else ""
        rows.append(("merged", f"{one['weight']:g} * {one['path']}{save}"))
    return rows


def _table(
    columns: list[str], rows: list[list[str]], some: int | None = None, noun: str = ""
) -> None:
    """Print a table, and how many rows there are beside ``some``."""
    table(columns, rows[:some], "  ")
    if some is not None and len(rows) > some:
        line((f"  and {count(len(rows) - some, noun)} more (--all)", "dim"))


def _show_entry(contents: Contents, name: str, *, show_all: bool, as_json: bool) -> None:
    entry = contents.entry(name)
    chunks = contents.stored_chunks(entry)
    state_path = contents.state_path(entry)
    shared = contents.sharing(entry)
    decoded = contents.index.coded_from(contents.numbers[name])
    if as_json:
        known: dict[str, Any] = {
            **to_json(entry),
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
    line((name, "bold"))
    what = "value" if entry.dtype is None else f"{entry.dtype} {show_shape(entry.shape)}"
    files = count(len({chunk.file for chunk in chunks}), "file")
    line(f"  {what}, {size(entry.nbytes)}, {count(len(chunks), 'chunk')} in {files}")
    if state_path is not None:
        line(("  in the state dict  ", "dim"), shown(state_path))
    if decoded is not None:
        line(("  decoded from  ", "dim"), f"{decoded[0]}: {', '.join(decoded[1])}")
    if shared:
        line(("  shares its bytes with  ", "dim"), ", ".join(shared))
    if entry.dtype is None:
        line(("  value  ", "dim"), contents.value_text(entry, 400))
    elif len(chunks) == 1:
        file = contents.files[chunks[0].file][0]
        line(("  in the file  ", "dim"), file, f", from byte {chunks[0].offset:,}")
    else:
        _show_chunks(contents, entry, show_all=show_all)


def _show_chunks(contents: Contents, entry: TensorInfo, *, show_all: bool) -> None:
    """List the chunks of a tensor."""
    line()
    _table(
        ["<from", "<elements", ">size", ">at byte", "<file"],
        [
            [
                show_shape(chunk.offsets),
                show_shape(chunk.sizes),
                size(chunk.length),
                f"{chunk.offset:,}",
                contents.files[chunk.file][0],
            ]
            for chunk in contents.stored_chunks(entry)
        ],
        None if show_all else 2 * _SOME,
        "chunk",
    )
