"""Arguments and options of several commands."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dcp_rs._url import StorageOptions, location, use_storage_options
from dcp_rs.checkpoint.folders import local_path
from dcp_rs.checkpoint.names import selector
from dcp_rs.checkpoint.views import Layout, views_in
from dcp_rs.cli.output import text_argument

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = [
    "any_checkpoint",
    "check_stats",
    "checkpoint",
    "dequantize",
    "exclude",
    "external",
    "html",
    "include",
    "json",
    "layout",
    "location_argument",
    "location_arguments",
    "rank",
    "selection",
    "show_all",
    "storage",
    "threads",
    "with_stats",
]


#: A function that options and arguments are added to.
Command = TypeVar("Command", bound=Callable[..., Any])


def location_argument(name: str) -> Callable[[Command], Command]:
    """Add an argument that is a path, or a URL of an object store."""
    return click.argument(name, type=location, shell_complete=_files)


def location_arguments(name: str) -> Callable[[Command], Command]:
    """Add one or more arguments that are paths, or URLs of object stores."""
    return click.argument(name, type=location, nargs=-1, required=True, shell_complete=_files)


def _files(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


#: An option of one store, with the store's URL before its name.
_FOR = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^=]*):([^:/=]+)")


def _use_store(_context: click.Context, _parameter: click.Parameter, pairs: Sequence[str]) -> None:
    options: dict[str, dict[str, str]] = {}
    for pair in pairs:
        key, is_there, value = pair.partition("=")
        if not is_there or not key:
            raise click.BadParameter("not KEY=VALUE")  # the text may be a secret
        limited = _FOR.fullmatch(key)
        store, name = limited.groups() if limited else ("", key)
        options.setdefault(store, {})[name] = value
    use_storage_options({store: StorageOptions(given) for store, given in options.items()})


storage = click.option(
    "--storage-option",
    metavar="[URL:]KEY=VALUE",
    multiple=True,
    expose_value=False,
    callback=_use_store,
    help="Set an option of the object store of a URL, such as aws_region=eu-west-1. Put a URL "
    "before it to limit it to that store: s3://other:aws_region=us-east-2. Repeatable. Pass "
    "secrets in environment variables.",
)


_FOLDERS = "PATH is a folder of dcp-rs, stock DCP or Hugging Face"


def checkpoint(function: Command) -> Command:
    """Add the argument ``path``: a local checkpoint that is no file of torch.save."""
    kinds = f"{_FOLDERS}, or a .safetensors file or its .index.json."
    return click.argument("path", type=local_path, shell_complete=_files)(
        _explained(function, kinds)
    )


def any_checkpoint(function: Command) -> Command:
    """Add the argument ``path``: any checkpoint, or its URL."""
    kinds = (
        f"{_FOLDERS}, a .safetensors file or its .index.json, or a torch.save file; "
        "or the URL of one on a store."
    )
    return location_argument("path")(_explained(function, kinds))


def _explained(function: Command, sentence: str) -> Command:
    function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{sentence}"
    return function


dequantize = click.option(
    "--dequantize",
    is_flag=True,
    help="Take quantized weights as bfloat16 tensors. The format is detected.",
)


def layout(function: Command) -> Command:
    """Add ``--dequantize`` and ``--views``, and pass them as ``layout``."""

    @functools.wraps(function)
    def with_layout(*args: Any, dequantize: bool, views: Path | None, **kwargs: Any) -> Any:
        return function(
            *args, layout=Layout.of(dequantize, views_in(views) if views else None), **kwargs
        )

    described = click.option(
        "--views",
        metavar="FILE",
        type=local_path,
        shell_complete=_files,
        help="Join, cut or turn tensors first, by a JSON list: "
        '[{"stack": "a.{n}.w", "into": "a.w"}, ...].',
    )(with_layout)
    return dequantize(described)  # type: ignore[return-value]  # its own arguments differ


json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
threads = click.option(
    "--threads",
    metavar="N",
    type=click.IntRange(min=1),
    help="Use N threads.  [default: the number of cores]",
)
rank = click.option(
    "--rank",
    metavar="N",
    type=click.IntRange(min=0),
    help="Of a rank-local save, show the part that rank N wrote.",
)
include = click.option(
    "--include",
    metavar="GLOB",
    multiple=True,
    type=text_argument,
    help="Take only names that match. Repeatable.",
)
exclude = click.option(
    "--exclude",
    metavar="GLOB",
    multiple=True,
    type=text_argument,
    help="Leave out names that match. Repeatable.",
)


def selection(function: Command) -> Command:
    """Add globs, ``--include`` and ``--exclude``, and pass a test of names as ``chosen``."""

    @functools.wraps(function)
    def with_selection(
        *args: Any,
        patterns: Sequence[str],
        include: Sequence[str],
        exclude: Sequence[str],
        **kwargs: Any,
    ) -> Any:
        chosen = selector([*patterns, *include] or None, list(exclude) or None)
        return function(*args, chosen=chosen, **kwargs)

    globs = click.argument("patterns", metavar="[GLOB]...", nargs=-1, type=text_argument)
    return globs(include(exclude(with_selection)))  # type: ignore[return-value]  # as above


html = click.option(
    "--html",
    metavar="FILE",
    type=local_path,
    shell_complete=_files,
    help="Write an HTML page in place of text; - is standard output.",
)
with_stats = click.option(
    "--stats",
    "with_stats",
    is_flag=True,
    help="Add statistics of the tensors to the HTML page. Reads all of them.",
)
external = click.option(
    "--allow-external",
    is_flag=True,
    help="Read data files outside the folder, if the index names any.",
)
show_all = click.option("--all", "show_all", is_flag=True, help="Print long lists in full.")


def check_stats(with_stats: bool, html: Path | None) -> None:
    """Raise if ``--stats`` was given without ``--html``."""
    if with_stats and html is None:
        raise click.UsageError("--stats needs --html; dcp-rs stats prints statistics")
