"""The command line, ``dcp-rs``. Exit status: 0 all is well, 1 a finding (damage, a difference), 2 no answer."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from dcp_rs._core import __version__
from dcp_rs.checkpoint.locate import local_path
from dcp_rs.cli.output import console, for_command_line, printable, text_argument, write_what_cannot_be_printed
from dcp_rs.errors import DcpRsError

__all__ = ["app", "main"]

app = typer.Typer(
    name="dcp-rs",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _examples(*commands: str) -> str:
    return "\n\n".join(["[dim]Examples:[/dim]", *(escape(f"  {command}") for command in commands)])


_FOLDERS = "A dcp-rs folder, a stock DCP folder, a Hugging Face folder"

#: What has an index, or is given one when it is opened.
Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help=f"{_FOLDERS}, a .safetensors file or its .index.json.",
        show_default=False,
        parser=local_path,
    ),
]
AnyCheckpoint = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help=f"{_FOLDERS}, a .safetensors file, its .index.json or a file of torch.save.",
        show_default=False,
        parser=local_path,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads. [default: the cores]", show_default=False)]
Rank = Annotated[
    int | None, typer.Option(min=0, help="What this rank wrote, of a rank-local save.", show_default=False)
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB", help="Only names that match. Can be given again.", show_default=False, parser=text_argument
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB", help="Not names that match. Can be given again.", show_default=False, parser=text_argument
    ),
]

External = Annotated[
    bool, typer.Option("--allow-external", help="Read data files outside of the folder, if its index names any.")
]


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"dcp-rs {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Look at, check, convert and compare PyTorch checkpoints: dcp-rs, stock DCP, safetensors, torch.save.

    Exit status: 0 all is well, 1 a finding (damage, a difference), 2 no answer.
    """


@app.command(
    "ls",
    epilog=_examples(
        "dcp-rs ls ckpt/",
        "dcp-rs ls ckpt/ 'model.layers.0.*' --sort size",
        "dcp-rs ls hf_model/ --json",
    ),
)
def _ls(
    path: AnyCheckpoint,
    patterns: Annotated[
        list[str] | None,
        typer.Argument(metavar="[GLOB]...", help="Only names that match.", show_default=False, parser=text_argument),
    ] = None,
    sort: Annotated[Literal["name", "size", "dtype", "chunks"], typer.Option(help="Order.")] = "name",
    rank: Rank = None,
    as_json: Json = False,
) -> None:
    """List what a checkpoint holds: dtype, shape, chunks, size, name."""
    from dcp_rs.cli.listing import ls

    ls(path, patterns or [], sort=sort, as_json=as_json, rank=rank)


@app.command(
    "inspect",
    epilog=_examples(
        "dcp-rs inspect ckpt/",
        "dcp-rs inspect ckpt/ model.embed.weight",
        "dcp-rs inspect ckpt/ --html page.html",
    ),
)
def _inspect(
    path: AnyCheckpoint,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="One entry: how it is cut, and over which files.",
            show_default=False,
            parser=text_argument,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write one page of HTML with all of it.", show_default=False, parser=local_path
        ),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Lists to their end.")] = False,
    rank: Rank = None,
    allow_external: External = False,
    as_json: Json = False,
) -> None:
    """Show how a checkpoint, or one entry of it, is made up. The map of an entry shows which file holds what."""
    from dcp_rs.cli import listing

    if html is not None:
        if name is not None:
            raise typer.BadParameter("--html shows the whole checkpoint, not one entry")
        listing.write_page(path, html, as_json=as_json, rank=rank)
    elif name is not None:
        listing.inspect_entry(path, name, show_all=show_all, as_json=as_json, rank=rank, allow_external=allow_external)
    else:
        listing.inspect(path, show_all=show_all, as_json=as_json, rank=rank)


@app.command(
    "verify",
    epilog=_examples(
        "dcp-rs verify ckpt/",
        "dcp-rs verify ckpt/ --json | jq .problems",
    ),
)
def _verify(path: Checkpoint, allow_external: External = False, threads: Threads = None, as_json: Json = False) -> None:
    """Read everything and check it against its digests. Exit status 1: something is damaged."""
    from dcp_rs.cli.work import verify

    raise typer.Exit(verify(path, allow_external=allow_external, threads=threads, as_json=as_json))


@app.command(
    "convert",
    epilog=_examples(
        "dcp-rs convert hf_model/ ckpt/",
        "dcp-rs convert ckpt/ hf_model/ --to safetensors --include 'model.*' --rename model= --dtype bf16",
        "dcp-rs convert model.pt ckpt/ --to dcp",
    ),
)
def _convert(
    src: AnyCheckpoint,
    dst: Annotated[
        Path,
        typer.Argument(
            metavar="DST",
            help="A new folder; a file for torch, and for safetensors if it ends so.",
            show_default=False,
            parser=local_path,
        ),
    ],
    to: Annotated[Literal["dcp-rs", "dcp", "safetensors", "torch"], typer.Option(help="The format of DST.")] = "dcp-rs",
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
        bool, typer.Option("--skip-unsupported", help="Leave out what DST cannot hold.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at DST.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Check the digests of SRC on the way, where it has some.")
    ] = True,
    unsafe: Annotated[
        bool, typer.Option("--trust-pickles", help="Unpickle whatever a file of torch.save asks for: it can run code.")
    ] = False,
    allow_external: External = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint again, in another format. DST appears when it is complete, or not at all."""
    from dcp_rs.cli.work import convert

    convert(
        src,
        dst,
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
    epilog=_examples(
        "dcp-rs index old_dcp_folder/",
        "dcp-rs index hf_model/ --digests",
        "dcp-rs index ckpt/   (after its index was lost)",
    ),
)
def _index(
    path: Checkpoint,
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
    token: Annotated[
        list[str] | None, typer.Option(help="Which save to recover, of one generation.", show_default=False)
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
        tokens=token or [],
        overwrite=overwrite,
        threads=threads,
        as_json=as_json,
    )


@app.command(
    "clean",
    epilog=_examples(
        "dcp-rs clean ckpt/",
        "dcp-rs clean ckpt/ --yes",
        "dcp-rs clean /mnt/nfs/ckpt --yes --older-than 3600",
    ),
)
def _clean(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="The folder of a checkpoint, or what was converted to.",
            show_default=False,
            parser=local_path,
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Remove it.")] = False,
    older_than: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="Leave alone what was written to since. [default: 0; a day, where the file system does not tell who is at work]",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List what killed saves and conversions left behind; with --yes, remove it."""
    from dcp_rs.cli.cleaning import clean

    clean(path, yes=yes, older_than=older_than, as_json=as_json)


@app.command(
    "diff",
    epilog=_examples(
        "dcp-rs diff before/ after/",
        "dcp-rs diff ckpt/ hf_model/ --include 'model.*' --tolerance 1e-3",
    ),
)
def _diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint.", show_default=False, parser=local_path)],
    b: Annotated[
        Path, typer.Argument(metavar="B", help="Another one, of any kind.", show_default=False, parser=local_path)
    ],
    include: Include = None,
    exclude: Exclude = None,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Absolute differences up to that do not count.")] = 0.0,
    allow_external: External = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes, every element. Exit status 1: they differ."""
    from dcp_rs.cli.difference import diff

    raise typer.Exit(
        diff(
            a,
            b,
            include=include or [],
            exclude=exclude or [],
            tolerance=tolerance,
            allow_external=allow_external,
            threads=threads,
            as_json=as_json,
        )
    )


@app.command(
    "bench",
    epilog=_examples(
        "dcp-rs bench ckpt/",
        "dcp-rs bench ckpt/ --cold --include 'model.layers.0.*'",
    ),
)
def _bench(
    path: Checkpoint,
    include: Include = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times each reader reads; the best counts.")] = 3,
    cold: Annotated[bool, typer.Option("--cold", help="Drop the files from the page cache before each time.")] = False,
    allow_external: External = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Time all readers on this checkpoint, this disk, this machine."""
    from dcp_rs.cli.bench import bench

    raise typer.Exit(
        bench(
            path,
            include=include or [],
            rounds=rounds,
            cold=cold,
            allow_external=allow_external,
            threads=threads,
            as_json=as_json,
        )
    )


@app.command(
    "demo",
    epilog=_examples(
        "dcp-rs demo",
        "dcp-rs demo --size-mb 1000",
    ),
)
def _demo(
    size_mb: Annotated[int, typer.Option(min=1, help="Size of the model's weights.")] = 300,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the checkpoints on the disk.")] = False,
    as_json: Json = False,
) -> None:
    """Save and restore a model with stock DCP and with dcp-rs, and compare."""
    from dcp_rs.demo import run

    if as_json:
        from dcp_rs.cli.output import print_json

        rows = run.demo_rows(size_mb, keep, console(stderr=True))
        print_json([vars(row) for row in rows])
        well = all(row.same is not False for row in rows)
    else:
        well = run.run_demo(size_mb, keep)
    raise typer.Exit(0 if well else 1)


def main(arguments: list[str] | None = None) -> None:
    """Runs a command and exits with its status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    # Anywhere on the line: it is added after an error, at the end.
    debug = "--debug" in arguments[:end]
    arguments = [a for i, a in enumerate(arguments) if a != "--debug" or i > end]
    signal.signal(signal.SIGTERM, _terminate)
    write_what_cannot_be_printed()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            status = _run(arguments)
    except Exception as error:  # every error becomes one line
        if debug:
            raise
        status = _report(error)
    except KeyboardInterrupt:
        if debug:
            raise
        _say("interrupted")
        status = 130
    sys.exit(status)


def _run(arguments: list[str]) -> int:
    try:
        status = app(arguments, prog_name="dcp-rs", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has enough, as `head` does. What Python flushes at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status if isinstance(status, int) else 0


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    _say(f"warning: {message}")


def _terminate(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


def _report(error: Exception) -> int:
    if isinstance(error, typer.Abort):
        _say("interrupted")
        return 130
    if hasattr(error, "format_message"):  # the command line itself is wrong
        if message := error.format_message():  # empty where help was shown for want of arguments
            _say(f"{message} (dcp-rs --help)")
        return 2
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and not isinstance(error, DcpRsError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif not isinstance(error, DcpRsError | OSError | ValueError):
        text = f"{type(error).__name__}: {text} (--debug shows where)"
    _say(text)
    return 2


def _say(text: str) -> None:
    one_line = for_command_line(" ".join(text.split("\n")))
    console(stderr=True).print(f"dcp-rs: {printable(one_line)}", soft_wrap=True)
