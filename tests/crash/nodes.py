"""Kills runs that save to the disks of nodes. ``python -m crash.nodes``: 300 kills, ``python -m crash.nodes 20``: fewer.

Four nodes of one rank, with copies on the next node. A run saves step after step, to the nodes and
every second to the root: a folder in half of the kills, a store in the others. At a random moment of
a load or of a save one rank or all are killed. In half of the kills of one rank its folder goes as
well, as with a machine that is lost, and after some kills of all, all folders do. The next run must
resume from a step at least as new as the last that was saved before the kill, or if all folders are
gone as the newest at the root, and every bit of it is compared.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dcp_rs
from support.object_server import object_server

NODES = 4
#: Elements of what one rank saves: two blocks of a copy.
ROWS = 3 << 20
#: Seconds that each request takes, and after which a run is killed, at most.
LATENCY, PATIENCE = 0.02, 2.5


# --- the root


class Folder:
    """A root in the file system."""

    def __init__(self, base: Path) -> None:
        self._path = base / "root"
        self.options: dict[str, Any] = {"root": self._path}

    def newest(self) -> int:
        """The newest step of which the root has the index."""
        steps = self._path.glob("step-*/index.dcprs")
        return max((int(path.parent.name[5:]) for path in steps), default=0)

    def is_busy(self) -> bool:
        """Return whether a file is being stored."""
        return any(self._path.glob("step-*/*.tmp"))


class Store:
    """A root on a store, in a process of its own, which goes on when the runs are killed."""

    def __init__(self) -> None:
        self._told, theirs = multiprocessing.Pipe()
        # Before anything was asked here: a fork has no threads of its parent.
        process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(theirs,), daemon=True
        )
        process.start()
        url, options = self._told.recv()
        self.options: dict[str, Any] = {"root": url, "storage_options": options}

    def _ask(self) -> tuple[int, int]:
        self._told.send("?")
        newest, stored = self._told.recv()
        return newest, stored

    def newest(self) -> int:
        """As of a folder."""
        return self._ask()[0]

    def is_busy(self) -> bool:
        """Return whether a file is being stored."""
        return self._ask()[1] > 0


def _serve(told: Connection) -> None:
    with object_server() as server:
        server.latency, server.page, server.trusts = LATENCY, 1000, True
        told.send((server.url("run"), server.options(retry_timeout=5)))
        while True:
            try:
                told.recv()
            except EOFError:
                return
            names = [key.split("/") for key in server.keys("run/") if key.endswith("index.dcprs")]
            told.send((max((int(n[1][5:]) for n in names), default=0), server.at_once))


# --- the runs


def _value(step: int, seed: int) -> torch.Tensor:
    return torch.arange(float(ROWS)).add_(step + seed / 8)


def _rank(base: Path, rank: int, number: int, root: dict[str, Any]) -> None:
    """One rank of a run: resumes, notes the step that it found, and saves until it is killed."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(base / f"store-{number}"), NODES)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=NODES, timeout=timedelta(seconds=60)
    )
    warnings.simplefilter("ignore")
    manager = dcp_rs.CheckpointManager(
        local=base / f"node{rank}",
        node=str(rank),
        copies=1,
        upload_every=2,
        keep_last=2,
        **root,
    )
    state = {f"own.{rank}": torch.zeros(ROWS), "step": 0}
    _note(base, rank, "loading", 1)
    step = found = manager.load(state) or 0
    if found:
        assert state["step"] == step
        assert torch.equal(state[f"own.{rank}"], _value(step, rank))
    _note(base, rank, "found", step)
    while True:
        step += 1
        state = {f"own.{rank}": _value(step, rank), "step": step}
        if step % 2:
            manager.save(step, state)
        else:
            manager.async_save(step, state)
            manager.wait()
        _note(base, rank, "saved", step)


def _note(base: Path, rank: int, what: str, step: int) -> None:
    path = base / f"{what}-{rank}"
    (new := path.with_name(f"new-{what}-{rank}")).write_text(str(step))
    new.replace(path)


def _read(base: Path, what: str) -> list[int]:
    return [int(path.read_text()) for path in base.glob(f"{what}-[0-9]")]


def _errors(base: Path) -> list[str]:
    return [path.read_text() for path in base.glob("error-*")]


class _Run:
    """Four ranks."""

    def __init__(self, base: Path, number: int, root: dict[str, Any]) -> None:
        self._over: set[int] = set()
        self.children = [self._start(base, rank, number, root) for rank in range(NODES)]

    @staticmethod
    def _start(base: Path, rank: int, number: int, root: dict[str, Any]) -> int:
        child = os.fork()
        if child == 0:
            try:
                _rank(base, rank, number, root)
            except BaseException as error:  # noqa: BLE001  # read by the parent
                text = f"{type(error).__name__}: {error}"
                (base / f"error-{rank}").write_text(text)
                os._exit(3)
        return child

    def has_ended(self, child: int) -> bool:
        if child not in self._over and os.waitpid(child, os.WNOHANG)[0] == child:
            self._over.add(child)
        return child in self._over

    def have_ended(self) -> bool:
        return all(map(self.has_ended, self.children))

    def kill(self) -> None:
        for child in self.children:
            if not self.has_ended(child):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                self._over.add(child)


def _wait(what: str, ready: Callable[[], object], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise AssertionError(f"hung: {what}")
        time.sleep(0.002)


# --- the kills


@dataclass
class _History:
    """The step that the next run must find.

    Attributes:
        last: a step that is on the nodes for sure, or at the root if they are gone.
        is_copied: each file of it is on two nodes.
    """

    choice: random.Random
    tally: Counter[str] = field(default_factory=Counter)
    last: int = 0
    is_copied: bool = False


def run(kills: int, seed: int = 0) -> Counter[str]:
    """Kills runs ``kills`` times, half of them over each kind of root. Returns what happened, and how often."""
    tally, store = Counter[str](), Store()
    with tempfile.TemporaryDirectory(prefix="dcp-rs-nodes-") as folder:
        runs: list[tuple[str, Path, Folder | Store, _History]] = []
        for kind in ("folder", "store"):
            base = Path(folder) / kind
            base.mkdir()
            root = Folder(base) if kind == "folder" else store
            runs.append((kind, base, root, _History(random.Random(f"{seed} {kind}"), tally)))
        for number in range(kills):
            kind, base, root, history = runs[number % 2]
            _round(base, number, root, history)
            tally[f"steps, {kind}"] = history.last
            print(number, kind, dict(sorted(tally.items())), flush=True)
    return tally


def _phases(base: Path, root: Folder | Store) -> Iterator[str]:
    """Yield the phases that the run is in now."""
    if len(_read(base, "found")) < NODES:
        yield "load"
    if any(base.glob("node*/step-*/*.0000000000000000.tmp")):
        yield "copy"
    elif any(not (path / "index.dcprs").exists() for path in base.glob("node*/step-*")):
        yield "write"
    if root.is_busy():
        yield "upload"


def _round(base: Path, number: int, root: Folder | Store, history: _History) -> None:
    """Starts a run, which must find the last step or a newer one, and kills it."""
    choice, tally = history.choice, history.tally
    for pattern in ("loading-*", "found-*", "saved-*", "error-*", "store-*"):
        for path in base.glob(pattern):
            path.unlink()
    run = _Run(base, number, root.options)
    try:
        if choice.random() < 0.2:
            _wait("the start", lambda: len(_read(base, "loading")) == NODES or _errors(base))
            time.sleep(choice.uniform(0, 0.7))
        else:
            _wait("a load", lambda: len(_read(base, "found")) == NODES or _errors(base))
            time.sleep(choice.uniform(0, PATIENCE))
        assert not _errors(base), _errors(base)
        during = "+".join(_phases(base, root)) or "between"
        victim, is_one = choice.randrange(NODES), choice.random() < 0.6
        for child in [run.children[victim]] if is_one else run.children:
            os.kill(child, signal.SIGKILL)
        tally[f"during {during}"] += 1
        tally["one killed" if is_one else "all killed"] += 1
        if is_one:
            _wait("the others", run.have_ended)  # they must learn of it
            assert all("RankLostError" in error for error in _errors(base)), _errors(base)
    finally:
        run.kill()
    found, saved = _read(base, "found"), _read(base, "saved")
    assert len(set(found)) <= 1, found
    assert min(found, default=history.last) >= history.last, f"{history.last} is lost: {found}"
    if saved:
        history.is_copied = True
    history.last = max([*found, *saved, history.last])
    if is_one and history.is_copied and choice.random() < 0.5:
        shutil.rmtree(base / f"node{victim}", ignore_errors=True)
        tally["nodes lost"] += 1
        history.is_copied = False  # until the next save
    elif not is_one and choice.random() < 0.15:
        for node in base.glob("node[0-9]"):
            shutil.rmtree(node)
        tally["all nodes lost"] += 1
        history.last, history.is_copied = root.newest(), False


if __name__ == "__main__":
    begun = time.monotonic()
    print(dict(run(int(sys.argv[1]) if len(sys.argv) > 1 else 300)))
    print(f"{time.monotonic() - begun:.0f} s")
