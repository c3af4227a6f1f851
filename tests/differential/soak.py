"""Loads and saves for a long time, whose memory and open files stay flat: ``make soak SECONDS=600``."""

from __future__ import annotations

import gc
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
from crash.states import found_number, load_number, rank_state, stray_files
from dcp_rs import RsReader
from differential.judge import tally
from support.memory import anonymous

MIB = 1 << 20


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def work(path: Path, number: int, rng: random.Random) -> int:
    """One of the things that training and inference do. Returns the number of the save that is there now."""
    what = rng.randrange(7)
    if what <= 1:
        number += 1
        dcp_rs.save(
            rank_state(number, 0),
            path,
            no_dist=True,
            io=rng.choice(["direct", "buffered"]),
            fsync=False,
        )
    elif what == 2:
        number += 1
        dcp_rs.async_save(rank_state(number, 0), path, fsync=False).result()
    elif what == 3:
        load_number(path, number, 1)
    elif what == 4:
        assert found_number(path, 1) == number
    elif what == 5:
        assert dcp_rs.verify(path).ok
    else:
        got = {"common": torch.zeros(1000 + number % 2)}
        reader = RsReader(
            path, io=rng.choice(["mmap", "direct", "buffered"]), threads=rng.randint(1, 4)
        )
        dcp.load(got, storage_reader=reader, no_dist=True)
        assert int(got["common"][0]) == number
    if rng.random() < 0.05:
        fail(path, rng)
    return number


def fail(path: Path, rng: random.Random) -> None:
    """Errors let go of what they held, too."""
    try:
        if rng.random() < 0.5:
            dcp_rs.load({"unknown": torch.zeros(1)}, path, no_dist=True)
        else:
            dcp_rs.save(
                {"x": torch.ones(100), "meta": torch.empty(1, device="meta")}, path, no_dist=True
            )
    except dcp_rs.errors.DcpRsError:
        return
    raise AssertionError("that should have failed")


@contextmanager
def flat(patience: float) -> Iterator[Callable[[int], None]]:
    """Yield what saves and loads for a while, and look whether memory and open files stayed flat.

    Raises:
        AssertionError: they grew, or files of saves were left.
    """
    samples: list[tuple[int, int, int]] = []
    with tempfile.TemporaryDirectory(prefix="dcp-rs-soak-") as folder:
        path, number = Path(folder) / "ckpt", 1
        dcp_rs.save(rank_state(number, 0), path, no_dist=True)

        def batch(seed: int) -> None:
            nonlocal number
            rng = random.Random(seed)
            for _ in range(50):
                number = work(path, number, rng)
            tally["cases"] += 50
            gc.collect()
            samples.append((anonymous(), descriptors(), threads()))

        yield batch
        assert found_number(path, 1) == number
        strays = stray_files(path)
    assert len(samples) > 5, "too short to tell"
    # The first third is for caches and arenas to fill.
    settled = samples[len(samples) // 3 :]
    half = len(settled) // 2
    memory = [sum(s[0] for s in part) / len(part) for part in (settled[:half], settled[half:])]
    files = [max(s[1] for s in part) for part in (settled[:half], settled[half:])]
    print(
        f"{number} saves; memory {memory[0] / MIB:.1f} then {memory[1] / MIB:.1f} MiB, open files {files[0]} then {files[1]}, "
        f"threads {settled[0][2]} then {settled[-1][2]}, {len(strays)} stray files"
    )
    assert memory[1] - memory[0] < 8 * MIB, "memory grows"
    assert files[1] <= files[0] + 1, "open files pile up"
    assert settled[-1][2] <= settled[0][2] + 1, "threads pile up"
    assert not strays
    assert threading.active_count() <= 3
