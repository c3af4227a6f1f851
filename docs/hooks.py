"""More pages of the site: files of the source tree, and what the commands print and draw.

Links are those of the source tree, so that they work there, too. On the site they lead to the page
of a file, or, if it has none, to the file in the repository.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: Pages that are files outside of docs/, and what they are called on the site.
BESIDE = {"CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}
#: The page that is made of the help of the commands.
COMMANDS = "reference/cli.md"
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")

log = logging.getLogger("mkdocs.hooks.dcp_rs")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of other files."""
    for name, uri in BESIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text()))
    files.append(File.generated(config, COMMANDS, content=_command_line()))
    for uri, content in _drawn().items():
        files.append(File.generated(config, uri, content=content))
    return files


def _drawn() -> dict[str, str]:
    """Return the page that `inspect --html` writes of a small checkpoint."""
    import torch

    import dcp_rs

    shapes = {
        "self_attn.q_proj": (64, 64),
        "self_attn.k_proj": (16, 64),
        "self_attn.v_proj": (16, 64),
        "self_attn.o_proj": (64, 64),
        "mlp.gate_proj": (176, 64),
        "mlp.up_proj": (176, 64),
        "mlp.down_proj": (64, 176),
    }

    model = {
        f"layers.{layer}.{name}.weight": torch.ones(shape)
        for layer in range(6)
        for name, shape in shapes.items()
    }
    model["embed_tokens.weight"] = torch.ones(512, 64)
    head = {"lm_head.weight": torch.ones(512, 64, dtype=torch.bfloat16)}
    with tempfile.TemporaryDirectory(prefix="dcp-rs-docs-") as folder:
        dcp_rs.save({"model": model, "step": 100} | head, f"{folder}/run/step-100", no_dist=True)
        command = [sys.executable, "-m", "dcp_rs", "inspect", "run/step-100", "--html", "page.html"]
        subprocess.run(command, check=True, cwd=folder, capture_output=True)
        return {"figures/inspect.html": Path(folder, "page.html").read_text()}


def _command_line() -> str:
    """Return the help of every command."""
    from dcp_rs.cli.app import COMMANDS

    codes = (
        "0 success, 1 damage or a difference found, 2 error, 3 no digests to verify, 130 Ctrl-C, "
        "143 SIGTERM"
    )
    parts = ["# Command line", f"Exit codes: {codes}."]
    for name in ["", *COMMANDS]:
        # As a process of its own: what is printed is what a terminal of this width shows.
        environment = os.environ | {"COLUMNS": "90", "NO_COLOR": "1", "TERM": "dumb"}
        command = [sys.executable, "-m", "dcp_rs", *filter(None, [name]), "--help"]
        printed = subprocess.run(
            command, check=True, capture_output=True, text=True, env=environment
        ).stdout
        parts.append(f"## `dcp-rs{' ' + name if name else ''}`\n\n```text\n{printed.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links of the source tree those of the site, and say where the page can be edited."""
    here = page.file.src_uri
    source = {uri: name for name, uri in BESIDE.items()}.get(here, f"docs/{here}")
    if here in BESIDE.values():
        page.edit_url = f"{config.repo_url}/edit/main/{source}"

    def lead(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        uri = BESIDE.get(file, file.removeprefix("docs/"))
        found = files.get_file_from_path(uri)
        if found is not None and found.inclusion.is_included():
            there = posixpath.relpath(uri, posixpath.dirname(here) or ".")
        elif (ROOT / file).exists():
            there = f"{config.repo_url}/{'tree' if (ROOT / file).is_dir() else 'blob'}/main/{file}"
        else:
            log.warning("%s: there is no %s", source, file)
            return match[0]
        return f"{match[1]}{there}{'#' + anchor if anchor else ''}{match[3]}"

    parts = FENCE.split(markdown)
    return "".join(part if FENCE.fullmatch(part) else LINK.sub(lead, part) for part in parts)
