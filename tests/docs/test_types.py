"""README.md, the pages and the examples pass `mypy --strict`, if functions need no annotations."""

import re
import subprocess
import sys

import pytest

from docs.test_pages import BLOCK, DOCS, pages
from support.places import ROOT

pytestmark = pytest.mark.slow  # mypy reads torch, too
#: Messages of strict mypy about functions without annotations, and of torch and torchdata.
NOT_OURS = (
    "--allow-untyped-defs",
    "--allow-incomplete-defs",
    "--allow-untyped-calls",
    "--no-warn-return-any",
    "--no-warn-unused-ignores",
    "--implicit-reexport",
    "--disable-error-code=import-untyped",
)


def blocks(page):
    """Return the Python of a page: a text for each of its programs."""
    page_itself = []
    for kind, about, block in BLOCK.findall((DOCS / page).read_text()):
        if kind == "python" and "title=" in about:
            yield block
        elif kind == "python":
            page_itself.append(block)
    yield "\n".join(page_itself)


def test_code_of_the_pages_is_typed(tmp_path):
    pytest.importorskip("mypy")
    files = [*(ROOT / "examples").glob("*.py")]
    for page in pages():
        for number, text in enumerate(blocks(page)):
            name = re.sub(r"\W", "_", page.removeprefix("../").removesuffix(".md"))
            files.append(tmp_path / f"page_{name}_{number}.py")
            files[-1].write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir=.mypy_cache/pages"]
    command += [*NOT_OURS, *map(str, files)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
