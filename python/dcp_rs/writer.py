"""``RsWriter``: DCP's ``StorageWriter`` (and stager for ``dcp.async_save``)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import uuid
import warnings
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_rs import _core
from dcp_rs.errors import CheckpointExistsError, CheckpointNotFoundError, PlanError
from dcp_rs.metadata import DCP_VERSION
from dcp_rs.options import WriteOptions
from dcp_rs.payload import collect, write_entries
from dcp_rs.sources import INDEX_NAME, rank_index_name

__all__ = ["RsWriter"]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Which of how many ranks a plan is for. It outlives a save where plans are cached, so nothing of one save is in it."""

    rank: int
    world_size: int


class RsWriter(StorageWriter, BlockingAsyncStager):
    """Writes a checkpoint under DCP's save protocol: ``dcp.save(state_dict, storage_writer=RsWriter(path))``.

    The old checkpoint at ``path``, if there is one, stays whole until the new one is complete; then one rename replaces it. No file that
    dcp-rs did not write is touched.

    Args:
        path: the folder; it is created where it does not exist.
        threads, fsync, io, max_inflight_bytes: see :class:`dcp_rs.WriteOptions`.
        overwrite: ``False`` refuses to replace a checkpoint.

    Raises (from a save, on every rank):
        CheckpointExistsError: with ``overwrite=False``.
        UnsupportedError: a value that the format cannot hold.
        OSError: a write failed; the files of this save have been removed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        fsync: bool = True,
        overwrite: bool = True,
        io: Literal["auto", "direct", "buffered"] = "auto",
        max_inflight_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.path = Path(path)
        self.options = WriteOptions(threads=threads, fsync=fsync, io=io, max_inflight_bytes=max_inflight_bytes)
        self.overwrite = overwrite
        self.save_id = str(uuid.uuid4())
        self._rank: int | None = None
        self._use_collectives = True
        self._generation = 1
        self._written: bytes | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new save, to another path where one is given."""
        if checkpoint_id:
            self.path = Path(checkpoint_id)
        self.save_id = str(uuid.uuid4())
        self._written = None

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The path, under DCP's name for it."""
        return self.path

    def storage_meta(self) -> StorageMeta | None:
        """The path and the id of this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes the rank, and whether this save is rank-local (``use_collectives=False``), from newer torch."""
        self._rank = kwargs.get("rank")
        self._use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Creates the folder. All ranks look at it before any of them writes, so they agree on the generation."""
        self.path.mkdir(parents=True, exist_ok=True)
        name = INDEX_NAME if self._use_collectives else rank_index_name(0)
        if (self.path / name).exists() and not self.overwrite:
            msg = f"there is a checkpoint at {self.path}, and overwrite=False"
            raise CheckpointExistsError(msg, path=self.path)
        if not self._use_collectives and (self.path / INDEX_NAME).exists():
            # Readers would go on to find the old one: no rank may replace it for all.
            msg = f"{self.path} holds a checkpoint of all ranks, which a rank-local save (use_collectives=False) cannot replace"
            raise CheckpointExistsError(msg, path=self.path)
        self._generation = _core.next_generation(str(self.path))
        if not self._use_collectives and self._rank is not None:
            return dataclasses.replace(plan, storage_data=_Place(self._rank, self._rank + 1))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tells each rank which one it is."""
        return [
            plan if plan.storage_data is not None else dataclasses.replace(plan, storage_data=_Place(rank, len(plans)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's data files. The one result carries this rank's index."""
        place = plan.storage_data if isinstance(plan.storage_data, _Place) else _Place(self._rank or 0, 1)
        entries = collect(plan, planner)
        save = _core.Save.create(
            str(self.path),
            [entry.item() for entry in entries],
            generation=self._generation,
            token=secrets.randbits(64),
            rank=place.rank,
            world_size=place.world_size,
            **self.options.engine(),
        )
        try:
            write_entries(save, entries, self.options)
            index = save.finish()
        except BaseException:
            save.abort()
            raise
        self._written = index
        result = WriteResult(
            index=MetadataIndex(rank_index_name(place.rank)),
            size_in_bytes=sum(entry.nbytes for entry in entries),
            storage_data=index,
        )
        future: Future[list[WriteResult]] = Future()
        future.set_result([result])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Merges the indexes of all ranks and commits the checkpoint."""
        indexes = [result.storage_data for rank_results in results for result in rank_results]
        try:
            left = self._commit(metadata, indexes)
        except Exception:
            # The sync of the folder may be what failed, after the commit.
            if not any(self._is_committed(index) for index in indexes):
                for index in indexes:
                    _discard(self.path, index)
            raise
        for reason in left:
            warnings.warn(
                f"the checkpoint is saved, but a file of the one before is still there: {reason}", stacklevel=2
            )
        metadata.storage_meta = self.storage_meta()
        if hasattr(metadata, "version"):  # torch 2.8 has none
            metadata.version = DCP_VERSION

    def discard(self) -> None:
        """Removes the files that this rank wrote for a save that is known to have failed; none that was committed."""
        index, self._written = self._written, None
        if index is not None and not self._is_committed(index):
            _discard(self.path, index)

    def _is_committed(self, index: bytes) -> bool:
        """Whether the index in the folder names data files of ``index``. In doubt it does."""
        written = {name for name, *_ in _core.Index.from_bytes(index, str(self.path / INDEX_NAME), False).files()}
        try:
            rank = None if self._use_collectives else self._rank or 0
            published = _core.Index.open(str(self.path), rank, False)
        except CheckpointNotFoundError:
            return False
        except Exception:  # noqa: BLE001 - what cannot be read may be ours
            return True
        return not written.isdisjoint(name for name, *_ in published.files())

    def _commit(self, metadata: Metadata, indexes: list[bytes]) -> list[str]:
        """Returns why files of the replaced checkpoint are still there, if any are."""
        data = _core.merge_indexes(
            indexes, uuid.UUID(self.save_id).bytes, self._generation, _plain(metadata.planner_data)
        )
        merged = _core.Index.from_bytes(data, str(self.path / INDEX_NAME), False)
        missing = [fqn for fqn in metadata.state_dict_metadata if merged.find(fqn) is None]
        if missing:
            msg = f"no rank wrote {missing[0]!r}" + (f" (nor {len(missing) - 1} others)" if missing[1:] else "")
            raise PlanError(msg, tensor=missing[0])
        rank = None if self._use_collectives else self._rank or 0
        return _core.commit(str(self.path), rank, data, self.options.fsync)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id can be a path of the local file system."""
        return "://" not in os.fspath(checkpoint_id)


def _discard(path: Path, index: bytes) -> None:
    with contextlib.suppress(OSError):  # the save has failed already
        _core.discard(str(path), index)


def _plain(planner_data: Any) -> Any:
    """Planner data as an exact dict, where it is a mapping."""
    return dict(planner_data) if isinstance(planner_data, dict) else planner_data
