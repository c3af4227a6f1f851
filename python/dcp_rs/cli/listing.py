"""``ls`` and ``inspect``: the lines that they print."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp_rs._progress import watching
from dcp_rs.checkpoint.clean import seen_beside
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.checkpoint.names import hint, natural
from dcp_rs.checkpoint.views import Layout
from dcp_rs.cli import cutmap
from dcp_rs.cli.cleaning import mention
from dcp_rs.cli.contents import UNSHOWN, Contents, Entry, Piece, open_contents, value_text
from dcp_rs.cli.output import (
    bar,
    count,
    for_command_line,
    is_json,
    line,
    print_json,
    printable,
    show_shape,
    size,
    table,
)
from dcp_rs.errors import EntryNotFoundError, PlanError
from dcp_rs.tensors.nesting import shown

if TYPE_CHECKING:
    from dcp_rs.checkpoint.stats import TensorStats

__all__ = ["inspect", "inspect_entry", "ls", "put_page", "statistics_of", "write_page"]

_SORTS: dict[str, Callable[[Entry], Any]] = {
    "name": lambda entry: natural(entry.name),
    "size": lambda entry: (-entry.nbytes, natural(entry.name)),
    "dtype": lambda entry: (entry.dtype or "", natural(entry.name)),
    "chunks": lambda entry: (-entry.chunks, natural(entry.name)),
}
#: Names of data files (section 1.1 of the format).
DATA_FILE = re.compile(r"g\d+-[0-9a-f]{16}(-r\d+-f\d+\.safetensors)")
#: Lines of a list that is only an overview.
_SOME = 10


def ls(
    path: Path,
    chosen: Callable[[str], bool] | None,
    *,
    sort: str,
    values: bool,
    as_json: bool,
    rank: int | None = None,
    layout: Layout | None = None,
) -> None:
    """One line an entry, and a total."""
    contents = open_contents(path, rank=rank, layout=layout)
    entries = [entry for entry in contents.entries if chosen is None or chosen(entry.name)]
    entries.sort(key=_SORTS[sort])
    total = sum(entry.nbytes for entry in entries)
    tensors = sum(1 for entry in entries if entry.dtype is not None)
    if as_json:
        print_json(
            {
                "path": str(path),
                "format": contents.format,
                "tensors": tensors,
                "values": len(entries) - tensors,
                "bytes": total,
                "entries": [
                    entry.to_json() | (_value_json(contents, entry) if values else {})
                    for entry in entries
                ],
            }
        )
        return
    rows = [_row(entry) for entry in entries]
    if values:
        rows = [
            [*row, value_text(contents, entry, 60)]
            for row, entry in zip(rows, entries, strict=True)
        ]
    headings = ["dtype", "shape", "chunks", "size", "name", *(["value"] if values else [])]
    table(headings, ["<", "<", ">", ">", "<", "<"][: len(headings)], rows)
    of = "" if len(entries) == len(contents.entries) else f" of {len(contents.entries):,} entries"
    if contents.entries and not entries:
        line("no name matches: a pattern covers a whole name, as '*norm*' does")
    line((f"{_holds(entries)}{of}, {size(total)}", "bold"), _decoded(contents))


def _decoded(contents: Contents) -> str:
    number, nbytes = contents.decoded()
    return f"; {number:,} of them decoded from {size(nbytes)} that are stored" if number else ""


def _decoded_json(contents: Contents) -> dict[str, Any]:
    number, nbytes = contents.decoded()
    return {"decoded": {"tensors": number, "stored_bytes": nbytes}} if number else {}


def _row(entry: Entry) -> list[str]:
    shape = "" if entry.dtype is None else show_shape(entry.shape)
    return [
        entry.dtype or "value",
        shape,
        f"{entry.chunks:,}",
        size(entry.nbytes),
        printable(entry.name),
    ]


def _holds(entries: Iterable[Entry]) -> str:
    entries = list(entries)
    tensors = sum(1 for entry in entries if entry.dtype is not None)
    values = len(entries) - tensors
    return count(tensors, "tensor") + (f", {count(values, 'value')}" if values else "")


def inspect(
    path: Path,
    *,
    show_all: bool,
    as_json: bool,
    rank: int | None = None,
    layout: Layout | None = None,
) -> None:
    """An overview of a checkpoint."""
    contents = open_contents(path, rank=rank, layout=layout)
    per_file = _per_file(contents)
    dtypes = _dtypes(contents)
    biggest = sorted(contents.entries, key=_SORTS["size"])
    left = seen_beside(path)
    if as_json:
        print_json(
            {
                "path": str(path),
                "format": contents.format,
                **contents.facts,
                "tensors": contents.tensors,
                "values": len(contents.entries) - contents.tensors,
                "chunks": contents.chunk_count,
                "bytes": contents.nbytes,
                **_decoded_json(contents),
                "files": [
                    {"name": name, "bytes": nbytes, "chunks": chunks}
                    for (name, nbytes), chunks in zip(contents.files, per_file, strict=True)
                ],
                "dtypes": [{"dtype": d, "tensors": n, "bytes": b} for d, n, b in dtypes],
                "merged_from": contents.merged_from,
                "leftovers": [asdict(leftover) for leftover in left],
                "biggest": [entry.to_json() for entry in biggest[: None if show_all else _SOME]],
            }
        )
        return
    _overview(contents)
    mention(left)
    some = None if show_all else _SOME
    line()
    files = list(zip(contents.files, per_file, strict=True))
    table(
        ["size", "chunks", "file"],
        [">", ">", "<"],
        [[size(nbytes), f"{chunks:,}", printable(name)] for (name, nbytes), chunks in files[:some]],
        "  ",
    )
    _more(len(files), some, "file")
    line()
    total = max(1, contents.nbytes)
    table(
        ["dtype", "entries", "size", "share"],
        ["<", ">", ">", "<"],
        [
            [dtype, f"{number:,}", size(nbytes), bar(nbytes / total)]
            for dtype, number, nbytes in dtypes
        ],
        "  ",
    )
    line()
    table(
        ["size", "biggest"],
        [">", "<"],
        [[size(e.nbytes), printable(e.name)] for e in biggest[:some]],
        "  ",
    )
    _more(len(biggest), some, "entry" if len(biggest) == 1 else "entries", plural="entries")


def _overview(contents: Contents) -> None:
    kinds = {
        "dcp-rs": "dcp-rs",
        "dcp": "stock DCP (.distcp)",
        "safetensors": "safetensors",
        "torch": "a file of torch.save",
    }
    line((printable(str(contents.path)), "bold"))
    facts = contents.facts
    rows = [
        (
            "format",
            kinds[contents.format]
            + (f", version {facts['version']}" if contents.format == "dcp-rs" else ""),
        )
    ]
    if contents.format != "dcp-rs" and contents.indexed:
        rows.append(("index", f"beside the data, version {facts['version']}"))
    rows.append(
        ("holds", f"{_holds(contents.entries)}, {size(contents.nbytes)}{_decoded(contents)}")
    )
    rows.append(
        (
            "stored",
            f"{count(contents.chunk_count, 'chunk')} in {count(len(contents.files), 'file')}",
        )
    )
    if facts:
        rows.append(("save", f"{facts['save_id']}, generation {facts['generation']}"))
    if facts.get("writer"):
        rows.append(("written", f"by {printable(facts['writer'])}"))
    for one in contents.merged_from:
        save = f", save {printable(str(one['save_id']))}" if one["save_id"] else ""
        rows.append(("merged", f"{one['weight']:g} * {printable(str(one['path']))}{save}"))
    for key, value in rows:
        line((f"  {key:<8}", "dim"), value)


def _more(number: int, some: int | None, noun: str, plural: str | None = None) -> None:
    if some is not None and number > some:
        rest = number - some
        what = f"{rest:,} {plural}" if plural else count(rest, noun)
        line((f"  and {what} more (--all)", "dim"))


def _per_file(contents: Contents) -> list[int]:
    chunks = [0] * len(contents.files)
    for entry in contents.entries:
        for piece in contents.pieces(entry):
            chunks[piece.file] += 1
    return chunks


def _dtypes(contents: Contents) -> list[tuple[str, int, int]]:
    sums: dict[str, tuple[int, int]] = {}
    for entry in contents.entries:
        number, nbytes = sums.get(entry.dtype or "value", (0, 0))
        sums[entry.dtype or "value"] = number + 1, nbytes + entry.nbytes
    return sorted(((d, n, b) for d, (n, b) in sums.items()), key=lambda row: -row[2])


def inspect_entry(
    path: Path,
    name: str,
    *,
    show_all: bool,
    as_json: bool,
    rank: int | None = None,
    allow_external: bool = False,
    layout: Layout | None = None,
) -> None:
    """How one entry is stored."""
    contents = open_contents(path, rank=rank, allow_external=allow_external, layout=layout)
    entry = contents.find(name)
    if entry is None:
        msg = f"there is no entry {name!r} in {path}{hint(name, [entry.name for entry in contents.entries])}"
        raise EntryNotFoundError(msg, path=path, tensor=name)
    pieces = contents.pieces(entry)
    state_path = contents.state_path(entry)
    shared = contents.sharing(entry)
    decoded = contents.decoded_from(entry)
    if as_json:
        print_json(
            {
                **entry.to_json(),
                **_value_json(contents, entry),
                "state_dict_path": None if state_path is None else list(state_path),
                "shares_bytes_with": shared,
                **(
                    {}
                    if decoded is None
                    else {"decoded_from": {"format": decoded[0], "tensors": decoded[1]}}
                ),
                "pieces": [
                    {
                        "offsets": list(piece.offsets),
                        "sizes": list(piece.sizes),
                        "file": contents.files[piece.file][0],
                        "offset": piece.offset,
                        "bytes": piece.nbytes,
                    }
                    for piece in pieces
                ],
            }
        )
        return
    line((printable(name), "bold"))
    what = "value" if entry.dtype is None else f"{entry.dtype} {show_shape(entry.shape)}"
    held = count(len({piece.file for piece in pieces}), "file")
    line(f"  {what}, {size(entry.nbytes)}, {count(len(pieces), 'chunk')} in {held}")
    if state_path is not None:
        line(("  in the state dict  ", "dim"), printable(shown(state_path)))
    if decoded is not None:
        line(("  decoded from  ", "dim"), f"{decoded[0]}: {printable(', '.join(decoded[1]))}")
    if shared:
        line(("  shares its bytes with  ", "dim"), printable(", ".join(shared)))
    if entry.dtype is None:
        line(("  value  ", "dim"), value_text(contents, entry, 400))
        return
    if len(pieces) == 1:
        (piece,) = pieces
        at = "" if piece.offset is None else f", from byte {piece.offset:,}"
        line(("  in the file  ", "dim"), _short(contents.files[piece.file][0]), at)
        return
    _show_map(contents, entry, pieces, show_all=show_all)


def _value_json(contents: Contents, entry: Entry) -> dict[str, Any]:
    """Return ``value`` if JSON can hold it, else its ``repr``, else the ``problem``."""
    if entry.dtype is not None:
        return {}
    try:
        value = contents.value(entry)
        return {"value": value} if is_json(value) else {"repr": repr(value)}
    except UNSHOWN as error:
        return {"problem": for_command_line(str(error))}


def _show_map(contents: Contents, entry: Entry, pieces: list[Piece], *, show_all: bool) -> None:
    drawn = cutmap.draw(entry.shape, [(piece.file, piece.offsets, piece.sizes) for piece in pieces])
    symbols = {file: symbol for symbol, file in drawn.files.items()}
    line()
    if entry.nbytes:
        margin = max(6, len(f"{drawn.row_starts[-1]:,}"))
        if drawn.column_dim is not None:
            line(
                (
                    f"  {'':{margin}}  dim {drawn.column_dim}: 0 … {entry.shape[drawn.column_dim] - 1:,}",
                    "dim",
                )
            )
        label = "" if drawn.row_dim is None else f"dim {drawn.row_dim}"
        line(f"  {label:>{margin}} ┌{'─' * len(drawn.rows[0])}┐")
        for start, row in zip(drawn.row_starts, drawn.rows, strict=True):
            left = "" if drawn.row_dim is None else f"{start:,}"
            line((f"  {left:>{margin}} ", "dim"), "│", *_coloured(row), "│")
        line(f"  {'':>{margin}} └{'─' * len(drawn.rows[0])}┘")
        for d in drawn.hidden:
            line((f"  also cut along dim {d}; drawn at its index 0", "dim"))
        line()
    some = len(pieces) if show_all else 2 * _SOME
    rows = [
        [
            symbols.get(piece.file, " "),
            show_shape(piece.offsets),
            show_shape(piece.sizes),
            size(piece.nbytes),
            "" if piece.offset is None else f"{piece.offset:,}",
            _short(contents.files[piece.file][0]),
        ]
        for piece in pieces[:some]
    ]
    table(
        ["", "from", "elements", "size", "at byte", "file"],
        ["<", "<", "<", ">", ">", "<"],
        rows,
        "  ",
    )
    _more(len(pieces), some, "chunk")


def _short(file: str) -> str:
    """The name of a data file; on a terminal, of those that this package wrote only what tells them apart."""
    found = DATA_FILE.fullmatch(file) if sys.stdout.isatty() else None
    return f"…{found[1]}" if found else printable(file)


_COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red", "bright_cyan", "bright_yellow")


def _coloured(row: str) -> list[tuple[str, str]]:
    """Runs of one symbol, each in the colour of its file."""
    runs: list[tuple[str, str]] = []
    begin = 0
    for i in range(1, len(row) + 1):
        if i == len(row) or row[i] != row[begin]:
            runs.append((row[begin:i], _COLOURS[ord(row[begin]) % len(_COLOURS)]))
            begin = i
    return runs


def write_page(
    path: Path,
    out: Path,
    *,
    with_stats: bool,
    as_json: bool,
    rank: int | None = None,
    allow_external: bool = False,
    layout: Layout | None = None,
) -> None:
    """All of it as one page of HTML; ``-`` is standard output."""
    from dcp_rs.cli import page

    contents = open_contents(path, rank=rank, allow_external=allow_external, layout=layout)
    found = (
        statistics_of(path, rank=rank, allow_external=allow_external, layout=layout)
        if with_stats
        else {}
    )
    nbytes = put_page(page.render(contents, found), out, as_json=as_json)
    if as_json:
        print_json({"path": str(path), "html": str(out), "bytes": nbytes})


def statistics_of(
    path: Path, *, rank: int | None, allow_external: bool, layout: Layout | None = None
) -> dict[str, TensorStats]:
    """What the tensors hold, by name. All of them are read."""
    from dcp_rs.checkpoint.stats import stats

    index = open_index(path, rank=rank, allow_external=allow_external, layout=layout)
    tensors = [number for number in index.file_order() if not index.tensor(number).is_bytes]
    with watching(True, "reading") as progress:
        return {one.name: one for one in stats(index, tensors, progress=progress)}


def put_page(text: str, out: Path, *, as_json: bool) -> int:
    """Writes a page to where it is wanted, and says so; returns its length in bytes."""
    from dcp_rs.cli import page

    if str(out) == "-":
        if as_json:
            raise PlanError("--html - and --json both print: choose one of them")
        sys.stdout.write(text)
        return len(text)
    nbytes = page.write(text, out)
    if not as_json:
        line(
            f"wrote {printable(str(out))} ({size(nbytes)}): open it in a browser, it needs no other files"
        )
    return nbytes
