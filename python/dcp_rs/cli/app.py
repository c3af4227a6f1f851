"""The program ``dcp-rs``, to which modules of :mod:`dcp_rs.cli.commands` add their commands, and the options before any of them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dcp_rs._core import __version__

__all__ = ["app"]

app = typer.Typer(
    name="dcp-rs",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"dcp-rs {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Look at, check, convert and compare PyTorch checkpoints: dcp-rs, stock DCP, safetensors, torch.save.

    Exit status: 0 all is well, 1 a finding (damage, a difference), 2 no answer.
    """
