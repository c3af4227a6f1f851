"""A row of the table: what was measured, against what, and what it should reach."""

from collections.abc import Mapping
from dataclasses import dataclass

from harness.pairs import Spread, Times, ratio


@dataclass(frozen=True)
class Row:
    """One figure and its targets.

    Attributes:
        case, ours, against: what was measured.
        unit: of `value`, `reach` and `stretch`: "x" for their time over ours, or "MB", "B/B", ...
        value, low, high: median and quartiles over the rounds.
        reach, stretch: the targets, where there are any.
        lower_is_better: for figures that are not ratios of times.
        ours_s, theirs_s: median seconds.
        ours_cpu_s, theirs_cpu_s: median seconds of processor time, where they were spent in the
            process that measured.
        rounds: how many pairs.
        note: a word on what to know.
        error: why there is no figure.
        skipped: whether that was to be expected here; `note` says why.
    """

    case: str
    ours: str
    against: str = ""
    unit: str = "x"
    value: float | None = None
    low: float | None = None
    high: float | None = None
    reach: float | None = None
    stretch: float | None = None
    lower_is_better: bool = False
    ours_s: float | None = None
    theirs_s: float | None = None
    ours_cpu_s: float | None = None
    theirs_cpu_s: float | None = None
    rounds: int = 0
    note: str = ""
    error: str | None = None
    skipped: bool = False

    @property
    def verdict(self) -> str:
        if self.skipped:
            return "skipped"
        if self.error is not None or self.value is None:
            return "failed"
        if self.reach is None:
            return ""
        for name, target in (("stretch", self.stretch), ("reached", self.reach)):
            if target is not None and (
                self.value <= target if self.lower_is_better else self.value >= target
            ):
                return name
        return "short"


def versus(
    case: str,
    times: Mapping[str, Times],
    ours: str,
    theirs: str,
    *,
    reach: float | None = None,
    stretch: float | None = None,
    note: str = "",
) -> Row:
    """The row for two contenders of one case."""
    for name in (ours, theirs):
        error = times[name].error
        if error is not None:
            return Row(case, ours, theirs, reach=reach, stretch=stretch, error=f"{name}: {error}")
    spread = ratio(times[theirs], times[ours])
    return Row(
        case=case,
        ours=ours,
        against=theirs,
        value=spread.median,
        low=spread.low,
        high=spread.high,
        reach=reach,
        stretch=stretch,
        ours_s=times[ours].median,
        theirs_s=times[theirs].median,
        ours_cpu_s=times[ours].median_cpu,
        theirs_cpu_s=times[theirs].median_cpu,
        rounds=min(len(times[ours].seconds), len(times[theirs].seconds)),
        note=note,
    )


def figure(
    case: str,
    ours: str,
    unit: str,
    values: list[float],
    *,
    reach: float | None = None,
    stretch: float | None = None,
    note: str = "",
) -> Row:
    """The row for a figure that is better when lower, and compared with nothing."""
    spread = Spread.of(values)
    return Row(
        case=case,
        ours=ours,
        unit=unit,
        value=spread.median,
        low=spread.low,
        high=spread.high,
        reach=reach,
        stretch=stretch,
        lower_is_better=True,
        rounds=len(values),
        note=note,
    )
