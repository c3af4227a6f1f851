"""Conversion of any kind of checkpoint to any other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from dcp_rs import _core
from dcp_rs._arguments import suggest_option
from dcp_rs._progress import Progress, watching
from dcp_rs._url import StorageOptions, Url, absolute, location, options_for
from dcp_rs.checkpoint.names import Rename, repeatable
from dcp_rs.checkpoint.source import Source, open_source
from dcp_rs.checkpoint.views import Layout, LayoutView
from dcp_rs.conversion import native, safetensors, stock, torch_file
from dcp_rs.conversion.job import (
    ConvertReport,
    Job,
    Task,
    check_renamed,
    parse_dtype,
    refuse_unsupported,
    select,
    select_containers,
)
from dcp_rs.conversion.output import (
    Output,
    check_apart,
    check_output,
    new_output,
    output_on_store,
    uploaded_output,
)
from dcp_rs.options import ReadOptions, WriteOptions
from dcp_rs.tensors import pickles

__all__ = ["ConvertReport", "Target", "WriteRequest", "convert", "stores_of", "write_result"]

Target = Literal["dcp-rs", "dcp", "safetensors", "torch"]

_WRITERS: dict[str, Callable[[Job, Output], None]] = {
    "dcp-rs": native.write,
    "dcp": stock.write,
    "safetensors": safetensors.write,
    "torch": torch_file.write,
}

#: The format of a file, by the ending of its name.
_ENDINGS: dict[str, Target] = {
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".safetensors": "safetensors",
}


@suggest_option
def convert(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: Target | None = None,
    dtype: torch.dtype | str | None = None,
    shards: int | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    rename: Rename = None,
    name: str = "model",
    skip_unsupported: bool = False,
    overwrite: bool = False,
    progress: Progress = None,
    threads: int | None = None,
    verify: bool = True,
    fsync: bool = True,
    max_inflight_bytes: int | None = None,
    weights_only: bool | None = True,
    allow_external: bool = False,
    storage_options: Mapping[str, Any] | Any | None = None,
    out_storage_options: Mapping[str, Any] | Any | None = None,
    dequantize: bool | torch.dtype = False,
    views: LayoutView | Iterable[LayoutView] | None = None,
) -> ConvertReport:
    """Write a checkpoint in another format, in bounded memory.

    The result appears at ``out`` in one step, when it is complete. After an error or Ctrl-C there
    is nothing. It is an error if files of the source change meanwhile. Files are mapped: if a file
    is cut short while it is copied, the process may end.

    ``"dcp-rs"`` and ``"torch"`` keep the nesting of a state dict. ``"dcp"`` has text for keys, so
    it cannot hold other keys, empty dicts and Counters. The numbers in an optimizer's
    ``state_dict()["state"]`` are an exception, which dcp-rs restores. There an ``OrderedDict`` or
    ``defaultdict`` becomes a ``dict``. ``"safetensors"`` has names, and no nesting.

    Args:
        path: a folder of dcp-rs, Hugging Face or stock DCP, a ``.safetensors`` file, a file of
            ``torch.save``, or the URL of one on a store.
        out: a folder. It is a file for ``to="torch"``, and for ``to="safetensors"`` if it ends in
            ``.safetensors``. Or the URL of one on a store. Except for ``to="dcp-rs"``, the result
            is then written to a temporary folder of this machine (``TMPDIR``), and uploaded.
        to: the format. Default: by the ending of ``out``: ``"torch"`` for ``.pt``, ``.pth`` and
            ``.bin``, ``"safetensors"`` for ``.safetensors``, else ``"dcp-rs"``. ``"dcp-rs"`` and
            ``"dcp"`` hold everything, and keep the pieces in which tensors are stored.
            ``"safetensors"`` holds tensors of common types, under the file names that
            ``transformers`` looks for. ``"torch"`` holds everything in one file.
        dtype: cast floating-point tensors of 16 bits and more to it: a dtype, or its name
            (``"bf16"``). It casts the state of optimizers too: limit it with ``include``. Step
            counters keep their dtype.
        shards: the number of files (for ``"dcp-rs"`` and ``"dcp"``: of ranks) to spread the data
            over, about evenly. Tensors are not cut.
        include, exclude: one glob or several, over names in the source.
        rename: maps stored names to new ones: a callable, or a mapping of names or of prefixes
            that end before a dot. ``{"model": "module"}`` makes ``model.x`` ``module.x``,
            ``{"model": ""}`` makes it ``x``, and ``{"": "model"}`` makes ``x`` ``model.x``.
            Renamed entries are not nested any more, unless all of them come from one container and
            keep their names in it.
        name: the name of files in a folder of ``to="safetensors"``: ``"model"`` for transformers,
            ``"diffusion_pytorch_model"``, ``"adapter_model"``.
        skip_unsupported: leave out what the format cannot hold. By default that is an error. For
            ``"dcp"``, entries below a key that is no text are written with its text, and a Counter
            as a dict.
        overwrite: replace the checkpoint at ``out``: a file, or a folder that holds one checkpoint,
            which may be damaged, and nothing else.
        progress: ``True`` draws a bar, on a terminal and in notebooks. A callable is called with
            the bytes written so far and the bytes to write.
        threads: see :class:`dcp_rs.options.ReadOptions`.
        verify: check the digests of the source, if it has any. The result gets digests of its own,
            which would hide damage.
        fsync, max_inflight_bytes: see :class:`dcp_rs.options.WriteOptions`.
        weights_only: refuse values of a file of ``torch.save``, or on their way into one, that
            ``torch.load(weights_only=True)`` would refuse. Other values are copied without
            unpickling them.
        allow_external: read data files outside of the source's folder, if its index names any.
        storage_options: for URLs, see :class:`dcp_rs.RsReader`.
        out_storage_options: those of ``out``. Default: ``storage_options``.
        dequantize, views: see :class:`dcp_rs.RsReader`. The other arguments name logical tensors.

    Returns:
        A :class:`ConvertReport`: what was written, cast, tied and left out.

    Raises:
        CheckpointNotFoundError, CorruptIndexError, CorruptDataError, UnsafePickleError: from the
            source.
        CheckpointExistsError: ``out`` exists, and ``overwrite`` is not set; or it holds more than
            one checkpoint; or it was created meanwhile; or it is a folder on a store, and that or
            the result is of another format than ``"dcp-rs"``.
        UnsupportedError: the format cannot hold an entry, which the message names.
        StoragePreconditionError: something was stored at ``out`` meanwhile. It is still there.
        StorageUnclearError: a store did not answer. The result may be there, now or in a moment.
        StorageError: a store fails; see :mod:`dcp_rs.errors`.
        PlanError: two entries would have one name, or an entry and a container would; or nothing
            is included.
        ValueError: an invalid option; or ``out`` is the source, contains it, or lies in it.
        OSError: the disk is full, or fails.

    Example:
        ```python
        dcp_rs.convert(
            "ckpt", "exported", to="safetensors", include="model.*", rename={"model": ""}
        )
        dcp_rs.convert("ckpt", "ckpt.pt", dtype=torch.bfloat16)
        ```
    """
    begin = time.perf_counter()
    source_path = location(path)
    of_source, of_out = stores_of(source_path, location(out), storage_options, out_storage_options)
    request = WriteRequest(
        out=location(out),
        to=to,
        dtype=parse_dtype(dtype),
        shards=shards,
        include=repeatable(include),
        exclude=repeatable(exclude),
        rename=rename,
        name=name,
        skip_unsupported=skip_unsupported,
        overwrite=overwrite,
        progress=progress,
        threads=threads,
        verify=verify,
        fsync=fsync,
        max_inflight_bytes=max_inflight_bytes,
        weights_only=weights_only is None or bool(weights_only),
        storage_options=of_out,
    )
    source = open_source(
        source_path,
        options=request.read_options,
        allow_external=allow_external,
        storage_options=of_source,
        layout=Layout.of(dequantize, views),
    )
    report = ConvertReport()
    paths = [source_path, source.path, *source.files]
    write_result(source, request, report, paths=paths, verb="converting")
    report.seconds = time.perf_counter() - begin
    return report


@dataclass(frozen=True, kw_only=True)
class WriteRequest:
    """The result to write. The fields are arguments of :func:`convert`.

    Attributes:
        storage_options: the options of the store of ``out``, if it is on one.
    """

    out: Path
    to: Target | None
    dtype: torch.dtype | None
    shards: int | None
    include: str | Iterable[str] | None
    exclude: str | Iterable[str] | None
    rename: Rename
    name: str
    skip_unsupported: bool
    overwrite: bool
    progress: Progress
    threads: int | None
    verify: bool
    fsync: bool
    max_inflight_bytes: int | None
    weights_only: bool
    storage_options: StorageOptions | None

    def __post_init__(self) -> None:
        _check(self.target, self.shards, self.name)
        if self.as_file and (self.shards or 1) > 1:
            msg = f"shards={self.shards}: {self.out} is one file"
            raise ValueError(msg)

    @property
    def target(self) -> Target:
        """The format. Default: by the ending of ``out``."""
        return _ENDINGS.get(self.out.suffix, "dcp-rs") if self.to is None else self.to

    @property
    def as_file(self) -> bool:
        """True if ``out`` is a file."""
        return self.target == "torch" or (
            self.target == "safetensors" and self.out.suffix == ".safetensors"
        )

    @property
    def write_options(self) -> WriteOptions:
        """The options to write with."""
        # A temporary folder for an upload need not survive a power failure.
        fsync = self.fsync and not isinstance(self.out, Url)
        return WriteOptions(
            threads=self.threads, fsync=fsync, max_inflight_bytes=self.max_inflight_bytes
        )

    @property
    def read_options(self) -> ReadOptions:
        """The options to read with. Reads get a quarter of the bound on memory."""
        inflight = self.write_options.inflight_bytes(accelerator=False)
        return ReadOptions(
            threads=self.threads, verify=self.verify, max_inflight_bytes=max(1 << 20, inflight // 4)
        )


def write_result(
    source: Source,
    request: WriteRequest,
    report: ConvertReport,
    *,
    paths: Sequence[Path],
    verb: str,
    merged_from: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the result.

    Args:
        source: the checkpoint to read.
        request: the result to write.
        report: to fill in, except for the seconds.
        paths: the files and folders of the source, which the result must not replace.
        verb: the verb for the progress bar.
        merged_from: the inputs of a merge, to store with the result.
    """
    out, to, before = request.out, request.target, None
    if isinstance(out, Url):
        check_apart(paths, out)
    else:
        out = absolute(out)
        before = check_output(paths, out, overwrite=request.overwrite)
    tasks = select(
        source,
        dtype=request.dtype,
        include=request.include,
        exclude=request.exclude,
        rename=request.rename,
    )
    containers = select_containers(
        source, tasks, include=request.include, exclude=request.exclude, rename=request.rename
    )
    if to != "safetensors":
        check_renamed(source, tasks, containers)
    if source.kind == "torch" and request.weights_only:
        for task in tasks:
            if task.dtype is None:
                pickles.check_loadable(task.item.name, source.value(task.item))
    skipped = report if request.skip_unsupported else None
    if to == "safetensors":
        tasks = refuse_unsupported(tasks, safetensors.why_not, to, skipped)
        tasks = _without_tied(source.tied([task.item for task in tasks]), tasks, report)
    if to == "dcp":
        stock.check_nesting(tasks, containers, skipped)
    source.check([task.item for task in tasks])
    job = Job(
        source,
        tasks,
        1 if request.as_file else request.shards,
        request.write_options,
        report,
        containers,
        name=request.name,
        weights_only=request.weights_only,
        merged_from=list(merged_from),
    )
    with (
        _output(job, request, out, before) as output,
        watching(request.progress, verb) as job.progress,
    ):
        _WRITERS[to](job, output)
    report.written = [task.name for task in tasks]
    report.bytes = job.total


def _check(to: str, shards: int | None, name: str) -> None:
    if to not in _WRITERS:
        msg = f"to={to!r}: must be one of {', '.join(map(repr, _WRITERS))}"
        raise ValueError(msg)
    if shards is not None and (
        isinstance(shards, bool) or not isinstance(shards, int) or shards < 1
    ):
        msg = f"shards={shards!r}: must be a positive integer"
        raise ValueError(msg)
    if not name or "/" in name:
        msg = f"name={name!r}: what files are called"
        raise ValueError(msg)


def stores_of(
    path: Path, target: Path, given: Any, for_target: Any
) -> tuple[StorageOptions | None, StorageOptions | None]:
    """Return the storage options of the source and of the result. None: not on a store."""
    of_source, of_target = StorageOptions.of(given), StorageOptions.of(for_target)
    if not isinstance(target, Url):
        options_for(target, of_target)
        return of_source, None
    if of_target is None:
        return of_source if isinstance(path, Url) else None, of_source
    return of_source, of_target


@contextmanager
def _output(
    job: Job, request: WriteRequest, out: Path, before: _core.Fingerprint | None
) -> Iterator[Output]:
    """Make the output. It gets its name only if the source did not change meanwhile."""
    options, overwrite, as_file = request.storage_options, request.overwrite, request.as_file
    if isinstance(out, Url) and request.target == "dcp-rs":
        # Its commit is the last step, so the writer checks the source before it.
        yield output_on_store(out, options, overwrite=overwrite)
        return
    if isinstance(out, Url):
        new = uploaded_output(out, options, job.options, as_file=as_file, overwrite=overwrite)
    else:
        new = new_output(out, before, as_file=as_file)
    with new as output:
        yield output
        job.source.check_again()


def _without_tied(tied: dict[str, str], tasks: list[Task], report: ConvertReport) -> list[Task]:
    """Return the tasks without second names of tensors. The metadata of the files has those names.

    ``transformers`` and ``safetensors.torch.load_model`` tie the tensors again.
    """
    names = {task.item.name: task.name for task in tasks}
    noted = {name: kept for name, kept in tied.items() if names[name] not in safetensors.RESERVED}
    report.tied = {names[name]: names[kept] for name, kept in noted.items()}
    return [task for task in tasks if task.item.name not in noted]
