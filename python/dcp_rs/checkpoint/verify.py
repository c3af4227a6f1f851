"""``dcp_rs.verify`` and ``dcp_rs.index``: whole checkpoints, checked and indexed."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcp_rs import _core
from dcp_rs._arguments import suggest_option
from dcp_rs._progress import Progress, watching
from dcp_rs._reports import Report
from dcp_rs._url import StorageOptions, Url, location, options_for
from dcp_rs.checkpoint.clean import Leftover, seen_beside
from dcp_rs.checkpoint.folders import make_folder
from dcp_rs.checkpoint.locate import INDEX_NAME, is_data_file, local_path, open_index, payload
from dcp_rs.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptDataError,
    CorruptIndexError,
    UnsupportedError,
)
from dcp_rs.options import ReadOptions, uuid_of

__all__ = ["Problem", "VerifyReport", "WantedSave", "index", "index_on_store", "verify"]


@dataclass(frozen=True)
class WantedSave:
    """What was asked for; None is whatever there is.

    Attributes:
        generation: the number in the names of its data files.
        save_id: its id, 16 bytes.
    """

    generation: int | None
    save_id: bytes | None

    @classmethod
    def of(cls, generation: int | None, save_id: str | None) -> WantedSave:
        """From what a caller gave.

        Raises:
            ValueError: a number below 0, or an id that is no UUID.
        """
        if generation is not None and (
            isinstance(generation, bool) or not 0 <= generation < 1 << 64
        ):
            msg = f"generation={generation!r}: a number from 0 on, as in the names of data files"
            raise ValueError(msg)
        return cls(generation, None if save_id is None else uuid_of(save_id).bytes)

    def check_lost(self, path: Path, *, is_lost: bool) -> None:
        """Raises a ``ValueError`` where there is nothing to choose among: an index of others' data is of all of it."""
        if not is_lost and self != WantedSave(None, None):
            msg = f"generation= and save_id= choose among saves of dcp-rs whose index is to be rebuilt, and {path} holds none"
            raise ValueError(msg)


def index_on_store(
    url: Url,
    options: StorageOptions | None,
    *,
    digests: bool,
    wanted: WantedSave,
    overwrite: bool,
    threads: int | None,
    progress: Progress,
) -> Path:
    """As :func:`dcp_rs.index`, of a URL. What is replaced is the index that was there before the data was read.

    Raises:
        StoragePreconditionError: a save was committed there meanwhile; it was not touched.
        StorageUnclearError: the store did not say whether the index is stored.
    """
    # What is secret gets no name here: tools show the variables of a traceback.
    store = _core.Store(os.fspath(url), options_for(url, options) or {})
    ((files, _),) = store.list([url])
    folder = url if files else url.parent  # of a single file
    store.begin(os.fspath(folder), None)
    if store.replaces and not overwrite:
        msg = f"there is an index at {folder / INDEX_NAME}; pass overwrite=True to replace it"
        raise CheckpointExistsError(msg, path=folder / INDEX_NAME)
    ((files, _),) = store.list([url])
    is_lost = any(is_data_file(name) for name, *_ in files)
    wanted.check_lost(url, is_lost=is_lost)
    # An index that is being replaced is no source: the data is.
    found = None if is_lost else _core.Index.from_data(os.fspath(url), options_for(url, options))
    with watching(progress, "indexing") as watch:
        if found is None:
            tell = None if watch is None else lambda done: watch(done, None)
            data = _core.recover(
                os.fspath(folder),
                generation=wanted.generation,
                save_id=wanted.save_id,
                threads=threads or 0,
                progress=tell,
                store=store,
            )
        else:
            total = 0 if watch is None else payload(found)
            tell = None if watch is None else lambda done: watch(done, total)
            data = found.copy(
                prefix=None,
                digests=digests,
                save_id=uuid.uuid4().bytes,
                threads=threads or 0,
                progress=tell,
            )
    store.replace_index(os.fspath(folder), data)
    return folder / INDEX_NAME


@dataclass(frozen=True)
class Problem:
    """Something in a checkpoint that is not as its index says.

    Attributes:
        file: path of the data file; of an index, or a stock ``.metadata``, where that is why
            nothing opens.
        tensor: FQN, of a tensor or value; empty where it is the file's header, another part that
            belongs to none, or the whole file.
        block: number of the damaged block (1 MiB) in its chunk.
        offset: where in the file the block, or what is wrong, begins, in bytes.
        expected, got: digests, or what else differs.
    """

    file: str
    tensor: str
    block: int
    offset: int
    expected: str
    got: str

    def __str__(self) -> str:
        where = (
            f"tensor {self.tensor!r}, block {self.block} (byte {self.offset}): "
            if self.tensor
            else ""
        )
        return f"{self.file}: {where}expected {self.expected}, got {self.got}"


@dataclass(frozen=True, repr=False)
class VerifyReport(Report):
    """Report of :func:`verify`. It is true if something was verified and nothing is damaged.

    Attributes:
        problems: damage, in the order of files and offsets.
        bytes_verified: bytes of payload that were hashed.
        bytes_without_digest: bytes of payload for which the index has no digests (checkpoints of
            others).
        lost: names of tensors and values that are damaged, or in a file that is missing or
            replaced. The others are whole, as far as that can be known. Empty if ``entries`` is
            None.
        leftovers: files of killed saves beside the checkpoint; :func:`dcp_rs.clean` removes them.
        entries: the number of tensors and values; None if damage keeps the checkpoint from being
            opened.
        seconds: the time it took.
    """

    _timed = "bytes_verified"

    problems: list[Problem] = field(default_factory=list)
    bytes_verified: int = 0
    bytes_without_digest: int = 0
    leftovers: list[Leftover] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    entries: int | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool | None:
        """True if no digest differs, False if one does, None if there are no digests to verify."""
        if self.problems:
            return False
        return None if self.bytes_without_digest and not self.bytes_verified else True

    def __bool__(self) -> bool:
        return self.ok is True


@suggest_option
def verify(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    allow_external: bool = False,
    storage_options: Mapping[str, Any] | Any | None = None,
    progress: Progress = None,
) -> VerifyReport:
    """Hash a whole checkpoint, and compare it with the digests in its index.

    Every file has to be there, and to have its length.

    Args:
        path: a folder of dcp-rs, Hugging Face or stock DCP, a ``.safetensors`` file, a file of
            ``torch.save``, or the URL of one of the first four on a store, which is fetched whole.
            If an index has no digests, as those over data of others, files are only looked for;
            see ``bytes_without_digest``.
        threads: default: the cores of this process.
        allow_external: read data files outside of the folder. By default an index that names any
            is refused.
        storage_options: for a URL, see :class:`dcp_rs.RsReader`.
        progress: ``True`` draws a bar, on a terminal and in notebooks. A callable is called with
            the bytes hashed so far and all bytes of the payload.

    Returns:
        A :class:`VerifyReport`. It is true if something was verified and nothing is damaged.

    Raises:
        ValueError: ``threads`` is not a positive number.
        CheckpointNotFoundError, UnsafePickleError, UnsupportedError, StorageError: see
            :mod:`dcp_rs.errors`. Damage does not raise: it is in the report, even if the
            checkpoint does not open.

    Example:
        ```python
        report = dcp_rs.verify("ckpt")
        assert report, report.problems
        ```
    """
    options = StorageOptions.of(storage_options)
    ReadOptions(threads=threads)
    begin = time.perf_counter()
    try:
        opened = open_index(path, rank=None, allow_external=allow_external, storage_options=options)
    except (CorruptDataError, CorruptIndexError) as error:
        return VerifyReport([_why_unopened(path, error)], leftovers=seen_beside(path))
    with watching(progress, "verifying") as watch:
        total = 0 if watch is None else payload(opened)
        tell = None if watch is None else lambda done: watch(done, total)
        found, hashed, without = opened.verify(threads=threads or 0, progress=tell)
    problems = [
        Problem(str(at.path), at.tensor, at.block, at.offset, at.expected, at.got) for at in found
    ]
    beside, lost, seconds = seen_beside(path), _lost(opened, found), time.perf_counter() - begin
    return VerifyReport(problems, hashed, without, beside, lost, opened.tensor_count, seconds)


def _why_unopened(
    path: str | os.PathLike[str], error: CorruptDataError | CorruptIndexError
) -> Problem:
    file = os.fspath(path) if error.path is None else error.path
    return Problem(
        file, error.tensor or "", 0, error.offset or 0, "a checkpoint that opens", str(error)
    )


def _lost(index: _core.Index, problems: Sequence[_core.Damage]) -> list[str]:
    """Names of what is in the damaged blocks, and in files that are not there as they were."""
    if not problems:
        return []
    gone = {str(problem.path) for problem in problems if problem.whole_file}
    files = {number for number, file in enumerate(index.file_paths()) if str(file) in gone}
    damaged = {problem.tensor for problem in problems if problem.tensor}
    return [
        name
        for number, name in enumerate(index.names())
        if name in damaged
        or any(chunk.file in files for chunk in (index.chunks(number) if files else ()))
    ]


@suggest_option
def index(
    path: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    digests: bool = False,
    generation: int | None = None,
    save_id: str | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    storage_options: Mapping[str, Any] | Any | None = None,
    progress: Progress = None,
) -> Path:
    """Write an index for data that is there already. The data is not changed.

    For a checkpoint of others (stock DCP, safetensors), the next open is then instant. For a
    folder of dcp-rs that lost its index, it rebuilds the index from the data, all of which it
    hashes. What is not recovered: empty dicts, and the kinds of dicts.

    Args:
        path: a checkpoint folder, a ``.safetensors`` file, a ``.safetensors.index.json``, a folder
            of dcp-rs without its index, or the URL of one on a store. In a folder with several
            models, pass the file of the one that the folder is to open as.
        out: a folder for the index. Default: beside the data, which is the only place on a store.
            An index elsewhere names its data by absolute paths, and opens with
            ``allow_external=True``.
        digests: hash the data of others too, so that it can be verified later.
        generation, save_id: which save to recover, if there are several. The generation is in the
            names of data files, the id in their headers, and both are in the error that asks for
            them.
        overwrite: replace an index that is there.
        threads: threads that hash. Default: the cores of this process.
        storage_options: for a URL, see :class:`dcp_rs.RsReader`.
        progress: as for :func:`verify`. The bytes to hash are None for a folder that lost its
            index.

    Returns:
        The path of the index.

    Raises:
        CheckpointExistsError: there is an index, and ``overwrite`` is not set; or it was created
            meanwhile.
        CheckpointReplacedError: a save was committed meanwhile, or the data is gone. Nothing was
            changed.
        CheckpointNotFoundError: there is no data to index.
        UnsupportedError: the folder holds a rank-local save (``use_collectives=False``), which an
            index of all ranks would hide; or several models, none of which transformers or
            diffusers would choose; or a link that leads out of the folder, without ``out``; or
            ``out`` is given for a URL. Links within Hugging Face's cache are followed.
        ValueError: an invalid option; or ``generation`` or ``save_id`` for data of others.
        StoragePreconditionError: another index was stored meanwhile.
        StorageError: see :mod:`dcp_rs.errors`.

    Example:
        ```python
        dcp_rs.index("hf_model", digests=True)
        assert dcp_rs.verify("hf_model")
        ```
    """
    source, options = location(path), StorageOptions.of(storage_options)
    ReadOptions(threads=threads)
    wanted = WantedSave.of(generation, save_id)
    if isinstance(source, Url):
        if out is not None:
            msg = f"{source}: the index of data on a store lies beside it: out= is for folders of the file system"
            raise UnsupportedError(msg, path=source)
        return index_on_store(
            source,
            options,
            digests=digests,
            wanted=wanted,
            overwrite=overwrite,
            threads=threads,
            progress=progress,
        )
    options_for(source, options)
    folder = source if source.is_dir() else source.parent
    target = folder if out is None else local_path(out)
    if target.is_dir():
        _core.check_no_rank_indexes(os.fspath(target))
    before = _core.fingerprint(os.fspath(target / INDEX_NAME))
    if (target / INDEX_NAME).exists() and not overwrite:
        msg = f"there is an index at {target / INDEX_NAME}; pass overwrite=True to replace it"
        raise CheckpointExistsError(msg, path=target / INDEX_NAME)
    count = threads or 0
    prefix = None if out is None else os.fspath(folder.absolute())
    is_lost = _is_lost(source)
    wanted.check_lost(source, is_lost=is_lost)
    if is_lost:
        with watching(progress, "indexing") as watch:
            tell = None if watch is None else lambda done: watch(done, None)
            data = _core.recover(
                os.fspath(source),
                generation=wanted.generation,
                save_id=wanted.save_id,
                threads=count,
                progress=tell,
            )
        found = _core.Index.from_bytes(data, os.fspath(folder / INDEX_NAME), False)
    else:
        # An index that is being replaced is no source: the data is.
        found = _core.Index.from_data(os.fspath(source))
    if out is None and (link := found.find_link_outside()) is not None:
        msg = (
            f"{link} is a link to something outside its folder, which is followed through an index only with allow_external=True: with an "
            "index beside it the folder would open no more as it does now. Give out=, a folder for the index, which is then opened with "
            "allow_external=True; or put the file in place of the link"
        )
        raise UnsupportedError(msg, path=link)
    # The id of the save that wrote the data, where it has one.
    own = uuid.uuid4() if found.save_id is None else uuid.UUID(found.save_id)
    with watching(progress, "indexing") as watch:
        total = 0 if watch is None else payload(found)
        tell = None if watch is None else lambda done: watch(done, total)
        data = found.copy(
            prefix=prefix, digests=digests, save_id=own.bytes, threads=count, progress=tell
        )
    make_folder(target)
    _core.replace_index(os.fspath(target), data, before, True)
    return target / INDEX_NAME


def _is_lost(source: Path) -> bool:
    """Whether the folder holds native data files, to be indexed anew."""
    if not source.exists():
        raise CheckpointNotFoundError(
            f"no checkpoint at {source}: there is no such path", path=source
        )
    return source.is_dir() and _core.has_native_data(os.fspath(source))
