"""What dcp-rs raises. Every class pickles, so that an error crosses from one rank to the others."""

from __future__ import annotations

from typing import Any

__all__ = [
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointReplacedError",
    "CorruptDataError",
    "CorruptIndexError",
    "DcpRsError",
    "EntryNotFoundError",
    "InternalError",
    "PlanError",
    "QuantizationError",
    "RankLostError",
    "RunTakenOverError",
    "SaveInProgressError",
    "StateChangedError",
    "StorageError",
    "StorageNotFoundError",
    "StoragePermissionError",
    "StoragePreconditionError",
    "StorageUnclearError",
    "UnsafePickleError",
    "UnsupportedError",
]


class DcpRsError(Exception):
    """The base of all errors of this package.

    Attributes:
        path: the file concerned, where there is one.
        tensor: the FQN concerned, where there is one.
        offset: the byte of ``path`` concerned, where there is one.
    """

    path: str | None = None
    tensor: str | None = None
    offset: int | None = None

    def __init__(self, *args: Any, path: Any = None, tensor: str | None = None, offset: int | None = None) -> None:
        super().__init__(*args)
        if path is not None:
            self.path = str(path)
        if tensor is not None:
            self.tensor = tensor
        if offset is not None:
            self.offset = offset

    def __str__(self) -> str:
        # OSError, a base of some classes here, has a format of its own for several arguments.
        return str(self.args[0]) if self.args else type(self).__name__


class CheckpointNotFoundError(DcpRsError, FileNotFoundError):
    """There is no checkpoint at the path. Check the path; a save that did not finish leaves none."""


class CheckpointExistsError(DcpRsError, FileExistsError):
    """There is a checkpoint already, and ``overwrite=False`` was given; or no folder, where one is to be made; or what was created meanwhile."""


class EntryNotFoundError(DcpRsError, KeyError):
    """No entry of the checkpoint has this name. The message names the nearest one."""


class CheckpointReplacedError(DcpRsError):
    """Another save replaced the checkpoint while it was being read. Open it, or load it, again: the new one is there, and whole."""


class CorruptIndexError(DcpRsError):
    """The index breaks a rule of the format. If the data files are whole, ``dcp_rs.index(path)`` rebuilds it."""


class CorruptDataError(DcpRsError):
    """A data file is missing, has another length than the index says, or does not match its digest; or a partial load would leave alone what a load before it filled from such a file."""


class UnsupportedError(DcpRsError):
    """Well-formed, but something that this release cannot do; the message says what."""


class QuantizationError(UnsupportedError):
    """Quantized weights of a format that this release cannot read, or a part of one that is missing or does not fit. The message names the tensor."""


class UnsafePickleError(DcpRsError):
    """A pickle asks for something that is not on the list of what a checkpoint may hold. Nothing was executed."""


class PlanError(DcpRsError, ValueError):
    """The state dict and the checkpoint do not fit: a missing key, another shape, a dtype that policy refuses."""


class RankLostError(DcpRsError):
    """A rank was killed or stopped, or cannot be reached: a collective failed. Nothing can be done over its process group any more.

    The process group does not say which rank. What was being loaded may be partly filled. What was being saved may have been committed or not: the checkpoint at the
    path is the new one or the one before, and whole.
    """


class RunTakenOverError(DcpRsError):
    """Another job resumed this run, or began to save to its root. Nothing was committed or removed. The message names the job's process."""


class SaveInProgressError(DcpRsError):
    """Another save to the same path is not over in this process: wait for the future of that one first.

    Or another process is saving there, or has kept the folder locked for ten minutes. The message names the process, or the lock.
    """


class StateChangedError(DcpRsError):
    """A tensor was changed while ``async_save(async_staging=True)`` copied it: the copy may be of both. Nothing was saved.

    Not every change is noticed: torch does not count those of its fused optimizers.
    """


class StorageError(DcpRsError, OSError):
    """A store could not be reached, or did not do what it was asked, after as many attempts as were allowed in the time that was allowed.

    The options ``max_retries`` and ``retry_timeout`` (seconds) say how many and how long.

    Attributes:
        path: the URL.
        operation: what was asked, as ``"read"``.
        attempts: how often.
    """

    operation: str | None = None
    attempts: int | None = None

    def __init__(self, *args: Any, operation: str | None = None, attempts: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if operation is not None:
            self.operation = operation
        if attempts is not None:
            self.attempts = attempts


class StorageNotFoundError(StorageError, FileNotFoundError):
    """There is no such bucket or container."""


class StoragePermissionError(StorageError, PermissionError):
    """The store refuses: credentials are missing, wrong, or do not suffice."""


class StoragePreconditionError(StorageError):
    """An object is another one than it was when it was first seen. For a save: another one was committed to its place meanwhile, and is whole."""


class StorageUnclearError(StorageError):
    """A store did not answer to the last request of a save or a conversion, or was not waited for: it may be there, now or in a moment.

    Nothing of it is removed.
    Where Ctrl-C or the handler of a signal ended the wait, what that raised has this as its ``__cause__``. The other ranks raise this one.
    """


class InternalError(DcpRsError, RuntimeError):
    """A defect of dcp-rs. Please report it with its message; what was being saved was not committed, what was being loaded is not to be used."""
