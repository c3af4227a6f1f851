"""What the site has beside the pages of this folder: files of the source tree as pages, the help of the commands, and links that lead to them."""

from __future__ import annotations

import logging
import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benches" / "results"
#: Pages that stand beside docs/, and what they are called on the site.
BESIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "license.md",
    "README.md": "index.md",
    "SECURITY.md": "security.md",
}
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")

log = logging.getLogger("mkdocs.hooks.dcp_rs")


def _places() -> dict[str, str]:
    """Files of the source tree that have a page, or are an image of one: where each is on the site."""
    places = dict(BESIDE)
    places |= {
        f"docs/{path.relative_to(ROOT / 'docs').as_posix()}": path.relative_to(ROOT / "docs").as_posix()
        for path in (ROOT / "docs").rglob("*.*")
    }
    places |= {f"examples/{path.name}": f"examples/{path.stem}.md" for path in (ROOT / "examples").glob("*.py")}
    places |= {
        f"benches/results/{path.name}": f"results/{path.name}" for path in RESULTS.glob("*") if path.suffix != ".json"
    }
    return places | {"benches/results": "results/index.md", "docs/reference/cli.md": "reference/cli.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation names sections; what belongs to a section by its folder is listed by itself."""
    notes = [f"design/{path.name}" for path in sorted((ROOT / "docs" / "design").glob("*.md"))]
    _section(config.nav, "Design notes").extend(notes)
    _section(config.nav, "Whole runs").extend(f"results/{path.name}" for path in sorted(RESULTS.glob("*.md")))
    examples = [{path.stem: f"examples/{path.stem}.md"} for path in sorted((ROOT / "examples").glob("*.py"))]
    guides = _section(config.nav, "Guides")
    named = set(_named(config.nav))
    # A new page is a guide until the navigation says otherwise.
    guides.extend(path.name for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in named)
    guides.append({"Examples": examples})
    return config


def _section(nav: Any, title: str) -> list[Any]:
    for entry in nav:
        if isinstance(entry, dict):
            for name, below in entry.items():
                if isinstance(below, list):
                    if name == title:
                        return below
                    if (found := _section(below, title)) is not None:
                        return found
    return None  # type: ignore[return-value]  # every title that is asked for is in mkdocs.yml


def _named(nav: Any) -> Iterator[str]:
    for entry in nav if isinstance(nav, list) else nav.values():
        if isinstance(entry, str):
            yield entry
        else:
            yield from _named(entry)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made of other files."""

    def add(uri: str, **what: Any) -> None:
        files.append(File.generated(config, uri, **what))

    for name, uri in BESIDE.items():
        if uri == "license.md":
            add(uri, content=f"# Licence\n\n```text\n{(ROOT / name).read_text()}```\n")
        elif uri != "index.md":
            add(uri, content=(ROOT / name).read_text())
    for path in sorted((ROOT / "examples").glob("*.py")):
        add(f"examples/{path.stem}.md", content=f"# {path.name}\n\n```python\n{path.read_text()}```\n")
    runs = []
    for path in sorted(RESULTS.glob("*")):
        if path.suffix in (".md", ".svg", ".png"):
            add(f"results/{path.name}", abs_src_path=str(path))
        if path.suffix == ".md":
            runs.append(f"* [{path.stem}]({path.name})")
    add(
        "results/index.md",
        content="# Whole runs\n\nAs `make bench` wrote them, losses and all.\n\n" + "\n".join(runs) + "\n",
    )
    add("reference/cli.md", content=_command_line())
    return files


def _command_line() -> str:
    """The help of every command."""
    import dcp_rs.cli.run  # noqa: F401  # adds the commands
    from dcp_rs.cli.app import app

    names = list(app.commands)
    parts = [
        "# The command line",
        "Exit status: 0 all is well, 1 a finding (damage, a difference), 2 no answer.",
    ]
    for name in ["", *names]:
        # As a process of its own: what is printed is what a terminal of this width shows.
        environment = os.environ | {"COLUMNS": "90", "NO_COLOR": "1", "TERM": "dumb"}
        command = [sys.executable, "-m", "dcp_rs", *filter(None, [name]), "--help"]
        printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        parts.append(f"## `dcp-rs{' ' + name if name else ''}`\n\n```text\n{printed.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links are those of the source tree, so that they lead somewhere there too: here they become those of the site."""
    places = _places()
    source = {uri: name for name, uri in places.items()} | {"index.md": "docs/index.md"}
    here = page.file.src_uri
    if here == "results/index.md":  # made above, of names beside it
        return markdown

    def lead(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source[here]), target))
        if file not in places:
            log.warning("%s: there is no page of %s", source[here], file)
            return match[0]
        there = posixpath.relpath(places[file], posixpath.dirname(here) or ".")
        return f"{match[1]}{there}{'#' + anchor if anchor else ''}{match[3]}"

    parts = FENCE.split(markdown)
    return "".join(part if FENCE.fullmatch(part) else LINK.sub(lead, part) for part in parts)
