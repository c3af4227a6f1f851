"""``completion``: scripts for shells."""

from __future__ import annotations

import sys

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from dcp_rs.cli.app import app, command

_SHELLS: dict[str, type[ShellComplete]] = {
    "bash": BashComplete,
    "zsh": ZshComplete,
    "fish": FishComplete,
}


@command(
    "completion",
    'eval "$(dcp-rs completion bash)"   (in ~/.bashrc)',
    'eval "$(dcp-rs completion zsh)"    (in ~/.zshrc)',
    "dcp-rs completion fish > ~/.config/fish/completions/dcp-rs.fish",
)
@click.argument("shell", type=click.Choice(list(_SHELLS)))
def _completion(shell: str) -> None:
    """Print a script that completes commands, options and files in a shell."""
    script = _SHELLS[shell](app, {}, "dcp-rs", "_DCP_RS_COMPLETE").source()
    sys.stdout.write(f"{script}\n")
