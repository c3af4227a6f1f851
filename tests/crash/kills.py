"""Ends saving processes at random moments, in several ways, and checks after each what the folder holds."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dcp_rs
from crash import faults, power
from crash.folder import Folder
from crash.states import found_number, load_number, rank_state
from crash.store import Store

#: A rank whose peers are gone has to notice by then.
PEER_TIMEOUT = 30.0  # seconds
#: Left-overs of so many kills lie about before they are removed.
KEEP_STRAYS = 10
#: As many children are forked.
CHILDREN = 12


@dataclass
class Tally:
    """What happened."""

    ranks: int
    kills: int = 0
    kept_old: int = 0
    became_new: int = 0
    finished_first: int = 0  # the save was done when the signal came
    one_rank_only: int = 0
    saves: int = 0
    most_strays: int = 0
    strays: int = 0
    by_moment: dict[str, int] = field(default_factory=dict)
    by_way: dict[str, int] = field(default_factory=dict)
    by_request: dict[str, int] = field(default_factory=dict)  # that a store was asked just before
    uploads: int = 0  # that were left open on a store
    children: int = 0  # that lived longer than the save that they were forked in

    def count(self, moment: str) -> None:
        self.by_moment[moment] = self.by_moment.get(moment, 0) + 1


class Savers:
    """``ranks`` forked processes that save number after number until they are killed."""

    def __init__(
        self, place: Folder | Store, scratch: Path, first: int, ranks: int, way: str = "kill"
    ) -> None:
        self.way = way
        self.read, write = os.pipe()
        self.pids: list[int] = []
        store = scratch / f"store-{time.monotonic_ns()}"
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                os.close(self.read)
                _save_forever(place, store, first, rank, ranks, write, way)
            self.pids.append(pid)
        os.close(write)
        self.locker = _lock_forever(place.path) if way == "contended" else None
        self._lines = b""

    def wait_for_start(self) -> None:
        """Returns when rank 0 is about to save."""
        self._read_until(b"begin", 60)

    def wait_for_child(self) -> None:
        """Returns when there is one that they forked."""
        self._read_until(b"child", 60)

    def _read_until(self, word: bytes, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while word not in self._lines:
            ready, _, _ = select.select([self.read], [], [], deadline - time.monotonic())
            data = os.read(self.read, 4096) if ready else b""
            if not data:
                msg = f"the savers said only {self._lines!r}"
                raise AssertionError(msg)
            self._lines += data

    def kill(self, victims: list[int]) -> None:
        number = signal.SIGTERM if self.way.endswith("term") else signal.SIGKILL
        for rank in victims:
            os.kill(self.pids[rank], number)

    def how_they_end(self) -> set[int]:
        """How those end that were killed."""
        # One that handles the signal may be past its last line of Python: then it is not heard.
        return {"term": {-signal.SIGTERM}, "handled term": {0, -signal.SIGTERM}}.get(
            self.way, {-signal.SIGKILL}
        )

    def children(self) -> list[int]:
        """What they forked, and what is still there."""
        return [
            int(line.split()[1])
            for line in self._lines.split(b"\n")[:-1]
            if line.startswith(b"child")
        ]

    def end(self) -> None:
        """Ends what has outlived them."""
        for child in self.children():
            os.kill(child, signal.SIGKILL)
        if self.locker is not None:
            os.kill(self.locker, signal.SIGKILL)
            os.waitpid(self.locker, 0)

    def wait(self) -> list[int]:
        """How each process ended: minus the number of a signal, or an exit code."""
        deadline = time.monotonic() + PEER_TIMEOUT
        ends = []
        for pid in self.pids:
            while not (done := os.waitpid(pid, os.WNOHANG))[0]:
                if time.monotonic() > deadline:
                    for other in self.pids:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(other, signal.SIGKILL)
                    msg = f"a rank is still there {PEER_TIMEOUT} s after another was killed"
                    raise AssertionError(msg)
                time.sleep(0.001)
            ends.append(os.waitstatus_to_exitcode(done[1]))
        while data := os.read(self.read, 4096):
            self._lines += data
        os.close(self.read)
        return ends

    def told(self) -> list[bytes]:
        """The last that they said."""
        return self._lines.split(b"\n")[-8:]

    def progress(self) -> tuple[int | None, int | None]:
        """The last save that began, and the last that ended, on rank 0."""
        begun = ended = None
        for line in self._lines.split(b"\n")[:-1]:
            word, number = line.split()
            if word == b"begin":
                begun = int(number)
            elif word == b"end":
                ended = int(number)
        return begun, ended


def _lock_forever(path: Path | str) -> int:
    """A process that takes the lock of the folder again and again."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)
        while True:
            lock = dcp_rs._core.FolderLock(str(path))
            time.sleep(random.uniform(0, 0.01))
            del lock
            time.sleep(random.uniform(0, 0.02))
    return pid


def _fork_forever(pipe: int) -> None:
    """On a thread: children that do nothing, and that live longer than this process."""
    for _ in range(CHILDREN):
        time.sleep(random.uniform(0, 0.02))
        pid = os.fork()
        if pid == 0:
            os.close(pipe)
            # One whose parent was killed before it told of it is known to nobody: who reads what is
            # printed must not wait for it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            signal.alarm(120)
            while True:
                signal.pause()
        os.write(pipe, b"child %d\n" % pid)


def _handled(*_: Any) -> None:
    raise SystemExit(143)


def _save_forever(
    place: Folder | Store, store: Path, first: int, rank: int, ranks: int, pipe: int, way: str
) -> None:
    """In the forked process; never returns."""
    code = 3
    try:
        if way == "handled term":
            signal.signal(signal.SIGTERM, _handled)
        if way == "forks":
            threading.Thread(target=_fork_forever, args=(pipe,), daemon=True).start()
        if way == "contended":
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)  # of peers that were killed, gloo and DCP say a lot
        if ranks > 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(store), ranks),
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=PEER_TIMEOUT / 2),
            )
        number = first
        while True:
            state = rank_state(number, rank, place.large)
            if ranks > 1:
                dist.barrier()
            if rank == 0:
                os.write(pipe, b"begin %d\n" % number)
            dcp_rs.save(state, place.path, no_dist=ranks == 1, **place.access)
            if rank == 0:
                os.write(pipe, b"end %d\n" % number)
            number += 1
    except BaseException as error:  # noqa: BLE001 - a peer was killed
        os.write(pipe, b"failed %s\n" % type(error).__name__.encode())
        code = 0
    finally:
        os._exit(code)


def run(
    place: Folder | Store, scratch: Path, *, kills: int, ranks: int, seed: int, log: Any = None
) -> Tally:
    """Kills ``kills`` times, in one of the place's ways after the other. Every second time on several ranks, it is one rank only.

    Raises:
        AssertionError: the place holds something other than the last save that ended or the one
            that was going on.
    """
    torch.set_num_threads(1)
    rng = random.Random(seed)
    tally = Tally(ranks)

    def found_now() -> int:
        return found_number(place.path, ranks, place.large, **place.access)

    savers = Savers(place, scratch, 1, ranks)  # the first: to the end, to see how long one takes
    savers.wait_for_start()
    began = time.monotonic()
    savers._read_until(b"end 2", 120)
    usual = (time.monotonic() - began) / 2
    savers.kill(list(range(ranks)))
    savers.wait()
    place.settle()
    number = found_now()
    # A child has its parent's connections, so that the peers of one that was killed would wait for
    # their time limit.
    ways = [way for way in place.ways if way != "forks" or ranks == 1]
    for round_ in range(kills):
        way = ways[round_ // 2 % len(ways)]
        moment = place.begin(way, round_)
        savers = Savers(place, scratch, number + 1, ranks, way)
        try:
            savers.wait_for_start()
        except BaseException:
            savers.kill(list(range(ranks)))
            raise
        if savers.way == "forks" and round_ % 2 == 1:
            savers.wait_for_child()
        place.wait(savers, rng, usual)
        one = ranks > 1 and round_ % 2 == 1
        victims = [rng.randrange(ranks)] if one else list(range(ranks))
        savers.kill(victims)
        ends = savers.wait()
        assert all(ends[rank] in savers.how_they_end() for rank in victims), (
            savers.way,
            moment,
            ends,
            savers.told(),
        )
        begun, ended = savers.progress()
        assert begun is not None
        old = ended if ended is not None else number
        tally.uploads += place.settle()
        found = found_now()
        assert found in (old, begun), f"save {begun} was killed, {old} was there; found {found}"
        tally.kills += 1
        tally.by_way[savers.way] = tally.by_way.get(savers.way, 0) + 1
        tally.by_request[moment] = tally.by_request.get(moment, 0) + 1
        tally.children += len(savers.children())
        tally.one_rank_only += one
        tally.saves += found - number
        if begun == ended:
            tally.finished_first += 1
        elif found == begun:
            tally.became_new += 1
        else:
            tally.kept_old += 1
        number = found
        if savers.way == "forks":
            # The lock is not theirs, nor the claim on what was being written.
            report = dcp_rs.clean(place.path)
            assert report.kept == [], report
            dcp_rs.save(rank_state(number := number + 1, 0), place.path, no_dist=True)
        savers.end()
        _look_at_strays(place, tally, remove=round_ % KEEP_STRAYS == KEEP_STRAYS - 1)
        if round_ % 7 == 0:
            load_number(place.path, number, ranks, place.large, **place.access)
            assert dcp_rs.verify(place.path, **place.access).ok
        if log and (round_ + 1) % 25 == 0:
            log(f"{round_ + 1} kills on {ranks} ranks: {tally}")
    # What killed saves left does not hinder the next one.
    if ranks == 1:
        dcp_rs.save(
            rank_state(number + 1, 0, place.large), place.path, no_dist=True, **place.access
        )
        assert found_now() == number + 1
    return tally


def _look_at_strays(place: Folder | Store, tally: Tally, *, remove: bool) -> None:
    strays = place.strays()
    tally.most_strays = max(tally.most_strays, len(strays))
    tally.count(
        "left a temporary index"
        if any(stray.endswith(".tmp") for stray in strays)
        else "left data files only"
        if strays
        else "left nothing"
    )
    if remove:
        tally.strays += len(strays)
        place.clean()


def main(arguments: list[str] | None = None) -> int:
    import argparse
    import dataclasses
    import json
    import tempfile

    parser = argparse.ArgumentParser(prog="python -m crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=1600, help="on one rank (default 1600)")
    parser.add_argument(
        "--kills-of-four", type=int, default=400, help="on four ranks (default 400)"
    )
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--folder", type=Path, help="where to save; default: a temporary folder")
    parser.add_argument(
        "--store",
        action="store_true",
        help="save to a store of objects, on this machine, which also misbehaves",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--faults", action="store_true", help="let every call fail, too (make crash does)"
    )
    parser.add_argument(
        "--power",
        type=int,
        metavar="STATES",
        help="judge what a loss of power can leave, so many states of each moment",
    )
    options = parser.parse_args(arguments)
    tallies = []
    print(f"seed {options.seed}", file=sys.stderr)
    log = None if options.json else print
    for ranks, kills in ((1, options.kills), (4, options.kills_of_four)):
        if kills:
            with tempfile.TemporaryDirectory(prefix="dcp-rs-crash-", dir=options.folder) as name:
                scratch = Path(name)
                place = Store() if options.store else Folder(scratch)
                tallies.append(
                    run(
                        place, scratch, kills=kills, ranks=ranks, seed=options.seed + ranks, log=log
                    )
                )
    if options.faults:
        print("\n".join(map(str, faults.run("1", "1,4", timeout=3600))))
    if options.power:
        print("\n".join(map(str, power.run(str(options.power), str(options.seed), timeout=7200))))
    print(
        json.dumps([dataclasses.asdict(t) for t in tallies])
        if options.json
        else "\n".join(map(str, tallies))
    )
    return 0
