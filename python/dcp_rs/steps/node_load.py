"""A load of a step whose files are on nodes, at the root, or some here and some there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dcp_rs import _core
from dcp_rs.checkpoint.folders import INDEX_NAME, is_data_file
from dcp_rs.checkpoint.locate import Routes, Tiers
from dcp_rs.errors import CheckpointNotFoundError
from dcp_rs.steps import notes
from dcp_rs.steps.exchange import Transfer, send_files
from dcp_rs.steps.nodes import Nodes, is_older_than_root, is_to_go_up, newer_than_root
from dcp_rs.steps.step_store import SkippedStep, Step

#: A data file: name and length.
_File = tuple[str, int]


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
    """The folder of a step on a node.

    Attributes:
        step: the step; without a save id if the folder has no index.
        lengths: the lengths of the data files, the notes, the user's files and the index, by name.
    """

    step: Step
    lengths: Mapping[str, int]


#: A choice, the files that go from node to node before it is read, and whether it can be read then.
#: If not, the coordinator has to see its index before it decides.
_Plan = tuple[Choice, list[Transfer], bool]


#: The step at the root, what was skipped for it, and the error if there is none.
_AtRoot = tuple[Step | None, list[SkippedStep], Exception | None]


class NodeLoad:
    """One load by a manager with nodes. Every rank makes one, and makes the same calls.

    The ranks tell the coordinator what is on their nodes. It chooses the step, and says which files
    the nodes send to each other before it is read. What the load then finds lacking or damaged is
    noted, and the step is chosen again.

    Args:
        nodes: the nodes.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._ranks, self._store = nodes, nodes.ranks, nodes.store
        self._layout, self._root_store = nodes.layout, nodes.root_store
        self._opened: list[_core.Index] = []  # by the last attempt
        # These are known to the coordinator:
        self._held: list[list[_Held]] = []  # by node
        self._at_root: _AtRoot | None = None
        self._unusable: dict[str, SkippedStep] = {}  # saves that cannot be loaded from the nodes
        self._damaged: set[tuple[int, str]] = set()  # nodes, and files there
        self._wanted: set[tuple[int, str]] = set()  # nodes, and files that reads lacked there

    def take_over(self) -> None:
        """Begin a run in the folder of each node, and at the root if it can be reached."""
        nodes = self._nodes
        nodes.saved = 0

        def take() -> None:
            if self._ranks.is_coordinator:
                try:
                    with nodes.uploads.paused():
                        nodes.root.take_over()
                except OSError as error:
                    nodes.own.problems.append(f"{self._root_store.path} cannot be reached: {error}")
            if nodes.is_leader:
                nodes.own.take_over()
                nodes.own.forget_saves()

        self._ranks.run(take)

    # --- the choice

    def choose(self, step: int | None, damaged: Mapping[int, str]) -> Choice:
        """Choose the newest step of which each file is on a node or at the root.

        Each node then has its index, and the files that are its own, if a node has them.

        Args:
            step: the step that the caller names.
            damaged: steps that a load from the root found damaged, and why.

        Raises:
            Exception: as :meth:`Coordinator.choose`, if no node has a step.
        """
        return self._bring(step, partial(self._decide, step, damaged))

    def _bring(self, step: int | None, decide: Callable[[], _Plan]) -> Choice:
        """Bring the files of the step that the coordinator decides on to the nodes."""

        def plan(held: list[list[_Held]]) -> _Plan:
            self._held = [held[ranks[0]] for ranks in self._layout.ranks]
            return decide()

        while True:
            choice, transfers, is_final = self._ranks.decide_by(step, self._look, plan)
            if self._send(choice.step, transfers) and is_final:
                return choice

    def _look(self) -> list[_Held]:
        """Look at the folders of steps on this node. Its first rank tells what is there."""
        if not self._nodes.is_leader:
            return []
        listing = self._store.look()
        steps = [replace(step, files={}) for step in listing.steps]  # of all nodes, for retention
        # The index of the others may have come to other nodes only.
        steps += [
            Step(number=each.number, path=each.path, save_id="", saved=0, nbytes=0)
            for each in listing.passed_over
        ]
        return [self._look_at(step) for step in steps]

    def _look_at(self, step: Step) -> _Held:
        lengths = self._store.lengths(step.number)
        beside = {INDEX_NAME, *(step.note.files if step.note else ())}
        own = {
            name: nbytes
            for name, nbytes in lengths.items()
            if is_data_file(name) or name in beside or notes.id_of(name) == step.save_id
        }
        return _Held(step, own)

    def _decide(self, step: int | None, damaged: Mapping[int, str]) -> _Plan:
        """Decide on the newest step, or on that which the caller names."""
        if self._at_root is None or damaged:
            self._at_root = self._choose_at_root(step, damaged)
        at_root, passed_over, problem = self._at_root
        for save in reversed(self._saves()):
            if save.step.save_id in self._unusable or step not in (None, save.step.number):
                continue
            if at_root is not None and is_older_than_root(save.step, at_root):
                break
            if (plan := self._plan(save.step)) is not None:
                return plan
            self._give_up(save.step.number, save.step.save_id, "some of its files are nowhere")
        if problem is not None:
            for skipped in self._unusable.values():
                problem.add_note(f"on the nodes: {skipped}")
            raise problem
        choice = self._choice(None if at_root is None else at_root.number)
        return replace(choice, skipped=[*choice.skipped, *passed_over]), [], True

    def _choose_at_root(self, step: int | None, damaged: Mapping[int, str]) -> _AtRoot:
        try:
            with self._nodes.uploads.paused():
                return *self._nodes.root.choose(step, damaged), None
        except (CheckpointNotFoundError, OSError) as error:
            return None, [], error

    def _give_up(self, number: int, save_id: str, why: str) -> None:
        skipped = SkippedStep(
            number=number, path=self._store.folder(number), why=why, kind="damaged"
        )
        self._unusable[save_id] = skipped

    def _choice(self, number: int | None, **more: Any) -> Choice:
        skipped = [each for each in self._unusable.values() if each.number != number]
        return Choice(number, skipped, **more)

    def _plan(self, step: Step, *, to_owners: bool = False) -> _Plan | None:
        """Return how to read a save; None if some of its files are nowhere.

        Args:
            step: the save.
            to_owners: each node gets the data files that are its own.
        """
        places = self._places(step.number, step.save_id)
        having = next((nodes for (name, _), nodes in places.items() if name == INDEX_NAME), [])
        is_final = self._nodes.node in having
        index = self._store.index(step.number) if is_final else None
        files = {(each.name, each.size) for each in index.files()} if index else set()
        lacking, at_root = files - places.keys(), dict[str, int]()
        if lacking:
            with suppress(OSError):
                at_root = self._root_store.lengths(step.number)
        if not having or lacking - at_root.items():
            return None
        targets = {name: {self._layout.owner(name)} if to_owners else set() for name, _ in files}
        for node, name in self._wanted:
            targets.get(name, set()).add(node)
        # Nodes without the index get it, and the files beside it, from the first node that has it.
        beside = {f for f, nodes in places.items() if having[0] in nodes and not is_data_file(f[0])}
        new = set(range(len(self._held))).difference(having)
        transfers = [
            self._layout.transfer(*file, holders[(node + turn) % len(holders)], node, turn)
            for turn, file in enumerate(sorted(beside | files - lacking))
            for holders in [places[file]]
            for node in targets.get(file[0], new).difference(holders)
        ]
        choice = self._choice(step.number, save_id=step.save_id, is_whole=not lacking)
        return choice, transfers, is_final

    def _saves(self) -> list[_Held]:
        """Return the saves of which a node has the index, the oldest first."""
        held = (each for held in self._held for each in held if each.step.save_id)
        found = sorted(held, key=lambda each: each.step.is_superseded)  # as one node knows
        saves = {each.step.save_id: each for each in found}.values()
        return sorted(saves, key=lambda each: (each.step.age, each.step.committed))

    def _places(self, number: int | None, save_id: str | None) -> dict[_File, list[int]]:
        """Return the nodes that have each file of a save, undamaged."""
        found: dict[_File, list[int]] = {}
        for node, held in enumerate(self._held):
            for each in (each for each in held if each.step.number == number):
                for name, nbytes in each.lengths.items():
                    is_its = is_data_file(name) or each.step.save_id == save_id
                    if is_its and (node, name) not in self._damaged:
                        found.setdefault((name, nbytes), []).append(node)
        return found

    def _send(self, number: int | None, transfers: Sequence[Transfer]) -> bool:
        """Send files of a step from node to node. Return whether all could be read."""
        if number is None or not transfers:
            return True
        folder = self._store.folder(number)
        # After a power failure they would be found damaged, and sent again.
        send = partial(send_files, self._ranks, transfers, folder, fsync=False)
        unread = set().union(*self._ranks.all_gather(send))
        node_of = self._layout.node_of
        for place, each in enumerate(transfers):
            if place in unread:
                self._damaged.add((node_of[each.source], each.name))
            else:
                self._damaged.discard((node_of[each.target], each.name))
        return not unread

    # --- the load

    def access(self, choice: Choice) -> tuple[Path, dict[str, Any]]:
        """Return the path to load a step from, and options of the load."""
        assert choice.step is not None  # noqa: S101  # there is a step
        folder, root, self._opened = self._store.folder(choice.step), self._root_store, []
        find = partial(self._find_routes, choice) if choice.is_whole else None
        options: dict[str, Any] = {"tiers": Tiers((os.fspath(folder),), find, self._opened)}
        if choice.is_whole:
            return folder, options
        return root.folder(choice.step), {**root.access, **options}

    def _find_routes(self, choice: Choice, lacking: list[list[str]]) -> list[Routes]:
        """Choose the ranks that read the files that ranks lack. Ranks of a node take turns."""
        places = {
            name: nodes for (name, _), nodes in self._places(choice.step, choice.save_id).items()
        }
        routes = [Routes() for _ in lacking]
        for rank, names in enumerate(lacking):
            for turn, name in enumerate(names, rank):
                others = [n for n in places.get(name, ()) if n != self._layout.node_of[rank]]
                if others:
                    able = self._layout.ranks[others[turn % len(others)]]
                    source = routes[rank].sources[name] = able[turn % len(able)]
                    routes[source].askers.add(rank)
        most = max(len(each.askers) for each in routes)
        return [replace(each, most=most) for each in routes]

    def repair(self, choice: Choice, why: str) -> bool:
        """Note what a failed load lacked. Every rank calls it.

        Args:
            choice: what was to be loaded.
            why: how it failed.

        Returns:
            True if the next choice may get it from other nodes. If not, the step is loaded from the
            nodes no more.
        """

        def find_lacking() -> set[str]:
            return {name for index in self._opened for name in index.lacking()}

        def note(lacking: list[set[str]]) -> bool:
            assert choice.step is not None  # noqa: S101  # it was loaded
            node_of = self._layout.node_of
            asked = {(node_of[rank], name) for rank, names in enumerate(lacking) for name in names}
            new = asked - self._wanted
            self._wanted |= new
            # A file that is there, and that a read passed over, is damaged.
            for node, held in enumerate(self._held):
                self._damaged |= new & {(node, name) for each in held for name in each.lengths}
            if choice.is_whole and new:
                return True
            self._give_up(choice.step, choice.save_id or "", why)
            return False

        return self._ranks.all_reduce(find_lacking, note)

    def resume_uploads(self, last: int) -> None:
        """Go on with the uploads that were begun, of steps up to ``last`` only."""
        due: list[Step] | None = None  # on the coordinator

        def plan() -> _Plan:
            nonlocal due
            if due is None:
                steps = [save.step for save in self._saves() if is_to_go_up(save.step)]
                due = [step for step in steps if step.number <= last]
                with suppress(OSError):
                    at_root = None if self._at_root is None else self._at_root[0]
                    due = newer_than_root(due, self._root_store, at_root)
            while due:
                if (found := self._plan(due[0], to_owners=True)) is not None:
                    return found
                due = due[1:]  # it cannot become whole
            return Choice(None, []), [], True

        self._nodes.uploads.drop(range(last + 1, sys.maxsize))  # the run went back
        while (choice := self._bring(None, plan)).step is not None:
            due = (due or [])[1:]
            if self._nodes.is_leader:
                index = self._store.index(choice.step)
                self._nodes.upload(choice.step, choice.save_id or "", index, is_new=False)
