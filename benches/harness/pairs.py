"""Interleaved rounds: every contender runs once a round, so that what disturbs one disturbs all."""

import gc
import random
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

#: A contender slower than this runs `slow_rounds` times only, in seconds.
SLOW = 5.0


def nothing() -> None:
    """The default of what a contender need not do."""


@dataclass
class Contender:
    """One way to do the work of a case.

    Attributes:
        name: in the report.
        run: does it; returns the seconds it took where it measured them itself, else None.
        before: prepares each run; not timed.
        verify: raises unless the last run did what it should; called after the timing of the last
            round.
        warm_up: run once before the first round.
    """

    name: str
    run: Callable[[], float | None]
    before: Callable[[], None] = nothing
    verify: Callable[[], object] = nothing
    warm_up: bool = True


@dataclass
class Times:
    """Seconds of a contender in each round, or why there are none.

    The seconds of processor time, of this process and all its threads, say on a busy machine what
    was work and what was waiting for a turn. They are none of a contender that works in another
    process.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def median_cpu(self) -> float | None:
        return statistics.median(self.cpu_seconds) if self.cpu_seconds else None


def measure(contenders: Sequence[Contender], *, rounds: int, slow_rounds: int) -> dict[str, Times]:
    """Runs all in turn, each round in another order: a disk that has rested, or has not, favours who comes next.

    One that fails is left out from then on.
    """
    order = random.Random(0)
    times = {contender.name: Times() for contender in contenders}
    for contender in contenders:
        if contender.warm_up:
            _attempt(contender, times[contender.name], keep=False)
    for this_round in range(rounds):
        for contender in order.sample(contenders, len(contenders)):
            record = times[contender.name]
            wanted = slow_rounds if max(record.seconds, default=0.0) > SLOW else rounds
            if record.error is None and this_round < wanted:
                _attempt(contender, record, keep=True)
    return times


def _attempt(contender: Contender, record: Times, *, keep: bool) -> None:
    try:
        contender.before()
        gc.collect()
        start, start_cpu = time.perf_counter(), time.process_time()
        seconds = contender.run()
        took, cpu = time.perf_counter() - start, time.process_time() - start_cpu
        contender.verify()
    except Exception as error:  # noqa: BLE001  # a contender that fails is a line of the report
        traceback.print_exc(limit=-4, chain=False)
        record.error = f"{type(error).__name__}: {error}".splitlines()[0]
        record.seconds.clear()
        return
    if keep:
        record.seconds.append(took if seconds is None else seconds)
        if seconds is None:
            record.cpu_seconds.append(cpu)


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high)


def ratio(theirs: Times, ours: Times) -> Spread:
    """How many times longer `theirs` took, round by round."""
    pairs = zip(theirs.seconds, ours.seconds, strict=False)  # the slower of them ran fewer rounds
    return Spread.of([their / our for their, our in pairs])
