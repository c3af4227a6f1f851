"""Kills runs that save to the disks of nodes. ``python -m crash.nodes``: 300 kills, ``python -m crash.nodes 20``: fewer.

Four nodes of one rank, with copies on the next node. A run saves step after step, to the nodes and
every third to the root. At a random moment one rank or all are killed, and in half of the kills of
one rank its folder goes as well, as with a machine that is lost. The next run must resume from a
step at least as new as the last that was saved before the kill, and every bit of it is compared.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

NODES = 4
ROWS = 1 << 15


def _value(step: int) -> torch.Tensor:
    return torch.arange(float(ROWS)) + step


def _rank(base: Path, rank: int, round_: int) -> None:
    """One rank of a run: resumes, notes the step that it found, and saves until it is killed."""
    import dcp_rs

    store = dist.FileStore(str(base / f"store-{round_}"), NODES)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=NODES, timeout=timedelta(seconds=60)
    )
    warnings.simplefilter("ignore")
    manager = dcp_rs.CheckpointManager(
        base / "root",
        local=base / f"node{rank}",
        node=str(rank),
        copies=1,
        upload_every=3,
        keep_last=2,
    )
    state = {"all": torch.zeros(ROWS), f"own.{rank}": torch.zeros(ROWS), "step": 0}
    found = manager.load(state)
    step = found or 0
    if found is not None:
        assert state["step"] == step
        for name in ("all", f"own.{rank}"):
            assert torch.equal(state[name], _value(step)), name
    _note(base, rank, "found", step)
    while True:
        step += 1
        state = {"all": _value(step), f"own.{rank}": _value(step), "step": step}
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


def _start(base: Path, rank: int, round_: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            _rank(base, rank, round_)
        except BaseException as error:  # noqa: BLE001  # read by the parent
            text = f"{type(error).__name__}: {error}"
            (base / f"error-{rank}").write_text(text)
            os._exit(3)
    return child


def _wait(what: str, ready: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise AssertionError(f"hung: {what}")
        time.sleep(0.002)


def run(kills: int, seed: int = 0) -> Counter[str]:
    """Kills a run ``kills`` times. Returns what happened, and how often."""
    choice, tally = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="dcp-rs-nodes-") as folder:
        last = 0
        for number in range(kills):
            last = _round(Path(folder), number, last, choice, tally)
            tally["steps"] = last
    return tally


def _round(base: Path, number: int, last: int, choice: random.Random, tally: Counter[str]) -> int:
    """Starts a run, which must find step ``last`` or a newer one, and kills it. Returns the last step that it saved."""
    for pattern in ("found-*", "saved-*", "error-*", "store-*"):
        for path in base.glob(pattern):
            path.unlink()
    children = [_start(base, rank, number) for rank in range(NODES)]
    _over.clear()
    try:
        _wait("a load", lambda: len(_read(base, "found")) == NODES or _errors(base))
        assert not _errors(base), _errors(base)
        (found,) = set(_read(base, "found"))
        assert found >= last, f"step {last} is lost, and step {found} was found"
        time.sleep(choice.uniform(0, 1.0))
        victim, is_one = choice.randrange(NODES), choice.random() < 0.7
        for rank in [victim] if is_one else range(NODES):
            os.kill(children[rank], signal.SIGKILL)
        if is_one and choice.random() < 0.5:
            _wait("the end of the killed", lambda: _ended(children[victim]))
            shutil.rmtree(base / f"node{victim}", ignore_errors=True)
            tally["nodes lost"] += 1
        tally["one killed" if is_one else "all killed"] += 1
        _wait("the others", lambda: all(map(_ended, children)))  # they must learn of it
        assert all("RankLostError" in error for error in _errors(base)), _errors(base)
        return max([*_read(base, "saved"), found])
    finally:
        for child in children:
            if not _ended(child):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _errors(base: Path) -> list[str]:
    return [path.read_text() for path in base.glob("error-*")]


_over: set[int] = set()


def _ended(child: int) -> bool:
    if child not in _over and os.waitpid(child, os.WNOHANG)[0] == child:
        _over.add(child)
    return child in _over


if __name__ == "__main__":
    print(dict(run(int(sys.argv[1]) if len(sys.argv) > 1 else 300)))
