"""Measures dcp-rs beside stock DCP and others, in one run: `make bench`, `make bench ARGS='--only warm,cold --quick'`."""

import argparse
import datetime as dt
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cases import FAMILIES, QUANTITIES, SCALING
from harness import machine, plot, report, tables
from harness.context import SIZES, Context

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"families:\n{_lines(FAMILIES)}\nquantities of --scaling:\n{_lines(QUANTITIES)}",
    )
    parser.add_argument(
        "--only", help="families, or quantities, separated by commas (default: all)"
    )
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument(
        "--quick", action="store_const", const="quick", dest="size", help="--size quick"
    )
    parser.add_argument("--rounds", type=int, help="pairs a case, in place of the size's own")
    parser.add_argument(
        "--scaling", action="store_true", help="how cost grows, in place of the table"
    )
    parser.add_argument(
        "--folder",
        type=resolved,
        default=HERE / "data",
        help="where data goes: some 16 GB, on the disk to be measured; removed after (default: %(default)s)",
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the data, for the next run with it"
    )
    parser.add_argument(
        "--out", type=resolved, default=HERE / "results", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--peers",
        type=resolved,
        default=ROOT / ".venv-peers",
        help="where the virtual environments of other loaders are made (default: %(default)s)",
    )
    parser.add_argument("--no-peers", action="store_const", const=None, dest="peers")
    parser.add_argument(
        "--limit", type=resolved, help="the built limit program, rather than building it"
    )
    parser.add_argument("--no-limit", action="store_true", help="without the limits of the machine")
    parser.add_argument(
        "--tables",
        type=resolved,
        metavar="FILE",
        help="measure nothing: write the tables and the chart of README.md and docs/performance.md from this run",
    )
    return parser.parse_args(arguments)


def _lines(what: Mapping[str, str]) -> str:
    return "\n".join(f"  {name:10} {text}" for name, text in what.items())


def resolved(text: str) -> Path:
    return Path(text).resolve()


def build_limit() -> Path:
    """The program that measures the limit of the machine."""
    command = ["cargo", "build", "--release", "--quiet", "--package", "dcp-rs-core"]
    subprocess.run([*command, "--example", "limit"], cwd=ROOT, check=True)
    described = subprocess.run(
        ["cargo", "metadata", "--format-version=1", "--no-deps"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return Path(json.loads(described.stdout)["target_directory"], "release", "examples", "limit")


def run_family(name: str, context: Context) -> dict[str, Any]:
    """A family in a process of its own: what fails in it is a line of the report."""
    out = context.folder / f"{name}.json"
    command = [sys.executable, "-m", "harness.family", name, context.to_json(), str(out)]
    status = subprocess.run(command, cwd=HERE, check=False).returncode
    if status == 0:
        result: dict[str, Any] = json.loads(out.read_text())
        return result
    row: dict[str, Any] = {
        "case": FAMILIES.get(name, name),
        "error": f"the family {name} failed with status {status}",
    }
    empty = dict.fromkeys(("value", "reach", "stretch", "ours_s", "theirs_s"))
    row |= {
        "ours": "",
        "against": "",
        "unit": "",
        "note": "",
        "rounds": 0,
        "verdict": "failed",
        "skipped": False,
    }
    quiet = {"busy": 0.0, "stolen": 0.0, "load_average": 0.0}
    return {"family": name, "noise": {"before": quiet, "after": quiet}, "rows": [row | empty]}


def main() -> int:
    arguments = parse()
    if arguments.tables:
        if (
            arguments.tables.parent != tables.RESULTS
            or not arguments.tables.with_suffix(".json").exists()
        ):
            print(f"{arguments.tables} is no run in {tables.RESULTS}")
            return 2
        for path in tables.rewrite(arguments.tables.stem):
            print(f"wrote {path.relative_to(ROOT)}")
        return 0
    known = QUANTITIES if arguments.scaling else FAMILIES
    names = arguments.only.split(",") if arguments.only else list(known)
    unknown = set(names) - known.keys()
    if unknown:
        kind = "quantity" if arguments.scaling else "family"
        print(f"no such {kind}: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return 2
    if arguments.scaling:
        names = [f"{SCALING}.{name}" for name in names]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    limit = None if arguments.no_limit else arguments.limit or build_limit()
    folder = arguments.folder / f"bench-{arguments.size}"
    if not arguments.keep:
        folder = Path(tempfile.mkdtemp(prefix="bench-", dir=arguments.folder))
    folder.mkdir(exist_ok=True)
    context = Context(folder, arguments.size, limit, arguments.peers, arguments.rounds)
    results: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
        "machine": machine.describe(folder),
        "size": arguments.size,
        "families": [],
    }
    try:
        for name in names:
            print(f"-- {name}", flush=True)
            results["families"].append(run_family(name, context))
            write(results, arguments.out)  # a run that is interrupted leaves what it has
    finally:
        if not arguments.keep:
            shutil.rmtree(folder)
    print(report.markdown(results))
    print(f"written to {arguments.out}")
    failed = any(row["verdict"] == "failed" for f in results["families"] for row in f["rows"])
    return 1 if failed else 0


def write(results: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    stem = f"{results['date']}-{machine.label(results['machine'])}"
    if results["size"] != "full":
        stem += f"-{results['size']}"
    if results["families"][0]["family"].startswith(SCALING):
        stem += f"-{SCALING}"
    (out / f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / f"{stem}.md").write_text(report.markdown(results))
    plot.draw(results, out / f"{stem}.svg")


if __name__ == "__main__":
    sys.exit(main())
