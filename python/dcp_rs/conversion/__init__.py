"""Conversion of any kind of checkpoint to any other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

from dcp_rs import _core
from dcp_rs._arguments import suggest_option
from dcp_rs._progress import watching
from dcp_rs._url import StrPath, Url, location
from dcp_rs.checkpoint.metadata import warn_of_left_out
from dcp_rs.checkpoint.source import CheckpointReader
from dcp_rs.conversion import native, safetensors, stock, torch_file
from dcp_rs.conversion.job import ConvertReport, Job, select
from dcp_rs.conversion.output import check_not_source, check_output, new_output, uploaded_output
from dcp_rs.conversion.request import ConvertArguments, Format, WriteRequest
from dcp_rs.options import take_options
from dcp_rs.tensors import pickles
from dcp_rs.tensors.nesting import nest

__all__ = ["ConvertReport", "convert", "write_result"]

_WRITERS: dict[Format, Callable[[Job, Path], None]] = {
    "dcp-rs": native.write,
    "dcp": stock.write,
    "safetensors": safetensors.write,
    "torch": torch_file.write,
}


@suggest_option
def convert(
    path: StrPath,
    out: StrPath,
    **options: Unpack[ConvertArguments],
) -> ConvertReport:
    """Write a checkpoint in another format, in bounded memory.

    The result appears at ``out`` in one step, when it is complete. After an error or Ctrl-C there
    is nothing. It is an error if files of the source change meanwhile. Files are mapped: if a file
    is cut short while it is copied, the process may end. The bound on memory is for tensors: all
    values that are no tensors are in memory together.

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
            ``.bin``, ``"safetensors"`` for ``.safetensors``, else ``"dcp-rs"``. An ending of
            files that it does not write, such as ``.gguf``, is an error. ``"dcp-rs"`` and
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
        name: the name of files in a folder of ``to="safetensors"``: ``"model"`` (the default) for
            transformers, ``"diffusion_pytorch_model"``, ``"adapter_model"``.
        skip_unsupported: leave out what the format cannot hold. By default that is an error. For
            ``"dcp"``, entries below a key that is no text are written with its text, and a Counter
            as a dict.
        overwrite: replace the checkpoint at ``out``: a file, or a folder that holds one checkpoint,
            which may be damaged, and nothing else.
        progress: ``True`` draws a bar, on a terminal and in notebooks. A callable is called with
            the bytes written so far and the bytes to write.
        threads: see :class:`dcp_rs.options.ReadOptions`.
        verify: check the digests of the source, if it has any. The result gets digests of its own,
            which would hide damage. ``True`` by default.
        fsync, max_inflight_bytes: see :class:`dcp_rs.options.WriteOptions`.
        weights_only: refuse values of a file of ``torch.save``, or on their way into one, that
            ``torch.load(weights_only=True)`` would refuse. Other values are copied without
            unpickling them. ``True`` by default.
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
        UnsupportedError: the format cannot hold an entry, which the message names; or storage
            options were given, but no path is a URL.
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
    given = take_options(convert, options)
    source_path = location(path)
    request = WriteRequest.of([source_path], out, given)
    source = request.open(source_path)
    if request.target in ("dcp-rs", "dcp"):
        warn_of_left_out(source.index)
    report = ConvertReport()
    paths = [source_path, source.path, *source.files]
    write_result(source, request, report, paths=paths)
    report.seconds = time.perf_counter() - begin
    return report


def write_result(
    source: CheckpointReader,
    request: WriteRequest,
    report: ConvertReport,
    *,
    paths: Sequence[Path],
    merged_from: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the result.

    Args:
        source: the checkpoint to read.
        request: the result to write.
        report: to fill in, except for the seconds.
        paths: the files and folders of the source, which the result must not replace.
        merged_from: the inputs of a merge, to store with the result.
    """
    before = None
    if isinstance(request.out, Url):
        check_not_source(paths, request.out)
    else:
        before = check_output(
            paths, request.out, overwrite=request.overwrite, as_file=request.as_file
        )
    tasks, containers = select(source, request)
    job = Job(source, request, report, tasks, containers, merged_from)
    if request.target == "safetensors":
        safetensors.leave_out(job)
    elif request.rename is not None and job.has_paths:
        # It raises if renamed entries cannot be nested beside the others.
        nest(((task.item.position, task.path, None) for task in tasks), containers or ())
    if request.target == "dcp":
        stock.check_nesting(job)
    for task in job.tasks:
        if task.dtype is None and source.format == "torch" and request.weights_only:
            path = os.fspath(source.path)
            pickles.check_loadable(task.item.name, source.value(task.item), path=path)
    source.check([task.item for task in job.tasks])
    with (
        _output(job, before) as result,
        watching(request.progress, "merging" if merged_from else "converting") as job.progress,
    ):
        _WRITERS[request.target](job, result)
    report.written = [task.name for task in job.tasks]
    report.bytes = job.total


@contextmanager
def _output(job: Job, before: _core.Fingerprint | None) -> Iterator[Path]:
    """Yield the path to write. It gets its name only if the source did not change meanwhile."""
    request, out = job.request, job.request.out
    if isinstance(out, Url) and request.target == "dcp-rs":
        # Its commit is the last step, so the writer checks the source before it.
        yield out
        return
    with uploaded_output(request, out) if isinstance(out, Url) else new_output(out, before) as made:
        yield made
        job.source.check_again()
