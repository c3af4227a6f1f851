"""Arguments and options that several commands have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dcp_rs._url import location
from dcp_rs.checkpoint.locate import local_path
from dcp_rs.checkpoint.names import selector
from dcp_rs.cli.output import text_argument

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = [
    "any_checkpoint",
    "checkpoint",
    "chosen",
    "exclude",
    "external",
    "globs",
    "html",
    "include",
    "json",
    "location_argument",
    "path_argument",
    "rank",
    "threads",
    "with_stats",
]


#: What an option or an argument is added to.
Command = TypeVar("Command", bound=Callable[..., Any])


def path_argument(name: str) -> Callable[[Command], Command]:
    """An argument that is a path of the file system, which the shell completes."""
    return click.argument(name, type=local_path, shell_complete=_files)


def location_argument(name: str) -> Callable[[Command], Command]:
    """An argument that is a path, or a URL of an object store."""
    return click.argument(name, type=location, shell_complete=_files)


def _files(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


_FOLDERS = "PATH is a dcp-rs folder, a stock DCP folder, a Hugging Face folder"


def checkpoint(function: Command) -> Command:
    """Adds the argument ``path``: of what has an index, or is given one when it is opened."""
    return path_argument("path")(_explained(function, f"{_FOLDERS}, a .safetensors file or its .index.json."))


def any_checkpoint(function: Command) -> Command:
    """The same, which takes files of torch.save too."""
    kinds = f"{_FOLDERS}, a .safetensors file, its .index.json, a file of torch.save; or the URL of one of them."
    return location_argument("path")(_explained(function, kinds))


def _explained(function: Command, sentence: str) -> Command:
    function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{sentence}"
    return function


json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
threads = click.option("--threads", type=click.IntRange(min=1), help="Threads.  [default: the cores]")
rank = click.option("--rank", type=click.IntRange(min=0), help="What this rank wrote, of a rank-local save.")
globs = click.argument("patterns", metavar="[GLOB]...", nargs=-1, type=text_argument)
include = click.option(
    "--include", metavar="GLOB", multiple=True, type=text_argument, help="Only names that match. Can be given again."
)
exclude = click.option(
    "--exclude", metavar="GLOB", multiple=True, type=text_argument, help="Not names that match. Can be given again."
)
html = click.option(
    "--html",
    metavar="FILE",
    type=local_path,
    shell_complete=_files,
    help="Write one page of HTML with all of it; - is standard output.",
)
with_stats = click.option(
    "--stats", "with_stats", is_flag=True, help="With --html: read the tensors, and show what they hold."
)
external = click.option(
    "--allow-external", is_flag=True, help="Read data files outside of the folder, if its index names any."
)


def chosen(patterns: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> Callable[[str], bool] | None:
    """Whether an entry was asked for, by globs on the line and ``--include`` (any of them), and ``--exclude``; None where all are."""
    return selector([*patterns, *include] or None, list(exclude) or None)
