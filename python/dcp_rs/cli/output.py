"""What the commands print: text for people, JSON for machines, progress on a terminal only."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

__all__ = [
    "bar",
    "count",
    "for_command_line",
    "line",
    "print_json",
    "printable",
    "progress_bar",
    "rate",
    "show_shape",
    "size",
]


def console(*, stderr: bool = False) -> Console:
    """Where text goes: without colours, unless it is a terminal."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


def line(*parts: str | tuple[str, str]) -> None:
    """Prints one line of texts, or (text, style). It is never cut or wrapped."""
    console().print(Text.assemble(*parts), soft_wrap=True)


def print_json(value: Any) -> None:
    """Prints one JSON document. Numbers that JSON has not (NaN, infinities) become text."""
    sys.stdout.write(json.dumps(_plain(value), indent=2, ensure_ascii=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


#: What messages call an option or a function, and what it is called here.
_COMMANDS = {
    "dcp_rs.index(path, overwrite=True)": "dcp-rs index --overwrite",
    "dcp_rs.index(path)": "dcp-rs index",
    "dcp_rs.convert": "dcp-rs convert",
    "overwrite=True": "--overwrite",
    "skip_unsupported=True": "--skip-unsupported",
    "weights_only=False": "--trust-pickles",
}


def for_command_line(text: str) -> str:
    """A message of the package, in terms of the commands."""
    for name, here in _COMMANDS.items():
        text = text.replace(name, here)
    return text


def printable(text: str) -> str:
    """The text with anything that a terminal could take for a command written out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def size(nbytes: float) -> str:
    """Bytes, to three digits (powers of 1000)."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        nbytes /= 1000
        if nbytes < 999.5 or unit == "TB":
            break
    return (
        f"{nbytes:.2f} {unit}"
        if nbytes < 9.995
        else f"{nbytes:.1f} {unit}"
        if nbytes < 99.95
        else f"{nbytes:.0f} {unit}"
    )


def rate(nbytes: int, seconds: float) -> str:
    """Bytes a second."""
    return f"{size(nbytes / seconds)}/s" if seconds > 0 else ""


def count(number: int, noun: str) -> str:
    """A number of things: ``1 file``, ``2 files``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def show_shape(shape: Any) -> str:
    """A shape as torch shows it."""
    return f"[{', '.join(map(str, shape))}]"


def bar(share: float, width: int = 20) -> str:
    """A share as a bar of at most ``width`` characters; something for anything."""
    return "█" * max(1 if share > 0 else 0, round(share * width))


@contextmanager
def progress_bar(what: str, *, total: int | None = None) -> Iterator[Callable[..., None] | None]:
    """A function to call with the bytes done (and all bytes). None where nobody watches."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task(what, total=total)

        def show(done: int, all_bytes: int | None = None) -> None:
            progress.update(task, completed=done, total=all_bytes if all_bytes is not None else total)

        yield show
