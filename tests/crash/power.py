"""Every state that a loss of power can leave, as far as POSIX allows: ``python -m crash.power``.

What a save (or conversion, ...) does to files and folders is written down as it happens
(``record.c``, preloaded). For each moment of it, what was synced is on the disk; of the rest any
part may be:

* a change of a folder (a name made, changed or removed) is there or not, whatever became of other
  names; a rename is one change;
* of a file's bytes that were not synced none, some or all are there, in any order; its length may
  be there and its bytes not, or not yet all, or what the disk held before in their place.

Each such state is made anew in a folder of its own and judged there: it is the old checkpoint or
the new one, whole.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import json
import random
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from crash.preload import preloaded

HEAD = struct.Struct("=8Q")
CREATE, MKDIR, WRITE, SIZE, SYNC_BEGIN, SYNC_END, RENAME, EXCHANGE, UNLINK, LINK = range(1, 11)
#: What a disk may hold where a file's bytes were not written yet.
GARBAGE = b"\xa5"


@dataclass
class Tally:
    """What was judged."""

    what: str
    moments: int = 0
    states: int = 0
    distinct: int = 0
    old: int = 0
    new: int = 0
    cleaned: int = 0
    saved_over: int = 0
    refused: list[str] = field(
        default_factory=list
    )  # what was found where syncs are left out of the log


def run(*arguments: str, timeout: float = 600) -> list[dict[str, Any]]:
    """The tallies of ``python -m crash.power``, in a process that writes down what it does.

    Raises:
        FileNotFoundError: there is no C compiler.
        AssertionError: a state is neither the old checkpoint nor the new one.
    """
    return preloaded("power", "record.c", arguments, timeout)


# --- what happened


@dataclass(eq=False)
class Node:
    """A file or folder, from its creation on."""

    is_folder: bool
    name: str
    content: bytes = b""  # when the log began
    entries: dict[str, Node] = field(default_factory=dict)


@dataclass
class Data:
    """Bytes of a file, or its length."""

    at: int
    node: Node
    offset: int
    data: bytes | None  # None: the length becomes ``offset``
    durable: int = sys.maxsize  # from that moment on


@dataclass
class Names:
    """Changes of folders that are one change."""

    at: int
    changes: list[tuple[Node, str, Node | None]]
    durable: int = sys.maxsize


class History:
    """A log over the tree that there was when it began."""

    def __init__(self, root: Path) -> None:
        self.forgets: Callable[[Node], bool] = lambda _: False
        self.by_inode: dict[int, Node] = {}
        self.root = self._snapshot(root)
        self.current: dict[Node, dict[str, Node]] = {
            node: dict(node.entries) for node in self.by_inode.values() if node.is_folder
        }
        self.data: list[Data] = []
        self.names: list[Names] = []
        self.moments = 0

    def _snapshot(self, path: Path) -> Node:
        node = Node(path.is_dir(), path.name)
        self.by_inode[path.stat().st_ino] = node
        if node.is_folder:
            node.entries = {entry.name: self._snapshot(entry) for entry in path.iterdir()}
        else:
            node.content = path.read_bytes()
        return node

    def read(self, log: Path) -> None:
        """Takes in what happened."""
        text = log.read_bytes()
        at, begun = 0, dict[tuple[int, int], list[int]]()
        while at < len(text):
            length, operation, inode, other, offset, size, process, _ = HEAD.unpack_from(text, at)
            body = text[at + HEAD.size : at + HEAD.size + length]
            at += HEAD.size + length
            name, second, data = body.split(b"\0", 2)
            self._take(
                operation,
                inode,
                other,
                offset,
                size,
                process,
                name.decode(),
                second.decode(),
                data,
                begun,
            )
            self.moments += 1

    def _take(
        self,
        operation: int,
        inode: int,
        other: int,
        offset: int,
        size: int,
        process: int,
        name: str,
        second: str,
        data: bytes,
        begun: dict[tuple[int, int], list[int]],
    ) -> None:
        now = self.moments
        if operation in (CREATE, MKDIR):
            made = self.by_inode[other] = Node(operation == MKDIR, name)
            if made.is_folder:
                self.current[made] = {}
            self._change((self.by_inode[inode], name, made))
        elif operation == LINK:
            self._change((self.by_inode[inode], name, self.by_inode[other]))
        elif operation == UNLINK:
            self._change((self.by_inode[inode], name, None))
        elif operation in (RENAME, EXCHANGE):
            source, target = self.by_inode[inode], self.by_inode[other]
            moved = self.current[source][name]
            back = self.current[target][second] if operation == EXCHANGE else None
            self._change((source, name, back), (target, second, moved))
        elif inode not in self.by_inode:
            return  # a file without a name
        elif operation == WRITE:
            self.data.append(Data(now, self.by_inode[inode], offset, data))
        elif operation == SIZE:
            self.data.append(Data(now, self.by_inode[inode], size, None))
        elif operation == SYNC_BEGIN:
            begun.setdefault((process, inode), []).append(now)
        elif operation == SYNC_END:
            since = begun[process, inode].pop(0)
            if not self.forgets(self.by_inode[inode]):
                self._synced(self.by_inode[inode], since)

    def _change(self, *changes: tuple[Node, str, Node | None]) -> None:
        self.names.append(Names(self.moments, list(changes)))
        for folder, name, node in changes:
            if node is None:
                self.current[folder].pop(name, None)
            else:
                self.current[folder][name] = node

    def _synced(self, node: Node, since: int) -> None:
        for data in self.data:
            if data.node is node and data.at < since:
                data.durable = min(data.durable, self.moments)
        for names in self.names:
            if names.at < since and any(folder is node for folder, _, _ in names.changes):
                names.durable = min(names.durable, self.moments)

    def renamed_to(self, name: str) -> tuple[int, int]:
        """When the name came to be the new one's, and when that was durable."""
        found = [n for n in self.names if len(n.changes) == 2 and n.changes[1][1] == name]
        return found[-1].at, found[-1].durable


# --- what may be left of it


@dataclass
class Volatile:
    """What was not synced at some moment."""

    names: list[Names]
    files: list[tuple[Node, list[Data]]]


def volatile(history: History, moment: int) -> Volatile:
    """At ``moment``, which is after so many records."""
    names = [n for n in history.names if n.at < moment <= n.durable]
    of: dict[Node, list[Data]] = {}
    for data in history.data:
        if data.at < moment <= data.durable:
            of.setdefault(data.node, []).append(data)
    return Volatile(names, list(of.items()))


#: In how many ways bytes that were not synced can be there.
VARIANTS = 6


def content(history: History, node: Node, moment: int, variant: int) -> bytes:
    """The bytes of a file."""
    before = [d for d in history.data if d.node is node and d.durable < moment]
    later = [d for d in history.data if d.node is node and d.at < moment <= d.durable]
    got = bytearray(node.content)
    _apply(got, before)
    kept = {0: [], 1: later, 2: later, 3: later[: len(later) // 2], 4: later[-1:], 5: later}[
        variant
    ]
    if variant == 2:  # the length only
        whole = bytearray(got)
        _apply(whole, later)
        return bytes(got[: len(whole)]) + bytes(max(0, len(whole) - len(got)))
    if variant == 5:  # each piece half, and the rest what the disk held before
        for data in kept:
            half = len(data.data) // 2 if data.data is not None else 0
            torn = (
                None if data.data is None else data.data[:half] + GARBAGE * (len(data.data) - half)
            )
            _apply(got, [Data(data.at, node, data.offset, torn)])
        return bytes(got)
    _apply(got, sorted([*kept], key=lambda d: d.at))
    return bytes(got)


def _apply(got: bytearray, changes: list[Data]) -> None:
    for change in changes:
        if change.data is None:
            if len(got) > change.offset:
                del got[change.offset :]
            else:
                got.extend(bytes(change.offset - len(got)))
        else:
            end = change.offset + len(change.data)
            got.extend(bytes(max(0, end - len(got))))
            got[change.offset : end] = change.data


def tree(
    history: History, moment: int, lost: set[int], variants: dict[Node, int]
) -> dict[str, bytes | None]:
    """All files (and folders: None) by their paths, without the changes of names that are lost."""
    entries = {node: dict(node.entries) for node in history.by_inode.values() if node.is_folder}
    for names in history.names:
        if names.at < moment and names.at not in lost:
            for folder, name, node in names.changes:
                entries.setdefault(folder, dict(folder.entries))
                if node is None:
                    entries[folder].pop(name, None)
                else:
                    entries[folder][name] = node
    found: dict[str, bytes | None] = {}

    def walk(node: Node, path: str, above: tuple[Node, ...]) -> None:
        for name, inner in entries.get(node, inner_entries(node)).items():
            if inner.is_folder:
                found[f"{path}{name}"] = None
                if inner not in above:
                    walk(inner, f"{path}{name}/", (*above, inner))
            else:
                found[f"{path}{name}"] = content(history, inner, moment, variants.get(inner, 1))

    walk(history.root, "", (history.root,))
    return found


def inner_entries(node: Node) -> dict[str, Node]:
    return node.entries


def choices(
    left: Volatile, limit: int, rng: random.Random
) -> Iterator[tuple[set[int], dict[Node, int]]]:
    """What is lost, and how files are: all ways, or ``limit`` of them with the most likely to matter first."""
    axes = [2] * len(left.names) + [VARIANTS] * len(left.files)
    total = 1
    for n in axes:
        total *= n
    picks: Iterator[tuple[int, ...]]
    picks = (
        itertools.product(*map(range, axes))
        if total <= limit
        else itertools.islice(_picks(axes, rng), limit)
    )
    for pick in picks:
        names = pick[: len(left.names)]
        lost = {n.at for n, kept in zip(left.names, names, strict=True) if not kept}
        yield (
            _closed(left.names, lost),
            {node: v for (node, _), v in zip(left.files, pick[len(left.names) :], strict=True)},
        )


def _picks(axes: list[int], rng: random.Random) -> Iterator[tuple[int, ...]]:
    for base in ([0] * len(axes), [1] * len(axes)):
        yield tuple(base)
        for i, n in enumerate(axes):
            for value in range(n):
                if value != base[i]:
                    yield (*base[:i], value, *base[i + 1 :])
    while True:
        yield tuple(rng.randrange(n) for n in axes)


def _closed(names: list[Names], lost: set[int]) -> set[int]:
    """What builds on a lost change of a name is lost too."""
    lost = set(lost)
    gone: set[tuple[int, str]] = set()
    for change in names:
        keys = {(id(folder), name) for folder, name, _ in change.changes}
        if change.at in lost or keys & gone:
            lost.add(change.at)
            gone |= keys
    return lost


# --- judging


@dataclass
class Scenario:
    """What is done, and what is right.

    Attributes:
        judge: given the folder, ``"old"``, ``"new"``, or what is wrong.
        new_name: what is renamed to, to make it the new one; None: it stays the old one.
    """

    what: str
    root: Path
    act: Callable[[], Any]
    judge: Callable[[Path], str]
    new_name: str | None
    ckpt: str | None = None  # where it can be cleaned, and saved over


def record(library: ctypes.CDLL, scenario: Scenario, scratch: Path) -> list[History]:
    """Does it, and returns what happened; and what would have, without syncs of some kind."""
    histories = [History(scenario.root) for _ in range(1 + len(FORGETTING))]
    for history, (_, forgets) in zip(histories[1:], FORGETTING, strict=True):
        history.forgets = forgets
    log = scratch / "log"
    log.unlink(missing_ok=True)
    library.record_begin(str(scenario.root.resolve()).encode(), str(log).encode())
    try:
        scenario.act()
    finally:
        library.record_end()
    for history in histories:
        history.read(log)
    return histories


#: Without these syncs a save is not safe: it is seen.
FORGETTING: list[tuple[str, Callable[[Node], bool]]] = [
    ("data", lambda node: node.name.endswith(".safetensors")),
    ("index", lambda node: node.name.endswith(".tmp") and not node.is_folder),
    ("folder", lambda node: node.is_folder),
]


def sweep(history: History, scenario: Scenario, scratch: Path, limit: int, seed: int) -> Tally:
    """Judges what each moment can leave.

    Raises:
        AssertionError: it is neither the old nor the new one, or the wrong one of them.
    """
    tally = Tally(scenario.what, moments=history.moments)
    rng = random.Random(seed)
    begins, durable = (sys.maxsize, sys.maxsize)
    if scenario.new_name is not None:
        begins, durable = history.renamed_to(scenario.new_name)
        assert durable < sys.maxsize, (
            f"{scenario.what}: the new one is not durable when it is said to be there"
        )
    verdicts: dict[bytes, str] = {}
    place = scratch / "state"
    for moment in range(history.moments + 1):
        allowed = {"old"} if moment <= begins else {"new"} if moment > durable else {"old", "new"}
        for lost, variants in choices(volatile(history, moment), limit, rng):
            files = tree(history, moment, lost, variants)
            tally.states += 1
            key = _fingerprint(files)
            if key not in verdicts:
                tally.distinct += 1
                verdicts[key] = _judge(files, scenario, place, tally)
            verdict = verdicts[key]
            where = (
                f"{scenario.what}, after {moment} of {history.moments} calls, lost {sorted(lost)}"
            )
            assert verdict in allowed, f"{where}: {verdict}, not {allowed}; {sorted(files)}"
            tally.old += verdict == "old"
            tally.new += verdict == "new"
    return tally


def _fingerprint(files: dict[str, bytes | None]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(files):
        data = files[name]
        digest.update(f"{name}\0{-1 if data is None else len(data)}\0".encode())
        digest.update(data or b"")
    return digest.digest()


def _judge(files: dict[str, bytes | None], scenario: Scenario, place: Path, tally: Tally) -> str:
    import dcp_rs
    from crash.states import found_number, rank_state

    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for name in sorted(files):
        data = files[name]
        path = place / name
        if data is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    try:
        verdict = scenario.judge(place)
    except (dcp_rs.errors.DcpRsError, AssertionError, OSError, RuntimeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    if scenario.ckpt is not None and verdict in ("old", "new"):
        ckpt = place / scenario.ckpt
        if tally.distinct % 3 == 0 and ckpt.exists():
            # What it left can be removed, and it is the same one after that.
            dcp_rs.clean(ckpt, yes=True, older_than=0)
            assert scenario.judge(place) == verdict, f"{scenario.what}: cleaned to death"
            tally.cleaned += 1
        if tally.distinct % 7 == 0:
            dcp_rs.save(rank_state(9, 0), ckpt, no_dist=True, fsync=False)
            assert found_number(ckpt, 1) == 9
            tally.saved_over += 1
    return verdict


# --- what is done


class _NoFaults:
    def disarm(self) -> None:
        """There is none."""


def _saved(ckpt: str, ranks: int, old: int | None, new: int) -> Callable[[Path], str]:
    from crash.states import found_number
    from dcp_rs.errors import CheckpointNotFoundError

    def judge(place: Path) -> str:
        try:
            number = found_number(place / ckpt, ranks)
        except CheckpointNotFoundError:
            number = None
        return {old: "old", new: "new"}.get(number, f"save {number}")

    return judge


def scenarios(folder: Path) -> Iterator[Scenario]:
    """Saves, conversions, and what else changes a folder."""
    import dcp_rs
    from crash.faults import _converted_number, _fork_ranks
    from crash.states import rank_state

    def save(path: Path, number: int, ranks: int = 1) -> None:
        results = _fork_ranks(_NoFaults(), path, number, ranks, -1, (0, 0))  # type: ignore[arg-type]
        assert not any(error for _, error in results), results

    def new_root(name: str) -> Path:
        root = folder / name
        root.mkdir()
        return root

    root = new_root("first")
    yield Scenario(
        "a first save, 1 rank",
        root,
        lambda: save(root / "a/b/ckpt", 1),
        _saved("a/b/ckpt", 1, None, 1),
        "index.dcprs",
    )
    for ranks in (1, 4):
        root = new_root(f"over-{ranks}")
        save(root / "ckpt", 1, ranks)
        yield Scenario(
            f"a save over another, {ranks} rank{'s' * (ranks > 1)}",
            root,
            lambda root=root, ranks=ranks: save(root / "ckpt", 2, ranks),
            _saved("ckpt", ranks, 1, 2),
            "index.dcprs",
            "ckpt",
        )

    root = new_root("discarded")
    save(root / "ckpt", 1)

    def fail() -> None:
        writer = dcp_rs.RsWriter(root / "ckpt")

        def no_commit(*_: Any) -> None:
            raise OSError(errno.EIO, "no")

        writer.finish = no_commit  # type: ignore[method-assign]
        import torch.distributed.checkpoint as dcp

        try:
            dcp.save(rank_state(2, 0), storage_writer=writer, no_dist=True)
        except BaseException:  # noqa: BLE001 - CheckpointException is not an Exception
            writer.reset()

    yield Scenario("a save that fails", root, fail, _saved("ckpt", 1, 1, 2), None, "ckpt")

    root = new_root("rebuilt")
    save(root / "ckpt", 1)
    (root / "ckpt/index.dcprs").unlink()
    yield Scenario(
        "a lost index rebuilt",
        root,
        lambda: dcp_rs.index(root / "ckpt"),
        _saved("ckpt", 1, None, 1),
        "index.dcprs",
    )

    root = new_root("cleaned")
    save(root / "other", 2)
    save(root / "ckpt", 1)
    for file in (root / "other").iterdir():
        # As after a kill, and as after a loss of power between the rename and the removal.
        name = f"{file.name}.0123456789abcdef.tmp" if file.suffix == ".dcprs" else file.name
        shutil.copy(file, root / "ckpt" / name)
    shutil.rmtree(root / "other")

    def clean() -> None:
        assert len(dcp_rs.clean(root / "ckpt", yes=True).removed) == 2

    yield Scenario("clean", root, clean, _saved("ckpt", 1, 1, 2), None, "ckpt")

    sources = [folder / "source-1", folder / "source-2"]
    for number, source in enumerate(sources, 1):
        save(source, number)
    for to in ("dcp-rs", "dcp", "safetensors", "torch"):
        root = new_root(f"convert-{to}")
        options: dict[str, Any] = {"to": to, "skip_unsupported": True, "overwrite": True}
        dcp_rs.convert(sources[0], root / "result", **options)

        def judge(place: Path, to: str = to) -> str:
            return {1: "old", 2: "new"}[_converted_number(place / "result", to)]

        yield Scenario(
            f"a conversion to {to} over another",
            root,
            lambda root=root, options=options: dcp_rs.convert(
                sources[1], root / "result", **options
            ),
            judge,
            "result",
        )


def reusing_scenarios(folder: Path) -> Iterator[Scenario]:
    """Saves that take over a part of an earlier one."""
    import dcp_rs
    from crash.states import rank_state

    root = folder / "over-its-parent"
    options: dict[str, Any] = {"reuse": "*frozen", "no_dist": True}
    dcp_rs.save(rank_state(1, 0), root / "ckpt", **options)
    yield Scenario(
        "a save over another that it reuses",
        root,
        lambda root=root: dcp_rs.save(
            rank_state(2, 0), root / "ckpt", parent=root / "ckpt", **options
        ),
        _saved("ckpt", 1, 1, 2),
        "index.dcprs",
        "ckpt",
    )

    root = folder / "parent"
    (root / "ckpt").mkdir(parents=True)

    def reuse() -> None:
        # What the parent did not sync is durable when the child is.
        dcp_rs.save(rank_state(1, 0), root / "parent", fsync=False, **options)
        dcp_rs.save(rank_state(2, 0), root / "ckpt", parent=root / "parent", **options)
        shutil.rmtree(root / "parent")

    yield Scenario(
        "a save that outlives what it reuses",
        root,
        reuse,
        _saved("ckpt", 1, None, 2),
        "index.dcprs",
        "ckpt",
    )


def main(arguments: list[str]) -> int:
    import warnings

    import torch

    from crash import states

    torch.set_num_threads(1)
    states.LARGE = 5_000  # states are many
    library_path, *rest = arguments
    limit = int(rest[0]) if rest else 200
    seed = int(rest[1]) if rest[1:] else 1
    only = rest[2] if rest[2:] else ""
    library = ctypes.CDLL(library_path)
    tallies = []
    with tempfile.TemporaryDirectory(prefix="dcp-rs-power-") as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder, scratch = Path(name, "folder"), Path(name, "scratch")
        folder.mkdir()
        scratch.mkdir()
        for scenario in itertools.chain(scenarios(folder), reusing_scenarios(folder)):
            if only not in scenario.what:
                continue
            history, *forgetful = record(library, scenario, scratch)
            assert scenario.judge(scenario.root) in ("new", "old")
            tally = sweep(history, scenario, scratch, limit, seed)
            tallies.append(tally)
            if scenario.ckpt is not None and scenario.new_name is not None:
                for (what, _), history in zip(FORGETTING, forgetful, strict=True):
                    try:
                        sweep(history, scenario, scratch, limit, seed)
                    except AssertionError:
                        tally.refused.append(what)
            print(tallies[-1], file=sys.stderr)
    print(json.dumps([asdict(tally) for tally in tallies]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
