"""Runs that save, prune, are killed at any moment and resume: ``make soak-steps STEPS=10000``.

Each run is made of rank processes that train (a counter), save every step through a manager, in the
foreground or the background, and write down what they were told: that a step is durable. They are
killed, one of them or all, at a random moment; what the root holds then is compared with what was
written down, by rules that are written anew here.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import dcp_rs
from dcp_rs import CheckpointManager
from dcp_rs.steps.folder_store import FolderStepStore

KEEP_LAST, KEEP_BEST = 2, 1
#: In the stacks of a rank whose process group is being made.
_MEETING = "_create_gloo_process_group"
#: So many steps stay in the end by `keep_every`: a save looks at each of them.
STAYING = 100
#: Within this, some rank saves a step or ends: every rank has to notice by then that another was
#: killed. It is no limit of a whole run, which a busy machine may make long.
PATIENCE = 60.0  # seconds


def loss_of(step: int) -> float:
    """The same for a step whenever it is made: falling, with lows that are not the newest."""
    return 1000 / (step + 10) + (step * 7919 % 101) / 10


def state_of(step: int, rank: int) -> dict[str, object]:
    return {
        f"of.{rank}": torch.full((3000 + step % 7,), float(step)),
        "frozen": torch.arange(20_000.0),
        # Stays for some steps, and is another one then.
        "slow": torch.full((5000,), float(step // 10)),
        "common": torch.full((10,), float(step)),
        "step": step,
    }


def promised(steps: set[int], keep_every: int) -> set[int]:
    """What has to be there, of all steps that were ever durable."""
    kept = set(sorted(steps)[-KEEP_LAST:])
    first: dict[int, int] = {}
    for step in sorted(steps, reverse=True):
        first[step // keep_every] = step
    kept |= {step for multiple, step in first.items() if multiple > 0}
    return kept | set(sorted(steps, key=lambda step: (loss_of(step), -step))[:KEEP_BEST])


# --- a rank


def train(run: Run, log: Path, store: Path, rank: int, seed: int, last: int) -> None:
    """In a process of its own; never returns."""
    code = 1
    root, ranks = run.root, run.ranks
    try:
        stacks = Path(f"{log}.{rank}.stacks").open("w")  # noqa: SIM115 - for as long as the process
        faulthandler.register(signal.SIGUSR1, stacks)
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), 2
        )  # of ranks that were killed, gloo and DCP say a lot
        if ranks > 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            meeting = dist.FileStore(str(store), ranks)
            limit = timedelta(seconds=PATIENCE / 2)
            dist.init_process_group(
                "gloo", store=meeting, rank=rank, world_size=ranks, timeout=limit
            )
        rng = random.Random(seed)  # the same on all ranks
        told = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

        def say(word: str, step: int) -> None:
            if rank == 0:
                os.write(told, f"{word} {step}\n".encode())

        manager = CheckpointManager(
            root,
            keep_last=KEEP_LAST,
            keep_every=run.keep_every,
            keep_best=KEEP_BEST,
            metric="loss",
            no_dist=ranks == 1,
            fsync=False,
            # Runs with it and without it follow each other: a step may take over from either kind.
            reuse=rng.choice([False, True, "frozen"]),
        )
        Path(f"{log}.{rank}.met").touch()
        state = {
            "common": torch.zeros(10),
            "frozen": torch.zeros(20_000),
            "slow": torch.zeros(5000),
            "step": 0,
        }
        first = manager.load(state, verify=True)
        if first is not None:
            want = state_of(first, rank)
            assert all(
                torch.equal(torch.as_tensor(state[key]), torch.as_tensor(want[key]))
                for key in state
            )
        say("resumed", -1 if first is None else first)
        pending = None
        for step in range((first or 0) + 1, last + 1):
            background = rng.random() < 0.5
            metrics = {"loss": loss_of(step)}
            if pending is not None:
                manager.wait()
                say("saved", pending)
                pending = None
            if background:
                state_now, early = state_of(step, rank), rng.random() < 0.5
                saving = manager.async_save(step, state_now, metrics=metrics, async_staging=early)
                saving.staged.result()
                for value in state_now.values():  # as the next step would
                    if isinstance(value, torch.Tensor):
                        value.fill_(-1)
                pending = step
            else:
                manager.save(step, state_of(step, rank), metrics=metrics)
                say("saved", step)
        manager.close()
        if pending is not None:
            say("saved", pending)
        say("ended", last)
        code = 0
    except BaseException:  # noqa: BLE001 - a peer was killed, or that is a finding: the parent tells
        Path(f"{log}.{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(code)


# --- the parent


@dataclass
class Tally:
    """What happened."""

    ranks: int
    seconds: float = 0.0
    slowest_start: float = 0.0  # seconds from the start of a process to its resume
    runs: int = 0
    kills: int = 0
    one_rank_only: int = 0
    steps: int = 0
    gained: int = 0  # that were durable before anybody was told
    unfinished: int = 0  # that a kill left
    half_removed: int = 0
    most_folders: int = 0
    reusing: int = 0  # steps seen that share files with others
    never_met: int = 0  # runs whose ranks gloo did not bring together


@dataclass
class Run:
    """What is known of a run by what its ranks were told."""

    root: Path
    ranks: int
    keep_every: int
    durable: set[int] = field(default_factory=set)  # ever
    #: What the last ranks that ended well had resumed from: that stays, too.
    resumed_from: set[int] = field(default_factory=set)

    def check(self, said: list[tuple[str, int]], tally: Tally) -> int:
        """Compares the root with what was told since the last time. Returns the newest step."""
        newest = max(self.durable, default=0)
        for word, step in said:
            if word == "resumed":
                assert step == (newest or -1), f"resumed from {step}, {newest} was the newest"
            elif word == "saved":
                self.durable.add(step)
        listing = FolderStepStore(self.root).look()
        # On NFS only the run that goes on knows that the save of an earlier one is over.
        assert all(passed.kind in ("unfinished", "unknown") for passed in listing.passed_over), (
            listing.passed_over
        )
        there = {step.number for step in listing.steps}
        # Of a save that was killed after its commit, nobody was told.
        unknown = {step for step in there if step > max(self.durable, default=0)}
        assert len(unknown) <= 2, (unknown, sorted(self.durable)[-3:])
        tally.gained += len(unknown)
        self.durable |= unknown
        lost = promised(self.durable, self.keep_every) - there
        assert not lost, f"{sorted(lost)} were promised, and are gone; there are {sorted(there)}"
        for step in there:
            assert dcp_rs.verify(self.root / f"step-{step}").ok
        tally.unfinished += len(listing.passed_over)
        tally.reusing += sum(step.linked > 0 for step in listing.steps)
        tally.half_removed += len(list(self.root.glob(".removing-*")))
        tally.most_folders = max(tally.most_folders, len(list(self.root.iterdir())))
        return max(self.durable, default=0)

    def check_rest(self) -> None:
        """After a save that was not killed: nothing is there that should have been removed."""
        there = {path.name for path in self.root.iterdir() if not path.name.startswith(".dcprs")}
        want = promised(self.durable, self.keep_every) | self.resumed_from
        assert there == {f"step-{step}" for step in want}, sorted(
            there ^ {f"step-{step}" for step in want}
        )


class RankGroup:
    """The processes of one run."""

    def __init__(self, run: Run, folder: Path, number: int, seed: int, last: int) -> None:
        self.log = folder / f"log-{number}"
        self.pids = []
        for rank in range(run.ranks):
            pid = os.fork()
            if pid == 0:
                train(run, self.log, folder / f"store-{number}", rank, seed, last)
            self.pids.append(pid)

    def wait_for(self, word: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not any(said == word for said, _ in self.said()):
            if time.monotonic() > deadline:
                assert not self.have_met(), self.errors() or "nothing was said"
                return
            if self.ended():
                return
            time.sleep(0.005)

    def ended(self) -> bool:
        return all(
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            for pid in self.pids
        )

    def said(self) -> list[tuple[str, int]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [(word, int(number)) for word, number in (line.split() for line in lines)]

    def errors(self) -> str:
        return "\n".join(f"{self.log.name}.{name}: {text}" for name, text in self._texts("*"))

    def have_met(self) -> bool:
        """Whether all ranks had their process groups. Of many runs on a busy machine, gloo leaves a rank waiting in one, beyond its own limit."""
        stuck = [text for _, text in self._texts("*.stacks") if text and _MEETING not in text]
        return bool(stuck) or len(self._texts("*.met")) == len(self.pids)

    def _texts(self, which: str) -> list[tuple[str, str]]:
        found = sorted(self.log.parent.glob(f"{self.log.name}.{which}"))
        return [(path.name.removeprefix(f"{self.log.name}."), path.read_text()) for path in found]

    def wait(self) -> list[int]:
        """How each ended; all have to, and within their patience one has ended, or saved a step."""
        ends: dict[int, int] = {}
        before, deadline = None, 0.0
        while len(ends) < len(self.pids):
            for pid in self.pids:
                if pid not in ends and (done := os.waitpid(pid, os.WNOHANG))[0]:
                    ends[pid] = os.waitstatus_to_exitcode(done[1])
            now = len(ends), self.log.stat().st_size if self.log.exists() else 0
            if now != before:
                before, deadline = now, time.monotonic() + PATIENCE
            elif time.monotonic() > deadline:
                self._end(ends)
                if self.have_met():
                    waiting = [rank for rank, pid in enumerate(self.pids) if pid not in ends]
                    raise AssertionError(
                        f"ranks {waiting} did nothing for {PATIENCE} s\n{self.errors()}"
                    )
            time.sleep(0.002)
        return [ends[pid] for pid in self.pids]

    def _end(self, ends: dict[int, int]) -> None:
        """Ends those that wait, which write down where they do."""
        waiting = [pid for pid in self.pids if pid not in ends]
        for number in (signal.SIGUSR1, signal.SIGKILL):
            for pid in waiting:
                os.kill(pid, number)  # nobody has waited for it, so it is there
            time.sleep(1)  # to write its stacks


def soak(
    folder: Path, *, ranks: int, steps: int, seed: int, kills: int | None = None, log: object = None
) -> Tally:
    """Saves ``steps`` steps on ``ranks`` ranks, killed again and again; or fewer, up to so many ``kills``.

    Raises:
        AssertionError: a step was lost that was told to be durable and is kept, a run resumed from
            another step than the newest, or something is left.
    """
    torch.set_num_threads(1)
    rng = random.Random(seed)
    run, tally = Run(folder / "run", ranks, keep_every=max(10, steps // STAYING)), Tally(ranks)
    newest, pace, start = 0, 0.05, time.monotonic()
    while newest < steps and (kills is None or tally.kills < kills):
        tally.runs += 1
        last = min(steps, newest + rng.randint(5, 60))
        processes = RankGroup(run, folder, tally.runs, rng.randrange(2**31), last)
        spared = rng.random() < 0.25 or last == steps
        victims: list[int] = []
        if spared:
            pass
        elif rng.random() < 0.1:
            time.sleep(rng.uniform(0, 0.3))  # as it starts, or resumes
            victims = _victims(rng, ranks)
        else:
            started = time.monotonic()
            processes.wait_for("resumed", PATIENCE)
            tally.slowest_start = max(tally.slowest_start, round(time.monotonic() - started, 2))
            time.sleep(rng.uniform(0, pace * (last - newest)))
            victims = _victims(rng, ranks)
        for rank in victims:
            os.kill(processes.pids[rank], signal.SIGKILL)
        begun = time.monotonic()
        ends = processes.wait()
        if ranks == 1:
            assert ends[0] in (0, -signal.SIGKILL), processes.errors()
        if not victims and not processes.have_met():
            tally.never_met += 1
            assert tally.never_met <= 1 + tally.runs // 50, processes.errors()
        elif spared:
            assert ends == [0] * ranks, processes.errors()
            pace = 0.7 * pace + 0.3 * (time.monotonic() - begun) / max(1, last - newest)
        said = processes.said()
        before = newest
        newest = run.check(said, tally)
        tally.kills += bool(victims)
        tally.one_rank_only += len(victims) == 1 and ranks > 1
        tally.steps += newest - before
        tally.seconds = round(time.monotonic() - start, 1)
        if ("ended", last) in said:
            run.resumed_from = {step for word, step in said if word == "resumed" and step > 0}
            run.check_rest()
        if log is not None and tally.runs % 20 == 0:
            print(f"{newest} steps: {tally}", file=log, flush=True)
    return tally


def _victims(rng: random.Random, ranks: int) -> list[int]:
    return [rng.randrange(ranks)] if rng.random() < 0.5 else list(range(ranks))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=int, nargs="?", default=10_000)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(prefix="dcp-rs-soak-") as folder:
            print(
                soak(
                    Path(folder),
                    ranks=ranks,
                    steps=options.steps,
                    seed=options.seed + ranks,
                    log=sys.stdout,
                )
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
