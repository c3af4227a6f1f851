"""Kills runs on what looks like NFS, with locks and without. ``python -m crash.nfs``: 500 kills."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from crash.preload import preloaded


def run(kills: int, *, timeout: float = 3600) -> list[dict[str, Any]]:
    """Kills a run of one rank ``kills`` times, half of them where there are locks. Returns the tally of each half."""
    return preloaded("nfs", "nfs.c", [str(kills)], timeout)


def main(library: str, kills: int) -> None:
    import soak_steps

    shim = ctypes.CDLL(library)
    tallies = []
    for locks in (1, 0):
        shim.nfs_locks(locks)
        with tempfile.TemporaryDirectory(prefix="dcp-rs-nfs-") as folder:
            tally = soak_steps.soak(
                Path(folder), ranks=1, steps=10**6, kills=kills // 2, seed=locks
            )
        tallies.append({"locks": bool(locks), **dataclasses.asdict(tally)})
    print(json.dumps(tallies))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(sys.argv[1], int(sys.argv[2]))
    else:
        print(*run(500), sep="\n")
