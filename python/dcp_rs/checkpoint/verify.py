"""``dcp_rs.verify``: a whole checkpoint, compared with its digests."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dcp_rs import _core
from dcp_rs._arguments import suggest_option
from dcp_rs._progress import Progress, watching
from dcp_rs._reports import Report
from dcp_rs._url import StorageOptions, StoreArguments, StrPath
from dcp_rs.checkpoint.clean import Leftover, seen_beside
from dcp_rs.checkpoint.locate import open_index, payload
from dcp_rs.errors import CorruptDataError, CorruptIndexError, escaped
from dcp_rs.options import ReadOptions


@dataclass(frozen=True)
class Problem:
    """A difference between a checkpoint and its index.

    Attributes:
        file: the path of the data file; that of the index or ``.metadata`` if it does not open, or
            if a tensor lacks elements.
        tensor: the FQN of the tensor or value; empty for a file's header, for bytes of no entry,
            and for a whole file.
        block: the number of the damaged block (1 MiB) in its chunk.
        offset: the byte of the file where the damage begins.
        expected, got: the digests, or other values that differ.
    """

    file: str
    tensor: str
    block: int
    offset: int
    expected: str
    got: str

    def __str__(self) -> str:
        where = f"tensor {self.tensor!r}, block {self.block} (byte {self.offset}): "
        where = where if self.tensor else ""
        return escaped(f"{self.file}: {where}expected {self.expected}, got {self.got}")


@dataclass(frozen=True, repr=False)
class VerifyReport(Report):
    """Report of :func:`verify`. It is true if something was verified and nothing is damaged.

    Attributes:
        problems: the damage, in the order of files and offsets.
        bytes_verified: the bytes of payload that were hashed.
        bytes_without_digest: the bytes of payload without digests in the index, as in foreign
            checkpoints.
        lost: the names of entries that are damaged, or in a file that is missing or replaced. Empty
            if ``entries`` is None.
        leftovers: files of killed saves beside the checkpoint; :func:`dcp_rs.clean` removes them.
        entries: the number of tensors and values; None if the checkpoint does not open.
        seconds: the time it took.
    """

    problems: list[Problem] = field(default_factory=list)
    bytes_verified: int = 0
    bytes_without_digest: int = 0
    leftovers: list[Leftover] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    entries: int | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool | None:
        """True if all digests match, False if one differs, None if there are none to verify."""
        if self.problems:
            return False
        return None if self.bytes_without_digest and not self.bytes_verified else True

    def __bool__(self) -> bool:
        return self.ok is True


@suggest_option
def verify(
    path: StrPath,
    *,
    threads: int | None = None,
    allow_external: bool = False,
    storage_options: StoreArguments = None,
    progress: Progress = None,
) -> VerifyReport:
    """Hash a whole checkpoint, and compare it with the digests in its index.

    Every file must exist and have its length, and the chunks must hold all elements of every
    tensor.

    Args:
        path: a folder of dcp-rs, Hugging Face or stock DCP, a ``.safetensors`` file, a file of
            ``torch.save``, or the URL of one on a store. From a store everything is fetched.
            Without digests, as in foreign checkpoints, only the files are checked; see
            ``bytes_without_digest``.
        threads: the number of threads. Default: the cores of this process.
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
            :mod:`dcp_rs.errors`. Damage does not raise. The report lists it, even if the
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
        opened = open_index(path, allow_external=allow_external, storage_options=options)
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


def _why_unopened(path: StrPath, error: CorruptDataError | CorruptIndexError) -> Problem:
    file = os.fspath(path) if error.path is None else error.path
    return Problem(
        file, error.tensor or "", 0, error.offset or 0, "a checkpoint that opens", str(error)
    )


def _lost(index: _core.Index, problems: Sequence[_core.Damage]) -> list[str]:
    """Return the names of entries in damaged blocks, and in missing or replaced files."""
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
