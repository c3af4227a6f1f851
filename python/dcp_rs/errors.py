"""Exceptions of dcp-rs. All of them pickle, so that they travel from rank to rank."""

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


#: Control characters but for line ends. A terminal could take them for commands.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != ord("\n")}


def escaped(text: str) -> str:
    """Return a text of names that others wrote, with its control characters escaped."""
    return text.translate(_CONTROLS)


class DcpRsError(Exception):
    """Base of all errors of dcp-rs.

    Attributes:
        path: the file, if the error concerns one.
        tensor: the name of the tensor or value, if the error concerns one.
        offset: the byte of ``path``, if the error concerns one.
    """

    def __init__(
        self, *args: Any, path: Any = None, tensor: str | None = None, offset: int | None = None
    ) -> None:
        super().__init__(*args)
        self.path = None if path is None else str(path)
        self.tensor = tensor
        self.offset = offset

    def __str__(self) -> str:
        # OSError, a base of some classes here, has a format of its own for several arguments.
        return escaped(str(self.args[0])) if self.args else type(self).__name__


class CheckpointNotFoundError(DcpRsError, FileNotFoundError):
    """There is no checkpoint at the path.

    Check the path. A save that did not finish leaves no checkpoint.
    """


class CheckpointExistsError(DcpRsError, FileExistsError):
    """There is a checkpoint already, and ``overwrite=False`` was given.

    Or there is a file where a folder is to be made, or something was created meanwhile.
    """


class EntryNotFoundError(DcpRsError, KeyError):
    """No entry of the checkpoint has this name. The message names the nearest one."""


class CheckpointReplacedError(DcpRsError):
    """Another save replaced the checkpoint while it was being read.

    Open it, or load it, again: the new checkpoint is there, and whole.
    """


class CorruptIndexError(DcpRsError):
    """The index breaks a rule of the format.

    If the data files are whole, ``dcp_rs.index(path, overwrite=True)`` rebuilds it.
    """


class CorruptDataError(DcpRsError):
    """A data file is missing, has the wrong length, or does not match its digest."""


class UnsupportedError(DcpRsError):
    """The input is valid, but this release does not support it. The message says what."""


class QuantizationError(UnsupportedError):
    """Quantized weights have an unknown format, or a part of them is missing or does not fit.

    The message names the tensor.
    """


class UnsafePickleError(DcpRsError):
    """A pickle asks for something that a checkpoint may not hold. Nothing was executed."""


class PlanError(DcpRsError, ValueError):
    """The state dict and the checkpoint do not fit.

    A key is missing, a shape differs, or ``dtype_policy`` refuses a dtype.
    """


class RankLostError(DcpRsError):
    """A collective failed: a rank was killed or stopped, or cannot be reached.

    The process group cannot be used any more, and does not say which rank it was. A state dict
    that was being loaded may be partly filled. After a save, the checkpoint at the path is the new
    one or the one before, and whole.
    """


class RunTakenOverError(DcpRsError):
    """Another job resumed this run, or began to save to its root.

    Nothing was committed or removed. The message names the process of that job.
    """


class SaveInProgressError(DcpRsError):
    """Another save of this process to the same path is not over: wait for its future.

    Or another process is saving there, or has kept the folder locked for ten minutes. The message
    names the process, or the lock.
    """


class StateChangedError(DcpRsError):
    """A tensor changed while ``async_save(async_staging=True)`` copied it. Nothing was saved.

    Not every change is noticed: torch does not count those of its fused optimizers.
    """


class StorageError(DcpRsError, OSError):
    """A store could not be reached, or did not do what was asked.

    ``max_retries`` and ``retry_timeout`` (seconds) in ``storage_options`` bound the attempts.

    Attributes:
        path: the URL.
        operation: what was asked, such as ``"read"``.
        attempts: the number of attempts.
    """

    def __init__(
        self, *args: Any, operation: str | None = None, attempts: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.operation = operation
        self.attempts = attempts


class StorageNotFoundError(StorageError, FileNotFoundError):
    """There is no such bucket or container."""


class StoragePermissionError(StorageError, PermissionError):
    """The store refused: credentials are missing, wrong, or do not allow this."""


class StoragePreconditionError(StorageError):
    """An object is not the one that was seen first.

    For a save: another save was committed there meanwhile, and is whole.
    """


class StorageUnclearError(StorageError):
    """A store did not answer the last request of a save or a conversion.

    The result may be there, now or in a moment, so nothing of it is removed. If Ctrl-C or a signal
    handler ended the wait, this is the ``__cause__`` of what that raised. The other ranks raise
    this error.
    """


class InternalError(DcpRsError, RuntimeError):
    """A bug in dcp-rs. Please report it with its message.

    Nothing was committed by a save. Do not use what a load filled.
    """
