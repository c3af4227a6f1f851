"""What planning a load costs a rank and the coordinator, for 8 to 16,384 ranks: one rank of a process group that is not there.

Every rank saved a shard of each tensor, and loads it again. The coordinator gets the plan of that
rank as often as there are ranks. The commit is of the save before that: the indexes of all ranks,
merged, checked and published.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from cases.metadata import commit, write_rank, write_stock
from harness.driven import worker


def write_native(path: Path, fqns: int, ranks: int) -> float:
    """Seconds of the commit."""
    path.mkdir()
    indexes = [write_rank(path, fqns, rank, ranks) for rank in range(ranks)]
    start = time.perf_counter()
    commit(path, fqns, indexes)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096, 16384])
    parser.add_argument("--fqns", type=int, default=500)
    parser.add_argument(
        "--stock-ranks", type=int, default=64, help="the most ranks that torch is tried with"
    )
    parser.add_argument(
        "--folder", help="where data goes, and is removed from after: 2 GB for 4,096 ranks"
    )
    options = parser.parse_args()
    print(
        "| ranks | who | commit | read_metadata | plan of a rank | sent by a rank | back to a rank | coordinator |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for ranks in options.ranks:
        ways = [("ours", write_native)] + (
            [("stock", write_stock)] if ranks <= options.stock_ranks else []
        )
        for name, write in ways:
            path = (
                Path(tempfile.mkdtemp(prefix="dcp-rs-planning-", dir=options.folder)) / "checkpoint"
            )
            try:
                committing = write(path, options.fqns, ranks)
                with worker("metadata_worker", path, options.fqns, ranks) as process:
                    answer = process.ask(f"coordinate-{name}")
            finally:
                shutil.rmtree(path.parent)
            shown = "-" if committing is None else f"{committing:.4f} s"
            print(
                f"| {ranks:,} | {name} | {shown} | {answer['read_metadata']:.4f} s | {answer['plan']:.4f} s"
                f" | {answer['sent']:,} B | {answer['answered']:,} B | {answer['coordinator']:.4f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
