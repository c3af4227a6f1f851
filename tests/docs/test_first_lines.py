"""Every source file says in its first line what it is for."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Written by tools, or the data of tests.
EXCEPT = ("tests/compat/", "tests/fixtures/")


def sources() -> list[str]:
    folders = ("python", "rust", "tests", "benches", "examples")
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".pyi", ".rs")
    ]
    names = [path.relative_to(ROOT).as_posix() for path in files]
    return sorted(name for name in names if "/target/" not in name and not name.startswith(EXCEPT))


def test_there_are_many() -> None:
    assert len(sources()) > 300


@pytest.mark.parametrize("suffix", [".py", ".pyi", ".rs"])
def test_every_file_says_what_it_is_for(suffix: str) -> None:
    begin = ("//! ", "#![doc = include_str!(") if suffix == ".rs" else '"""'
    silent = [
        name
        for name in sources()
        if name.endswith(suffix)
        and not (ROOT / name).read_text().removeprefix("#!/usr/bin/env python3\n").startswith(begin)
    ]
    assert silent == []
