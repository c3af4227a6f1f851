"""Applies one bug at a time to a copy of the tree, and runs the tests that have to find it."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from mutants.bugs import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
#: The copy, and what cargo keeps between two runs.
SCRATCH = ROOT / "build" / "mutants"
TARGET = ROOT / "target" / "mutants"
COPIED = [
    "python",
    "rust",
    "tests",
    "docs",
    "examples",
    ".cargo",
    "Cargo.toml",
    "Cargo.lock",
    "pyproject.toml",
]
EXTENSION = Path("python/dcp_rs/_core.abi3.so")
#: A test that hangs is no test that found the bug.
PATIENCE = 900.0  # seconds
#: The exit code of pytest when tests failed.
FAILED = 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="of mutants; default: all")
    chosen = parser.parse_args().names
    unknown = set(chosen) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    mutants = [mutant for mutant in MUTANTS if not chosen or mutant.name in chosen]
    if stale := [
        mutant for mutant in mutants if (ROOT / mutant.file).read_text().count(mutant.old) != 1
    ]:
        sys.exit(
            "the text is not in the file once: " + "; ".join(f"{m.name} ({m.file})" for m in stale)
        )
    synchronize()
    check_environment()
    seconds, failure = tests_of({test for mutant in mutants for test in mutant.tests})
    if failure:
        sys.exit(f"fails without a mutant: {failure}")
    rows, survivors = [("(none)", "-", seconds)], []
    # Those of Rust last: the extension that they leave is none to test others with.
    for mutant in sorted(mutants, key=lambda mutant: mutant.is_rust):
        began = time.monotonic()
        failure = caught_by(mutant)
        rows.append((mutant.name, failure or "NOT CAUGHT", time.monotonic() - began))
        if not failure:
            survivors.append(mutant)
        print(f"{rows[-1][0]}: {rows[-1][1]} ({rows[-1][2]:.0f} s)", flush=True)
    show(rows)
    if survivors:
        sys.exit(
            "not caught: " + "; ".join(f"{mutant.name} ({mutant.why})" for mutant in survivors)
        )


def synchronize() -> None:
    """Make the copy what the tree is. Files that are alike keep their times, for cargo."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *COPIED]
    names = subprocess.run(
        listed, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    wanted = {name for name in names if (ROOT / name).is_file()}
    for file in list(SCRATCH.rglob("*")):
        if (
            file.is_file()
            and str(file.relative_to(SCRATCH)) not in wanted
            and "__pycache__" not in file.parts
        ):
            file.unlink()
    for name in wanted:
        data = (ROOT / name).read_bytes()
        if not (SCRATCH / name).is_file() or (SCRATCH / name).read_bytes() != data:
            (SCRATCH / name).parent.mkdir(parents=True, exist_ok=True)
            (SCRATCH / name).write_bytes(data)
    shutil.copyfile(ROOT / EXTENSION, SCRATCH / EXTENSION)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SCRATCH / "python"), "PYTHONDONTWRITEBYTECODE": "1"}


def check_environment() -> None:
    """Fail unless the tests import the copy of the package."""
    command = [sys.executable, "-c", "import dcp_rs; print(dcp_rs.__file__)"]
    done = subprocess.run(
        command, cwd=SCRATCH, env=environment(), check=True, capture_output=True, text=True
    )
    if not done.stdout.startswith(str(SCRATCH)):
        sys.exit(f"the tests would import {done.stdout.strip()}")


def tests_of(tests: set[str]) -> tuple[float, str]:
    """Run tests until one fails. Return the seconds, and which test failed, if one did."""
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-rfE",
        "-p",
        "no:cacheprovider",
        *sorted(tests),
    ]
    done = subprocess.run(
        command,
        cwd=SCRATCH,
        env=environment(),
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    seconds = time.monotonic() - began
    if done.returncode == 0:
        return seconds, ""
    if done.returncode < 0:
        return seconds, f"the process died of signal {-done.returncode}"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+\.py.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode != FAILED or failed is None:
        sys.exit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return seconds, failed[1]


def caught_by(mutant: Mutant) -> str:
    """Return the test that finds the mutant, or nothing."""
    file = SCRATCH / mutant.file
    right = file.read_text()
    file.write_text(right.replace(mutant.old, mutant.new))
    try:
        if mutant.is_rust:
            build(mutant)
        return tests_of(set(mutant.tests))[1]
    finally:
        file.write_text(right)  # with a new time, so that cargo builds it again


def build(mutant: Mutant) -> None:
    """Build the extension of the copy, as ``make test`` does."""
    command = ["cargo", "build", "--quiet", "--package", "dcp-rs-py"]
    done = subprocess.run(
        [*command, "--features", "pyo3/extension-module"],
        cwd=SCRATCH,
        env={**os.environ, "CARGO_TARGET_DIR": str(TARGET), "PYO3_PYTHON": sys.executable},
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{mutant.name} does not compile:\n{done.stderr[-3000:]}")
    built = (TARGET / "debug").glob("lib_core.*")
    (library,) = (file for file in built if file.suffix in (".so", ".dylib"))
    # Not over the old one: a process may have it mapped.
    (SCRATCH / EXTENSION).unlink()
    shutil.copyfile(library, SCRATCH / EXTENSION)


def show(rows: list[tuple[str, str, float]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    print(f"\n{'mutant':{widths[0]}}  {'caught by':{widths[1]}}  seconds")
    for name, caught, seconds in rows:
        print(f"{name:{widths[0]}}  {caught:{widths[1]}}  {seconds:7.1f}")


if __name__ == "__main__":
    main()
