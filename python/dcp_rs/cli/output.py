"""How commands print: lines, tables, styles, sizes for people; JSON for machines."""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import re
import sys
from typing import TYPE_CHECKING, Any, TextIO

import click

from dcp_rs._reports import size

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "bar",
    "count",
    "entries",
    "for_command_line",
    "is_json",
    "line",
    "plain",
    "prepare_streams",
    "print_json",
    "printable",
    "rate",
    "readable",
    "show_shape",
    "size",
    "table",
    "text_argument",
]


def line(*parts: str | tuple[str, str]) -> None:
    """Print one line of texts, or of (text, style), as ``bold red``. It is never cut or wrapped."""
    fitting = [
        _fitting(part) if isinstance(part, str) else _styled(_fitting(part[0]), part[1])
        for part in parts
    ]
    sys.stdout.write("".join(fitting) + "\n")


def _styled(text: str, style: str) -> str:
    """Return the text with its style, if a terminal shows it: https://no-color.org."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    words = style.split()
    colour = next((word for word in words if word not in ("bold", "dim")), None)
    return click.style(text, fg=colour, bold="bold" in words or None, dim="dim" in words or None)


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
            if self.fileno() == _OUT and not isinstance(error, BrokenPipeError):
                raise
            return super().write(data)


#: Descriptors of standard output and standard error.
_OUT, _ERROR = 1, 2


def _with_outlet(stream: TextIO, descriptor: int) -> TextIO:
    """Return the stream through an outlet, if it is that of the descriptor, and no terminal."""
    buffer = getattr(stream, "buffer", None)
    behind = getattr(buffer, "raw", buffer)  # with PYTHONUNBUFFERED there is no buffer
    if (
        not isinstance(stream, io.TextIOWrapper)
        or not isinstance(behind, io.FileIO)
        or behind.fileno() != descriptor
        or stream.isatty()
    ):
        return stream
    stream.flush()
    raw = io.BufferedWriter(_Outlet(descriptor, "w", closefd=False))
    return io.TextIOWrapper(
        raw, encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering
    )


def _open_closed_streams() -> None:
    """Open the descriptors 0 to 2 if they are closed.

    Else the next files that are opened get them, and receive the text that torch prints.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free descriptor, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115


def prepare_streams() -> None:
    """Let the standard streams accept any character, and a reader that has gone, or never was.

    A character that the terminal's encoding lacks is written as an escape.
    """
    _open_closed_streams()
    sys.stdout, sys.stderr = _with_outlet(sys.stdout, _OUT), _with_outlet(sys.stderr, _ERROR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


#: Replacements of drawing characters that the terminal's encoding lacks.
_PLAIN = str.maketrans(
    {"█": "#", "·": ".", "…": "...", "─": "-", "│": "|", **dict.fromkeys("┌┐└┘", "+")}
)


def _fitting(text: str) -> str:
    text = readable(text)
    return text if _fits(text) else text.translate(_PLAIN)


def _fits(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def text_argument(argument: str) -> str:
    """Return a name or a pattern as it was typed, in UTF-8, whatever encoding Python assumes.

    Paths stay as Python can open them.
    """
    try:
        return os.fsencode(argument).decode()
    except UnicodeError:
        return argument


def readable(text: str) -> str:
    """Return the text with bytes that Python could not decode taken as UTF-8."""
    if text.isascii() or not any("\udc80" <= c <= "\udcff" for c in text):
        return text
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def print_json(value: Any) -> None:
    """Print one JSON document, in UTF-8 or in ASCII.

    NaN and infinities become text, as JSON has no such numbers. Characters that a terminal could
    take for a command are escaped.
    """
    text = json.dumps(plain(value), indent=2, ensure_ascii=False)
    if not text.replace("\n", "").isprintable():
        text = "".join(c if c == "\n" or c.isprintable() else _escaped(c) for c in text)
    if codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8" or not _fits(text):
        text = json.dumps(plain(value), indent=2)
    sys.stdout.write(text + "\n")


def _escaped(character: str) -> str:
    """Return the character as JSON escapes it. JSON's own encoder leaves DEL as it is."""
    return json.dumps(character)[1:-1] if character != "\x7f" else "\\u007f"


def plain(value: Any) -> Any:
    """Return the value as JSON can store it."""
    if isinstance(value, dict):
        return {readable(str(key)): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


#: Bits of the largest integer that Python prints: its limit of 4,300 digits is a little more.
_BITS = 14_000


def is_json(value: Any) -> bool:
    """Return whether JSON can store the value, with tuples as lists, and infinities as text."""
    if isinstance(value, dict):
        return all(type(key) is str and is_json(entry) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_json, value))
    if type(value) is int:
        return value.bit_length() < _BITS
    return value is None or type(value) in (bool, float, str)


#: Arguments of functions whose options have different names.
_OPTIONS = {"weights_only=False": "--trust-pickles", "(exclude=)": "(--exclude)"}
_CALL = re.compile(r"\bdcp_rs\.([a-z]+)(?:\(path((?:, [a-z_]+=True)*)\))?(?![\w(.])")
#: An argument, but no part of a path, such as ``runs/rank=3/ckpt``.
_ARGUMENT = re.compile(r"(?<![\w/,=.-])([a-z_]+)=(?![^\s'\"]*/)(True\b)?(?=(['\"\d(\[])?)")


def for_command_line(text: str) -> str:
    """Return a message of the package in terms of commands and options."""
    from dcp_rs.cli.app import COMMANDS, all_commands

    parameters = [each for command in all_commands().values() for each in command.params]
    options = {name for parameter in parameters for name in parameter.opts}
    for name, here in _OPTIONS.items():
        text = text.replace(name, here)

    def call(found: re.Match[str]) -> str:
        arguments = (found[2] or "").replace(",", "")
        return f"dcp-rs {found[1]}{arguments}" if found[1] in COMMANDS else found[0]

    def argument(found: re.Match[str]) -> str:
        option = "--" + found[1].replace("_", "-")
        if option not in options:
            return found[0]
        return option + (" " if found[3] else "")

    return _ARGUMENT.sub(argument, _CALL.sub(call, text))


def printable(text: str) -> str:
    """Return the text with characters escaped that a terminal could take for a command."""
    text = readable(text)
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def rate(nbytes: int, seconds: float) -> str:
    """Return bytes a second as text."""
    return f"{size(nbytes / seconds)}/s" if seconds > 0 else ""


def count(number: int, noun: str) -> str:
    """Return ``1 file``, ``2 files``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def entries(number: int) -> str:
    """Return ``1 entry``, ``2 entries``."""
    return "1 entry" if number == 1 else f"{number:,} entries"


def show_shape(shape: Any) -> str:
    """Return a shape as torch prints it."""
    return f"[{', '.join(map(str, shape))}]"


def bar(share: float, width: int = 20) -> str:
    """Return a bar of at most ``width`` characters for a share; at least one if it is not 0."""
    return "█" * max(1 if share > 0 else 0, round(share * width))


def table(columns: list[tuple[str, str]], rows: list[list[str]], indent: str = "") -> None:
    """Print a table of columns, each (heading, alignment ``<`` or ``>``). The last is never cut."""
    if not rows:
        return
    headings = [heading for heading, _ in columns]
    widths = [max(map(len, cells)) for cells in zip(headings, *rows, strict=True)]
    widths[-1] = 0

    def fields(row: list[str]) -> str:
        cells = zip(row, columns, widths, strict=True)
        joined = "  ".join(f"{cell:{side}{width}}" for cell, (_, side), width in cells)
        return indent + joined.rstrip()

    line((fields(headings), "dim"))
    for row in rows:
        line(fields(row))
