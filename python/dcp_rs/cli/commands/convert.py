"""``convert`` and ``merge``: a checkpoint made from others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from dcp_rs._url import location
from dcp_rs.checkpoint.views import Views
from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.options import Command
from dcp_rs.cli.output import count, line, print_json, size, took

if TYPE_CHECKING:
    from dcp_rs.conversion import ConvertReport  # it imports torch


def _weights(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        msg = f"{text!r} is not a list of numbers such as 0.5,0.3,0.2"
        raise click.BadParameter(msg) from None


#: The options that ``convert`` and ``merge`` share.
_WRITING = [
    click.option(
        "--to",
        type=click.Choice(["dcp-rs", "dcp", "safetensors", "torch"]),
        help="The format of OUT.  [default: by the ending of OUT: torch for .pt, .pth and .bin, "
        "safetensors for .safetensors, else dcp-rs]",
    ),
    click.option(
        "--dtype",
        metavar="DTYPE",
        help="Write floating-point tensors as bf16, fp16, fp32, ...  [default: that of the input]",
    ),
    click.option("--shards", metavar="N", type=click.IntRange(min=1), help="Write N data files."),
    options.include,
    options.exclude,
    options.rename,
    click.option(
        "--skip-unsupported", is_flag=True, help="Leave out entries that the format cannot store."
    ),
    click.option("--overwrite", is_flag=True, help="Replace the checkpoint at OUT."),
    click.option(
        "--verify/--no-verify", default=True, help="Check digests while reading, if there are any."
    ),
    click.option(
        "--trust-pickles",
        is_flag=True,
        help="Unpickle anything in a torch.save file. Such a file can run code.",
    ),
    options.views,
    options.external,
    options.threads,
    options.storage,
    options.json,
]


def _writing(function: Command) -> Command:
    for option in reversed(_WRITING):
        function = option(function)
    return function


def _arguments(
    *,
    dtype: str | None,
    rename: dict[str, str] | None,
    trust_pickles: bool,
    views: Views,
    **options: Any,
) -> dict[str, Any]:
    """Return the arguments of ``dcp_rs.convert`` and ``dcp_rs.merge`` for these options."""
    import torch

    from dcp_rs.tensors.dtypes import parse_dtype

    # Weights are decoded to the dtype that was asked for, so that they are rounded once. For other
    # dtypes they are cast from float32, in which they are computed.
    target = parse_dtype(dtype)
    dequantize: bool | torch.dtype = views.dequantize is not None
    if dequantize and target is not None:
        dequantize = target if target in (torch.bfloat16, torch.float16) else torch.float32
    return options | {
        "dtype": dtype,
        "rename": rename,
        "weights_only": not trust_pickles,
        "dequantize": dequantize,
        "views": views.views,
        "progress": True,
    }


@command(
    "convert",
    "dcp-rs convert hf_model/ ckpt/",
    "dcp-rs convert ckpt/ hf_model/ --to safetensors --include 'model.*' --rename model=",
    "dcp-rs convert model.pt ckpt/ --to dcp",
)
@options.checkpoint
@options.location_argument("out")
@_writing
def _convert(path: Path, out: Path, as_json: bool, **given: Any) -> None:
    """Convert a checkpoint to another format. OUT appears when it is complete, or not at all.

    OUT is a new folder, a .pt, .pth, .bin or .safetensors file, or a URL.
    """
    import dcp_rs

    report = dcp_rs.convert(path, out, **_arguments(**given))
    if as_json:
        print_json({"path": str(path), "out": str(out), "to": given["to"], **asdict(report)})
    else:
        _show_written(report, out)


@command(
    "merge",
    "dcp-rs merge run/step-100 run/step-110 run/step-120 -o averaged/ --include 'model.*'",
    "dcp-rs merge a/ b/ c/ -o merged/ --weights 0.5,0.3,0.2 --to safetensors --dtype bf16",
)
@options.location_argument("paths", nargs=-1, required=True)
@click.option(
    "-o",
    "--out",
    metavar="OUT",
    required=True,
    type=location,
    help="The result, as OUT of dcp-rs convert.",
)
@click.option(
    "--weights",
    metavar="W,W,...",
    type=_weights,
    help="A number for each input, used as given. If the first is negative, write "
    "--weights=-0.5,1.5.  [default: the mean]",
)
@click.option(
    "--conflicts",
    type=click.Choice(["error", "first", "last", "drop"]),
    default="error",
    help="What to do with an integer, a boolean or another value that differs between inputs.",
)
@_writing
def _merge(
    paths: Sequence[Path],
    out: Path,
    weights: list[float] | None,
    conflicts: Literal["error", "first", "last", "drop"],
    as_json: bool,
    **given: Any,
) -> None:
    """Write the weighted sum of checkpoints, by default their mean.

    OUT appears when it is complete, or not at all. PATHS are checkpoints of one model, in any
    format and sharding. The state of optimizers is left out, unless --include names it.
    """
    import dcp_rs

    report = dcp_rs.merge(paths, out, weights=weights, conflicts=conflicts, **_arguments(**given))
    if as_json:
        inputs = {"paths": [str(path) for path in paths], "out": str(out)}
        print_json(inputs | {"to": given["to"], **asdict(report)})
        return
    if report.left_out:
        state = f"{count(len(report.left_out), 'entry')} of optimizer state (--include keeps it)"
        line(("left out  ", "yellow"), state)
    for name in report.conflicts:
        line(("differs   ", "yellow"), f"{name} (--conflicts {conflicts})")
    for path, weight in zip(paths, report.weights, strict=True):
        line(("summed    ", "dim"), f"{weight:g} * {path}")
    _show_written(report, out)


def _show_written(report: ConvertReport, out: Path) -> None:
    for name, reason in report.skipped.items():
        line(("left out  ", "yellow"), f"{name}: {reason}")
    for name, kept in report.tied.items():
        line(("tied      ", "dim"), f"{name} is {kept}")
    written = f"{count(len(report.written), 'entry')}, {size(report.bytes)}"
    files = f"{count(report.files, 'file')}, {took(report.seconds, report.bytes)}"
    line(f"wrote {out}: {written} in {files}")
