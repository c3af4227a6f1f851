"""Two checkpoints, compared a bounded piece at a time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dcp_rs._reports import Report
from dcp_rs._url import StorageOptions, Url, location
from dcp_rs.checkpoint.names import globs, selector, some
from dcp_rs.checkpoint.source import Item, Request, Source, open_source
from dcp_rs.checkpoint.views import Layout
from dcp_rs.errors import PlanError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors import pickles
from dcp_rs.tensors.equality import same
from dcp_rs.tensors.nesting import TreePath, name_of, remaining, shown
from dcp_rs.tensors.regions import rectangles

__all__ = ["Comparison", "Difference", "compare", "difference"]

#: Bytes of each checkpoint that are in memory at a time.
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class Difference:
    """An entry, or a container, that is not the same in both.

    Attributes:
        name: FQN.
        kind: what differs; ``"path"``: keys that look the same are of other types, as 0 and "0".
        a, b: what it is in each: a shape, a dtype, a path; empty for values of elements.
        elements: how many elements differ in at least one bit; None where they were not compared.
        max_abs: the largest absolute difference of two elements, of integers an exact ``int``; NaN
            where one is and the other is not.
        container: it is no entry but a container that entries do not tell of: an empty one, or one
            of another kind than ``dict``.
    """

    name: str
    kind: Literal["only in a", "only in b", "kind", "path", "shape", "dtype", "elements", "value"]
    a: str = ""
    b: str = ""
    elements: int | None = None
    max_abs: float | None = None
    container: bool = False


@dataclass(frozen=True, repr=False)
class Comparison(Report):
    """Report of :func:`compare`.

    Attributes:
        differences: what is not the same.
        entries: tensors and values that are in either.
        bytes: that were read of one of them.
        seconds: it took.
    """

    _timed = "bytes"

    differences: list[Difference]
    entries: int
    bytes: int
    seconds: float = 0.0


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    tolerance: float = 0.0,
    threads: int | None = None,
    allow_external: bool = False,
    storage_options: Mapping[str, Any] | Any | None = None,
    b_storage_options: Mapping[str, Any] | Any | None = None,
    layout: Layout | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> Comparison:
    """Compares two checkpoints of any kind. How tensors are cut and stored makes no difference; every bit does.

    Args:
        a, b: paths, or URLs.
        include, exclude: globs over names.
        tolerance: elements whose absolute difference is at most that count as equal.
        threads: that read; default: the cores of this process.
        allow_external: read data files outside of the checkpoints' folders, if an index names any.
        storage_options: for URLs, see :class:`dcp_rs.RsReader`.
        b_storage_options: for that of ``b``; default: those of ``a``.
        layout: how the tensors of both are seen.
        progress: called with the bytes of ``a`` compared so far, and all of them.

    Raises:
        PlanError: ``include`` and ``exclude`` leave nothing to compare.
    """
    begin = time.perf_counter()
    options = ReadOptions(threads=threads, max_inflight_bytes=_PIECE_BYTES)
    stores = StorageOptions.of(storage_options)
    of_b = StorageOptions.of(b_storage_options)
    left, right = (
        open_source(
            path,
            options=options,
            allow_external=allow_external,
            storage_options=given if isinstance(location(path), Url) else None,
            layout=layout,
        )
        for path, given in ((a, stores), (b, stores if of_b is None else of_b))
    )
    wanted, unwanted = globs(include), globs(exclude)

    def chosen(source: Source) -> dict[str, Item]:
        return {
            item.name: item
            for item in source.items
            if (wanted is None or wanted.match(item.name))
            and not (unwanted and unwanted.match(item.name))
        }

    in_a, in_b = chosen(left), chosen(right)
    there = [item.name for item in (*left.items, *right.items)]
    if there and not in_a and not in_b:
        msg = f"there is nothing to compare: no name passes include={include!r}, exclude={exclude!r}; there are {some(there)}"
        raise PlanError(msg)
    pairs = [(item, in_b[name]) for name, item in in_a.items() if name in in_b]
    differences = [
        Difference(name, "only in a", _what(item))
        for name, item in in_a.items()
        if name not in in_b
    ]
    differences += [
        Difference(name, "only in b", b=_what(item))
        for name, item in in_b.items()
        if name not in in_a
    ]
    left.check([item for item, _ in pairs])
    right.check([item for _, item in pairs])
    total, done = sum(item.nbytes for item, _ in pairs), 0
    for one, other in pairs:
        found = difference(left, one, right, other, tolerance)
        if found is not None:
            differences.append(found)
        done += one.nbytes
        if progress is not None:
            progress(done, total)
    mappings_a, mappings_b = (
        _mappings(left, in_a, selector(include, exclude)),
        _mappings(right, in_b, selector(include, exclude)),
    )
    if mappings_a is not None and mappings_b is not None:
        differences += [
            Difference(one.name, "path", shown(one.path or ()), shown(other.path or ()))
            for one, other in pairs
            if not same(one.path, other.path)
        ]
        differences += _unlike(mappings_a, mappings_b)
    seconds = time.perf_counter() - begin
    return Comparison(
        sorted(differences, key=lambda d: d.name), len({**in_a, **in_b}), done, seconds
    )


def _mappings(
    source: Source, chosen: dict[str, Item], passes: Callable[[str], bool] | None
) -> dict[str, tuple[TreePath, str]] | None:
    """The mappings that entries do not tell, by name: path and kind. None where the checkpoint does not know, as those of stock DCP."""
    if source.containers is None:
        return None
    leaves = [item.path for item in chosen.values() if item.path is not None]
    kept = remaining(source.containers, leaves, passes or (lambda _: True))
    holding = {path[:depth] for path in leaves for depth in range(len(path))}
    return {
        name_of(c.path): (c.path, c.kind if c.path in holding else f"empty {c.kind}")
        for c in kept
        if c.path or c.kind != "dict"
    }


def _unlike(
    a: dict[str, tuple[TreePath, str]], b: dict[str, tuple[TreePath, str]]
) -> Iterator[Difference]:
    for name in {**a, **b}:
        (path_a, kind_a), (path_b, kind_b) = a.get(name, ((), "")), b.get(name, ((), ""))
        if not kind_a.startswith("empty ") and not kind_b.startswith("empty "):
            if kind_a != kind_b:
                yield Difference(name, "kind", kind_a or "dict", kind_b or "dict", container=True)
        elif not kind_a or not kind_b:
            yield Difference(
                name, "only in a" if kind_a else "only in b", kind_a, kind_b, container=True
            )
        elif kind_a != kind_b or not same(path_a, path_b):
            kind: Literal["kind", "path"] = "kind" if kind_a != kind_b else "path"
            yield Difference(
                name, kind, f"{kind_a} {shown(path_a)}", f"{kind_b} {shown(path_b)}", container=True
            )


def _what(item: Item) -> str:
    return "value" if item.dtype is None else f"{_dtype(item)} {list(item.shape)}"


def _dtype(item: Item) -> str:
    return str(item.dtype).removeprefix("torch.")


def difference(
    left: Source, one: Item, right: Source, other: Item, tolerance: float = 0.0
) -> Difference | None:
    """Return what differs between an entry of one checkpoint and an entry of another, if anything does."""
    if (one.dtype is None) != (other.dtype is None):
        return Difference(one.name, "kind", _what(one), _what(other))
    if one.dtype is None or other.dtype is None:
        return _value_differs(one.name, left.value(one), right.value(other))
    if one.shape != other.shape:
        return Difference(one.name, "shape", str(list(one.shape)), str(list(other.shape)))
    elements, largest = _elements(left, one, right, other)
    if one.dtype != other.dtype:
        return Difference(one.name, "dtype", _dtype(one), _dtype(other), elements, largest)
    if elements and not (largest is not None and largest <= tolerance and tolerance > 0):
        return Difference(one.name, "elements", elements=elements, max_abs=largest)
    return None


def _value_differs(name: str, one: bytes, other: bytes) -> Difference | None:
    if one == other:
        return None
    try:
        # One value has many pickles.
        a, b = (pickles.load(name, data, weights_only=True) for data in (one, other))
        return None if same(a, b) else Difference(name, "value", _short(a), _short(b))
    except Exception:  # noqa: BLE001  # of classes that the caller allowed, whatever: what cannot be compared, or shown, counts as different
        return Difference(name, "value", f"{len(one)} bytes", f"{len(other)} bytes")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _elements(left: Source, one: Item, right: Source, other: Item) -> tuple[int, float | None]:
    """How many elements differ, and by how much at most (None where that cannot be told, as of complex32)."""
    if one.dtype is None or other.dtype is None:
        raise TypeError(one.name)
    count = math.prod(one.shape)
    step = _PIECE_BYTES // max(one.dtype.itemsize, other.dtype.itemsize)
    differing, largest = 0, 0.0
    comparable = True
    for begin in range(0, count, step):
        length = min(step, count - begin)
        a, b = (
            _read(source, item, begin, length) for source, item in ((left, one), (right, other))
        )
        if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            continue
        number, by = _difference(a, b)
        differing += number
        comparable = comparable and by is not None
        if by is not None and not math.isnan(largest):
            largest = by if math.isnan(by) else max(largest, by)
    return differing, largest if comparable else None


def _read(source: Source, item: Item, begin: int, count: int) -> torch.Tensor:
    if item.dtype is None:
        raise TypeError(item.name)
    flat = torch.empty(count, dtype=item.dtype, device="cpu")
    requests, at = [], 0
    for offsets, sizes in rectangles(item.shape, begin, count):
        length = math.prod(sizes)
        requests.append(Request(item, None, offsets, flat[at : at + length].view(sizes)))
        at += length
    source.read(requests)
    return flat


def _difference(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float | None]:
    same_bits = None
    if a.dtype == b.dtype:
        size = a.dtype.itemsize
        bits, bits_b = (tensor.view(torch.uint8).view(-1, size) for tensor in (a, b))
        same_bits = (bits == bits_b).all(1)
        if not (a.dtype.is_floating_point or a.dtype.is_complex) or bool(
            (~same_bits).sum() * 8 < a.numel()
        ):
            # Most are the same. Older torch picks no elements of unsigned types.
            a, b = (some[~same_bits].view(a.dtype).view(-1) for some in (bits, bits_b))
    try:
        number, largest = _exactly(a, b) if _is_integral(a) and _is_integral(b) else _nearly(a, b)
    except (RuntimeError, NotImplementedError):
        number, largest = 0, None
    return number if same_bits is None else int((~same_bits).sum()), largest


def _is_integral(tensor: torch.Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _exactly(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int]:
    """How many integers differ, and by how much at most: beyond 2**53 floating point would lose that."""
    (high, low), (high_b, low_b) = _halves(a), _halves(b)
    high, low = high - high_b, low - low_b
    high, low = high + (low >> 32), low & _LOW  # low is no negative number now
    negative = high < 0
    high[negative], low[negative] = (
        -high[negative] - (low[negative] > 0).long(),
        -low[negative] & _LOW,
    )
    number = int(((high != 0) | (low != 0)).sum())
    if not number:
        return 0, 0
    most = int(high.max())
    return number, (most << 32) + int(low[high == most].max())


#: The lower half of 64 bits.
_LOW = (1 << 32) - 1


def _halves(integers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``high * 2**32 + low``, with ``low`` from 0 to 2**32 - 1."""
    if integers.dtype == torch.uint64:
        bits = integers.view(torch.int64)
        return bits >> 32 & _LOW, bits & _LOW
    wide = integers.to(torch.int64)
    return wide >> 32, wide & _LOW


def _nearly(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float]:
    """The same in double precision, part by part of complex numbers."""
    if a.dtype.is_complex or b.dtype.is_complex:
        x, y = (torch.view_as_real(tensor.to(torch.complex128)) for tensor in (a, b))
    else:
        x, y = a.to(torch.float64), b.to(torch.float64)
    by = (x - y).abs()
    by[(x == y) | (x.isnan() & y.isnan())] = 0.0  # infinities, too
    if by.ndim > 1:
        incomparable = by.isnan().any(1)
        by = torch.hypot(by[:, 0], by[:, 1])
        by[incomparable] = math.nan
    return int((by != 0).sum()), float(by.max()) if by.numel() else 0.0
