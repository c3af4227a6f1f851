"""A long run: ``python -m differential --seconds 3600``. Says what it saw, and prints how to see each failure again.

The subjects: states that stock DCP and dcp-rs save and load (``dcp``); saves and loads whose memory
and open files have to stay flat (``soak``); mutated files that torch and dcp-rs read (``torch``,
``metadata``).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from hypothesis import HealthCheck, given, seed, settings

from differential import bodies, foreign, soak
from differential.cases import cases
from differential.judge import judge, tally

#: Runs the cases of a seed.
Batch = Callable[[int], None]


@contextmanager
def _dcp(patience: float) -> Iterator[Batch]:
    def batch(number: int) -> None:
        @seed(number)
        @settings(
            max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(cases(tuple(bodies.SAVES), tuple(bodies.LOADS)))
        def run(case: object) -> None:
            judge(case, patience)

        run()

    yield batch


@contextmanager
def _foreign(kind: str, patience: float) -> Iterator[Batch]:
    yield partial(foreign.run, kind, tally=tally)


SUBJECTS: dict[str, Callable[[float], AbstractContextManager[Batch]]] = {
    "dcp": _dcp,
    "soak": soak.flat,
    **{kind: partial(_foreign, kind) for kind in foreign.KINDS},
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="differential", description=__doc__)
    parser.add_argument("subject", choices=SUBJECTS, nargs="?", default="dcp")
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
    began, number, failed = time.monotonic(), arguments.seed, []
    with SUBJECTS[arguments.subject](arguments.patience) as batch:
        while time.monotonic() - began < arguments.seconds:
            try:
                batch(number)
            except KeyboardInterrupt:
                break
            except Exception:  # noqa: BLE001 - hypothesis raises what the case raised, with the smallest case that does
                failed.append(number)
                again = f"{arguments.subject} --seed {number} --seconds 1"
                print(f"--- {again}\n{traceback.format_exc()}", flush=True)
                if not arguments.keep_going:
                    break
            number += 1
    seconds = time.monotonic() - began
    print(
        f"{tally.pop('cases', 0)} cases in {seconds:.0f} s, seeds {arguments.seed} to {number}, {len(failed)} failed"
    )
    for outcome, count in tally.most_common():
        print(f"{count:8} {outcome}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
