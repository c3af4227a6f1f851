"""Steps on the disks of nodes: saved there, uploaded behind, read from the nearest place."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dcp_rs import _core
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.folders import INDEX_NAME, is_data_file, local_path, rank_of
from dcp_rs.checkpoint.locate import Tiers
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.errors import CheckpointNotFoundError, DcpRsError, StorageError
from dcp_rs.options import local_ranks
from dcp_rs.steps import notes
from dcp_rs.steps.coordinator import Coordinator, ExtraFiles, check_save
from dcp_rs.steps.exchange import Transfer, exchange
from dcp_rs.steps.folder_store import FolderStepStore, sync
from dcp_rs.steps.ranks import ManagerRanks
from dcp_rs.steps.retention import Policies
from dcp_rs.steps.step_store import File, Files, SkippedStep, StepStore
from dcp_rs.steps.uploads import Uploads

__all__ = ["Choice", "NodeStepStore", "Nodes", "TierReport", "names_of_nodes"]

#: Seconds between two looks of all ranks at the uploads that are left.
_LOOK = 2.0


@dataclass(frozen=True)
class TierReport:
    """The newest steps of a run on this node and at the root.

    Attributes:
        local_step: the newest step on this node; None if there is none.
        root_step: the newest step at the root; None if there is none, or it cannot be reached.
        steps_behind: the number of steps on this node that are still to go to the root.
    """

    local_step: int | None
    root_step: int | None
    steps_behind: int


@dataclass(frozen=True)
class Choice:
    """A step to load, and where it is.

    Attributes:
        step: its number; None if there is none.
        skipped: newer steps that are not loaded.
        save_id: the save on the nodes; None if the step is read from the root alone.
        is_whole: all of its files are on nodes.
    """

    step: int | None
    skipped: list[SkippedStep]
    save_id: str | None = None
    is_whole: bool = False


@dataclass(frozen=True)
class _Held:
    """One step on a node.

    Attributes:
        number: the number of the step.
        files: the length of each file, by name.
        save_id: the id of its save; empty if there is no index.
        saved: the time of the save.
        is_superseded: all other steps count as newer.
        upload: it is to go to the root.
    """

    number: int
    files: Mapping[str, int]
    save_id: str = ""
    saved: float = 0.0
    is_superseded: bool = False
    upload: bool = False

    @property
    def age(self) -> tuple[bool, int, float]:
        """A key that sorts saves, the oldest first."""
        return not self.is_superseded, self.number, self.saved


class NodeStepStore(FolderStepStore):
    """The folder of a node. A step in it is whole without the data files of other nodes."""

    def _data_files(self, index: _core.Index, files: Files) -> list[File | None]:
        return [
            file
            if (file := files.get(entry.name)) is not None and file.nbytes == entry.size
            else File(entry.size, entry.name, None, 0.0)
            for entry in index.files()
        ]


def names_of_nodes(
    ranks: RankGroup, local: str | os.PathLike[str] | None, node: str | None
) -> list[str]:
    """Return the name of each rank's node. It is empty if the steps are not saved on nodes.

    Every rank calls it.

    Raises:
        ValueError: only some ranks have ``local``.
        UnsupportedError: ``local`` is a URL.
    """

    def name() -> str | None:
        if local is None:
            return None
        local_path(local)
        if node is not None:
            return node
        count = local_ranks()
        return socket.gethostname() if count is None else f"#{_rank() // count}"

    names = ranks.all_gather(name)
    if None in names and any(names):
        without = [rank for rank, name in enumerate(names) if name is None]
        raise ValueError(f"local= is given on some ranks only, and not on ranks {without}")
    return [name for name in names if name is not None]


def _raise_if_lost(failed: Sequence[Transfer], folder: Path) -> None:
    if failed:
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        msg = f"{failed[0].name}{more} could not be copied to another node: the step is not saved"
        raise StorageError(msg, path=folder)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


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
        self._ranks, self.store, self._root, self._root_store = ranks, store, root, root_store
        self._upload_every, self._copies = upload_every, copies
        of_node: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            of_node.setdefault(name, []).append(rank)
        #: The ranks of each node.
        self._nodes = list(of_node.values())
        self._node = list(of_node).index(names[ranks.rank])
        self._is_leader = self._nodes[self._node][0] == ranks.rank
        self.uploads = Uploads(store, root_store, root if ranks.is_coordinator else None)
        self.own = Coordinator(
            store,
            Policies(keep_last=keep_local),
            verify=False,
            on_saved=on_saved if ranks.is_coordinator else None,
            needed=self.uploads.pending,
        )
        self._saved = 0  # by this manager
        self._held: list[list[_Held]] = [[] for _ in self._nodes]
        self._unusable: set[str] = set()  # saves that could not be loaded from the nodes
        self._lost: set[tuple[int, str]] = set()  # nodes, and damaged files there
        self._sent: set[tuple[int, str]] = set()  # nodes, and files that they got
        self._tiers = Tiers()

    # --- saves

    def begin(
        self, step: int, metrics: Mapping[str, float], files: ExtraFiles, *, force: bool
    ) -> tuple[Path, dict[str, Any], Callable[[RankGroup], None]]:
        """Create the folders of a step. Every rank calls it.

        Returns:
            The folder of this rank, options of the save, and what commits it on all nodes.
        """

        def check() -> tuple[str, dict[str, float], dict[str, bytes]]:
            if self.uploads.taken_over is not None:
                raise self.uploads.taken_over
            return uuid.uuid4().hex, *check_save(step, metrics, files)

        save_id, numbers, contents = self._ranks.decide(step, check)
        upload = self._saved % self._upload_every == 0

        def prepare() -> None:
            if self._is_leader:
                how = {"upload": upload, "replaces": force}
                self.own.prepare(
                    step, numbers, contents, force=force, reuse=False, save_id=save_id, **how
                )
            self.warn()

        self._ranks.run(prepare)
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
        prepared = f"{INDEX_NAME}.{save_id[:16]}.tmp"
        try:
            failed = exchange(
                ranks, transfers := list(self._to_copy(index)), folder, fsync=self._fsync
            )

            def prepare() -> None:
                _raise_if_lost([transfers[number] for number in failed], folder)
                if self._is_leader:
                    with self.store.holding():
                        _core.publish(os.fspath(folder), prepared, data, self._fsync)

            ranks.run(prepare)
        except BaseException:
            # Without failures that all ranks know of, another node may still commit.
            if self._is_leader and ranks.failures:
                self._abandon(folder, data)
            raise

        def publish() -> None:
            if self._is_leader:
                with self.store.holding():
                    self._publish(folder, prepared, index)

        def finish() -> None:
            if ranks.is_coordinator and self._root.went_back:
                with self.uploads.paused():
                    self._root.supersede_now(step, save_id)
            if self._is_leader:
                if upload:
                    self.uploads.add(step, save_id, self._by_node(index)[self._node])
                self.own.committed(step, save_id)

        ranks.run(publish)
        self._saved += 1
        ranks.run(finish)

    @property
    def _fsync(self) -> bool:
        return self.store.fsync

    def _by_node(self, index: _core.Index) -> list[list[str]]:
        """Return the data files that the ranks of each node wrote, if the job is as it was then."""
        files: list[list[str]] = [[] for _ in self._nodes]
        node_of = {rank: node for node, ranks in enumerate(self._nodes) for rank in ranks}
        for entry in index.files():
            rank = rank_of(entry.name)
            if rank in node_of:
                files[node_of[rank]].append(entry.name)
        return files

    def _publish(self, folder: Path, prepared: str, index: _core.Index) -> None:
        """Give an index its name. Remove the data files of the save that it replaces."""
        (folder / prepared).replace(folder / INDEX_NAME)
        if self._fsync:
            sync(folder)
        names = {entry.name for entry in index.files()}
        with os.scandir(folder) as files:
            old = [
                each.path for each in files if is_data_file(each.name) and each.name not in names
            ]
        for path in old:
            Path(path).unlink(missing_ok=True)

    def _abandon(self, folder: Path, index: bytes) -> None:
        """Remove the files of a save that failed, those of other nodes too."""
        with suppress(OSError, DcpRsError):  # a sweep removes what is left
            _core.discard(os.fspath(folder), None, index)

    def _to_copy(self, index: _core.Index) -> Iterator[Transfer]:
        """Return the transfers of each node's files to the nodes after it."""
        sizes = {entry.name: entry.size for entry in index.files()}
        by_node = self._by_node(index)
        for distance in range(1, min(self._copies, len(self._nodes) - 1) + 1):
            for node, names in enumerate(by_node):
                target = (node + distance) % len(self._nodes)
                for number, name in enumerate(names):
                    yield self._transfer(name, sizes[name], node, target, number)

    def _transfer(self, name: str, nbytes: int, source: int, target: int, number: int) -> Transfer:
        """Return a transfer between two nodes, whose ranks take turns."""
        of_source, of_target = self._nodes[source], self._nodes[target]
        return Transfer(
            name,
            nbytes,
            of_source[number % len(of_source)],
            of_target[number % len(of_target)],
        )

    # --- loads

    def take_over(self) -> None:
        """Begin a run in the folder of each node, and at the root if it can be reached."""
        self._lost, self._sent, self._unusable = set(), set(), set()

        def take() -> None:
            if self._ranks.is_coordinator:
                try:
                    with self.uploads.paused():
                        self._root.take_over()
                except OSError as error:
                    self.own.problems.append(f"{self._root_store.path} cannot be reached: {error}")
            if self._is_leader:
                self.own.take_over()

        self._ranks.run(take)

    def choose(self, step: int | None, damaged: Mapping[int, str]) -> Choice:
        """Choose the newest step of which each file is on a node or at the root.

        Args:
            step: the step that the caller names.
            damaged: steps that a load from the root found damaged, and why.

        Raises:
            Exception: as :meth:`Coordinator.choose`, if no node has a step.
        """
        self.own.forget_saves()
        held = self._ranks.all_gather(lambda: list(self._look()) if self._is_leader else [])
        self._held = [held[ranks[0]] for ranks in self._nodes]
        at_root, save_id, problem = self._ranks.decide(
            step, partial(self._choose_root, step, damaged)
        )
        skipped: list[SkippedStep] = []
        for save in self._saves():
            if save.save_id in self._unusable or step not in (None, save.number):
                continue
            newer = at_root.step is not None and (
                save.is_superseded
                or at_root.step > save.number
                or (at_root.step == save.number and save_id != save.save_id)
            )
            if newer:
                break
            self._adopt(save)
            is_whole = self._place(save)
            if is_whole is not None:
                return Choice(save.number, skipped, save.save_id, is_whole)
            self._unusable.add(save.save_id)
            path, why = self.store.folder(save.number), "some of its files are nowhere"
            skipped.append(SkippedStep(number=save.number, path=path, why=why, kind="damaged"))
        if problem is not None:
            raise problem
        return Choice(at_root.step, [*skipped, *at_root.skipped])

    def _choose_root(
        self, step: int | None, damaged: Mapping[int, str]
    ) -> tuple[Choice, str | None, Exception | None]:
        """Return the choice at the root and its save, and the error if there is none."""
        try:
            with self.uploads.paused():
                number, skipped = self._root.choose(step, damaged)
                found = None if number is None else self._root_store.look_at(number)
            return Choice(number, skipped), getattr(found, "save_id", None), None
        except (CheckpointNotFoundError, OSError) as error:
            return Choice(None, []), None, error

    def _look(self) -> Iterator[_Held]:
        """Look at the steps on this node."""
        listing = self.store.look()
        for step in listing.steps:
            note, files = self.store.note(step), self.store.lengths(step.number)
            yield _Held(
                number=step.number,
                save_id=step.save_id,
                saved=step.committed,
                is_superseded=step.is_superseded,
                upload=note is not None and note.upload,
                files=files,
            )
        for skipped in listing.passed_over:  # its index may have come to other nodes only
            yield _Held(skipped.number, files=self.store.lengths(skipped.number))

    def _saves(self) -> list[_Held]:
        """Return the saves of which a node has the index, the newest first."""
        found: dict[str, _Held] = {}
        for each in self._all_held():
            if each.save_id and (each.save_id not in found or each.upload or each.is_superseded):
                found[each.save_id] = each
        return sorted(found.values(), key=lambda held: held.age, reverse=True)

    def _all_held(self) -> Iterator[_Held]:
        return (each for held in self._held for each in held)

    def _holders(self, number: int) -> dict[tuple[str, int], list[int]]:
        """Return the nodes that have each data file (name, length) of a step, undamaged."""
        found: dict[tuple[str, int], list[int]] = {}
        for node, held in enumerate(self._held):
            files = next((each.files for each in held if each.number == number), {})
            for name, nbytes in files.items():
                if is_data_file(name) and (node, name) not in self._lost:
                    found.setdefault((name, nbytes), []).append(node)
        return found

    def _adopt(self, save: _Held) -> None:
        """Give the index of a save, its note and the user's files to the nodes that lack it."""
        having = [any(each.save_id == save.save_id for each in held) for held in self._held]
        source = having.index(True)
        files = next(each.files for each in self._held[source] if each.save_id == save.save_id)
        names = [name for name in files if notes.is_extra(name)]
        names += [name for name in files if notes.id_of(name) == save.save_id]
        transfers = [
            Transfer(name, files[name], self._nodes[source][0], self._nodes[target][0])
            for name in (*names, INDEX_NAME)
            for target, has in enumerate(having)
            if not has
        ]
        if transfers:
            exchange(self._ranks, transfers, self.store.folder(save.number), fsync=self._fsync)

    def _index(self, number: int) -> _core.Index:
        return _core.Index.open(os.fspath(self.store.folder(number)), None, False)

    def _place(self, save: _Held) -> bool | None:
        """Return whether nodes have all files of a save; None if the root lacks some as well."""

        def look() -> bool | None:
            holders = self._holders(save.number)
            files = {(entry.name, entry.size) for entry in self._index(save.number).files()}
            missing = files - holders.keys()
            try:
                there = self._root_store.lengths(save.number).items() if missing else ()
            except OSError:
                there = ()
            return not missing or (None if missing - set(there) else False)

        return self._ranks.broadcast(look)

    def access(self, choice: Choice) -> tuple[Path, dict[str, Any]]:
        """Return the path to load a step from, and options of the load."""
        assert choice.step is not None  # noqa: S101  # there is a step
        folder = self.store.folder(choice.step)
        self._tiers = Tiers([os.fspath(folder)])
        if choice.is_whole:
            return folder, {"tiers": self._tiers}
        return self._root_store.folder(choice.step), {
            **self._root_store.access,
            "tiers": self._tiers,
        }

    def fetch_own(self, choice: Choice) -> None:
        """Give each node the files that its ranks wrote, if another node has them."""
        if choice.is_whole and choice.step is not None:
            index = self._ranks.run(partial(self._index, choice.step))
            self._fetch(choice.step, index, self._by_node(index))

    def repair(self, choice: Choice) -> bool:
        """Get what a failed load lacked from other nodes. Every rank calls it.

        Returns:
            Whether the load may succeed now. If not, the step is loaded from the nodes no more.
        """
        assert choice.step is not None  # noqa: S101  # it was loaded
        asked = self._ranks.all_gather(self._tiers.lacking)
        index = self._ranks.run(partial(self._index, choice.step))
        wanted = [set().union(*(asked[rank] for rank in ranks)) for ranks in self._nodes]
        sizes = {entry.name: entry.size for entry in index.files()}
        holders = self._holders(choice.step)
        # A file that is there, and that a read passed over, is damaged.
        damaged = {
            (node, name)
            for node, names in enumerate(wanted)
            for name in names
            if node in holders.get((name, sizes[name]), ())
        }
        self._lost |= damaged
        if choice.is_whole and (self._fetch(choice.step, index, wanted) or damaged):
            return True
        self._unusable.add(choice.save_id or "")
        return False

    def _fetch(self, step: int, index: _core.Index, wanted: Sequence[Collection[str]]) -> bool:
        """Send files to the nodes that want and lack them. Return whether one arrived."""
        sizes = {entry.name: entry.size for entry in index.files()}
        transfers, targets, places = [], [], self._holders(step)
        for node, names in enumerate(wanted):
            for number, name in enumerate(sorted(names)):
                holders = places.get((name, sizes[name]), [])
                if holders and node not in holders and (node, name) not in self._sent:
                    source = holders[(node + number) % len(holders)]
                    transfers.append(self._transfer(name, sizes[name], source, node, number))
                    targets.append((node, source))
        if not transfers:
            return False
        failed = exchange(self._ranks, transfers, self.store.folder(step), fsync=False)
        for number, (each, (node, source)) in enumerate(zip(transfers, targets, strict=True)):
            if number in failed:
                self._lost.add((source, each.name))
            else:
                self._sent.add((node, each.name))
                self._lost.discard((node, each.name))
        return len(failed) < len(transfers)

    def resume_uploads(self, last: int | None) -> None:
        """Go on with the uploads that an earlier process began, of steps up to ``last``."""

        def look() -> list[tuple[int, str]] | None:
            try:
                return [(step.number, step.save_id) for step in self._root_store.look().steps]
            except OSError:
                return None

        at_root, saves = self._ranks.broadcast(look) or [], self._saves()
        there, held = {save_id for _, save_id in at_root}, {save.save_id for save in saves}
        # Steps before one that is at the root were there, too, and were removed.
        newest = max((number for number, save_id in at_root if save_id in held), default=-1)
        for save in reversed(saves):
            is_due = save.upload and not save.is_superseded and save.save_id not in there
            if last is not None and is_due and newest < save.number <= last:
                self._adopt(save)
                if self._place(save) is not None:
                    self._ranks.run(partial(self._resume_upload, save))

    def _resume_upload(self, save: _Held) -> None:
        """Upload the files of which this node is the first that has them."""
        holders = self._holders(save.number)
        first = {
            entry.name: holders.get((entry.name, entry.size), [-1])[0]
            for entry in self._index(save.number).files()
        }
        own = [name for name, node in first.items() if node == self._node]
        if self._ranks.is_coordinator or (self._is_leader and own):
            self.uploads.add(save.number, save.save_id, own)

    # --- the rest

    def delete(self, step: int, remove_at_root: Callable[[], None]) -> None:
        """Remove a step from all nodes and from the root.

        Raises:
            CheckpointNotFoundError: it is nowhere.
        """

        def remove() -> bool:
            if not self._is_leader or self.store.look_at(step) is None:
                return False
            self.uploads.drop(step)
            self.store.remove(step)
            return True

        was_here = any(self._ranks.all_gather(remove))

        def remove_there() -> None:
            try:
                with self.uploads.paused():
                    remove_at_root()
            except CheckpointNotFoundError:
                if not was_here:
                    raise

        self._ranks.decide(step, remove_there)

    def report(self) -> TierReport:
        """Look at the steps of this node and at the root."""
        local = self.store.latest()
        try:
            steps = self._root_store.look().steps
        except OSError:
            steps = []
        there = {step.save_id for step in steps}
        newest = steps[-1].number if steps else None
        behind = [
            step
            for step in self.store.look().steps
            if step.save_id not in there and (note := self.store.note(step)) and note.upload
        ]
        return TierReport(None if local is None else local.number, newest, len(behind))

    def warn(self) -> None:
        """Warn of the problems of this node."""
        for problem in self.own.untold():
            warn_caller(f"{self.store.path}: {problem}")
        for problem in self.uploads.problems():
            warn_caller(problem)

    def close(self) -> None:
        """Wait for the uploads. Every rank calls it.

        Raises:
            StorageError: steps are not at the root. They stay on the nodes.
        """
        ranks = self._ranks
        self.uploads.end()
        while not all(ranks.all_gather(partial(self.uploads.has_ended, _LOOK))):
            pass
        ranks.broadcast(self.uploads.run_once)  # now that all nodes sent what they could
        left = sorted(
            {step for of_rank in ranks.all_gather(self.uploads.pending) for step in of_rank}
        )

        def check() -> None:
            self.warn()
            if self.uploads.taken_over is not None:
                raise self.uploads.taken_over
            if left:
                msg = (
                    f"these steps are on the nodes, and not at {self._root_store.path}: "
                    f"{', '.join(map(str, left))}. The next run that loads goes on with them"
                )
                raise StorageError(msg, path=self._root_store.path)

        ranks.run(check)
