"""Commands that write: ``convert``, ``index``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dcp_rs.checkpoint.locate import local_path
from dcp_rs.cli.app import app
from dcp_rs.cli.options import AnyCheckpoint, Exclude, External, Include, Json, Threads, examples
from dcp_rs.cli.output import text_argument


@app.command(
    "convert",
    epilog=examples(
        "dcp-rs convert hf_model/ ckpt/",
        "dcp-rs convert ckpt/ hf_model/ --to safetensors --include 'model.*' --rename model= --dtype bf16",
        "dcp-rs convert model.pt ckpt/ --to dcp",
    ),
)
def _convert(
    path: AnyCheckpoint,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="A new folder; a file for torch, and for safetensors if it ends so.",
            show_default=False,
            parser=local_path,
        ),
    ],
    to: Annotated[Literal["dcp-rs", "dcp", "safetensors", "torch"], typer.Option(help="The format of OUT.")] = "dcp-rs",
    dtype: Annotated[
        str | None, typer.Option(help="What floating-point tensors become: bf16, fp16, fp32 …", show_default=False)
    ] = None,
    shards: Annotated[
        int | None, typer.Option(min=1, help="Files to spread the data over.", show_default=False)
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OLD=NEW",
            help="A name, or what names begin with up to a dot. OLD= takes it away, =NEW puts it before all.",
            show_default=False,
            parser=text_argument,
        ),
    ] = None,
    skip_unsupported: Annotated[
        bool, typer.Option("--skip-unsupported", help="Leave out what OUT cannot hold.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at OUT.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Check the digests of PATH on the way, where it has some.")
    ] = True,
    unsafe: Annotated[
        bool, typer.Option("--trust-pickles", help="Unpickle whatever a file of torch.save asks for: it can run code.")
    ] = False,
    allow_external: External = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint again, in another format. OUT appears when it is complete, or not at all."""
    from dcp_rs.cli.work import convert

    convert(
        path,
        out,
        to=to,
        dtype=dtype,
        shards=shards,
        include=include,
        exclude=exclude,
        renames=rename or [],
        skip_unsupported=skip_unsupported,
        overwrite=overwrite,
        verify=verify,
        weights_only=not unsafe,
        allow_external=allow_external,
        threads=threads,
        as_json=as_json,
    )


@app.command(
    "index",
    epilog=examples(
        "dcp-rs index old_dcp_folder/",
        "dcp-rs index hf_model/ --digests",
        "dcp-rs index ckpt/   (after its index was lost)",
    ),
)
def _index(
    path: AnyCheckpoint,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Put the index there, not beside the data.", show_default=False, parser=local_path
        ),
    ] = None,
    digests: Annotated[
        bool, typer.Option("--digests", help="Hash the data, so that it can be verified later.")
    ] = False,
    generation: Annotated[
        int | None, typer.Option(help="Which save to recover (g… in the names).", show_default=False)
    ] = None,
    save_id: Annotated[
        str | None, typer.Option(help="Which save to recover, of one generation.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an index that is there.")] = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Write an index over data that is there: of others, or of a dcp-rs folder that lost its own."""
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
