"""What planning a load costs a rank and the coordinator, for 8 to 4,096 ranks: one rank of a process group that is not there.

Every rank saved a shard of each tensor, and loads it again. The coordinator gets the plan of that rank as often as there are ranks.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from cases.metadata import write_native, write_stock
from harness.driven import worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--fqns", type=int, default=500)
    parser.add_argument("--stock-ranks", type=int, default=64, help="the most ranks that torch is tried with")
    parser.add_argument("--folder", help="where data goes, and is removed from after: 2 GB for 4,096 ranks")
    options = parser.parse_args()
    print("| ranks | who | read_metadata | plan of a rank | sent by a rank | back to a rank | coordinator |")
    print("|---|---|---|---|---|---|---|")
    for ranks in options.ranks:
        ways = [("ours", write_native)] + ([("stock", write_stock)] if ranks <= options.stock_ranks else [])
        for name, write in ways:
            path = Path(tempfile.mkdtemp(prefix="dcp-rs-planning-", dir=options.folder)) / "checkpoint"
            try:
                write(path, options.fqns, ranks)
                with worker("metadata_worker", path, options.fqns, ranks) as process:
                    answer = process.ask(f"coordinate-{name}")
            finally:
                shutil.rmtree(path.parent)
            print(
                f"| {ranks:,} | {name} | {answer['read_metadata']:.4f} s | {answer['plan']:.4f} s | {answer['sent']:,} B"
                f" | {answer['answered']:,} B | {answer['coordinator']:.4f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
