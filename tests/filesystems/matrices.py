"""Kills, take-overs, signals and failing calls, many times over: ``python -m filesystems.matrices``.

After each, the next start has to resume from the newest whole step, nothing that was not committed
is loaded, and an error is one about what happened. The tests run a few of each.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import programs
import soak_steps
from dcp_rs import CheckpointManager
from dcp_rs.errors import CorruptDataError, RunTakenOverError
from filesystems.mounts import Mounted, bindfs, mounted

#: Attributes and names stay in the cache of a client for so many seconds.
CACHING = ("--enable-lock-forwarding", "-o", "attr_timeout=600,entry_timeout=600")
#: Errors that a failing mount gives.
ERRORS = ("EIO", "ENOTCONN", "ESTALE", "ENOSPC")


def state_of(step: int) -> dict[str, object]:
    return {"w": torch.full((1000,), float(step)), "step": step}


def load(manager: CheckpointManager) -> int | None:
    """Load the newest step. Check that it is that step."""
    state: dict[str, object] = {"w": torch.zeros(1000), "step": -1}
    found = manager.load(state, verify=True)
    if found is not None:
        assert state["step"] == found
        assert torch.equal(state["w"], torch.full((1000,), float(found)))  # type: ignore[arg-type]
    return found


def kills(folder: Path, count: int) -> Counter[str]:
    """Kill a run at random moments on a mount that renames deleted open files."""
    with bindfs(folder / "source", folder / "mount") as at:
        tally = soak_steps.soak(at, ranks=1, steps=10**6, kills=count, seed=1)
    return Counter(kills=tally.kills, steps=tally.steps, unfinished=tally.unfinished)


def take_overs(folder: Path, count: int) -> Counter[str]:
    """Take a run over again and again, each time by another client. The old job goes on saving."""
    seen: Counter[str] = Counter()
    source = folder / "source"
    with bindfs(source, folder / "a", *CACHING) as a, bindfs(source, folder / "b", *CACHING) as b:
        old, newest = CheckpointManager(a / "run", keep_last=2), None
        assert load(old) is None
        for turn, client in zip(range(count), itertools.cycle([b, a])):
            for _ in range(2):
                newest = (newest or 0) + 1
                old.save(newest, state_of(newest))
            new = CheckpointManager(client / "run", keep_last=2)
            assert load(new) == newest, turn
            try:
                old.save(newest + 1, state_of(-1))
            except RunTakenOverError:
                seen["told"] += 1
            else:
                seen["committed"] += 1
            old = new
    return seen


_JOB = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader
from dcp_rs import CheckpointManager

os.setsid()
run, number = sys.argv[1], signal.Signals(int(sys.argv[2]))
with CheckpointManager(run, preemption=number, fsync=False) as manager:
    state = {"w": torch.zeros(1000), "step": 0}
    first = manager.load(state) or 0
    print("ready", first, flush=True)
    step = first
    for batch in DataLoader(range(10**9), batch_size=4, num_workers=2):
        step += 1
        if manager.should_save(step):
            manager.save(step, {"w": torch.full((1000,), float(step)), "step": step})
            print("saved", step, flush=True)
        if manager.preempted:
            break
"""


def preemptions(folder: Path, count: int, number: signal.Signals) -> Counter[str]:
    """Send a signal to a whole job that has workers of a DataLoader, at random moments.

    SIGTERM goes to the first process alone: torch lets it end the workers.
    """
    seen: Counter[str] = Counter()
    rng, newest = random.Random(1), 0
    for _ in range(count):
        command = [sys.executable, "-c", _JOB, folder / "run", str(int(number))]
        with programs.Popen(command, stdout=subprocess.PIPE) as job:
            assert job.stdout is not None
            assert job.stdout.readline().split() == [b"ready", b"%d" % newest]
            time.sleep(rng.random() / 2)
            if number == signal.SIGTERM:
                os.kill(job.pid, number)
            else:
                os.killpg(job.pid, number)
            said = job.stdout.read().split()
            status = job.wait(60)
        if status == 0 and said[:1] == [b"saved"]:
            newest = int(said[1])
            seen["saved"] += 1
        else:
            seen[f"status {status}"] += 1
    return seen


def failing_calls(mount: Mounted, count: int) -> Counter[str]:
    """Fail the nth call of a save, and all after it; then start again."""
    seen: Counter[str] = Counter()
    newest, rng = None, random.Random(1)
    run = mount.path / "run"
    for turn in range(count):
        step, name = (newest or 0) + 1, ERRORS[turn % len(ERRORS)]
        at = rng.randrange(1, 160)
        with CheckpointManager(run, keep_last=2) as manager:
            assert load(manager) == newest, turn
            times = rng.choice([1, 1 << 60])
            mount.set(fail={"errno": name, "at": at, "times": times})
            try:
                manager.save(step, state_of(step))
            except (OSError, CorruptDataError) as error:
                if getattr(error, "errno", None) != getattr(errno, name):
                    raise  # it is not about what happened
                seen[name] += 1
            else:
                seen["saved"] += 1
                newest = step
            mount.set()
        with CheckpointManager(run, keep_last=2) as manager:
            found = load(manager)
            # The error may come after the commit.
            assert found in (newest, step), (turn, at, name, found, newest)
            newest = found
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, count in (("kills", 300), ("take-overs", 100), ("signals", 100), ("failing", 100)):
        parser.add_argument(f"--{name}", type=int, default=count)
    counts = parser.parse_args()
    torch.set_num_threads(1)
    programs.start_server()

    def report(name: str, count: int, work: object) -> None:
        with tempfile.TemporaryDirectory(prefix="dcp-rs-fs-") as folder:
            begin = time.monotonic()
            seen = work(Path(folder), count)  # type: ignore[operator]
            print(f"{name}: {dict(seen)}, {time.monotonic() - begin:.0f} s", flush=True)

    def fail(folder: Path, count: int) -> Counter[str]:
        with mounted(folder / "source", folder / "mount") as mount:
            return failing_calls(mount, count)

    report("kills on a renaming mount", counts.kills, kills)
    report("take-overs on two clients", counts.take_overs, take_overs)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        half = counts.signals // 2
        report(number.name, half, lambda folder, n, number=number: preemptions(folder, n, number))
    report("failing calls", counts.failing, fail)
    programs.stop_server()


if __name__ == "__main__":
    main()
