"""Saves to the disks of nodes, and restores after one of them is lost: four nodes of one rank each.

A node is a folder and a process of this machine, so all of them share one disk, one memory and the
processors. The root is a server of objects with 20 ms for each request.
"""

import itertools
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from harness import page_cache, stores
from harness.context import Context
from harness.driven import BENCHES, Driven
from harness.pairs import Contender, measure
from harness.rows import Row, figure, versus
from harness.states import Pattern, size_of, square_shapes
from harness.stores import Store

NODES, LATENCY = 4, 0.02
PLAIN, ALONE, COPIED = "CheckpointManager", "local=", "local=, copies=1"
COPIES = {PLAIN: "plain", ALONE: "0", COPIED: "1"}


def run(context: Context) -> list[Row]:
    pattern = Pattern(square_shapes(context.sizes), torch.bfloat16)
    folder = context.folder / "nodes"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with stores.serving(LATENCY) as store, together(context, folder, store) as nodes:
        saves = measure([nodes.save(name) for name in COPIES], **context.pairs)
        store.counts()
        restores = measure([nodes.restore(name) for name in (PLAIN, COPIED)], **context.pairs)
        asked = store.counts()["data"]
    shutil.rmtree(folder)
    case = f"{size_of(pattern.nbytes)}, {NODES} nodes"
    lost = f"{case}, one of them lost, warm"
    return [
        versus(f"save {case}", saves, ALONE, PLAIN, reach=1 / 1.15),
        versus(f"save {case}", saves, COPIED, PLAIN),
        versus(f"restore {lost}", restores, COPIED, PLAIN, reach=1 / 1.5),
        figure(f"restore {lost}: requests for data at the root", COPIED, "", [asked], reach=0),
    ]


class Nodes:
    """Processes that do the same at once, each with a folder."""

    def __init__(self, folder: Path, processes: list[Driven], pool: ThreadPoolExecutor) -> None:
        self._folder, self._processes, self._pool = folder, processes, pool
        self._numbers = itertools.count()
        self._runs: dict[str, str] = {}

    def ask(self, *words: str) -> None:
        list(self._pool.map(lambda process: process.ask(*words), self._processes))

    def _forget(self, run: str) -> None:
        for folder in self._folders(run):
            shutil.rmtree(folder, ignore_errors=True)

    def _folders(self, run: str) -> list[Path]:
        return [self._folder / run, *(node_folder(self._folder, i) / run for i in range(NODES))]

    def save(self, name: str) -> Contender:
        """A save by all of them, in a run that is new each time. The last one stays."""

        def before() -> None:
            if name in self._runs:
                self._forget(self._runs[name])
            self._runs[name] = f"run-{COPIES[name]}-{next(self._numbers)}"
            self.ask("prepare", self._runs[name], COPIES[name])

        return Contender(
            name, lambda: self.ask("save"), before=before, verify=lambda: self.ask("close")
        )

    def restore(self, name: str) -> Contender:
        """A restore by all of them, of the last save. With copies, the second node is empty."""
        run = self._runs[name]

        def before() -> None:
            if name == COPIED:
                shutil.rmtree(node_folder(self._folder, 1) / run)
            page_cache.warm(*(folder for folder in self._folders(run) if folder.exists()))

        return Contender(
            name,
            lambda: self.ask("restore", run, COPIES[name]),
            before=before,
            verify=lambda: self.ask("verify"),
        )


def node_folder(folder: Path, number: int) -> Path:
    return folder / f"node{number}"


@contextmanager
def together(context: Context, folder: Path, store: Store) -> Iterator[Nodes]:
    """The processes, which meet in one process group."""
    meeting = folder / "nodes.store"
    script = BENCHES / "workers" / "node_worker.py"
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(NODES))
        processes = []
        for rank in range(NODES):
            words = [rank, NODES, meeting, context.size, node_folder(folder, rank), "s3://bucket"]
            command = [sys.executable, script, *map(str, words)]
            processes.append(stack.enter_context(Driven(command, **store.environment())))
        yield Nodes(folder, processes, pool)
