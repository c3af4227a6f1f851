"""Destination of one save: a folder of the file system or of a store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dcp_rs import _core
from dcp_rs._url import StorageOptions, Url, absolute, options_for, store_at
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.folders import (
    INDEX_NAME,
    is_known,
    make_folder,
    rank_index_name,
    remember,
)
from dcp_rs.errors import (
    CheckpointExistsError,
    DcpRsError,
    SaveInProgressError,
    StorageUnclearError,
)


def commit_outcome(
    error: BaseException | None, handled: BaseException | None = None
) -> StorageUnclearError | None:
    """Return the ``StorageUnclearError`` in the chain of an error, if there is one.

    Args:
        error: the error. A second Ctrl-C while the first error is handled is raised in its place,
            and has it as context.
        handled: the error that the caller handled when the save began. Python puts it into the
            chain, though it is of another save.
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
    """Folder that one save goes to. It remembers what was there when the save began.

    Args:
        path: the folder.
        options: how to reach the store, for a URL.
        rank: the rank of a rank-local save; None for a save of all ranks.
        overwrite: replace a checkpoint that is there.

    Attributes:
        folder: the folder, for the engine.
        store: the store of a URL; None for a folder of the file system.

    Raises:
        UnsupportedError: unknown options, or options for a folder of the file system.
    """

    def __init__(
        self,
        path: Path,
        options: StorageOptions | None,
        *,
        rank: int | None = None,
        overwrite: bool = True,
    ) -> None:
        self.path = path
        self.options = options
        self.rank = rank
        self._overwrite = overwrite
        self.folder = absolute(path)
        self.store: _core.Store | None = None
        if isinstance(path, Url):
            self.store = store_at(path, options)
        else:
            options_for(path, options)  # it raises if there are any

    def why_no_shared_files(self, other: Path) -> str | None:
        """Return why no file of another folder can be linked or copied here; None if it can."""
        if isinstance(other, Url) != (self.store is not None):
            return "a store and a file system have no files in common"
        if isinstance(other, Url) and _bucket(other) != _bucket(self.path):
            return "it is in another bucket, and stores copy within one"
        return None

    def prepare(self) -> None:
        """Create the folder, and check that it may be saved to.

        Raises:
            CheckpointExistsError: a checkpoint is there that may not be replaced, or a file.
            NotADirectoryError: a file is in the place of a folder above it.
        """
        if self.store is None:
            make_folder(self.folder)
        is_local = self.rank is not None
        if not self._overwrite:
            # `begin` looks for rank-local saves on a store.
            of_ranks = () if is_local or self.store else self.folder.glob(f"__[0-9]*.{INDEX_NAME}")
            if self._has_index(self.rank) or any(of_ranks):
                raise self._exists()
        if is_local and self._has_index(None):
            # Readers would go on to find the old checkpoint.
            msg = (
                f"{self.path} holds a checkpoint of all ranks, which a rank-local save "
                "(use_collectives=False) cannot replace"
            )
            raise CheckpointExistsError(msg, path=self.path)

    def begin(self) -> int:
        """Return the generation of a save that begins now. It replaces what is there now.

        It warns if this process has neither opened nor saved what is there: a run that should have
        resumed may have begun anew.

        Raises:
            CheckpointExistsError: on a store, a checkpoint is there that may not be replaced.
        """
        if self.store is None:
            if self._has_index(self.rank):
                self._warn_unless_known()
            return _core.next_generation(self.folder)
        generation = self.store.begin(self.folder, self.rank)
        if (self.store.replaces or self.store.replaces_ranks) and not self._overwrite:
            raise self._exists()
        if self.store.replaces:
            self._warn_unless_known()
        if not self.store.keeps_conditions:
            warn_caller(
                f"the store of {self.path} ignores conditions, or gives its index no strong tag: "
                "of two saves that replace it at the same time the last one wins, "
                "and the other may not hear of it"
            )
        return generation

    def commit(
        self,
        indexes: Sequence[bytes],
        *,
        save_id: bytes,
        generation: int,
        planner_data: Any,
        items: int | None = None,
        names: Collection[str] = (),
        fsync: bool = True,
        publish: Callable[[bytes], object] | None = None,
    ) -> _core.Index:
        """Merge the indexes of all ranks, and commit the result, or give it to ``publish``.

        It warns if files of the checkpoint before are left.

        Args:
            indexes: the indexes of all ranks.
            save_id, generation: section 1.1 of the format.
            planner_data: data that belongs to no entry.
            items: the number of chunks and values of all ranks, if it is known.
            names: tensors that the indexes must have.
            fsync: make the commit durable.
            publish: takes the bytes of the index in place of the commit.

        Raises:
            CheckpointExistsError: in a folder, another save was committed meanwhile, and this one
                may not replace it.
            StoragePreconditionError: the same on a store.
        """
        index, left = _core.commit_indexes(
            self.folder,
            self.rank,
            indexes,
            save_id=save_id,
            generation=generation,
            planner_data=planner_data,
            items=items,
            names=names,
            fsync=fsync,
            overwrite=self._overwrite,
            store=self.store,
            publish=publish is None,
        )
        if publish is not None:
            publish(index.to_bytes())
            return index
        for reason in left:
            warn_caller(
                f"the checkpoint is saved, but a file of the one before is still there: {reason}"
            )
        remember(self.folder)
        return index

    def give_up(
        self,
        indexes: Sequence[bytes],
        error: BaseException,
        handled: BaseException | None = None,
    ) -> None:
        """Remove the files of all ranks after a commit that failed.

        They stay if a store did not say how the commit ended.

        Args:
            indexes: the indexes of all ranks.
            error: the error of the commit.
            handled: as for :func:`commit_outcome`.
        """
        if self.store is None or not commit_outcome(error, handled):
            self.remove(indexes)

    def remove(self, indexes: Sequence[bytes]) -> None:
        """Remove the files that indexes of a failed save name.

        Files that the index at the destination names stay. The save may have been committed before
        it failed, by the last sync.
        """
        removals: list[Callable[[], None]]
        if self.store is not None:
            removals = [partial(self.store.discard, self.folder, self.rank, indexes)]
        else:
            removals = [partial(_core.discard, self.folder, self.rank, index) for index in indexes]
        for remove in removals:
            try:
                remove()
            except (OSError, DcpRsError) as error:
                warn_caller(
                    "files of a save that failed are still there, for dcp_rs.clean to remove: "
                    f"{error}"
                )
                if isinstance(error, SaveInProgressError):  # the folder is locked
                    break

    def _warn_unless_known(self) -> None:
        if not is_known(self.folder):
            warn_caller(
                f"this save replaces the checkpoint at {self.path}, which this process has neither "
                "loaded nor saved. If you meant to resume, load it first, if dcp_rs.exists(path). "
                "overwrite=False replaces nothing"
            )

    def _exists(self) -> CheckpointExistsError:
        return CheckpointExistsError(
            f"Checkpoint already exists at {self.path}, and overwrite=False: "
            "pass overwrite=True, or another path",
            path=self.path,
        )

    def _has_index(self, rank: int | None) -> bool:
        if self.store is not None:
            return self.store.has_index(self.folder, rank)
        return (self.folder / (INDEX_NAME if rank is None else rank_index_name(rank))).exists()


def _bucket(url: Path) -> list[str]:
    return str(url).split("/")[:3]
