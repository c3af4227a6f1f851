"""Steps on the disks of nodes: saves there, and what is the same for saves and loads."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dcp_rs import _core
from dcp_rs._url import StrPath
from dcp_rs.checkpoint.folders import INDEX_NAME, is_data_file, local_path, rank_of, sync
from dcp_rs.checkpoint.names import some
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.errors import CheckpointNotFoundError, DcpRsError, StorageError
from dcp_rs.options import local_ranks
from dcp_rs.steps.coordinator import Coordinator, ExtraFiles, check_save
from dcp_rs.steps.exchange import Transfer, send_files
from dcp_rs.steps.folder_store import FolderStepStore
from dcp_rs.steps.ranks import ManagerRanks
from dcp_rs.steps.retention import Policies
from dcp_rs.steps.step_store import File, Files, Step, StepStore
from dcp_rs.steps.uploads import Uploads

#: Seconds between two looks of all ranks at the uploads that are left.
_LOOK = 2.0


@dataclass(frozen=True)
class TierReport:
    """The newest steps of a run on this node and at the root.

    Attributes:
        local_step: the newest step on this node; None if there is none.
        root_step: the newest step at the root; None if there is none, or it cannot be reached.
        steps_behind: the number of steps on this node that are still to go to the root.
        uploaded_bytes: the bytes of their data files, of all nodes, that are at the root already.
        pending_bytes: the bytes that are not. A file counts once all of it is there.
    """

    local_step: int | None
    root_step: int | None
    steps_behind: int
    uploaded_bytes: int
    pending_bytes: int


class NodeStepStore(FolderStepStore):
    """The folder of a node. A step in it is whole without the data files of other nodes."""

    def _data_files(self, index: _core.Index, files: Files) -> list[File | None]:
        return [
            file
            if (file := files.get(entry.name)) is not None and file.nbytes == entry.size
            else File(entry.size, entry.name, None, 0.0)
            for entry in index.files()
        ]

    def index(self, number: int) -> _core.Index:
        """Open the index of a step."""
        return _core.Index.open(os.fspath(self.folder(number)), None, False)


def name_of_node(ranks: RankGroup, local: StrPath, node: str | None) -> str:
    """Return the name of this rank's node.

    Raises:
        UnsupportedError: ``local`` is a URL.
    """
    local_path(local)
    if node is not None:
        return node
    if (count := local_ranks()) is None:
        return socket.gethostname()
    return f"#{ranks.global_rank(ranks.rank) // count}"


def names_of_nodes(ranks: RankGroup, name: Callable[[], str | None]) -> list[str]:
    """Return the name of each rank's node. It is empty if the steps are not saved on nodes.

    Every rank calls it. An error of ``name``, which returns that of this rank, is raised on all.

    Raises:
        ValueError: only some ranks have ``local``.
    """
    names = ranks.all_gather(name)
    if None in names and any(names):
        without = [rank for rank, name in enumerate(names) if name is None]
        raise ValueError(f"local= is given on some ranks only, and not on ranks {without}")
    return [name for name in names if name is not None]


def newer_than_root(
    saves: Sequence[Step], root: StepStore, known: Step | None = None
) -> list[Step]:
    """Return the saves after the newest of them that is at the root.

    Those before it were at the root, too, and may have been removed there.

    Args:
        saves: the saves that are to go to the root, the oldest first.
        root: the steps at the root.
        known: a step that is there.

    Raises:
        OSError: the root cannot be reached.
    """
    for place in reversed(range(len(saves))):
        number = saves[place].number
        found = known if known and known.number == number else root.look_at(number)
        if isinstance(found, Step) and found.save_id == saves[place].save_id:
            return list(saves[place + 1 :])
    return list(saves)


def is_older_than_root(step: Step, at_root: Step) -> bool:
    """Return whether a step at the root counts as newer than one on a node."""
    if step.is_superseded or step.save_id == at_root.save_id:
        return step.is_superseded
    if step.note and step.note.went_back and at_root.saved < step.committed:
        return False  # the run left that step behind, and the root was not told yet
    if at_root.number == step.number:  # it was saved again
        return at_root.saved >= step.saved
    return at_root.number > step.number


def is_to_go_up(step: Step) -> bool:
    """Return whether a step on a node is to go to the root."""
    return step.note is not None and step.note.upload is True and not step.is_superseded


def bytes_at(lengths: Mapping[str, int], index: _core.Index) -> int:
    """Return the bytes of the data files of a step that are in a folder of these files."""
    return sum(each.size for each in index.files() if lengths.get(each.name) == each.size)


def _raise_lost(lost: Sequence[Transfer], folder: Path) -> None:
    names = some([each.name for each in lost])
    msg = f"{names} could not be copied to another node: the step is not saved"
    raise StorageError(msg, path=folder)


class Layout:
    """The ranks of each node, given the name of each rank's node.

    Attributes:
        ranks: the ranks by node. The first node is that of rank 0.
        node_of: the node by rank.
    """

    def __init__(self, names: Sequence[str]) -> None:
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        self.node_of = [numbers[name] for name in names]
        self.ranks: list[list[int]] = [[] for _ in numbers]
        for rank, node in enumerate(self.node_of):
            self.ranks[node].append(rank)

    def owner(self, name: str) -> int:
        """Return the node whose own a data file is: that of the rank that wrote it.

        In a job of other ranks, some node has it for its own, the same on all ranks.
        """
        return self.node_of[(rank_of(name) or 0) % len(self.node_of)]

    def own(self, index: _core.Index) -> list[list[_core.FileEntry]]:
        """Return the data files of each node's own."""
        files: list[list[_core.FileEntry]] = [[] for _ in self.ranks]
        for entry in index.files():
            files[self.owner(entry.name)].append(entry)
        return files

    def transfer(self, name: str, nbytes: int, source: int, target: int, turn: int = 0) -> Transfer:
        """Return a transfer between two nodes, whose ranks take turns."""
        sources, targets = self.ranks[source], self.ranks[target]
        return Transfer(name, nbytes, sources[turn % len(sources)], targets[turn % len(targets)])

    def to_next_node(self, index: _core.Index) -> list[Transfer]:
        """Return the transfers of each node's files to the node after it."""
        return [
            self.transfer(entry.name, entry.size, node, (node + 1) % len(self.ranks), turn)
            for node, entries in enumerate(self.own(index))
            for turn, entry in enumerate(entries)
            if len(self.ranks) > 1
        ]


class Nodes:
    """The nodes of a manager. Every rank has one, and makes the same calls.

    The first rank of a node changes its folder. A save is the step once one node has its index,
    which comes after all data is durable on all nodes. A node that lacks the index then gets it
    from another one when the step is loaded.

    Args:
        ranks: the ranks of the manager.
        names: the name of each rank's node.
        store: the folder of this node.
        root: the coordinator's part at the root.
        root_store: the steps at the root.
        upload_every, keep_local, copies, on_saved: as for the manager.

    Attributes:
        own: the coordinator's part on this node.
        is_leader: this rank changes the folder of its node.
        uploads: what this node uploads.
        saved: the number of saves since the last load.
    """

    def __init__(
        self,
        ranks: ManagerRanks,
        names: Sequence[str],
        store: NodeStepStore,
        root: Coordinator,
        root_store: StepStore,
        *,
        upload_every: int,
        keep_local: int,
        copies: int,
        on_saved: Callable[[Path], object] | None,
    ) -> None:
        self.ranks, self.store, self.root, self.root_store = ranks, store, root, root_store
        self.layout = Layout(names)
        self.node = self.layout.node_of[ranks.rank]
        self.is_leader = self.layout.ranks[self.node][0] == ranks.rank
        self.uploads = Uploads(store, root_store, root if ranks.is_coordinator else None)
        self.own = Coordinator(
            store,
            Policies(keep_last=keep_local),
            verify=False,
            on_saved=on_saved if ranks.is_coordinator else None,
        )
        # Other nodes may be ahead, and have sent files of a step that replaces one at the root.
        root.needed = self.own.needed = self.uploads.pending
        self._upload_every, self._copies = upload_every, copies
        self.saved = 0

    # --- saves

    def begin(
        self, step: int, metrics: Mapping[str, float], files: ExtraFiles, *, force: bool
    ) -> tuple[Path, dict[str, Any], Callable[[RankGroup], None]]:
        """Create the folders of a step. Every rank calls it.

        Returns:
            The folder of this rank, options of the save, and what commits it on all nodes.
        """

        def check() -> tuple[str, bool, dict[str, float], dict[str, bytes]]:
            self.uploads.check()
            # In place of a save that is still to go to the root, the new one goes there.
            upload = self.saved % self._upload_every == 0 or step in self.uploads.pending()
            return uuid.uuid4().hex, upload, *check_save(step, metrics, files)

        save_id, upload, numbers, contents = self.ranks.decide(step, check)
        resumed, went_back = self.own.resumed, self.own.went_back

        def prepare() -> None:
            if self.is_leader:
                self.own.prepare(
                    step,
                    numbers,
                    contents,
                    force=force,
                    reuse=False,
                    save_id=save_id,
                    upload=upload,
                    replaces=force,
                    went_back=went_back or resumed is None or step < resumed,
                )
            self.own.warn()

        self.ranks.run(prepare)
        made: list[bytes] = []
        commit = partial(self._commit, made=made, step=step, save_id=save_id, upload=upload)
        return self.store.folder(step), {"save_id": save_id, "publish": made.append}, commit

    def _commit(
        self, ranks: RankGroup, *, made: list[bytes], step: int, save_id: str, upload: bool
    ) -> None:
        """Make a save the step on every node, or on none. All ranks have written their files."""
        data = ranks.broadcast(made.pop)
        folder = self.store.folder(step)
        index = _core.Index.from_bytes(data, os.fspath(folder / INDEX_NAME), False)
        copies = self.layout.to_next_node(index) if self._copies else []
        prepared = folder / f"{INDEX_NAME}.{save_id[:16]}.tmp"

        def prepare() -> set[int]:
            unread = send_files(ranks, copies, folder, fsync=self.store.fsync)
            if self.is_leader:
                with self.store.holding():
                    prepared.write_bytes(data)
                    if self.store.fsync:
                        sync(prepared)
            return unread

        def publish() -> None:
            if self.is_leader:
                with self.store.holding():
                    self._publish(prepared, index)
                self.own.committed(step, save_id)  # the user's files may come only now
                if upload:
                    self.upload(step, save_id, index, is_new=True)

        try:
            unread = set().union(*ranks.all_gather(prepare))
            if unread:
                ranks.run(partial(_raise_lost, [copies[number] for number in unread], folder))
        except BaseException:
            # Without failures that all ranks know of, another node may still commit.
            if self.is_leader and ranks.failures:
                with suppress(OSError, DcpRsError):  # a sweep removes what is left
                    _core.discard(os.fspath(folder), None, data)  # the files of other nodes, too
            raise
        ranks.run(publish)
        self.saved += 1

    def _publish(self, prepared: Path, index: _core.Index) -> None:
        """Give an index its name. Remove the data files of the save that it replaces."""
        folder = prepared.parent
        prepared.replace(folder / INDEX_NAME)
        if self.store.fsync:
            sync(folder)
        names = {entry.name for entry in index.files()}
        for path in list(folder.iterdir()):
            if is_data_file(path.name) and path.name not in names:
                path.unlink(missing_ok=True)

    def upload(self, step: int, save_id: str, index: _core.Index, *, is_new: bool) -> None:
        """Begin the upload of this node's own files of a step. See :meth:`Uploads.add`."""
        there = self.store.lengths(step)
        own = self.layout.own(index)[self.node]
        # Files that no node has are at the root.
        names = [each.name for each in own if there.get(each.name) == each.size]
        if names or self.ranks.is_coordinator:
            self.uploads.add(step, save_id, names, is_new=is_new)

    # --- the rest

    def delete(self, step: int, remove_at_root: Callable[[], None]) -> None:
        """Remove a step from all nodes and from the root.

        Raises:
            CheckpointNotFoundError: it is nowhere.
        """

        def remove() -> bool:
            if not self.is_leader or self.store.look_at(step) is None:
                return False
            self.uploads.drop({step})
            self.store.remove(step)
            return True

        def remove_there(was_here: list[bool]) -> None:
            try:
                with self.uploads.paused():
                    remove_at_root()
            except CheckpointNotFoundError:
                if not any(was_here):
                    raise

        self.ranks.decide_by(step, remove, remove_there)

    def annotate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store metrics of a step at the root. On the first node, those of others stay beside it.

        They go to the root with it.

        Raises:
            Exception: as :meth:`Coordinator.annotate`.
        """
        is_here = self.node == 0 and isinstance(self.store.look_at(step), Step)
        with self.uploads.paused():
            if is_here and step in self.uploads.pending():
                self.own.annotate(step, metrics)
                return
            try:
                self.root.annotate(step, metrics)
            except CheckpointNotFoundError:
                if not is_here:
                    raise
                self.own.annotate(step, metrics)

    def latest(self) -> Step | None:
        """Return the newest step that is on this node or at the root.

        Raises:
            OSError: the root cannot be read, and the node has no step.
        """
        on_node = self.store.latest()
        try:
            at_root = self.root_store.latest()
        except OSError:
            if on_node is None:
                raise
            return on_node
        if on_node is None or at_root is None:
            return on_node or at_root
        return at_root if is_older_than_root(on_node, at_root) else on_node

    def report(self) -> TierReport:
        """Look at the steps of this node and at the root."""
        steps = self.store.look().steps
        behind = [step for step in steps if is_to_go_up(step)]
        newest: Step | None = None
        there: dict[int, Mapping[str, int]] = {}
        with suppress(OSError):
            newest = self.root_store.latest()
            behind = newer_than_root(behind, self.root_store)
            there = {step.number: self.root_store.lengths(step.number) for step in behind}
        indexes = {step.number: self.store.index(step.number) for step in behind}
        uploaded = sum(bytes_at(there.get(n, {}), index) for n, index in indexes.items())
        total = sum(entry.size for index in indexes.values() for entry in index.files())
        return TierReport(
            local_step=steps[-1].number if steps else None,
            root_step=None if newest is None else newest.number,
            steps_behind=len(behind),
            uploaded_bytes=uploaded,
            pending_bytes=total - uploaded,
        )

    def close(self) -> None:
        """Wait for the uploads. Every rank calls it.

        Raises:
            StorageError: steps are not at the root. They stay on the nodes.
        """
        ranks, uploads = self.ranks, self.uploads
        uploads.end()
        told = [(False, set[int]())]
        while not all(ended for ended, _ in told):
            told = ranks.all_gather(self._look_at_uploads)
        if any(pending for _, pending in told):
            ranks.broadcast(uploads.run_once)  # now that all nodes sent what they could
            told = ranks.all_gather(self._look_at_uploads)
        left = sorted(set().union(*(pending for _, pending in told)))

        def check() -> None:
            self.own.warn()
            self.uploads.check()
            if left:
                msg = (
                    f"these steps are on the nodes, and not at {self.root_store.path}: "
                    f"{', '.join(map(str, left))}. The next run that loads goes on with them"
                )
                raise StorageError(msg, path=self.root_store.path)

        ranks.run(check)

    def _look_at_uploads(self) -> tuple[bool, set[int]]:
        """Wait a while for this node. Return whether its uploads ended, and the steps left."""
        return self.uploads.has_ended(_LOOK), self.uploads.pending()
