"""``completion``: scripts for shells."""

from __future__ import annotations

import click
from click.shell_completion import shell_complete

from dcp_rs.cli.app import app, command


@command(
    "completion",
    'eval "$(dcp-rs completion bash)"   (in ~/.bashrc)',
    'eval "$(dcp-rs completion zsh)"    (in ~/.zshrc)',
    "dcp-rs completion fish > ~/.config/fish/completions/dcp-rs.fish",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def _completion(shell: str) -> int:
    """Print a script that completes commands, options and files in a shell."""
    return shell_complete(app, {}, "dcp-rs", "_DCP_RS_COMPLETE", f"{shell}_source")
