"""``show``: the elements of a tensor, or a value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.contents import Contents, value_json, value_text
from dcp_rs.cli.output import line, print_json, show_shape
from dcp_rs.errors import PlanError, UnsupportedError

#: The text that torch prints around the elements of a tensor.
_FRAME = re.compile(r"\Atensor\(|(,\s+(size=\([\d, ]*\)|dtype=[\w.]+))*\)\Z")
_SLICE = re.compile(r"(-?\d+)|(-?\d*):(-?\d*)")


def _index(text: str) -> tuple[int | slice, ...]:
    """Parse an index such as ``0, 2:5, :``."""
    parts = [_SLICE.fullmatch(part.strip()) for part in text.strip("[]").split(",")]

    def one(found: re.Match[str] | None) -> int | slice:
        if found is None:
            msg = f"{text!r} is not an index such as '0,2:5' or ':4'"
            raise click.BadParameter(msg)
        if found[1] is not None:
            return int(found[1])
        return slice(*(int(end) if end else None for end in found.groups()[1:]))

    return tuple(map(one, parts))


@command(
    "show",
    "dcp-rs show ckpt/ model.embed.weight",
    "dcp-rs show ckpt/ model.embed.weight --slice '0,:8'",
    "dcp-rs show ckpt/ step --json",
)
@options.checkpoint
@click.argument("name")
@click.option("--slice", "part", metavar="INDEX", type=_index, help="Show a part: '0', '2:5,:8'.")
@options.views
@options.rank
@options.external
@options.storage
@options.json
def _show(
    path: Path,
    name: str,
    part: tuple[int | slice, ...] | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Print the elements of a tensor, or a value.

    Of a large tensor, the elements at its edges are printed. --json prints all of them, and
    complex numbers as pairs.
    """
    contents = Contents(path, **how)
    entry = contents.entry(name)
    if entry.dtype is None:
        if part is not None:
            raise PlanError(f"{name!r} is not a tensor: leave --slice out", tensor=name)
        if as_json:
            print_json({"name": name, **value_json(contents.value(entry))})
        else:
            line(value_text(contents.value(entry), 1_000_000))
        return
    import torch

    from dcp_rs.checkpoint.open import Checkpoint
    from dcp_rs.options import ReadOptions

    with Checkpoint(contents.index, options=ReadOptions()) as checkpoint:
        tensor = checkpoint[name] if part is None else checkpoint.get_slice(name)[part]
        if tensor.dtype == torch.float4_e2m1fn_x2:
            msg = f"{name!r} is of dtype {entry.dtype}, which torch cannot print"
            raise UnsupportedError(msg, path=checkpoint.path, tensor=name)
        if as_json:
            numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            numbers = numbers.double() if numbers.is_floating_point() else numbers
            known = {"name": name, "dtype": entry.dtype, "shape": list(tensor.shape)}
            print_json(known | {"elements": numbers.tolist()})
            return
        line((f"{entry.dtype} {show_shape(tensor.shape)}", "dim"))
        for text in _FRAME.sub("", str(tensor.detach())).splitlines():
            line(text.removeprefix(" " * len("tensor(")))
