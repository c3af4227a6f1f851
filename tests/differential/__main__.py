"""A long run: ``python -m differential --seconds 3600``. Says what it saw, and prints how to see each failure again."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings

from hypothesis import HealthCheck, given, seed, settings

from differential import bodies
from differential.cases import cases
from differential.judge import judge, tally

#: Cases drawn from one seed.
BATCH = 50


def main() -> int:
    parser = argparse.ArgumentParser(prog="differential", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument(
        "--seed", type=int, default=int.from_bytes(os.urandom(4)), help="of the first batch"
    )
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    parser.add_argument(
        "--patience",
        type=float,
        default=300,
        help="seconds that a step may take, on a busy machine",
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    began, batch, failed = time.monotonic(), arguments.seed, []
    while time.monotonic() - began < arguments.seconds:
        try:
            _batch(batch, arguments.patience)
        except KeyboardInterrupt:
            break
        except Exception:  # noqa: BLE001 - hypothesis raises what the case raised, with the smallest case that does
            failed.append(batch)
            print(f"--- --seed {batch} --seconds 1\n{traceback.format_exc()}", flush=True)
            if not arguments.keep_going:
                break
        batch += 1
    seconds = time.monotonic() - began
    print(
        f"{tally.pop('cases', 0)} cases in {seconds:.0f} s, seeds {arguments.seed} to {batch}, {len(failed)} failed"
    )
    for outcome, count in tally.most_common():
        print(f"{count:8} {outcome}")
    return 1 if failed else 0


def _batch(number: int, patience: float) -> None:
    @seed(number)
    @settings(
        max_examples=BATCH, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(cases(tuple(bodies.SAVES), tuple(bodies.LOADS)))
    def run(case: object) -> None:
        judge(case, patience)

    run()


if __name__ == "__main__":
    sys.exit(main())
