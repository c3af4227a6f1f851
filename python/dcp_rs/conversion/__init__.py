"""``dcp_rs.convert``: from any kind of checkpoint to any other."""

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
from dcp_rs._url import StorageOptions, Url, location, options_for
from dcp_rs.checkpoint.names import Rename
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
from dcp_rs.conversion.place import (
    Place,
    check_apart,
    check_place,
    new_place,
    place_before_store,
    place_on_store,
)
from dcp_rs.options import ReadOptions, WriteOptions
from dcp_rs.tensors import pickles

__all__ = ["ConvertReport", "Target", "Wish", "convert", "stores_of", "write_result"]

Target = Literal["dcp-rs", "dcp", "safetensors", "torch"]

_WRITERS: dict[str, Callable[[Job, Place], None]] = {
    "dcp-rs": native.write,
    "dcp": stock.write,
    "safetensors": safetensors.write,
    "torch": torch_file.write,
}

#: What files are, by what their names end in.
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
    is nothing. If files of the source change meanwhile, that is an error, and there is no result.
    Files are mapped: if one is cut short while it is being copied, the process may end.

    ``"dcp-rs"`` and ``"torch"`` keep the nesting of a state dict. ``"dcp"`` has text for keys, so
    it cannot hold other keys, empty dicts and Counters; numbers in an optimizer's
    ``state_dict()["state"]`` are an exception, which dcp-rs restores. There an ``OrderedDict`` or
    ``defaultdict`` becomes a ``dict``. ``"safetensors"`` has names, and no nesting.

    Args:
        path: a folder of dcp-rs, Hugging Face or stock DCP, a ``.safetensors`` file, a file of
            ``torch.save``, or the URL of one of the first four on a store.
        out: a folder. It is a file for ``to="torch"``, and for ``to="safetensors"`` if it ends in
            ``.safetensors``. Or the URL of one on a store. Except for ``to="dcp-rs"``, the result
            is then made in a temporary folder of this machine (``TMPDIR``), and sent from there.
        to: the format. Default: by the ending of ``out``: ``"torch"`` for ``.pt``, ``.pth`` and
            ``.bin``, ``"safetensors"`` for ``.safetensors``, else ``"dcp-rs"``. ``"dcp-rs"`` and
            ``"dcp"`` hold everything, and keep the pieces in which tensors are stored.
            ``"safetensors"`` holds tensors of common types, under the file names that
            ``transformers`` looks for. ``"torch"`` holds everything in one file.
        dtype: cast floating-point tensors of 16 bits and more to it: a dtype, or its name
            (``"bf16"``). It casts the state of optimizers too: limit it with ``include``.
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
        skip_unsupported: leave out what ``out`` cannot hold. By default that is an error.
        overwrite: replace the checkpoint that is at ``out`` when this begins: a file, or a folder
            that holds one checkpoint, which may be damaged, and nothing else.
        progress: ``True`` draws a bar, on a terminal and in notebooks. A callable is called with
            the bytes written so far and the bytes to write.
        threads: see :class:`dcp_rs.options.ReadOptions`.
        verify: check the digests of the source, where it has some. The result gets digests of its
            own, which would hide damage.
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
            one checkpoint; or it was created meanwhile; or it is a folder on a store, and the
            format is not ``"dcp-rs"``.
        UnsupportedError: ``out`` cannot hold an entry, which the message names.
        StoragePreconditionError: something was stored at ``out`` meanwhile. It is still there.
        StorageUnclearError: a store did not answer. The result may be there, now or in a moment.
        StorageError: a store fails; see :mod:`dcp_rs.errors`.
        PlanError: two entries would have one name, or an entry and a container would; or nothing
            is included.
        ValueError: an invalid option; or ``out`` is the source, contains it, or lies in it.
        OSError: the disk is full, or fails.

    Example:
        ```python
        dcp_rs.convert("ckpt", "exported", to="safetensors", include="model.*", rename={"model": ""})
        dcp_rs.convert("ckpt", "ckpt.pt", dtype=torch.bfloat16)
        ```
    """
    begin = time.perf_counter()
    source_path = location(path)
    of_source, of_out = stores_of(source_path, location(out), storage_options, out_storage_options)
    wish = Wish(
        out=location(out),
        to=to,
        dtype=parse_dtype(dtype),
        shards=shards,
        include=include,
        exclude=exclude,
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
        options=wish.read_options,
        allow_external=allow_external,
        storage_options=of_source,
        layout=Layout.of(dequantize, views),
    )
    report = ConvertReport()
    write_result(
        source, wish, report, paths=[source_path, source.path, *source.files], verb="converting"
    )
    report.seconds = time.perf_counter() - begin
    return report


@dataclass(frozen=True, kw_only=True)
class Wish:
    """The result that a caller wants. The fields are arguments of :func:`convert`.

    Attributes:
        storage_options: those of the store of ``out``, if it is on one.
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
        """The format, by the ending of ``out`` where it is not said."""
        return _ENDINGS.get(self.out.suffix, "dcp-rs") if self.to is None else self.to

    @property
    def as_file(self) -> bool:
        """Whether ``out`` is a file, and no folder."""
        return self.target == "torch" or (
            self.target == "safetensors" and self.out.suffix == ".safetensors"
        )

    @property
    def write_options(self) -> WriteOptions:
        """How the result is written."""
        # What is sent to a store from a temporary folder need not outlive the power.
        fsync = self.fsync and not isinstance(self.out, Url)
        return WriteOptions(
            threads=self.threads, fsync=fsync, max_inflight_bytes=self.max_inflight_bytes
        )

    @property
    def read_options(self) -> ReadOptions:
        """How a source is read: in a part of the memory that all may take."""
        inflight = self.write_options.inflight_bytes(accelerator=False)
        return ReadOptions(
            threads=self.threads, verify=self.verify, max_inflight_bytes=max(1 << 20, inflight // 4)
        )


def write_result(
    source: Source,
    wish: Wish,
    report: ConvertReport,
    *,
    paths: Sequence[Path],
    verb: str,
    merged_from: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write what is wanted of a source.

    Args:
        source: where the entries come from.
        wish: what becomes of them.
        report: to be filled in, but for the seconds.
        paths: all that the source is made of, which the result must not replace.
        verb: for the progress bar.
        merged_from: the inputs of a merge, to be kept with the result.
    """
    target, to, shards = wish.out, wish.target, wish.shards
    if not isinstance(target, Url):
        target = Path(os.path.abspath(target))  # noqa: PTH100  # Path.resolve would follow the last link
    if isinstance(target, Url):
        check_apart(paths, target)
        before = None
    else:
        before = check_place(paths, target, overwrite=wish.overwrite)
    tasks = select(
        source, dtype=wish.dtype, include=wish.include, exclude=wish.exclude, rename=wish.rename
    )
    containers = select_containers(
        source, tasks, include=wish.include, exclude=wish.exclude, rename=wish.rename
    )
    if to != "safetensors":
        check_renamed(source, tasks, containers)
    if source.kind == "torch" and wish.weights_only:
        for task in tasks:
            if task.dtype is None:
                pickles.check_loadable(task.item.name, source.value(task.item))
    if to == "safetensors":
        tasks = refuse_unsupported(
            tasks, safetensors.why_not, to, report if wish.skip_unsupported else None
        )
        tasks = _without_tied(source.tied([task.item for task in tasks]), tasks, report)
        if wish.as_file:
            shards = 1
    if to == "dcp":
        stock.check_nesting(tasks, containers, report if wish.skip_unsupported else None)
    source.check([task.item for task in tasks])
    job = Job(
        source,
        tasks,
        shards,
        wish.write_options,
        report,
        containers,
        name=wish.name,
        weights_only=wish.weights_only,
        renamed=any(task.name != task.item.name for task in tasks),
        filtered=len(tasks) < len(source.items),
        merged_from=list(merged_from),
    )
    with (
        _place(
            job,
            target,
            wish.storage_options,
            before,
            to=to,
            as_file=wish.as_file,
            overwrite=wish.overwrite,
        ) as place,
        watching(wish.progress, verb) as job.progress,
    ):
        _WRITERS[to](job, place)
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
    """Options of the store of the source, and of that of the result, where they are on one."""
    of_source, of_target = StorageOptions.of(given), StorageOptions.of(for_target)
    if not isinstance(target, Url):
        options_for(target, of_target)
        return of_source, None
    if of_target is None:
        return of_source if isinstance(path, Url) else None, of_source
    return of_source, of_target


@contextmanager
def _place(
    job: Job,
    target: Path,
    options: StorageOptions | None,
    before: _core.Fingerprint | None,
    *,
    to: Target,
    as_file: bool,
    overwrite: bool,
) -> Iterator[Place]:
    """Where the result is made. It stays only if the source is still what it was: a save to a store looks before it commits."""
    if isinstance(target, Url) and to == "dcp-rs":
        yield place_on_store(target, options, overwrite=overwrite)
        return
    if isinstance(target, Url):
        new = place_before_store(target, options, job.options, as_file=as_file, overwrite=overwrite)
    else:
        new = new_place(target, before, as_file=as_file)
    with new as place:
        yield place
        job.source.check_again()


def _without_tied(tied: dict[str, str], tasks: list[Task], report: ConvertReport) -> list[Task]:
    """One of the tensors that are the same, but for those under whose name nothing can be noted: ``transformers`` and ``safetensors.torch.load_model`` tie them again."""
    names = {task.item.name: task.name for task in tasks}
    noted = {name: kept for name, kept in tied.items() if names[name] not in safetensors.RESERVED}
    report.tied = {names[name]: names[kept] for name, kept in noted.items()}
    return [task for task in tasks if task.item.name not in noted]
