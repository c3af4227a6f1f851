"""The program ``dcp-rs``. The modules of :mod:`dcp_rs.cli.commands` add their commands to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from dcp_rs._core import __version__

__all__ = ["app", "command"]


class _Program(click.Group):
    """A group that lists its commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands."""
        return list(self.commands)


@click.group(
    name="dcp-rs",
    cls=_Program,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, message="dcp-rs %(version)s", help="Print the version.")
@click.option(
    "--debug", is_flag=True, expose_value=False, help="Show the whole traceback of an error."
)
def app() -> None:
    """Inspect, verify, compare and convert PyTorch checkpoints: dcp-rs, stock DCP, safetensors, torch.save.

    Exit codes: 0 success, 1 damage or a difference found, 2 error.
    """


def command(name: str, *examples: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Adds a function to the program, with its docstring as help, which ``examples`` end as they are typed."""
    epilog = "\n".join(["\b", "Examples:", *(f"  {example}" for example in examples)])

    def add(function: Callable[..., Any]) -> click.Command:
        sentence = (function.__doc__ or "").partition(".")[0] + "."
        return app.command(name, short_help=sentence, epilog=epilog)(function)

    return add
