"""README.md and the pages of docs/ run by themselves, in an empty folder, and print what they show.

`DCP_RS_WRITE_PAGES=1 pytest tests/docs/test_pages.py -n0` puts what is printed now into the pages.

Blocks of a page: `python` is run, and what it prints stands in the `text` block after it. With a
`title` it is a file, which a later line `$ torchrun --nproc-per-node N FILE` runs on N ranks.
`console` has commands, each after `$`, and what they print. In `sh` blocks the lines of dcp-rs run,
and what they print is not shown. Blocks of any other kind are not run.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_rs
from dcp_rs.cli import main
from support import run_ranks
from support.object_server import object_server
from support.places import ROOT

DOCS = ROOT / "docs"
WRITE = "DCP_RS_WRITE_PAGES" in os.environ
#: Their code belongs to a program of the reader's: it has to be Python, and its names of dcp_rs
#: have to exist.
FRAGMENTS = ("frameworks.md", "serving.md")
#: What is printed is that of this torch. Another one pickles values to another length.
RELEASE = "2.15"
#: Commands of a shell that a page may run.
SHELL = {"cp", "ls", "mv", "printf", "rm", "torchrun"}
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)


def stable(printed: str) -> str:
    """Return the text without what differs from run to run: times, random parts of names, digests."""
    printed = re.sub(r" *\b[\d.]+ s\b", " <time>", printed)
    printed = re.sub(r"[\d.]+ \w?B/s", "<speed>", printed)
    printed = re.sub(
        r" +[\d,]+ +(?=__\d+_\d+\.distcp)", " <offset> ", printed
    )  # the order in which stock writes
    printed = re.sub(
        r"\b[0-9a-f]{16}\b|\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "<random>", printed
    )
    return "\n".join(re.sub(r"  +", "  ", line).rstrip() for line in printed.strip().splitlines())


def run_python(page: str, code: str, names: dict[str, Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, page, "exec"), names)  # the page is ours
    return printed.getvalue()


def program_on_rank(folder: str, program: str, arguments: list[str]) -> str:
    """What a program prints under torchrun, in a rank process that has its process group already."""
    printed = io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", [program, *arguments])
            for name in ("init_process_group", "destroy_process_group"):
                patch.setattr(dist, name, lambda *_: None)
            runpy.run_path(program, run_name="__main__")
    finally:
        os.chdir(ROOT)  # the folder will be removed, and the process stays
    return printed.getvalue()


def torchrun(arguments: list[str]) -> str:
    """What the ranks of a program print, one after the other."""
    assert arguments[0] == "--nproc-per-node"
    return "".join(
        run_ranks(int(arguments[1]), program_on_rank, str(Path.cwd()), arguments[2], arguments[3:])
    )


def run_command(line: str, capfd: pytest.CaptureFixture[str]) -> str:
    capfd.readouterr()
    program, *arguments = shlex.split(line)
    if program == "torchrun":
        return torchrun(arguments)
    if program == "dcp-rs":
        with pytest.raises(SystemExit):
            main(arguments)
    else:
        assert program in SHELL, line
        subprocess.run(["bash", "-c", line], check=True, timeout=60)
    return "".join(capfd.readouterr())


def run_shell(block: str) -> None:
    """Run the lines of dcp-rs, as somebody copies them."""
    for line in re.findall(r"^dcp-rs (.*)$", block, re.MULTILINE):
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(line, comments=True))
        assert not ended.value.code, line


def run_console(block: str, capfd: pytest.CaptureFixture[str]) -> str:
    steps = []
    for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command = re.match(r"(?:.*\\\n)*.*\n", step)[0]
        printed = run_command(command.replace("\\\n", " "), capfd).strip("\n")
        steps.append("\n".join([f"$ {command}".rstrip("\n"), *printed.splitlines(), ""]))
    return ("\n" if any(step.count("\n") > 1 for step in steps) else "").join(steps)


def made_anew(page: str, text: str, capfd: pytest.CaptureFixture[str]) -> str:
    """Run the page, and return it with what is printed now, where that differs from what it shows."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    parts, at = [], 0
    for match in BLOCK.finditer(text):
        kind, about, block = match.groups()
        new = block
        if kind == "text":
            assert printed, f"{page}: nothing prints {block!r}"
            new, printed = printed, ""
        else:
            assert not printed, f"{page}: no text block shows {printed!r}"
        if kind == "python" and (title := re.search(r'title="(.*?)"', about)):
            Path(title[1]).write_text(block)
        elif kind == "python":
            printed = run_python(page, block, names)
        elif kind == "console":
            new = run_console(block, capfd)
        elif kind == "sh":
            run_shell(block)
        if stable(new) == stable(block):
            new = block
        parts += [text[at : match.start(3)], new]
        at = match.end(3)
    assert not printed, f"{page}: no text block shows {printed!r}"
    return "".join([*parts, text[at:]])


def pages() -> list[str]:
    with_code = [
        path.name
        for path in DOCS.glob("*.md")
        if re.search("^```(python|console)", path.read_text(), re.MULTILINE)
    ]
    return ["../README.md", *sorted(set(with_code) - set(FRAGMENTS))]


@pytest.fixture
def store(monkeypatch):
    """What `s3://` leads to, as the environment of a job says it."""
    with object_server() as server:
        monkeypatch.setattr(server, "bucket", "bucket")
        for name, value in server.options().items():
            monkeypatch.setenv(
                name.upper(), str(value).lower() if isinstance(value, bool) else str(value)
            )
        yield server


@pytest.mark.parametrize("page", pages())
def test_a_page_runs_by_itself(page, tmp_path, monkeypatch, capfd, request):
    text = (DOCS / page).read_text()
    if "s3://" in text:
        request.getfixturevalue("store")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    torch.manual_seed(0)
    try:
        made = made_anew(page, text, capfd)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if torch.__version__.startswith(f"{RELEASE}."):
        if WRITE:
            (DOCS / page).write_text(made)
        assert made.splitlines() == text.splitlines()


@pytest.mark.parametrize("page", FRAGMENTS)
def test_fragments_are_python_and_name_what_is_there(page):
    found = 0
    for kind, _, block in BLOCK.findall((DOCS / page).read_text()):
        if kind != "python":
            continue
        found += 1
        compile(block, page, "exec")
        for module, names in re.findall(r"^from (dcp_rs[\w.]*) import (.*)$", block, re.MULTILINE):
            if module.startswith(
                "dcp_rs.integrations."
            ):  # each needs its framework: tests/frameworks
                continue
            for name in names.split(", "):
                assert hasattr(__import__(module, fromlist=[name]), name), f"{module}.{name}"
        for name in re.findall(
            r"\bdcp_rs\.(\w+)", re.sub(r"^(from|import) .*$", "", block, flags=re.MULTILINE)
        ):
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
    for link in (first or second for first, second in LINK.findall(text)):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target) or target.endswith("cli.md"):  # made when the site is
            continue
        path = page.parent / target if target else page
        assert path.exists(), link
        if anchor:
            assert anchor in anchors(path.read_text()), link


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_headings_stand_alone(page):
    """One was glued to the paragraph before it, and the site showed both as text."""
    text = re.sub(r"^```.*?^```$", "```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"[^\n>]\n(#+ .*)", text) == []  # after HTML there need be no empty line


def test_every_guide_leads_to_the_other_doors():
    section = (ROOT / "mkdocs.yml").read_text().partition("  - Guides:\n")[2]
    guides = re.findall(r" ([\w/-]+\.md)$", section.partition("\n  - ")[0], re.MULTILINE)
    assert len(guides) > 10
    assert [name for name in guides if "](doors.md)" not in (DOCS / name).read_text()] == []


def test_links_of_the_readme_work_on_the_package_index():
    """They were relative once, and led nowhere on PyPI."""
    text = re.sub(
        r"^```.*?^```$", "", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    targets = [first or second for first, second in LINK.findall(text)]
    assert len(targets) > 10
    anchored = {f"#{anchor}" for anchor in anchors(text)}
    assert [
        target for target in targets if not target.startswith("https://") and target not in anchored
    ] == []
    for target in targets:  # and those of the site and of the repository lead to what is there
        if match := re.fullmatch(r"https://dcp-rs\.github\.io/dcp-rs/(.*)\.html", target):
            made = match[1] in ("security", "changelog", "reference/cli")
            assert made or (DOCS / f"{match[1]}.md").exists(), target
        elif match := re.fullmatch(r"https://github\.com/dcp-rs/dcp-rs/blob/main/(.*)", target):
            assert (ROOT / match[1]).exists(), target


def test_the_site_is_small_enough_to_know():
    """At most 29 pages beside the reference, each in the navigation once."""
    lines = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].splitlines()
    named = [match[1] for line in lines if (match := re.search(r" ([\w/-]+\.md)$", line))]
    assert len(named) == len(set(named))
    section = "\n".join(lines).partition("  - Reference:\n")[2]
    reference = set(
        re.findall(
            r" ([\w/-]+\.md)$", re.split(r"^  - ", section, flags=re.MULTILINE)[0], re.MULTILINE
        )
    )
    assert len(set(named) - reference) <= 29
    assert {path.name for path in DOCS.glob("*.md")} <= set(named)


def public() -> list[str]:
    """Every public name."""
    from dcp_rs import errors, optim, options

    elsewhere = {"__version__", *errors.__all__}
    found = [f"dcp_rs.{name}" for name in [*dcp_rs.__all__, "open"] if name not in elsewhere]
    for module in (errors, optim, options):
        found += [f"{module.__name__}.{name}" for name in module.__all__]
    return found


def test_the_reference_has_every_public_name():
    text = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    missing = [
        name
        for name in public()
        if name not in documented and name.rpartition(".")[0] not in documented
    ]
    assert missing == []
    for name in documented:  # and nothing that is not there
        module, _, attribute = name.rpartition(".")
        if ".integrations." in name:  # each needs its framework
            source = (ROOT / "python" / module.replace(".", "/")).with_suffix(".py").read_text()
            assert re.search(rf"^(class|def) {attribute}\b", source, re.MULTILINE), name
            continue
        owner = __import__(module, fromlist=[attribute])
        assert hasattr(owner, attribute) or __import__(name, fromlist=["x"]), name


def test_the_install_page_is_of_this_release():
    assert f"dcp-rs {dcp_rs.__version__}" in (DOCS / "install.md").read_text()
