"""How commands print: lines, tables, styles, sizes for people; JSON for machines."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from dcp_rs._reports import size

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "bar",
    "count",
    "for_command_line",
    "json_text",
    "line",
    "plain",
    "prepare_streams",
    "print_json",
    "show_shape",
    "size",
    "table",
    "took",
]


def line(*parts: str | tuple[str, str]) -> None:
    """Print one line of texts, or of (text, style): ``bold``, ``dim`` or a colour.

    It is never cut or wrapped. Characters are escaped that a terminal could take for a command.
    """
    for part in parts:
        text = _printable(part if isinstance(part, str) else part[0])
        sys.stdout.write(text if isinstance(part, str) else _styled(text, part[1]))
    sys.stdout.write("\n")


def _styled(text: str, style: str) -> str:
    """Return the text with its style, if a terminal shows it: https://no-color.org."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    if style in ("bold", "dim"):
        return click.style(text, bold=style == "bold" or None, dim=style == "dim" or None)
    return click.style(text, fg=style)


class _Outlet(io.FileIO):
    """A standard stream that drops its data once the reader has gone, as ``head`` does.

    The command goes on to its exit code.
    """

    def write(self, data: Buffer, /) -> int:
        """Write, or drop the data if nobody reads.

        Raises:
            OSError: standard output is on a disk that is full, or fails. It is raised once: a
                second error, as Python exits, would replace the exit code. Failures of standard
                error are not raised, as there is no way to print them.
        """
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self.fileno() == 1 and not isinstance(error, BrokenPipeError):
                raise
            return super().write(data)


def prepare_streams() -> None:
    """Let the standard streams accept any character, and a reader that has gone, or never was.

    A character that the terminal's encoding lacks is written as an escape.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # It is closed: else the next file that is opened gets it, and what torch prints. The
            # lowest free descriptor is this one.
            os.open(os.devnull, os.O_RDWR)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not getattr(sys, f"__{name}__"):
            continue  # the stream of a caller, such as a test
        outlet = io.BufferedWriter(_Outlet(descriptor, "w", closefd=False))
        by_line = name == "stderr" or outlet.isatty()
        stream = io.TextIOWrapper(outlet, errors="backslashreplace", line_buffering=by_line)
        setattr(sys, name, stream)


def print_json(value: Any) -> None:
    """Print one JSON document, in ASCII. NaN and infinities become text, as JSON lacks them."""
    sys.stdout.write(json_text(value) + "\n")


def json_text(value: Any) -> str:
    """Return the text of a JSON document.

    Raises:
        TypeError: JSON cannot store the value.
        ValueError, RecursionError: it holds a number that is too long, or is nested too deep.
    """
    return json.dumps(plain(value), indent=2)


def plain(value: Any) -> Any:
    """Return the value with the numbers that JSON lacks as text.

    Raises:
        TypeError: a dict has a key that is no text. JSON would make it the same as one that is.
    """
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a key is no text")
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


#: Arguments of functions whose options have different names.
_OPTIONS = {"weights_only=False": "--trust-pickles", "(exclude=)": "(--exclude)"}
_CALL = re.compile(r"\bdcp_rs\.([a-z]+)(?:\(path((?:, [a-z_]+=True)*)\))?(?![\w(.])")
_RENAME = re.compile(r"\brename=\{'([^']*)': '([^']*)'\}")
#: An argument, but no part of a path, such as ``runs/rank=3/ckpt``.
_ARGUMENT = re.compile(r"(?<![\w/,=.-])([a-z_]+)=(?![^\s'\"]*/)(True\b)?(?=(['\"\d(\[])?)")


def for_command_line(text: str) -> str:
    """Return a message of the package in terms of commands and options, in one printable line."""
    from dcp_rs.cli.app import COMMANDS, all_commands

    parameters = [each for command in all_commands().values() for each in command.params]
    options = {name for parameter in parameters for name in parameter.opts}
    for name, here in _OPTIONS.items():
        text = text.replace(name, here)

    def rename(found: re.Match[str]) -> str:
        return f"--rename {shlex.quote(f'{found[1]}={found[2]}')}"

    def call(found: re.Match[str]) -> str:
        arguments = (found[2] or "").replace(",", "")
        return f"dcp-rs {found[1]}{arguments}" if found[1] in COMMANDS else found[0]

    def argument(found: re.Match[str]) -> str:
        option = "--" + found[1].replace("_", "-")
        if option not in options:
            return found[0]
        return option + (" " if found[3] else "")

    return _printable(
        _ARGUMENT.sub(argument, _RENAME.sub(rename, _CALL.sub(call, text))).replace("\n", " ")
    )


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def took(seconds: float, nbytes: int) -> str:
    """Return a time and the bytes a second: ``0.5 s (2.00 GB/s)``."""
    return f"{seconds:.1f} s ({size(nbytes / max(seconds, 1e-9))}/s)"


def count(number: int, noun: str) -> str:
    """Return ``1 file``, ``2 files``, ``3 entries``."""
    if number != 1:
        noun = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{number:,} {noun}"


def show_shape(shape: Sequence[int]) -> str:
    """Return a shape as torch prints it."""
    return str(list(shape))


def bar(share: float, width: int = 20) -> str:
    """Return a bar of at most ``width`` characters for a share; at least one if it is not 0."""
    return "█" * max(1 if share > 0 else 0, round(share * width))


def table(columns: list[str], rows: list[list[str]], indent: str = "") -> None:
    """Print a table, if it has rows. The last column is never cut.

    Args:
        columns: the headings, each after its alignment: ``<name`` or ``>size``.
        rows: the cells.
        indent: what each line begins with.
    """
    if not rows:
        return
    headings = [column[1:] for column in columns]
    widths = [max(map(len, cells)) for cells in zip(headings, *rows, strict=True)]
    widths[-1] = 0

    def fields(row: list[str]) -> str:
        cells = zip(row, columns, widths, strict=True)
        joined = "  ".join(f"{cell:{column[0]}{width}}" for cell, column, width in cells)
        return indent + joined.rstrip()

    line((fields(headings), "dim"))
    for row in rows:
        line(fields(row))
