"""docs/how-to.md: its commands, in its order, in folders made as it says, print what it shows."""

import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from test_examples import example

from dcp_rs.cli import main
from support import run_ranks
from support.places import ROOT
from support.training import quiet

PAGE = ROOT / "docs" / "how-to.md"
#: The page is of this release. What its pickles are long, and so where things lie, changes from one to the next.
RELEASE = "2.15"


def make(folder: Path) -> None:
    with quiet():
        example("how_to_folders").main(str(folder))
        example("how_to_folders").main(str(folder / "large"))  # as wide as the other


def shown() -> list[tuple[str, str]]:
    """Every command of the page, and what it prints."""
    blocks = re.findall(r"^```\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    steps = [step.partition("\n") for block in blocks for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [(command, printed.strip()) for command, _, printed in steps]


def stable(command: str, printed: str) -> str:
    """Without what differs from run to run: times, random parts of names, and the order in which stock writes its items."""
    printed = re.sub(r"[\d.]+ s \([\d.]+ \w?B/s\)", "<time>", printed)
    printed = re.sub(r" +[\d,]+ +(?=__\d+_\d+\.distcp)", " <offset> ", printed)
    printed = re.sub(r"-[0-9a-f]{16}-", "-<token>-", printed)
    if "bench" in command or "large" in command:
        printed = re.sub(r"[\d.]+( [MkG]?B\b|x)?", "<number>", printed)
        printed = re.sub(r" +", " ", printed)
    return printed.strip()


@pytest.mark.skipif(not torch.__version__.startswith(f"{RELEASE}."), reason=f"the page is of torch {RELEASE}")
def test_every_command_prints_what_the_page_shows(tmp_path, monkeypatch, capfd):
    run_ranks(2, make, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    steps = shown()
    assert len(steps) > 20
    for command, printed in steps:
        program, *arguments = shlex.split(command)
        if program == "torchrun":  # done above
            assert "examples/how_to_folders.py" in arguments
            continue
        if program == "dcp-rs":
            with pytest.raises(SystemExit):
                main(arguments)
        else:
            subprocess.run(["bash", "-c", command], check=True, timeout=60)
        said = capfd.readouterr()
        assert stable(command, said.out + said.err) == stable(command, printed), command
    snippets = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, PAGE.name, "exec"), {})


def test_its_links_lead_somewhere():
    text = PAGE.read_text()
    headings = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
        for title in re.findall(r"^## (.*)$", text, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]*)\)", text):
        assert target[1:] in headings if target.startswith("#") else (PAGE.parent / target).exists(), target
