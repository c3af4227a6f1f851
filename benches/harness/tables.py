"""Tables and the chart of the README and of docs/performance.md, made from the files of whole runs.

A page holds a table between two comments, which name the table and the run:

    <!-- table: headline 2026-11-23-amd-epyc-2cores -->
    <!-- end of table -->

The table `runs` is of all whole runs in benches/results, whatever run its comment names.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benches" / "results"
#: Where tables are.
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
CHART = ROOT / "docs" / "figures" / "performance.svg"
#: The table that the chart draws.
CHARTED = "headline"
#: Bars of stock DCP, of torch's functions with our classes, and of our functions.
_COLORS = ("#c9d1d6", "#f4a07f", "#e64a19")

_TABLE = re.compile(r"<!-- table: (\w+) (\S+) -->\n(.*?)<!-- end of table -->", re.DOTALL)


class MissingRowError(LookupError):
    """The run has no such case, or it failed there."""


@dataclass(frozen=True)
class Line:
    """A line of a table: what a user does, and the row of the run that measured it."""

    what: str
    case: str
    ours: str
    against: str
    #: What `against` is called in the table, where another name is clearer.
    called: str = ""
    #: The state of the page cache, for the tables that have both doors.
    cache: str = ""
    #: The row's `ours` for `RsReader` and `RsWriter` under torch's functions.
    plugged: str = ""


@dataclass(frozen=True)
class Table:
    """A table of a page."""

    lines: Sequence[Line]
    head: Callable[[], list[str]]
    row: Callable[[Line, dict[str, Any]], str]


_BIG = "145 bf16 tensors, 2.28 GB"
_SMALL = "20,000 float32 tensors of 64x16"
_CHUNKS = "1,024,000 chunks (2,000 FQNs x 512 ranks): read_metadata and one rank's plan"
_COLUMNS = "saved as row shards of 8 (2.01 GB), loaded as one column shard of 4"
_STEP = "a step of 1.02 GB, of which 10.07 MB changed, with fsync"
_RETURNS = "until the call returns, 0.81 GB of parameters and moments"
_BEGINS = "a step in which a save begins, 0.81 GB of parameters and moments"

_HEADLINE = [
    Line("Load 2.28 GB", f"warm, {_BIG}", "dcp_rs.load", "FileSystemReader", cache="warm", plugged="dcp.load, RsReader"),
    Line("Load 2.28 GB", f"cold, {_BIG}", "dcp_rs.load", "FileSystemReader", cache="cold", plugged="dcp.load, RsReader"),
    Line("Load 2.28 GB from a stock folder", f"foreign, warm, {_BIG}", "dcp_rs.load of the stock folder", "FileSystemReader", cache="warm", plugged="dcp.load, RsReader of the stock folder"),
    Line("Load 20,000 tensors of 4 KiB", _SMALL, "dcp_rs.load", "FileSystemReader", cache="warm", plugged="dcp.load, RsReader"),
    Line("Plan a load of a 512-rank checkpoint", _CHUNKS, "dcp_rs", "FileSystemReader, stock planner", cache="warm", plugged="RsReader, stock planner"),
    Line("Save 2.28 GB", f"save with fsync, {_BIG}", "dcp_rs.save", "FileSystemWriter", cache="fsync", plugged="dcp.save, RsWriter"),
    Line("Save 20,000 tensors of 4 KiB", f"save {_SMALL}, with fsync", "dcp_rs.save", "FileSystemWriter", cache="fsync", plugged="dcp.save, RsWriter"),
]  # fmt: skip

_JOB = [
    Line("Load a column shard of 4 from row shards of 8, cold", f"cold, {_COLUMNS}", "dcp_rs.load", "FileSystemReader"),
    Line("The same, warm", f"warm, {_COLUMNS}", "dcp_rs.load", "FileSystemReader"),
    Line("Load replicas on 4 ranks of one machine, cold", "cold, 2.01 GB, 4 ranks of a machine load replicas", "dcp_rs.load", "FileSystemReader"),
    Line("Load row shards on 4 ranks of one machine, cold", "cold, 2.01 GB, 4 ranks of a machine load rows", "dcp_rs.load", "FileSystemReader"),
    Line("Save 1.02 GB of which 10 MB changed, `parent=`", _STEP, "parent=", "FileSystemWriter"),
    Line("`async_save(async_staging=True)` of 0.81 GB, until it returns", _RETURNS, "async_save(async_staging=True)", "dcp.async_save, DefaultStager"),
    Line("A training step in which such a save begins", _BEGINS, "async_save(async_staging=True)", "dcp.async_save, DefaultStager"),
    Line("Convert 2.28 GB from stock DCP, warm", "convert 2.28 GB", "dcp_rs.convert, stock to dcp-rs", "cp -r and sync"),
    Line("Load a `torch.save` file, 20,000 tensors, warm", f"torch.save, {_SMALL}", "dcp_rs.load", "torch.load and copy_"),
    Line("Load FP8 blocks as bfloat16, 0.13 GB, warm", "FP8 blocks, 4 matrices, 0.13 GB of bf16", "dcp_rs.load, dequantize=True", "QuantizedHuggingFaceStorageReader"),
    Line("Average four checkpoints of 2.28 GB, `dcp_rs.merge`, warm", "merge 4 times 2.28 GB", "dcp_rs.merge", "dcp.load, add_ in float32, dcp.save"),
]  # fmt: skip

_SLOWER = [
    Line("`load_file` and touch 2.28 GB, warm", "one file, 2.28 GB: load and touch, warm", "dcp_rs.load_file", "safetensors load_file"),
    Line("Load with `verify=True`, warm", f"warm, {_BIG}", "dcp_rs.load, verify=True", "dcp_rs.load"),
    Line("Load a `torch.save` file, warm", f"torch.save, warm, {_BIG}", "dcp_rs.load", "torch.load(mmap=True) and copy_"),
    Line("Load a Hugging Face folder, warm", f"foreign, warm, {_BIG}", "dcp_rs.load of the Hugging Face folder", "HuggingFaceStorageReader"),
    Line("Load column shards on 4 ranks by `RsReader`, cold", "cold, 2.01 GB, 4 ranks of a machine load columns", "dcp.load, RsReader", "FileSystemReader"),
    Line("`load_file` and touch 2.28 GB, cold", "one file, 2.28 GB: load and touch, cold", "dcp_rs.load_file", "safetensors load_file"),
    Line("Load one rank's rows of a `torch.save` file, warm", "torch.save, warm, 2.28 GB, one rank of 4 takes its rows", "dcp_rs.load", "torch.load(mmap=True) and copy_ of the rows"),
    Line("Load 2.28 GB, cold", f"cold, {_BIG}", "dcp_rs.load", "HuggingFaceStorageReader"),
    Line("Load 2.28 GB, warm", f"warm, {_BIG}", "dcp_rs.load", "HuggingFaceStorageReader"),
]  # fmt: skip

_LOADERS = [
    Line(f"2.28 GB, {state}", f"{state}, {_BIG}", "dcp_rs.load", name, called)
    for name, called in (
        ("safetensors (pre-release) load_file 0.9.0rc1", "safetensors 0.9.0rc1"),
        ("fastsafetensors 0.5.0", ""),
        ("Run:ai model streamer 0.17.1", ""),
        ("flashpack 0.4.5", ""),
        ("tensorizer 2.12.1", ""),
    )
    for state in ("warm", "cold")
    if (name, state) != ("tensorizer 2.12.1", "cold")  # it needs more memory than the machine has
]


def _two_doors() -> list[str]:
    return [
        "| | page cache | stock DCP | `RsReader`, `RsWriter` | `dcp_rs.load`, `save` |",
        "|---|---|---:|---:|---:|",
    ]


def _two_doors_row(line: Line, row: dict[str, Any]) -> str:
    own = _faster(row)
    plugged = _faster(row["plugged"]) if row["plugged"] else "not measured"
    return f"| {line.what} | {line.cache} | {seconds(row['theirs_s'])} | {plugged} | {own} |"


def _faster(row: dict[str, Any]) -> str:
    return f"{seconds(row['ours_s'])}, **{times(row['value'])}** x"


def _against_others() -> list[str]:
    return ["| | against | theirs | dcp-rs | times as fast |", "|---|---|---:|---:|---:|"]


def _others_row(line: Line, row: dict[str, Any]) -> str:
    name = line.called or line.against
    return f"| {line.what} | {name} | {seconds(row['theirs_s'])} | {seconds(row['ours_s'])} | {_quartiles(row)} |"


TABLES = {
    "headline": Table(_HEADLINE, _two_doors, _two_doors_row),
    "job": Table(_JOB, _against_others, _others_row),
    "slower": Table(_SLOWER, _against_others, _others_row),
    "loaders": Table(_LOADERS, _against_others, _others_row),
}


def seconds(value: float) -> str:
    """Two significant digits below a second, hundredths up to ten, tenths beyond."""
    if value < 1:
        return f"{float(f'{value:.2g}'):g} s"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def times(value: float) -> str:
    """A ratio: tenths up to a hundred."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _quartiles(row: dict[str, Any]) -> str:
    form = ".2f" if row["value"] < 10 else ".0f"
    return f"{row['value']:{form}} ({row['low']:{form}} to {row['high']:{form}})"


def circumstances(results: dict[str, Any]) -> str:
    """The machine, the date and the method, in a sentence each."""
    machine = results["machine"]
    file_system = machine["file_system"].partition(" ")[0]
    torch = ".".join(machine["torch"].split(".")[:2])
    cpu = processor(results)
    accelerator = "CPU tensors" if machine["accelerator"] == "none" else machine["accelerator"]
    busy = [
        family["noise"][when]["busy"]
        for family in results["families"]
        for when in ("before", "after")
    ]
    about = (
        f"{cpu}, {machine['cores']} cores, {file_system}, torch {torch}, {accelerator}, commit "
        f"`{commit(results)}`, {results['date']}. Medians of interleaved rounds; every loaded or "
        "saved bit was compared. Between the cases, other work kept the processors "
        f"{min(busy):.0%} to {max(busy):.0%} busy."
    )
    return textwrap.fill(about, 100)


def commit(results: dict[str, Any]) -> str:
    """Return the commit that was measured, short."""
    return str(results["machine"]["commit"])[:8]


def processor(results: dict[str, Any]) -> str:
    """Return the name of the processor."""
    machine = results["machine"]
    return re.sub(r"\(R\)| Processor", "", machine.get("processor") or machine["cpu"])


def load(stem: str) -> dict[str, Any]:
    """Return the run of this name in benches/results."""
    results: dict[str, Any] = json.loads((RESULTS / f"{stem}.json").read_text())
    return results


def find(results: dict[str, Any], line: Line) -> dict[str, Any]:
    """Return the run's row of a line."""
    for family in results["families"]:
        for row in family["rows"]:
            if (row["case"], row["ours"], row["against"]) == (line.case, line.ours, line.against):
                if row["value"] is None:
                    raise MissingRowError(f"{line.case}: {row['error']}")
                return {**row, "plugged": _plugged(results, line)}
    raise MissingRowError(
        f"the run has no row of {line.case!r}, {line.ours!r} against {line.against!r}"
    )


def _plugged(results: dict[str, Any], line: Line) -> dict[str, Any] | None:
    """Return the row of the other door; None if the run did not measure it."""
    if not line.plugged:
        return None
    try:
        return find(results, replace(line, ours=line.plugged, plugged=""))
    except MissingRowError:
        return None


def whole_runs() -> list[dict[str, Any]]:
    """Return the runs in benches/results that have every line of the headline, oldest first."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        results = load(path.stem)
        try:
            for line in _HEADLINE:
                find(results, line)
        except MissingRowError:
            continue
        found.append(results)
    return found


def runs() -> str:
    """Return how many times as fast dcp-rs was in each whole run, by both doors, as Markdown."""
    measured = whole_runs()
    columns = [
        # Without the caches: a head of a column is short.
        f"{results['date']}, {re.sub('; .*[)]', ')', processor(results))}, `{commit(results)}`"
        for results in measured
    ]
    lines = [f"| | page cache | {' | '.join(columns)} |", "|---|---|" + "---:|" * len(columns)]
    for line in _HEADLINE:
        cells = []
        for results in measured:
            row = find(results, line)
            plugged = times(row["plugged"]["value"]) if row["plugged"] else "-"
            cells.append(f"{plugged} / {times(row['value'])}")
        lines.append(f"| {line.what} | {line.cache} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def table(name: str, results: dict[str, Any]) -> str:
    """Return one table as Markdown, with the circumstances below it."""
    what = TABLES[name]
    rows = [what.row(line, find(results, line)) for line in what.lines]
    return "\n".join([*what.head(), *rows, "", circumstances(results), ""])


def render(text: str, run: str | None = None) -> str:
    """Return the page with its tables made anew: of `run` where it has all rows, else of the run that each names."""

    def fill(match: re.Match[str]) -> str:
        name, stem = match[1], match[2]
        if name == "runs":
            return f"<!-- table: runs {stem} -->\n{runs()}<!-- end of table -->"
        if run is not None and _has(run, name):
            stem = run
        return f"<!-- table: {name} {stem} -->\n{table(name, load(stem))}<!-- end of table -->"

    return _TABLE.sub(fill, text)


def _has(run: str, name: str) -> bool:
    try:
        table(name, load(run))
    except MissingRowError:
        return False
    return True


def charted_run() -> str:
    """Return the run that the README's table is of: the chart is of the same."""
    found = re.search(rf"<!-- table: {CHARTED} (\S+) -->", PAGES[0].read_text())
    assert found, "README.md has no such table"
    return found[1]


def chart(results: dict[str, Any]) -> str:
    """Return the chart as SVG: for each line the time of dcp-rs beside that of stock DCP, which is the whole width."""
    lines = TABLES[CHARTED].lines
    # Narrow, with labels above their bars: for telephones, too.
    left, width, pitch, top = 16, 400, 76, 44
    height = top + pitch * len(lines) + 26
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 520 {height}" width="520" height="{height}" '
            'font-family="system-ui, sans-serif" font-size="13.5" role="img">'
        ),
        "<title>Time of dcp-rs beside that of stock DCP</title>",
        f'<rect width="520" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    legend = ("stock DCP", "RsReader, RsWriter", "dcp_rs.load, save")
    for name, color, x in zip(legend, _COLORS, (0, 100, 260), strict=True):
        parts += [
            f'<rect x="{left + x}" y="15" width="12" height="12" fill="{color}"/>',
            f'<text x="{left + x + 18}" y="26" fill="#37474f">{name}</text>',
        ]
    for at, line in enumerate(lines):
        row = find(results, line)
        y = top + pitch * at
        what = f"{line.what}, {line.cache}"
        parts.append(f'<text x="{left}" y="{y + 12}" fill="#263238">{escape(what)}</text>')
        bars = [(1.0, seconds(row["theirs_s"]))]
        bars += [
            (1 / found["value"], f"{seconds(found['ours_s'])}, {times(found['value'])} x")
            if found
            else (0.0, "not measured")
            for found in (row["plugged"], row)
        ]
        for below, (share, label) in enumerate(bars):
            part = max(width * share, 2.0)
            parts += [
                f'<rect x="{left}" y="{y + 18 + 16 * below}" width="{part:.1f}" height="14" rx="2" fill="{_COLORS[below]}"/>',
                f'<text x="{left + part + 8:.1f}" y="{y + 30 + 16 * below}" fill="#455a64">{label}</text>',
            ]
    about = escape(
        circumstances(results).partition(". Medians")[0].replace("\n", " ").replace("`", "")
    )
    parts += [
        f'<text x="{left}" y="{height - 12}" font-size="11.5" fill="#607d8b">{about}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def rewrite(run: str | None = None) -> list[Path]:
    """Make all tables and the chart anew, of this run as far as it goes, and return the files that changed."""
    changed = []
    for page in PAGES:
        text = render(page.read_text(), run)
        if text != page.read_text():
            page.write_text(text)
            changed.append(page)
    drawn = chart(load(charted_run()))
    if not CHART.exists() or CHART.read_text() != drawn:
        CHART.write_text(drawn)
        changed.append(CHART)
    return changed
