"""Commands that write: ``convert``, ``merge``, ``index``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from dcp_rs._url import location
from dcp_rs.checkpoint.folders import local_path
from dcp_rs.checkpoint.views import Layout
from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.output import text_argument


@command(
    "convert",
    "dcp-rs convert hf_model/ ckpt/",
    "dcp-rs convert ckpt/ hf_model/ --to safetensors --include 'model.*' --rename model= --dtype bf16",
    "dcp-rs convert model.pt ckpt/ --to dcp",
)
@options.any_checkpoint
@options.location_argument("out")
@click.option(
    "--to",
    type=click.Choice(["dcp-rs", "dcp", "safetensors", "torch"]),
    help="The format of OUT.  [default: by the ending of OUT: torch for .pt, .pth and .bin, safetensors for .safetensors, else dcp-rs]",
)
@click.option("--dtype", metavar="DTYPE", help="Cast floating-point tensors: bf16, fp16, fp32, ...")
@click.option("--shards", metavar="N", type=click.IntRange(min=1), help="Write N data files.")
@options.include
@options.exclude
@click.option(
    "--rename",
    metavar="OLD=NEW",
    multiple=True,
    type=text_argument,
    help="Rename an entry, or the prefix of names up to a dot. OLD= removes a prefix, =NEW adds one to all names. Repeatable.",
)
@click.option(
    "--skip-unsupported", is_flag=True, help="Leave out entries that the format cannot store."
)
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint at OUT.")
@click.option(
    "--verify/--no-verify",
    default=True,
    help="Check the digests of PATH while reading, if it has any.",
)
@click.option(
    "--trust-pickles",
    is_flag=True,
    help="Unpickle anything in a torch.save file. Such a file can run code.",
)
@options.layout
@options.external
@options.threads
@options.storage
@options.json
def _convert(
    path: Path,
    out: Path,
    to: str | None,
    dtype: str | None,
    shards: int | None,
    include: Sequence[str],
    exclude: Sequence[str],
    rename: Sequence[str],
    skip_unsupported: bool,
    overwrite: bool,
    verify: bool,
    trust_pickles: bool,
    layout: Layout,
    allow_external: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Convert a checkpoint to another format. OUT appears when it is complete, or not at all.

    OUT is a new folder, a .pt, .pth, .bin or .safetensors file, or a URL.
    """
    from dcp_rs.cli.work import convert

    convert(
        path,
        out,
        to=to,
        dtype=dtype,
        shards=shards,
        include=list(include) or None,
        exclude=list(exclude) or None,
        renames=rename,
        skip_unsupported=skip_unsupported,
        overwrite=overwrite,
        verify=verify,
        weights_only=not trust_pickles,
        allow_external=allow_external,
        layout=layout,
        threads=threads,
        as_json=as_json,
    )


def _parse_weights(
    _context: click.Context, _parameter: click.Parameter, text: str | None
) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 0.5,0.3,0.2") from None


@command(
    "merge",
    "dcp-rs merge run/step-100 run/step-110 run/step-120 -o averaged/ --include 'model.*'",
    "dcp-rs merge a/ b/ c/ -o merged/ --weights 0.5,0.3,0.2 --to safetensors --dtype bf16",
)
@options.location_arguments("paths")
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
    callback=_parse_weights,
    help="A number for each input, used as given. If the first is negative, write --weights=-0.5,1.5.  [default: the mean]",
)
@click.option(
    "--conflicts",
    type=click.Choice(["error", "first", "last", "drop"]),
    default="error",
    show_default=True,
    help="What to do with an integer, a boolean or another value that differs between inputs.",
)
@click.option(
    "--to",
    type=click.Choice(["dcp-rs", "dcp", "safetensors", "torch"]),
    help="The format of OUT, as for dcp-rs convert.",
)
@click.option(
    "--dtype",
    metavar="DTYPE",
    help="The type of the sums: bf16, fp16, fp32, ...  [default: that of the first input]",
)
@click.option("--shards", metavar="N", type=click.IntRange(min=1), help="Write N data files.")
@options.include
@options.exclude
@click.option(
    "--rename",
    metavar="OLD=NEW",
    multiple=True,
    type=text_argument,
    help="Rename an entry, or the prefix of names up to a dot. Repeatable.",
)
@click.option(
    "--skip-unsupported", is_flag=True, help="Leave out entries that the format cannot store."
)
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint at OUT.")
@click.option(
    "--verify/--no-verify",
    default=True,
    help="Check the digests of the inputs while reading, if they have any.",
)
@click.option(
    "--trust-pickles",
    is_flag=True,
    help="Unpickle anything in a torch.save file. Such a file can run code.",
)
@options.layout
@options.external
@options.threads
@options.storage
@options.json
def _merge(
    paths: Sequence[Path],
    out: Path,
    weights: list[float] | None,
    conflicts: str,
    to: str | None,
    dtype: str | None,
    shards: int | None,
    include: Sequence[str],
    exclude: Sequence[str],
    rename: Sequence[str],
    skip_unsupported: bool,
    overwrite: bool,
    verify: bool,
    trust_pickles: bool,
    layout: Layout,
    allow_external: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Write the weighted sum of checkpoints, by default their mean. OUT appears when it is complete, or not at all.

    PATHS are checkpoints of one model, in any format and sharding. The state of optimizers is left
    out, unless --include names it.
    """
    from dcp_rs.cli.work import merge

    merge(
        paths,
        out,
        weights=weights,
        conflicts=conflicts,
        to=to,
        dtype=dtype,
        shards=shards,
        include=list(include) or None,
        exclude=list(exclude) or None,
        renames=rename,
        skip_unsupported=skip_unsupported,
        overwrite=overwrite,
        verify=verify,
        weights_only=not trust_pickles,
        layout=layout,
        allow_external=allow_external,
        threads=threads,
        as_json=as_json,
    )


@command(
    "index",
    "dcp-rs index old_dcp_folder/",
    "dcp-rs index hf_model/ --digests",
    "dcp-rs index ckpt/   (after its index was lost)",
)
@options.any_checkpoint
@click.option(
    "--out",
    metavar="DIR",
    type=local_path,
    help="Write the index to this folder, not beside the data.",
)
@click.option(
    "--digests", is_flag=True, help="Hash the data, so that dcp-rs verify can check it later."
)
@click.option(
    "--generation",
    metavar="N",
    type=click.IntRange(min=0),
    help="Recover the save of this generation (the number after g in file names).",
)
@click.option("--save-id", metavar="ID", help="Recover the save with this id.")
@click.option("--overwrite", is_flag=True, help="Replace the index.")
@options.threads
@options.storage
@options.json
def _index(
    path: Path,
    out: Path | None,
    digests: bool,
    generation: int | None,
    save_id: str | None,
    overwrite: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Write an index for existing data, so that it opens faster, or for a dcp-rs folder that lost its index.

    The data is not changed.
    """
    from dcp_rs.cli.work import index

    index(
        path,
        out=out,
        digests=digests,
        generation=generation,
        save_id=save_id,
        overwrite=overwrite,
        threads=threads,
        as_json=as_json,
    )
