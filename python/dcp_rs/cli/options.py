"""Arguments and options that several commands have, and how their help shows examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from dcp_rs.checkpoint.locate import local_path
from dcp_rs.checkpoint.names import selector
from dcp_rs.cli.output import text_argument

__all__ = [
    "AnyCheckpoint",
    "Checkpoint",
    "Exclude",
    "External",
    "Globs",
    "Html",
    "Include",
    "Json",
    "Rank",
    "Threads",
    "WithStats",
    "chosen",
    "examples",
]


def examples(*commands: str) -> str:
    """The end of a command's help."""
    return "\n\n".join(["[dim]Examples:[/dim]", *(escape(f"  {command}") for command in commands)])


_FOLDERS = "A dcp-rs folder, a stock DCP folder, a Hugging Face folder"

#: What has an index, or is given one when it is opened.
Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help=f"{_FOLDERS}, a .safetensors file or its .index.json.",
        show_default=False,
        parser=local_path,
    ),
]
AnyCheckpoint = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help=f"{_FOLDERS}, a .safetensors file, its .index.json or a file of torch.save.",
        show_default=False,
        parser=local_path,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads. [default: the cores]", show_default=False)]
Rank = Annotated[
    int | None, typer.Option(min=0, help="What this rank wrote, of a rank-local save.", show_default=False)
]
Globs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[GLOB]...",
        help="Only names that match; as --include.",
        show_default=False,
        parser=text_argument,
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB", help="Only names that match. Can be given again.", show_default=False, parser=text_argument
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB", help="Not names that match. Can be given again.", show_default=False, parser=text_argument
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write one page of HTML with all of it; - is standard output.",
        show_default=False,
        parser=local_path,
    ),
]
WithStats = Annotated[bool, typer.Option("--stats", help="With --html: read the tensors, and show what they hold.")]
External = Annotated[
    bool, typer.Option("--allow-external", help="Read data files outside of the folder, if its index names any.")
]


def chosen(
    patterns: Sequence[str] | None, include: Sequence[str] | None, exclude: Sequence[str] | None
) -> Callable[[str], bool] | None:
    """Whether an entry was asked for, by globs on the line and ``--include`` (any of them), and ``--exclude``; None where all are."""
    return selector([*(patterns or []), *(include or [])] or None, exclude or None)
