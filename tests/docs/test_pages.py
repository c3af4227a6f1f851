"""Pages whose code is run: each in a folder of its own, in its order; and the links, names and figures of all pages."""

import contextlib
import io
import re
import shlex
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_rs
from dcp_rs.cli import main
from support import run_ranks
from support.places import ROOT

DOCS = ROOT / "docs"
#: Pages that other tests of this folder run.
ELSEWHERE = {"first-steps.md", "from-dcp.md", "how-to.md", "hugging-face.md", "torch-files.md", "verify-and-repair.md"}
#: What is run on several ranks.
RANKS = {"sharding.md": 2}
#: Pages whose code is of a program that the reader has: it has to be Python, and the names of dcp_rs in it have to be there.
FRAGMENTS = {"index.md", "training.md", "steps.md", "frameworks.md", "gpu.md", "object-stores.md"}
#: What is printed is of this release: of another, values are pickled to another length.
RELEASE = "2.15"
LINK = re.compile(r"\]\(([^)\s]+)\)")


def blocks(page: str) -> list[tuple[str, str]]:
    """Kind and content of the page's blocks."""
    text = (DOCS / page).read_text()
    return re.findall(r"^```(python|console|text)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run_python(page: str, code: str, names: dict[str, Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, page, "exec"), names)  # the page is ours
    return printed.getvalue()


def run_on_rank(page: str, folder: str) -> None:
    with contextlib.chdir(folder):
        names: dict[str, Any] = {}
        for kind, block in blocks(page):
            if kind == "console":  # how a reader starts it
                assert block.startswith(f"$ torchrun --nproc-per-node {dist.get_world_size()} ")
                continue
            assert kind == "python"
            run_python(page, block, names)
            dist.barrier()


def stable(printed: str) -> str:
    """Without times."""
    return re.sub(r"[\d.]+ s \([\d.]+ \w?B/s\)", "<time>", printed).strip()


def pages() -> list[str]:
    with_code = {path.name for path in DOCS.glob("*.md") if "```python" in path.read_text()}
    return sorted(with_code - ELSEWHERE - FRAGMENTS)


@pytest.mark.parametrize("page", pages())
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capfd):
    if page in RANKS:
        run_ranks(RANKS[page], run_on_rank, page, str(tmp_path))
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    names: dict[str, Any] = {}
    printed = ""
    try:
        for kind, block in blocks(page):
            if kind == "python":
                printed = run_python(page, block, names) or printed
            elif kind == "text":
                assert printed == block
            else:
                for line in re.findall(r"^\$ (.*)$", block, re.MULTILINE):
                    program, *arguments = shlex.split(line)
                    if program == "pip":  # that it installs is what `make test-wheel` shows
                        assert arguments[0] == "install"
                        assert re.fullmatch(r"dcp-rs(\[\w+\])?", arguments[1])
                        continue
                    assert program == "dcp-rs"
                    capfd.readouterr()
                    with pytest.raises(SystemExit):
                        main(arguments)
                    said = "".join(capfd.readouterr())
                    if torch.__version__.startswith(f"{RELEASE}."):
                        assert stable(f"$ {line}\n{said}") in stable(block)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("page", sorted(FRAGMENTS))
def test_fragments_are_python_and_name_what_is_there(page):
    found = 0
    for kind, block in blocks(page):
        if kind != "python":
            continue
        found += 1
        compile(block, page, "exec")
        for module, names in re.findall(r"^from (dcp_rs[\w.]*) import (.*)$", block, re.MULTILINE):
            if module.startswith("dcp_rs.integrations."):  # each needs its framework: tests/frameworks
                continue
            for name in names.split(", "):
                assert hasattr(__import__(module, fromlist=[name]), name), f"{module}.{name}"
        for name in re.findall(r"\bdcp_rs\.(\w+)", re.sub(r"^(from|import) .*$", "", block, flags=re.MULTILINE)):
            assert name in dir(dcp_rs), name
    assert found


def anchors(text: str) -> set[str]:
    """What headings are called in links."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in LINK.findall(text):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target) or target.endswith("cli.md"):  # made when the site is
            continue
        path = page.parent / target if target else page
        assert path.exists(), link
        if anchor:
            assert anchor in anchors(path.read_text()), link


def public() -> list[str]:
    """Every public name."""
    from dcp_rs import errors, optim, options
    from dcp_rs.testing import compare, conformance, disk, states, strategies

    found = [f"dcp_rs.{name}" for name in [*dcp_rs.__all__, "open"] if name != "__version__"]
    for module in (errors, optim, options, compare, conformance, disk, states, strategies):
        found += [f"{module.__name__}.{name}" for name in module.__all__]
    return found


def test_the_reference_has_every_public_name():
    text = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    missing = [name for name in public() if name not in documented and name.rpartition(".")[0] not in documented]
    assert missing == []
    for name in documented:  # and nothing that is not there
        module, _, attribute = name.rpartition(".")
        if ".integrations." in name:  # each needs its framework
            source = (ROOT / "python" / module.replace(".", "/")).with_suffix(".py").read_text()
            assert re.search(rf"^(class|def) {attribute}\b", source, re.MULTILINE), name
            continue
        owner = __import__(module, fromlist=[attribute])
        assert hasattr(owner, attribute) or __import__(name, fromlist=["x"]), name


def test_the_first_page_is_of_this_release():
    assert f"dcp-rs {dcp_rs.__version__}" in (DOCS / "start.md").read_text()
