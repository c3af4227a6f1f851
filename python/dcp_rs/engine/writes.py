"""What one rank writes in a save: items, how the state dict was nested, and the files with their index."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dcp_rs import _core
from dcp_rs._progress import Progress, watching
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs._warnings import warn_caller
from dcp_rs.engine.destination import Destination
from dcp_rs.engine.reports import SaveReport
from dcp_rs.errors import UnsupportedError
from dcp_rs.options import WriteOptions
from dcp_rs.tensors.dtypes import NAMES
from dcp_rs.tensors.flatten import Flat
from dcp_rs.tensors.nesting import Container, TreePath, name_of, remaining, storable
from dcp_rs.transfer.entry import Entry
from dcp_rs.transfer.save import turns, write_entries

__all__ = ["Nesting", "Place", "Writes", "Written", "packed", "unpacked", "write_files"]


@dataclass
class Nesting:
    """How a state dict was nested.

    Attributes:
        paths: of its leaves, by FQN, in its order, with keys as they are.
        containers: those that the paths do not tell.
        lost: keys that the format cannot hold, by the name of what they lead to. They are text here.
    """

    paths: dict[str, TreePath]
    containers: list[Container]
    lost: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, flat: Flat) -> Nesting:
        """That of a state dict."""
        if flat.is_text:
            return cls(flat.paths, flat.containers)
        lost: dict[str, Any] = {}

        def kept(path: TreePath) -> TreePath:
            path, keys = storable(path)
            if keys:
                lost[name_of(path)] = keys[0]
            return path

        paths = {fqn: kept(path) for fqn, path in flat.paths.items()}
        return cls(paths, [Container(c.position, kept(c.path), c.kind) for c in flat.containers], lost)

    def judge(self, *, strict: bool) -> None:
        """Warn of keys that come back as text.

        Raises:
            UnsupportedError: there are some, with ``strict``; or a number of more than 64 bits, infinity, or a tuple with such.
        """
        for name, key in self.lost.items():
            keys = "keys are text, numbers, None, and tuples of such"
            if isinstance(key, int | float | tuple):  # its text could not be told from a text
                msg = f"{name!r}: the key {key!r} cannot be kept: {keys}, and integers have 64 bits"
                raise UnsupportedError(msg, tensor=name)
            msg = f"{name!r}: the key {key!r} ({type(key).__name__}) is kept as text, {str(key)!r}: {keys}"
            if strict:
                raise UnsupportedError(f"{msg} (strict_values=True)", tensor=name)
            warn_caller(msg)

    @cached_property
    def positions(self) -> dict[str, int]:
        """The places of the leaves."""
        return {fqn: position for position, fqn in enumerate(self.paths)}

    def places(self, names: list[str]) -> tuple[list[TreePath | None], list[int | None]]:
        """The path and the position of each leaf; None of what is none."""
        if list(self.paths) == names:  # nothing was added, taken or moved
            return list(self.paths.values()), list(range(len(names)))
        return [self.paths.get(name) for name in names], [self.positions.get(name) for name in names]

    def only(self, names: Iterable[str], passes: Callable[[str], bool]) -> Nesting:
        """That of a state dict of which only the leaves ``names`` are left, and other containers that pass."""
        leaves = [self.paths[name] for name in names]
        lost = {name: key for name, key in self.lost.items() if passes(name)}
        return Nesting(self.paths, remaining(self.containers, leaves, passes), lost)

    def to_core(self) -> list[tuple[int, TreePath, str]]:
        """The containers, as ``_core.Save.finish`` takes them."""
        return [(container.position, container.path, container.kind) for container in self.containers]


@dataclass
class Writes:
    """What one rank writes.

    Attributes:
        plan: its items.
        keep: which of them it writes, a bit for each; None: all.
        tensors: the list that the plan's plain tensors are places in.
        entries: the other items that it writes.
        nesting: of the state dict, where the planner is one that knows.
    """

    plan: _core.SavePlan
    keep: bytes | None
    tensors: list[Any]
    entries: list[Entry]
    nesting: Nesting | None = None


#: What every index begins with (section 3.1 of the format).
_INDEX_MAGIC = b"\x89DCPRS"


@dataclass(frozen=True)
class Place:
    """Which part of which save a rank writes. The coordinator chooses the save.

    Attributes:
        rank: the number of this rank.
        world_size: the number of ranks; 0 in a rank-local save.
        save_id: the id of the save, the same on all ranks.
        generation: section 1.1 of the format.
    """

    rank: int
    world_size: int
    save_id: bytes
    generation: int

    @property
    def own_rank(self) -> int | None:
        """The rank whose index it becomes, in a rank-local save; None: all ranks share one."""
        return self.rank if self.world_size == 0 else None


@dataclass(frozen=True)
class Written:
    """The complete files of one rank, and the claim on them.

    Attributes:
        to: where the files are.
        place: which save it is.
        index: names the files.
        save: claims the files, so that ``dcp_rs.clean`` in another process leaves them alone.
        process: the process that wrote.
    """

    to: Destination
    place: Place
    index: bytes
    save: _core.Save
    process: int

    def report(self) -> SaveReport:
        """Return how much this rank wrote."""
        save = self.save
        return SaveReport(
            os.fspath(self.to.path),
            bytes_written=save.bytes,
            bytes_reused=save.bytes_reused,
            requests=save.requests,
        )

    def let_go(self) -> None:
        """End the claim: an index names the files, or nobody needs them."""
        self.save.let_go()

    def discard(self) -> None:
        """Remove the files, unless the index of this save is there."""
        if self.process != os.getpid():  # a fork: the parent decides
            return
        self.to.remove(self.place.own_rank, [self.index])
        self.let_go()

    def forget(self) -> None:
        """Give up on hearing whether the save was committed.

        In a folder the index tells. On a store the commit of another rank may still be on its way:
        there :func:`dcp_rs.clean` removes files that no index names.
        """
        if self.to.store is None:
            self.discard()
        elif self.process == os.getpid():
            self.let_go()


def write_files(
    writes: Writes,
    to: Destination,
    place: Place,
    options: WriteOptions,
    *,
    reuse: _core.Reuse | None,
    progress: Progress,
) -> Written:
    """Write the data files of one rank. If that fails, remove them.

    Args:
        writes: what the rank writes.
        to: where it goes.
        place: which save it is.
        options: how bytes are written.
        reuse: what of it a parent holds.
        progress: who hears of the bytes.
    """
    save = writes.plan.create(
        to.folder,
        writes.keep,
        [entry.nbytes for entry in writes.entries],
        save_id=place.save_id,
        generation=place.generation,
        token=secrets.randbits(64),
        rank=place.rank,
        world_size=place.world_size,
        turns=turns(writes.entries),
        reuse=reuse,
        store=to.store,
        **options.engine(remote=to.store is not None),
    )
    try:
        with watching(progress, "saving") as watch:
            if watch is not None:
                save.watch(lambda done: watch(done, save.bytes))
            save.write_plain(writes.tensors, PLAIN_TYPES, NAMES)
            to_write = [not reused for reused in save.reused()]
            write_entries(save, writes.entries, options, save.plain_count, only=to_write)
        index = save.finish(None if writes.nesting is None else writes.nesting.to_core())
    except BaseException:
        for reason in save.abort():
            warn_caller(f"the failed save left something on the store: {reason}")
        raise
    return Written(to, place, index, save, os.getpid())


def packed(index: bytes, ranks: int) -> bytes:
    """Return an index as it travels to the coordinator: it repeats itself, and is a sixth of its size then."""
    return index if ranks <= 1 else zlib.compress(index, 1)


def unpacked(data: bytes) -> bytes:
    """Return the index that a rank sent."""
    return data if data.startswith(_INDEX_MAGIC) else zlib.decompress(data)
