"""Pages of commands: these, in their order, in folders made as they say, print what they show."""

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

#: In this order: a page goes on with the folders of the one before.
PAGES = [ROOT / "docs" / name for name in ("from-dcp.md", "hugging-face.md", "how-to.md", "verify-and-repair.md")]
#: The pages are of this release. What its pickles are long, and so where things lie, changes from one to the next.
RELEASE = "2.15"


def make(folder: Path) -> None:
    with quiet():
        example("how_to_folders").main(str(folder))
        example("how_to_folders").main(str(folder / "large"))  # as wide as the other


def shown(page: Path) -> list[tuple[str, str]]:
    """Every command of the page, and what it prints."""
    text = re.sub(r"^```python\n.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
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


def run(command: str, printed: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Runs a command of a page, and compares what it prints."""
    program, *arguments = shlex.split(command)
    if program == "torchrun":  # done before
        assert "how_to_folders.py" in arguments
        return
    if program == "dcp-rs":
        with pytest.raises(SystemExit):
            main(arguments)
    else:
        subprocess.run(["bash", "-c", command], check=True, timeout=60)
    said = capfd.readouterr()
    assert stable(command, said.out + said.err) == stable(command, printed), command


@pytest.mark.skipif(not torch.__version__.startswith(f"{RELEASE}."), reason=f"the pages are of torch {RELEASE}")
def test_every_command_prints_what_its_page_shows(tmp_path, monkeypatch, capfd):
    run_ranks(2, make, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for page in PAGES:
        steps = shown(page)
        assert steps
        for command, printed in steps:
            run(command, printed, capfd)
        names = {}
        for snippet in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
            exec(compile(snippet, page.name, "exec"), names)  # the page is ours
        capfd.readouterr()
