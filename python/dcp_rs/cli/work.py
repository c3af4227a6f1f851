"""``verify``, ``index``, ``convert`` and ``merge``: carried out, and what is said of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp_rs.checkpoint.views import Layout
from dcp_rs.cli.cleaning import mention
from dcp_rs.cli.output import (
    count,
    entries,
    for_command_line,
    line,
    print_json,
    printable,
    rate,
    size,
)
from dcp_rs.errors import PlanError

if TYPE_CHECKING:
    from dcp_rs.conversion import ConvertReport

__all__ = ["convert", "index", "merge", "verify"]

#: Names of a list that is only an overview.
_SOME = 10


def verify(
    path: Path, *, allow_external: bool, allow_unverified: bool, threads: int | None, as_json: bool
) -> int:
    """1 where something is damaged, or nothing could be verified."""
    from dcp_rs.checkpoint.folders import INDEX_NAME
    from dcp_rs.checkpoint.verify import verify as check

    begin = time.perf_counter()
    report = check(path, threads=threads, allow_external=allow_external, progress=True)
    seconds = time.perf_counter() - begin
    if as_json:
        print_json(
            {
                "path": str(path),
                "ok": report.ok,
                "entries": report.entries,
                "bytes_verified": report.bytes_verified,
                "bytes_without_digest": report.bytes_without_digest,
                "seconds": seconds,
                "lost": report.lost,
                "problems": [asdict(problem) for problem in report.problems],
                "leftovers": [asdict(leftover) for leftover in report.leftovers],
            }
        )
        return 0 if report or (report.ok is None and allow_unverified) else 1
    for problem in report.problems:
        text = problem.got if report.entries is None else str(problem)
        line(("damaged  ", "red"), printable(for_command_line(text)))
    if report.entries is None:
        (problem,) = report.problems
        rebuilt = Path(problem.file).name == INDEX_NAME
        mend = (
            "; dcp-rs index --overwrite rebuilds the index, if the data is whole" if rebuilt else ""
        )
        line(("lost     ", "red"), f"all of it: it does not open{mend}")
        mention(report.leftovers)
        line(("1 problem", "bold red"), ": nothing was verified")
        return 1
    if report.lost:
        shown = ", ".join(map(printable, report.lost[:_SOME]))
        rest = (
            f" and {len(report.lost) - _SOME:,} more (--json)" if len(report.lost) > _SOME else ""
        )
        line(
            ("lost     ", "red"),
            f"{len(report.lost):,} of {entries(report.entries)}: {shown}{rest}",
        )
    mention(report.leftovers)
    without = report.bytes_without_digest
    if without:
        line(
            ("not checked  ", "yellow"),
            f"{size(without)} of data without digests (dcp-rs index --digests adds them)",
        )
    if report.ok is None:
        line(("the files are there and of the right size; nothing was verified", "yellow"))
        return 0 if allow_unverified else 1
    if report.ok:
        verdict = ("no damage found", "yellow") if without else ("all is well", "green")
    else:
        verdict = (count(len(report.problems), "problem"), "bold red")
    line(
        verdict,
        f": {size(report.bytes_verified)} verified in {seconds:.1f} s ({rate(report.bytes_verified, seconds)})",
    )
    return 0 if report.ok else 1


def index(
    path: Path,
    *,
    out: Path | None,
    digests: bool,
    generation: int | None,
    save_id: str | None,
    overwrite: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Writes an index over data that is there."""
    from dcp_rs.checkpoint.index import index as write_index
    from dcp_rs.checkpoint.locate import open_index

    begin = time.perf_counter()
    made = write_index(
        path,
        out=out,
        digests=digests,
        generation=generation,
        save_id=save_id,
        overwrite=overwrite,
        threads=threads,
        progress=True,
    )
    seconds = time.perf_counter() - begin
    opened = open_index(made.parent, rank=None, allow_external=True)
    nbytes = len(opened.to_bytes())
    if as_json:
        print_json(
            {
                "index": str(made),
                "bytes": nbytes,
                "source": opened.source,
                "entries": opened.tensor_count,
                "chunks": opened.chunk_count,
                "seconds": seconds,
            }
        )
        return
    line(
        f"wrote {made} ({size(nbytes)}) over {entries(opened.tensor_count)} in {count(len(opened.files()), 'file')}; no data was touched"
    )
    if digests or opened.source == "dcp-rs":
        line(
            "its digests are of the data as it is now: what was damaged before will pass for whole"
        )


def convert(
    path: Path, out: Path, *, renames: Sequence[str], layout: Layout, as_json: bool, **options: Any
) -> None:
    """Converts, and says what came of it."""
    import dcp_rs

    options |= _layout_arguments(layout, options["dtype"])
    report = dcp_rs.convert(path, out, rename=_renames(renames), progress=True, **options)
    if as_json:
        print_json({"path": str(path), "out": str(out), "to": options["to"], **asdict(report)})
        return
    _show_written(report, out)


def merge(
    paths: Sequence[Path],
    out: Path,
    *,
    weights: Sequence[float] | None,
    renames: Sequence[str],
    layout: Layout,
    as_json: bool,
    **options: Any,
) -> None:
    """Merge, and print what came of it."""
    import dcp_rs

    options |= _layout_arguments(layout, options["dtype"])
    report = dcp_rs.merge(
        paths, out, weights=weights, rename=_renames(renames), progress=True, **options
    )
    if as_json:
        print_json(
            {
                "paths": [str(path) for path in paths],
                "out": str(out),
                "to": options["to"],
                **asdict(report),
            }
        )
        return
    if report.left_out:
        line(
            ("left out  ", "yellow"),
            f"{entries(len(report.left_out))} of optimizer state (--include takes it in)",
        )
    what = {
        "first": "taken from the first input",
        "last": "taken from the last input",
        "drop": "dropped",
    }
    for name in report.conflicts:
        line(("differs   ", "yellow"), f"{printable(name)}: {what[options['conflicts']]}")
    for path, weight in zip(paths, report.weights, strict=True):
        line(("summed    ", "dim"), f"{weight:g} * {printable(str(path))}")
    _show_written(report, out)


def _show_written(report: ConvertReport, out: Path) -> None:
    for name, reason in report.skipped.items():
        line(("left out  ", "yellow"), f"{printable(name)}: {reason}")
    for name, kept in report.tied.items():
        line(("tied      ", "dim"), f"{printable(name)} is {printable(kept)}")
    speed = rate(report.bytes, report.seconds)
    line(
        f"wrote {out}: {entries(len(report.written))}, {size(report.bytes)} in {count(report.files, 'file')}, {report.seconds:.1f} s ({speed})"
    )


def _layout_arguments(layout: Layout, dtype: str | None) -> dict[str, Any]:
    """Return ``dequantize`` and ``views``. A dtype that is asked for is decoded to at once, so that nothing is rounded twice."""
    import torch

    from dcp_rs.conversion.job import parse_dtype

    wanted = parse_dtype(dtype)
    if layout.dequantize is None or wanted is None:
        return {"dequantize": layout.dequantize is not None, "views": layout.views}
    # Other dtypes are cast from the one in which weights are computed.
    is_decoded_to = wanted in (torch.bfloat16, torch.float16)
    return {"dequantize": wanted if is_decoded_to else torch.float32, "views": layout.views}


def _renames(pairs: Sequence[str]) -> dict[str, str] | None:
    renames: dict[str, str] = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not equals:
            msg = f"--rename {pair}: it takes OLD=NEW"
            raise PlanError(msg)
        renames[old] = new
    return renames or None
