"""docs/first-steps.md: its steps, in their order, print what stands below each."""

import contextlib
import io
import re
import shlex
import signal
from typing import Any

import pytest
import torch

from dcp_rs.cli import main
from support.places import ROOT

PAGE = ROOT / "docs" / "first-steps.md"
#: The page is of this release.
RELEASE = "2.15"


def stable(printed: str) -> str:
    """Without what differs from run to run, or from processor to processor: times, random parts of names, digests."""
    printed = re.sub(r"[\d.]+ s\b", "<time>", printed)
    printed = re.sub(r"[\d.]+ \w?B/s", "<speed>", printed)
    return re.sub(r"\b[0-9a-f]{16}\b", "<token or digest>", printed).strip()


def run(kind: str, block: str, names: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> str:
    """What a block prints."""
    if kind == "python":
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, PAGE.name, "exec"), names)  # the page is ours
        return printed.getvalue()
    said = []
    for line in block.splitlines():
        program, *arguments = shlex.split(line.removeprefix("$ "))
        assert (line[:2], program) == ("$ ", "dcp-rs")
        with pytest.raises(SystemExit):
            main(arguments)
        said.append(f"{line}\n{''.join(capfd.readouterr())}")
    return "\n".join(said)


def session(capfd: pytest.CaptureFixture[str]) -> list[tuple[str, str, str]]:
    """Each block of the page: its kind, what it shows, what it printed."""
    blocks = re.findall(r"^```(python|console|text)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    found = []
    for at, (kind, block) in enumerate(blocks):
        if kind == "python":
            shown = blocks[at + 1][1] if at + 1 < len(blocks) and blocks[at + 1][0] == "text" else ""
            found.append((kind, shown, run(kind, block, names, capfd)))
        elif kind == "console":
            commands = "\n".join(line for line in block.splitlines() if line.startswith("$ "))
            found.append((kind, block, run(kind, commands, names, capfd)))
    return found


@pytest.mark.skipif(not torch.__version__.startswith(f"{RELEASE}."), reason=f"the page is of torch {RELEASE}")
def test_every_step_prints_what_the_page_shows(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    steps = session(capfd)
    assert len(steps) == 8
    for _, shown, printed in steps:
        assert stable(printed) == stable(shown)
