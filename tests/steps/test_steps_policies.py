"""Which steps stay: each policy by a table, and all of them together."""

import math
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_rs.steps.retention import (
    Policies,
    beyond,
    keep_best,
    keep_every,
    keep_last,
    keep_within,
    used,
)


@dataclass(frozen=True)
class Saved:
    number: int
    saved: float = 0.0
    nbytes: int = 10
    metrics: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)
    is_stock: bool = False

    @property
    def age(self):
        return True, self.number


def steps(*numbers):
    return [Saved(number) for number in numbers]


@pytest.mark.parametrize(
    ("numbers", "count", "kept"),
    [([], 2, []), ([5], 2, [5]), ([1, 2, 3], 2, [2, 3]), ([3, 1, 2], 1, [3]), ([1, 2], 5, [1, 2])],
)
def test_keep_last(numbers, count, kept):
    assert keep_last(steps(*numbers), count) == set(kept)


@pytest.mark.parametrize(
    ("numbers", "interval", "kept"),
    [
        ([], 10, []),
        ([10, 20, 30], 10, [10, 20, 30]),
        ([5, 10, 15, 20], 10, [10, 20]),
        ([0, 5], 10, []),  # nothing before the first multiple
        ([3, 6, 9, 12, 15, 18, 21], 10, [12, 21]),  # the first after each multiple
        ([29, 25, 12], 10, [12, 25]),
        ([1, 2, 3], 1, [1, 2, 3]),
    ],
)
def test_keep_every(numbers, interval, kept):
    assert keep_every(steps(*numbers), interval) == set(kept)


@pytest.mark.parametrize(
    ("times", "seconds", "kept"),
    [
        ({}, 5, []),
        ({1: 0, 2: 10, 3: 12}, 5, [2, 3]),
        ({1: 0, 2: 10, 3: 12}, 2, [2, 3]),
        ({1: 0, 2: 10, 3: 12}, 12, [1, 2, 3]),
        ({1: 0, 2: 1e9}, 5, [2]),  # the newest counts, and not the clock
    ],
)
def test_keep_within(times, seconds, kept):
    assert keep_within([Saved(n, saved=t) for n, t in times.items()], seconds) == set(kept)


@pytest.mark.parametrize(
    ("times", "kept"),
    [
        ({1: 10, 2: 20, 3: 10_000}, {1, 2, 3}),  # once, on a machine whose clock was wrong
        ({1: 10, 2: 20, 3: 10_000, 4: 111}, {3, 4}),
        ({1: 9_000, 2: 10_000}, {1, 2}),
        ({1: 10, 2: 100, 3: 130}, {2, 3}),  # within what clocks differ by
        ({1: 9_000, 2: 60, 3: 9_000, 4: 80}, {1, 2, 3, 4}),
    ],
)
def test_no_step_is_compared_with_one_of_the_future(times, kept):
    """One step that was stamped a year ahead had all others removed."""
    assert keep_within([Saved(n, saved=t) for n, t in times.items()], 30, now=110) == kept


@pytest.mark.parametrize(
    ("times", "kept"),
    [
        ({1: 10, 2: 90, 3: 0}, {1, 2, 3}),  # nothing tells how old the others are
        ({1: 10, 2: 90, 3: 0, 4: 110}, {2, 3, 4}),
        ({1: 10, 2: 90, 3: 0, 4: 100, 5: 1, 6: 2, 7: 105}, {2, 3, 4, 5, 6, 7}),
        ({1: 10, 2: 0, 3: 20, 4: 100}, {4}),
    ],
)
def test_no_step_is_compared_with_one_of_the_past(times, kept):
    """One step whose clock was behind had all steps before it removed, and then itself."""
    assert keep_within([Saved(n, saved=t) for n, t in times.items()], 30, now=110) == kept


@pytest.mark.parametrize(
    ("losses", "count", "mode", "kept"),
    [
        ({}, 1, "min", []),
        ({1: 3.0, 2: 1.0, 3: 2.0}, 1, "min", [2]),
        ({1: 3.0, 2: 1.0, 3: 2.0}, 2, "min", [2, 3]),
        ({1: 3.0, 2: 1.0, 3: 2.0}, 1, "max", [1]),
        ({1: 1.0, 2: 1.0}, 1, "min", [2]),  # of equal ones the newer
        ({1: 1.0, 2: 1.0}, 1, "max", [2]),
        ({1: math.nan, 2: 5.0}, 2, "min", [2]),
        ({1: math.nan, 2: 5.0}, 2, "max", [2]),
        ({1: -math.inf, 2: 5.0}, 1, "min", [1]),
        ({1: None, 2: 5.0}, 2, "min", [2]),  # not measured
    ],
)
def test_keep_best(losses, count, mode, kept):
    found = [Saved(n, metrics={} if loss is None else {"loss": loss}) for n, loss in losses.items()]
    assert keep_best(found, count, "loss", mode) == set(kept)
    if count == 1:
        assert Policies(metric="loss", mode=mode).best(found) == min(kept, default=None)
        assert Policies(metric="another", mode=mode).best(found) is None


@pytest.mark.parametrize(
    ("sizes", "max_bytes", "protected", "gone"),
    [
        ({}, 10, [], []),
        ({1: 10, 2: 10}, 20, [], []),
        ({1: 10, 2: 10}, 19, [], [1]),
        ({1: 10, 2: 10, 3: 10}, 10, [], [1, 2]),
        ({1: 10, 2: 10, 3: 10}, 10, [1], [2, 3]),
        ({1: 10, 2: 10}, 0, [1, 2], []),  # it is exceeded by what is never removed
        ({1: 100, 2: 1, 3: 1}, 50, [], [1]),
    ],
)
def test_beyond_max_bytes(sizes, max_bytes, protected, gone):
    assert beyond(
        [Saved(n, nbytes=size) for n, size in sizes.items()], max_bytes, protected
    ) == set(gone)


@pytest.mark.parametrize(
    ("policies", "gone"),
    [
        ({}, []),
        ({"keep_last": 2}, [5, 10, 15, 20]),
        ({"keep_last": 1, "keep_every": 10}, [5, 15, 25]),
        ({"keep_every": 10}, [5, 15, 25]),
        ({"keep_every": 5}, []),
        ({"keep": lambda step, _: step == 5}, []),
        ({"keep_last": 1, "keep": lambda step, _: step == 5}, [10, 15, 20, 25]),
        ({"keep_last": 1, "keep_best": 1, "metric": "loss"}, [10, 15, 20, 25]),
        ({"keep_last": 1, "keep_within": 2.5}, [5, 10, 15]),
        ({"keep_within": timedelta(seconds=1)}, [5, 10, 15, 20]),
        ({"max_bytes": 30}, [5, 10, 15]),
        ({"keep_every": 10, "max_bytes": 20}, [5, 10, 15, 25]),  # 20 and 30 are left; 10 is beyond
        ({"metric": "loss"}, []),
    ],
)
def test_together_they_keep_what_one_of_them_keeps(policies, gone):
    found = [Saved(n, saved=n / 5, metrics={"loss": float(n)}) for n in (5, 10, 15, 20, 25, 30)]
    assert unneeded(Policies(**policies), found) == gone


def unneeded(policies, *arguments, **options):
    return [step.number for step in policies.unneeded(*arguments, **options)]


def test_protected_steps_stay():
    policies = Policies(keep_last=1, max_bytes=10, metric="loss")
    assert unneeded(policies, steps(1, 2, 3), {1}) == [2]
    assert unneeded(policies, steps(1, 2, 3), room=10) == [1, 2]
    assert unneeded(policies, [Saved(1, metrics={"loss": 1.0}), *steps(2, 3)]) == [2]
    assert unneeded(Policies(keep_last=1), steps(1, 2, 3), room=10**9) == []


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"keep_last": 0}, "keep_last=0: must be a positive integer"),
        ({"keep_every": 2.5}, "keep_every"),
        ({"keep_best": True, "metric": "loss"}, "keep_best"),
        ({"max_bytes": -1}, "max_bytes"),
        ({"keep_within": 0}, "keep_within"),
        ({"keep_within": timedelta(0)}, "keep_within"),
        ({"keep_best": 1}, "needs metric="),
        ({"mode": "best"}, "one of 'min', 'max'"),
    ],
)
def test_senseless_policies_are_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        Policies(**wrong)


losses = st.floats(allow_nan=True)
found = st.dictionaries(
    st.integers(0, 200), st.tuples(losses, st.integers(0, 50)), max_size=30
).map(
    lambda all_of_them: [
        Saved(n, saved=float(n), nbytes=size, metrics={"loss": loss})
        for n, (loss, size) in sorted(all_of_them.items())
    ]
)
counts = st.none() | st.integers(1, 20)


@given(found, counts, counts, counts, counts)
def test_pruning_early_or_late_removes_the_same(found, last, every, within, best_ones):
    """A step at a time, with removal after each, or all at once: nothing that is promised is lost on the way, and nothing else stays."""
    policies = Policies(
        keep_last=last, keep_every=every, keep_within=within, keep_best=best_ones, metric="loss"
    )
    there = []
    for step in found:
        there.append(step)
        gone = policies.unneeded(there)
        there = [each for each in there if each not in gone]
    fixed = {found[-1].number, policies.best(found)} - {None} if found else set()
    assert {step.number for step in there} == policies.kept(found) | fixed


def sharing(*files):
    """Steps with these files (bytes by name), and 1 byte each that is its own."""
    return [Saved(n, nbytes=1 + sum(held.values()), files=held) for n, held in enumerate(files)]


@pytest.mark.parametrize(
    ("files", "max_bytes", "gone", "total"),
    [
        ([{"a": 100}, {"a": 100}, {"a": 100}], 103, [], 103),
        ([{"a": 100}, {"a": 100}, {"a": 100}], 102, [0], 103),
        (
            [{"a": 100}, {"a": 100, "b": 5}, {"b": 5}],
            50,
            [0, 1],
            108,
        ),  # what two share goes with the second
        ([{"a": 100}, {"b": 100}, {"b": 100}], 150, [0], 203),
    ],
)
def test_shared_bytes_count_once(files, max_bytes, gone, total):
    assert used(sharing(*files)) == total
    assert beyond(sharing(*files), max_bytes, {2}) == set(gone)
