"""By how much elements differ, as `compare` has it."""

import math
import random

import pytest
import torch

import dcp_rs
from dcp_rs.checkpoint.compare import _SLAB_BYTES, Difference, _largest_difference, compare
from support.both import save_rs

NAN, INF = math.nan, math.inf
INTEGERS = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
]


def differences(tmp_path, a, b, **options):
    save_rs({"x": a}, tmp_path / "a")
    save_rs({"x": b}, tmp_path / "b")
    return [
        (one.kind, one.elements, one.max_abs)
        for one in compare(tmp_path / "a", tmp_path / "b", **options).differences
    ]


@pytest.mark.parametrize(
    ("dtype", "a", "b"),
    [
        (torch.int64, 2**62, 2**62 + 100),
        (torch.int64, -(2**63), 2**63 - 1),
        (torch.int64, 2**53, 2**53 + 1),
        (torch.uint64, 2**64 - 1, 2**64 - 1000),
        (torch.uint64, 0, 2**64 - 1),
        (torch.int32, -(2**31), 2**31 - 1),
        (torch.bool, 0, 1),
    ],
)
def test_integers_differ_by_what_they_differ(tmp_path, dtype, a, b):
    """They were compared as floating point: 2**62 and 2**62 + 100 were the same under a tolerance, and differed "by at most 0" without."""
    by = abs(a - b)
    one, other = torch.tensor([a, 1], dtype=dtype), torch.tensor([b, 1], dtype=dtype)
    assert differences(tmp_path, one, other) == [("elements", 1, by)]
    assert differences(tmp_path, other, one, tolerance=1e-9 if by == 1 else by / 2) == [
        ("elements", 1, by)
    ]
    assert differences(tmp_path, one, other, tolerance=2.0 * by) == []


def test_other_dtypes_are_equal_or_differ_by_something(tmp_path):
    for a, b, by in (
        (torch.tensor([1.5, 2.0]), torch.tensor([1.5, 2.0]).half(), 0),
        (torch.tensor([1.5, 2.0]), torch.tensor([1.5, 4.0]).half(), 2),
        (torch.tensor([2**53 + 1, 5]), torch.tensor([1, 5], dtype=torch.int8), 2**53),
        (torch.tensor([1 + 2j]), torch.tensor([1.0]), 2),
        (torch.tensor([NAN]), torch.tensor([NAN]).bfloat16(), 0),
        (torch.tensor([2**62]), torch.tensor([2**62], dtype=torch.uint64), None),
    ):
        assert differences(tmp_path, a, b) == [("dtype", None, by)]
        assert differences(tmp_path, b, a) == [("dtype", None, by)]


@pytest.mark.parametrize("seed", range(4))
def test_random_integers_against_python(tmp_path, seed):
    rng = random.Random(seed)

    def some(dtype, count):
        if dtype == torch.bool:
            return [rng.random() < 0.5 for _ in range(count)]
        info = torch.iinfo(dtype)
        near = (info.min, info.max, 0, 1 << 32, 1 << 31, info.max // 2)
        drawn = [
            rng.choice((rng.randint(info.min, info.max), rng.choice(near) + rng.randint(-2, 2)))
            for _ in range(count)
        ]
        return [max(info.min, min(info.max, value)) for value in drawn]

    for dtype in INTEGERS:
        other = rng.choice([dtype, dtype, *INTEGERS])
        a, b = some(dtype, 50), some(other, 50)
        by = [abs(int(x) - int(y)) for x, y in zip(a, b, strict=True)]
        want = [("elements", sum(map(bool, by)), max(by))]
        if dtype != other:
            want = [("dtype", None, None if torch.uint64 in (dtype, other) else max(by))]
        assert (
            differences(tmp_path, torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=other))
            == want
        ), (dtype, other)


def test_entries_under_keys_of_other_types_differ(tmp_path):
    for folder, key in (("a", 0), ("b", "0")):
        dcp_rs.save({"x": {key: torch.ones(1)}}, tmp_path / folder, no_dist=True)
    (one,) = compare(tmp_path / "a", tmp_path / "b").differences
    assert one == Difference("x.0", "path", "['x'][0]", "['x']['0']")


def test_progress_hears_of_an_end_without_elements(tmp_path):
    save_rs({"step": 1, "w": torch.ones(3)}, tmp_path / "a")
    save_rs({"step": 1, "w": torch.ones(4)}, tmp_path / "b")
    seen = []
    compare(tmp_path / "a", tmp_path / "b", progress=lambda *told: seen.append(told))
    done, total = seen[-1]
    assert done == total > 12


def test_only_what_is_near_a_difference_is_cast(tmp_path, monkeypatch):
    """All elements that were read with it were cast, in several times their memory."""
    cast = []

    def largest(x, y):
        cast.append(x.numel())
        return _largest_difference(x, y)

    monkeypatch.setattr("dcp_rs.checkpoint.compare._largest_difference", largest)
    a = torch.zeros(1 << 21)
    b = a.clone()
    b[:: 1 << 20] = 1
    assert differences(tmp_path, a, b) == [("elements", 2, 1.0)]
    assert sum(cast) == 2 << 16


def test_the_largest_difference_of_several_pieces(tmp_path):
    count = _SLAB_BYTES // 8 + 10
    a, b = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    a[3], a[-1], b[5] = 2**60, 7, 2**60 + 1
    assert differences(tmp_path, a, b) == [("elements", 3, 2**60 + 1)]


@pytest.mark.parametrize(
    ("a", "b", "by"),
    [
        (complex(NAN, 1), complex(NAN, 1000), 999),
        (complex(1, NAN), complex(1000, NAN), 999),
        (complex(INF, 1), complex(INF, 4), 3),
        (complex(1, 2), complex(4, 6), 5),
        (complex(NAN, 1), complex(2, 1), NAN),
        (complex(NAN, INF), complex(2, 1), NAN),
        (complex(INF, 1), complex(-INF, 1), INF),
        (complex(0.0, 1), complex(-0.0, 1), 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_parts_of_complex_numbers_that_are_no_numbers_hide_nothing(tmp_path, dtype, a, b, by):
    """Two of which a part was NaN in both were the same under a tolerance, whatever the other part was."""
    one, other = torch.tensor([a], dtype=dtype), torch.tensor([b], dtype=dtype)
    ((kind, elements, largest),) = differences(tmp_path, one, other)
    assert (kind, elements) == ("elements", 1)
    assert largest == by or (math.isnan(largest) and math.isnan(by))
    assert bool(differences(tmp_path, one, other, tolerance=2.0)) == (by != 0)


def test_floats_are_compared_as_before(tmp_path):
    one = torch.tensor([1.0, NAN, INF, 0.5])
    assert differences(tmp_path, one, torch.tensor([1.25, NAN, INF, 0.5])) == [
        ("elements", 1, 0.25)
    ]
    assert differences(tmp_path, one, torch.tensor([1.25, NAN, INF, 0.5]), tolerance=0.25) == []
    ((_, elements, largest),) = differences(
        tmp_path, one, torch.tensor([1.0, 2.0, INF, 0.5]), tolerance=9.0
    )
    assert elements == 1
    assert math.isnan(largest)
