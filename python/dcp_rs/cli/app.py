"""The program ``dcp-rs``, to which modules of :mod:`dcp_rs.cli.commands` add their commands, and the options before any of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from dcp_rs._core import __version__
from dcp_rs._url import StorageOptions, use_storage_options

__all__ = ["app", "command"]


class _Program(click.Group):
    """A group that lists its commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands."""
        return list(self.commands)


#: A URL before the name of an option: the stores that it is for.
_FOR = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^=]*):([^:/=]+)")


def _use_store(_context: click.Context, _parameter: click.Parameter, pairs: Sequence[str]) -> None:
    options: dict[str, dict[str, str]] = {}
    for pair in pairs:
        key, is_there, value = pair.partition("=")
        if not is_there or not key:
            raise click.BadParameter("not KEY=VALUE")  # not what it is, which may be a secret
        limited = _FOR.fullmatch(key)
        store, name = limited.groups() if limited else ("", key)
        options.setdefault(store, {})[name] = value
    use_storage_options({store: StorageOptions(given) for store, given in options.items()})


@click.group(
    name="dcp-rs", cls=_Program, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(__version__, message="dcp-rs %(version)s", help="Print the version.")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
@click.option(
    "--storage-option",
    metavar="[URL:]KEY=VALUE",
    multiple=True,
    expose_value=False,
    callback=_use_store,
    help="How to reach the store of a URL, as aws_region=eu-west-1, or only what is at that URL, as s3://other:aws_region=us-east-2. Can be given again. "
    "Secrets are better in the environment.",
)
def app() -> None:
    """Look at, check, convert and compare PyTorch checkpoints: dcp-rs, stock DCP, safetensors, torch.save.

    Exit status: 0 all is well, 1 a finding (damage, a difference), 2 no answer.
    """


def command(name: str, *examples: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Adds a function to the program, with its docstring as help, which ``examples`` end as they are typed."""
    epilog = "\n".join(["\b", "Examples:", *(f"  {example}" for example in examples)])

    def add(function: Callable[..., Any]) -> click.Command:
        sentence = (function.__doc__ or "").partition(".")[0] + "."
        return app.command(name, short_help=sentence, epilog=epilog)(function)

    return add
