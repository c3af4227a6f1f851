"""Comparison of two checkpoints, in pieces of bounded size."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from dcp_rs._progress import Watch
from dcp_rs._reports import Report
from dcp_rs._url import StrPath
from dcp_rs.checkpoint.blocks import Region, blocks, make_slabs
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.checkpoint.names import explain_prefix, renamer, selector, some
from dcp_rs.checkpoint.source import CheckpointReader, IndexSource, Item
from dcp_rs.checkpoint.views import Views
from dcp_rs.errors import PlanError
from dcp_rs.options import Globs, ReadOptions, Rename
from dcp_rs.tensors import pickles
from dcp_rs.tensors.equality import same
from dcp_rs.tensors.nesting import shown

#: Bytes of each checkpoint that are read at once.
_SLAB_BYTES = 16 << 20
#: Bytes that several passes compare at once, a multiple of all itemsizes. They stay in the cache.
_COMPARED_BYTES = 256 << 10
#: The dtype that torch cannot cast, and one whose integers no other dtype holds.
_UNREADABLE = torch.float4_e2m1fn_x2
_UNCASTABLE = {_UNREADABLE, torch.uint64}
_INT64_MIN = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class Difference:
    """An entry that differs between two checkpoints.

    Attributes:
        name: its FQN.
        kind: the kind of difference. ``"path"`` is for keys with the same text but other types, as
            0 and "0".
        a, b: a shape, dtype or path in each checkpoint; empty if elements differ.
        elements: the number of elements with different bits; None between two dtypes.
        max_abs: the largest absolute difference of two elements, an exact ``int`` for integers; NaN
            if only one of them is NaN. Between two dtypes 0 says that all elements are equal, and
            None that torch has no dtype for both.
    """

    name: str
    kind: Literal["only in a", "only in b", "kind", "path", "shape", "dtype", "elements", "value"]
    a: str = ""
    b: str = ""
    elements: int | None = None
    max_abs: float | None = None


@dataclass(frozen=True, repr=False)
class Comparison(Report):
    """Report of :func:`compare`.

    Attributes:
        differences: the differences, by name.
        entries: the number of tensors and values in either checkpoint.
        bytes: the bytes that were read of one checkpoint.
        seconds: the time it took.
        hint: the ``rename=`` that would let more names agree; empty if there is none.
    """

    differences: list[Difference]
    entries: int
    bytes: int
    seconds: float = 0.0
    hint: str = ""


def compare(
    a: StrPath,
    b: StrPath,
    *,
    include: Globs = None,
    exclude: Globs = None,
    rename: Rename = None,
    tolerance: float = 0.0,
    threads: int | None = None,
    allow_external: bool = False,
    views: Views | None = None,
    progress: Watch | None = None,
) -> Comparison:
    """Compare the entries of two checkpoints of any kind, to the bit.

    Chunks and files make no difference, nor do empty dicts and the kinds of dicts. Digests are not
    checked: damage shows as a difference.

    Args:
        a, b: paths or URLs.
        include, exclude: globs over names.
        rename: maps the names of ``a`` to those of ``b``, as for :func:`dcp_rs.load`. ``include``
            and ``exclude`` come after it. Where names are in the state dicts is not compared then.
        tolerance: the absolute difference up to which elements count as equal.
        threads: the number of threads that read; default: the cores of this process.
        allow_external: read data files outside of the checkpoints' folders.
        views: the views to apply to both.
        progress: called with the bytes of ``a`` compared so far, and all of them.

    Raises:
        PlanError: ``include`` and ``exclude`` leave nothing to compare, or ``rename`` gives two
            entries one name.
    """
    begin = time.perf_counter()
    # Damaged elements are differences.
    options = ReadOptions(threads=threads, verify=False, max_inflight_bytes=_SLAB_BYTES)
    left, right = (
        IndexSource(open_index(path, allow_external=allow_external, views=views), options)
        for path in (a, b)
    )
    passes = selector(include, exclude)
    in_a = {item.name: item for item in _renamed(left.items, rename) if passes(item.name)}
    in_b = {item.name: item for item in right.items if passes(item.name)}
    there = [item.name for item in (*left.items, *right.items)]
    if there and not in_a and not in_b:
        msg = (
            f"there is nothing to compare: no name passes include={include!r}, "
            f"exclude={exclude!r}; there are {some(there)}"
        )
        raise PlanError(msg)
    pairs = [(item, in_b[name]) for name, item in in_a.items() if name in in_b]
    differences = [
        Difference(name, "only in a", _describe(item))
        for name, item in in_a.items()
        if name not in in_b
    ]
    differences += [
        Difference(name, "only in b", b=_describe(item))
        for name, item in in_b.items()
        if name not in in_a
    ]
    left.check([item for item, _ in pairs])
    right.check([item for _, item in pairs])
    differences += entry_differences(left, right, pairs, tolerance, progress)
    # Stock checkpoints have text for every key.
    if rename is None and left.containers is not None and right.containers is not None:
        paths = [(one.name, shown(one.path or ()), shown(other.path or ())) for one, other in pairs]
        differences += [Difference(name, "path", a, b) for name, a, b in paths if a != b]
    missing = [name for name in in_b if name not in in_a]
    return Comparison(
        sorted(differences, key=lambda d: d.name),
        len({**in_a, **in_b}),
        sum(item.nbytes for item, _ in pairs),
        time.perf_counter() - begin,
        (explain_prefix(missing, in_b, in_a) if missing and in_a else None) or "",
    )


def _renamed(items: Sequence[Item], rename: Rename) -> list[Item]:
    """Return items with their new names.

    Raises:
        PlanError: two have the same one.
    """
    new_name = renamer(rename)
    found = {new_name(item.name): item for item in items}
    if len(found) < len(items):
        raise PlanError("rename= gives two entries of one checkpoint the same name")
    return [replace(item, name=name) for name, item in found.items()]


def _describe(item: Item) -> str:
    return "value" if item.dtype is None else f"{_dtype_name(item)} {list(item.shape)}"


def _dtype_name(item: Item) -> str:
    return str(item.dtype).removeprefix("torch.")


def entry_differences(
    left: CheckpointReader,
    right: CheckpointReader,
    pairs: Sequence[tuple[Item, Item]],
    tolerance: float = 0.0,
    progress: Watch | None = None,
) -> Iterator[Difference]:
    """Yield the differences between entries of ``left`` and entries of ``right``.

    Args:
        left, right: the checkpoints.
        pairs: the entries to compare with each other.
        tolerance, progress: see :func:`compare`.
    """
    alike: list[tuple[Item, Item]] = []
    for one, other in pairs:
        if (one.dtype is None) != (other.dtype is None):
            yield Difference(one.name, "kind", _describe(one), _describe(other))
        elif one.dtype is None:
            yield from _value_difference(one.name, left.value(one), right.value(other))
        elif one.shape != other.shape:
            yield Difference(one.name, "shape", str(list(one.shape)), str(list(other.shape)))
        elif one.dtype != other.dtype and {one.dtype, other.dtype} & _UNCASTABLE:
            yield Difference(one.name, "dtype", _dtype_name(one), _dtype_name(other))
        else:
            alike.append((one, other))
    total = sum(one.nbytes for one, _ in pairs)
    done = total - sum(one.nbytes for one, _ in alike)
    numbers = [0] * len(alike)
    largest: list[float | None] = [0.0] * len(alike)
    if progress is not None and done:
        progress(done, total)
    for pair, a, b in _pieces(left, right, alike):
        one, other = alike[pair]
        number, by = _compared(a, b)
        numbers[pair] += number
        largest[pair] = _larger(largest[pair], by)
        done += one.nbytes * a.numel() // math.prod(one.shape)
        if progress is not None:
            progress(done, total)
    for (one, other), number, by in zip(alike, numbers, largest, strict=True):
        if one.dtype != other.dtype:
            dtypes = _dtype_name(one), _dtype_name(other)
            yield Difference(one.name, "dtype", *dtypes, max_abs=by)
        elif number and not (by is not None and by <= tolerance and tolerance > 0):
            yield Difference(one.name, "elements", elements=number, max_abs=by)


def _value_difference(name: str, one: bytes, other: bytes) -> Iterator[Difference]:
    if one == other:
        return
    try:
        # One value may have many pickles.
        a, b = (pickles.load(name, data, weights_only=True) for data in (one, other))
        if not same(a, b):
            yield Difference(name, "value", _short(a), _short(b))
    except Exception:  # noqa: BLE001  # classes that the caller allowed may raise anything
        yield Difference(name, "value", f"{len(one)} bytes", f"{len(other)} bytes")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _pieces(
    left: CheckpointReader, right: CheckpointReader, pairs: Sequence[tuple[Item, Item]]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield the number of a pair and a run of elements of both, in a dtype that holds either."""
    dtypes = [_common_dtype(one.dtype, other.dtype) for one, other in pairs]
    sides = [
        blocks(
            source,
            [Region(pair[side], None, dtype) for pair, dtype in zip(pairs, dtypes, strict=True)],
            make_slabs(_SLAB_BYTES),
        )
        for side, source in enumerate((left, right))
    ]
    for slab_a, slab_b in zip(*sides, strict=True):
        # Regions of equal sizes and dtypes are cut at the same places.
        for a, b in zip(slab_a, slab_b, strict=True):
            dtype = dtypes[a.region]
            yield a.region, a.data.view(dtype), b.data.view(dtype)


def _common_dtype(one: torch.dtype | None, other: torch.dtype | None) -> torch.dtype:
    if one is None or other is None:
        raise TypeError("values have no dtype")
    if one == other:
        return one
    if one.is_complex or other.is_complex:
        return torch.complex128
    if _is_integral(one) and _is_integral(other):
        return torch.int64
    return torch.float64


def _is_integral(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _compared(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float | None]:
    """Return how many elements of one dtype differ, and by how much at most."""
    if _equal(a, b):
        return 0, 0.0
    total = 0
    largest: float | None = 0.0
    count = _COMPARED_BYTES // a.dtype.itemsize
    for at in range(0, a.numel(), count):
        x, y = a[at : at + count], b[at : at + count]
        if not _equal(x, y):
            total += _count_different(x, y)
            largest = _larger(largest, _largest_difference(x, y))
    return total, largest


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether all bits are equal."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _count_different(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the number of elements with different bits."""
    bits = a.view(torch.uint8) != b.view(torch.uint8)
    return int(bits.view(-1, a.dtype.itemsize).any(1).sum())


def _larger(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return None
    return max(one, other, key=lambda by: (math.isnan(by), by))


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Return the largest absolute difference of two elements; None for :data:`_UNREADABLE`.

    Integers are compared exactly, complex numbers part by part, and others in float64.
    """
    if a.dtype == _UNREADABLE:
        return None
    if _is_integral(a.dtype):
        if a.dtype == torch.uint64:  # in the same order as signed numbers
            a, b = (tensor.view(torch.int64) ^ _INT64_MIN for tensor in (a, b))
        a, b = a.to(torch.int64), b.to(torch.int64)
        # The difference may overflow: its bits are those of an unsigned number.
        apart = torch.maximum(a, b) - torch.minimum(a, b)
        return int((apart ^ _INT64_MIN).max()) - _INT64_MIN
    is_complex = a.dtype.is_complex
    if is_complex:
        a, b = (torch.view_as_real(tensor.to(torch.complex128)) for tensor in (a, b))
    a, b = a.to(torch.float64), b.to(torch.float64)
    by = (a - b).abs()
    by[(a == b) | (a.isnan() & b.isnan())] = 0.0  # infinities, too
    if is_complex:
        by = torch.where(by.isnan().any(1), math.nan, torch.hypot(by[:, 0], by[:, 1]))
    return float(by.max())
