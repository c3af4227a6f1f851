"""Arguments and options of several commands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from dcp_rs._url import StorageOptions, location, use_storage_options
from dcp_rs.checkpoint.names import selector
from dcp_rs.checkpoint.views import Views
from dcp_rs.cli.contents import SORTS

#: A function that options and arguments are added to.
Command = TypeVar("Command", bound=Callable[..., Any])


#: Completes a word as the name of a file.
_files = click.Path().shell_complete


def location_argument(name: str, **more: Any) -> Callable[[Command], Command]:
    """Add an argument that is a path, or a URL of an object store."""
    return click.argument(name, type=location, shell_complete=_files, **more)


def _use_store(_context: click.Context, _parameter: click.Parameter, pairs: Sequence[str]) -> None:
    options: dict[str, dict[str, str]] = {}
    for pair in pairs:
        key, is_there, value = pair.partition("=")
        if not is_there or not key:
            raise click.BadParameter("not KEY=VALUE")  # the text may be a secret
        # Before the name there may be the URL of the one store that it is for.
        store, _, name = key.rpartition(":")
        if "://" not in store:
            store, name = "", key
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


def checkpoint(function: Command) -> Command:
    """Add the argument ``path``: any checkpoint, or its URL."""
    kinds = (
        "PATH is a folder of dcp-rs, stock DCP or Hugging Face, a .safetensors file or its "
        ".index.json, or a torch.save file; or the URL of one on a store."
    )
    function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{kinds}"
    return location_argument("path")(function)


def _views(_context: click.Context, _parameter: click.Parameter, dequantize: bool) -> Views:
    return Views.of(dequantize, None)


views = click.option(
    "--dequantize",
    "views",
    is_flag=True,
    callback=_views,
    help="Take quantized weights as bfloat16 tensors. The format is detected.",
)
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


def local(does: str) -> Callable[[Command], Command]:
    """Add the folders of nodes."""
    return click.option(
        "--local",
        multiple=True,
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        metavar="FOLDER",
        help="The folder of a node (local= of the manager), once for each node that can be seen "
        f"from here: {does}",
    )


def _globs(
    _context: click.Context, _parameter: click.Parameter, given: Sequence[str]
) -> list[str] | None:
    return list(given) or None


include = click.option(
    "--include",
    metavar="GLOB",
    multiple=True,
    callback=_globs,
    help="Take only names that match. Repeatable.",
)
exclude = click.option(
    "--exclude",
    metavar="GLOB",
    multiple=True,
    callback=_globs,
    help="Leave out names that match. Repeatable.",
)


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals:
        raise click.BadParameter("it takes OLD=NEW")
    return old, new


def _mapping(
    _context: click.Context, _parameter: click.Parameter, pairs: Sequence[tuple[str, str]]
) -> dict[str, str] | None:
    return dict(pairs) or None


rename = click.option(
    "--rename",
    metavar="OLD=NEW",
    multiple=True,
    type=_pair,
    callback=_mapping,
    help="Rename an entry, or the prefix of names up to a dot. OLD= removes a prefix, =NEW adds "
    "one to all names. Repeatable.",
)


def selection(function: Command) -> Command:
    """Add globs, ``--include`` and ``--exclude``, and pass a test of names as ``chosen``."""

    @functools.wraps(function)
    def with_selection(
        *args: Any,
        patterns: Sequence[str],
        include: list[str] | None,
        exclude: list[str] | None,
        **kwargs: Any,
    ) -> Any:
        chosen = selector([*patterns, *(include or ())] or None, exclude)
        return function(*args, chosen=chosen, **kwargs)

    globs = click.argument("patterns", metavar="[GLOB]...", nargs=-1)
    return globs(include(exclude(with_selection)))  # type: ignore[return-value]  # as above


external = click.option(
    "--allow-external",
    is_flag=True,
    help="Read data files outside the folder, if the index names any.",
)
show_all = click.option("--all", "show_all", is_flag=True, help="Print long lists in full.")
sort = click.option("--sort", type=click.Choice(list(SORTS)), default="name", help="Sort by this.")
