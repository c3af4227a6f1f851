"""Where one save goes: a folder of the file system, or one on a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dcp_rs import _core
from dcp_rs._url import StorageOptions, Url, options_for
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.folders import make_folder
from dcp_rs.checkpoint.locate import INDEX_NAME, rank_index_name
from dcp_rs.errors import (
    CheckpointExistsError,
    DcpRsError,
    SaveInProgressError,
    StorageUnclearError,
)

__all__ = ["Destination", "commit_outcome"]


def commit_outcome(
    error: BaseException | None, handled: BaseException | None = None
) -> StorageUnclearError | None:
    """Return the ``StorageUnclearError`` in the chain of an error, if there is one.

    Args:
        error: what was raised. A second Ctrl-C, say, comes while the first error is dealt with, and
            is what the caller sees.
        handled: what the caller was handling when the save began (``sys.exception()``): Python puts
            it into the chain, and it is of another save.
    """
    waiting, seen = [error], {id(handled)}
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        if isinstance(error, StorageUnclearError):
            return error
        seen.add(id(error))
        waiting += [error.__context__, error.__cause__]
    return None


class Destination:
    """Where one save goes. What it replaces is what it found there when it began.

    Args:
        path: the folder.
        options: how to reach the store, for a URL.

    Attributes:
        folder: the folder, for the engine.
        store: of a URL.
        options: how to reach it.

    Raises:
        UnsupportedError: options that are not known, or for a folder of the file system.
    """

    def __init__(self, path: Path, options: StorageOptions | None) -> None:
        self.path = path
        self.options = options
        self.store: _core.Store | None = None
        if isinstance(path, Url):
            self.folder = os.fspath(path)
            # What is secret gets no name here: tools show the variables of a traceback.
            self.store = _core.Store(self.folder, options_for(path, options) or {})
        else:
            options_for(path, options)
            self.folder = os.path.abspath(path)  # noqa: PTH100  # Path.resolve would follow links

    def why_apart_from(self, other: Path) -> str | None:
        """Why no file of a folder can be one of this as well: by a link, or by the store's copy. None where that may be."""
        if isinstance(other, Url) != (self.store is not None):
            return "a store and a file system have no files in common"
        if isinstance(other, Url) and _bucket(other) != _bucket(self.path):
            return "it is in another bucket, and stores copy within one"
        return None

    def prepare(self, rank: int | None, *, overwrite: bool) -> None:
        """Creates the folder, and looks at what is in it; ``rank``: whose rank-local save it is.

        Raises:
            CheckpointExistsError: what is there may not, or cannot, be replaced: a checkpoint, or
                something that is no folder.
            NotADirectoryError: something that is no folder is where one above it is to be.
        """
        if self.store is None:
            make_folder(self.folder)
        if not overwrite and self._has_index(rank):
            raise self._exists()
        if rank is not None and self._has_index(None):
            # Readers would go on to find the old one: no rank may replace it for all.
            msg = f"{self.path} holds a checkpoint of all ranks, which a rank-local save (use_collectives=False) cannot replace"
            raise CheckpointExistsError(msg, path=self.path)

    def _exists(self) -> CheckpointExistsError:
        return CheckpointExistsError(
            f"Checkpoint already exists at {self.path}, and overwrite=False: pass overwrite=True, or another path",
            path=self.path,
        )

    def _has_index(self, rank: int | None) -> bool:
        if self.store is not None:
            return self.store.has_index(self.folder, rank)
        return (
            Path(self.folder) / (INDEX_NAME if rank is None else rank_index_name(rank))
        ).exists()

    def begin(self, rank: int | None, *, overwrite: bool) -> int:
        """The number of the save. What it replaces is what is there now. Warns of a store that does not look what it replaces.

        Raises:
            CheckpointExistsError: on a store, what is there may not be replaced.
        """
        if self.store is None:
            return _core.next_generation(self.folder)
        generation = self.store.begin(self.folder, rank)
        if self.store.replaces and not overwrite:
            raise self._exists()
        if not self.store.keeps_conditions:
            warn_caller(
                f"the store of {self.path} ignores conditions, or gives its index no strong tag: of two saves that replace it at the same time "
                "the last one wins, and the other may not hear of it"
            )
        return generation

    def commit(self, rank: int | None, indexes: Sequence[bytes], **how: Any) -> _core.Index:
        """Merge the indexes of all ranks and commit them. Warn of files of the checkpoint before that are still there.

        Arguments as for ``_core.commit_indexes``.

        Raises:
            CheckpointExistsError: in a folder, another save was committed meanwhile, and this one
                may not replace it.
            StoragePreconditionError: the same on a store.
        """
        index, left = _core.commit_indexes(self.folder, rank, indexes, store=self.store, **how)
        for reason in left:
            warn_caller(
                f"the checkpoint is saved, but a file of the one before is still there: {reason}"
            )
        return index

    def give_up(
        self,
        rank: int | None,
        indexes: Sequence[bytes],
        error: BaseException,
        handled: BaseException | None = None,
    ) -> None:
        """After a commit that failed with ``error``: removes what the ranks wrote, all of them, since some may never hear of it.

        Not where the save may yet be found committed, since a store did not answer: ``error`` says
        that. ``handled`` as for :func:`commit_outcome`.
        """
        if self.store is None or not commit_outcome(error, handled):
            self.remove(rank, indexes)

    def remove(self, rank: int | None, indexes: Sequence[bytes]) -> None:
        """Removes the files that indexes name, of a save that failed. What was committed all the same (its last sync failed) stays."""
        removals: list[Callable[[], None]]
        if self.store is not None:
            removals = [partial(self.store.discard, self.folder, rank, indexes)]
        else:
            removals = [partial(_core.discard, self.folder, rank, index) for index in indexes]
        for remove in removals:
            try:
                remove()
            except (OSError, DcpRsError) as error:
                warn_caller(
                    f"files of a save that failed are still there, for dcp_rs.clean to remove: {error}"
                )
                if isinstance(
                    error, SaveInProgressError
                ):  # the folder is locked, for the next as well
                    break


def _bucket(url: Path) -> list[str]:
    return str(url).split("/")[:3]
