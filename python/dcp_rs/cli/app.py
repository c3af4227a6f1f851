"""The program ``dcp-rs``. Each module of :mod:`dcp_rs.cli.commands` adds commands to it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import click

from dcp_rs._arguments import suggest
from dcp_rs._core import __version__

#: The commands, in the order of the help, and their modules.
COMMANDS = {
    **{
        name: name for name in ("ls", "tree", "inspect", "show", "stats", "verify", "diff", "clean")
    },
    "steps": "runs",
    "prune": "runs",
    "convert": "convert",
    "merge": "convert",
    **{name: name for name in ("index", "bench", "completion")},
}


class _Program(click.Group):
    """A group that imports a command when it is used: ``dcp-rs ls`` waits for no other one."""

    def list_commands(self, ctx: click.Context | None = None) -> list[str]:
        """Return the names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        """Return a command, or None if there is none of that name."""
        if cmd_name in COMMANDS:
            import_module(f"dcp_rs.cli.commands.{COMMANDS[cmd_name]}")
        return self.commands.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the name of a command, the command and its arguments.

        Raises:
            click.UsageError: there is no such command. The message suggests another.
        """
        if args[0] not in COMMANDS and args[0].isidentifier():
            hint = suggest(args[0], COMMANDS)
            ctx.fail(f"there is no command {args[0]!r}" + (f": {hint}" if hint else ""))
        return super().resolve_command(ctx, args)


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
    """Inspect, verify, compare and convert PyTorch checkpoints.

    Formats: dcp-rs, stock DCP, safetensors, torch.save.

    Exit codes: 0 success, 1 damage or a difference found, 2 error, 3 no digests to verify.
    """


def command(name: str, *examples: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Add a function to the program. Its docstring and the examples are the help."""
    epilog = "\n".join(["\b", "Examples:", *(f"  {example}" for example in examples)])

    def add(function: Callable[..., Any]) -> click.Command:
        sentence = (function.__doc__ or "").partition(".")[0] + "."
        return app.command(name, short_help=sentence, epilog=epilog)(function)

    return add


def all_commands() -> dict[str, click.Command]:
    """Import all commands, and return them by name."""
    return {name: found for name in COMMANDS if (found := app.get_command(None, name))}
