"""A run of the program. An error becomes one line and, with ``--json``, a document."""

from __future__ import annotations

import signal
import sys
import warnings
from typing import Any

import click

from dcp_rs.cli.app import app
from dcp_rs.cli.output import for_command_line, prepare_streams, print_json
from dcp_rs.errors import DcpRsError


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given, names = arguments[:end], arguments[end:]
    # ``--debug`` may stand anywhere: people add it at the end of a line that failed.
    debug = "--debug" in given
    arguments = [argument for argument in given if argument != "--debug"] + names
    signal.signal(signal.SIGTERM, _terminate)
    prepare_streams()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _say(
                for_command_line(f"warning: {message}")
            )
            result = app(arguments or ["--help"], prog_name="dcp-rs", standalone_mode=False)
            sys.stdout.flush()
        status = (result or 0) if arguments else 2
    except (KeyboardInterrupt, click.Abort):  # click makes the one of the other
        if debug:
            raise
        _say("interrupted")
        status = 130
    except Exception as error:  # every error becomes one line
        if debug:
            raise
        text = for_command_line(_message(error))
        _say(text)
        if "--json" in given:
            where = {name: getattr(error, name, None) for name in ("path", "tensor", "offset")}
            print_json({"error": {"type": type(error).__name__, "message": text, **where}})
        status = 2
    sys.exit(status)


def _terminate(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


def _message(error: Exception) -> str:
    if isinstance(error, click.ClickException):  # the command line itself is wrong
        context = getattr(error, "ctx", None)
        command = "dcp-rs" if context is None else context.command_path
        return f"{error.format_message()} ({command} --help)"
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and not isinstance(error, DcpRsError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if not isinstance(error, DcpRsError | OSError | ValueError):
        return f"{type(error).__name__}: {text} (--debug shows where)"
    return text


def _say(text: str) -> None:
    sys.stderr.write(f"dcp-rs: {text}\n")
