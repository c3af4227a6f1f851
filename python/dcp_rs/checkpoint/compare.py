"""Comparison of two checkpoints, in pieces of bounded size."""

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
from dcp_rs.checkpoint.names import selector, some
from dcp_rs.checkpoint.source import Item, Request, Source, open_source
from dcp_rs.checkpoint.views import Layout
from dcp_rs.errors import PlanError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors import pickles
from dcp_rs.tensors.equality import same
from dcp_rs.tensors.nesting import TreePath, name_of, remaining, shown
from dcp_rs.tensors.regions import unflatten

__all__ = ["Comparison", "Difference", "compare", "difference"]

#: Bytes of each checkpoint in memory at a time.
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class Difference:
    """An entry or container that differs between two checkpoints.

    Attributes:
        name: its FQN.
        kind: the kind of difference. ``"path"`` is for keys with the same text but other types, as
            0 and "0".
        a, b: a shape, dtype or path in each checkpoint; empty if elements differ.
        elements: the number of elements with different bits; None if they were not compared.
        max_abs: the largest absolute difference of two elements, an exact ``int`` for integers; NaN
            if only one of them is NaN.
        container: whether it is a container: an empty one, or one of another kind than ``dict``.
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
        differences: the differences, by name.
        entries: the number of tensors and values in either checkpoint.
        bytes: the bytes that were read of one checkpoint.
        seconds: the time it took.
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
    """Compare two checkpoints of any kind, to the bit. Chunks and files make no difference.

    Digests are not checked: damage shows as a difference.

    Args:
        a, b: paths or URLs.
        include, exclude: globs over names.
        tolerance: the absolute difference up to which elements count as equal.
        threads: the number of threads that read; default: the cores of this process.
        allow_external: read data files outside of the checkpoints' folders.
        storage_options: for URLs, see :class:`dcp_rs.RsReader`.
        b_storage_options: those for ``b``; default: those for ``a``.
        layout: the views to apply to both.
        progress: called with the bytes of ``a`` compared so far, and all of them.

    Raises:
        PlanError: ``include`` and ``exclude`` leave nothing to compare.
    """
    begin = time.perf_counter()
    # Damaged elements are differences.
    options = ReadOptions(threads=threads, verify=False, max_inflight_bytes=_PIECE_BYTES)
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
    passes = selector(include, exclude) or (lambda _: True)
    in_a, in_b = (
        {item.name: item for item in source.items if passes(item.name)} for source in (left, right)
    )
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
    total, done = sum(item.nbytes for item, _ in pairs), 0
    for one, other in pairs:
        found = difference(left, one, right, other, tolerance)
        if found is not None:
            differences.append(found)
        done += one.nbytes
        if progress is not None:
            progress(done, total)
    mappings_a, mappings_b = _mappings(left, in_a, passes), _mappings(right, in_b, passes)
    if mappings_a is not None and mappings_b is not None:
        differences += [
            Difference(one.name, "path", shown(one.path or ()), shown(other.path or ()))
            for one, other in pairs
            if not same(one.path, other.path)
        ]
        differences += _container_differences(mappings_a, mappings_b)
    seconds = time.perf_counter() - begin
    return Comparison(
        sorted(differences, key=lambda d: d.name), len({**in_a, **in_b}), done, seconds
    )


def _mappings(
    source: Source, chosen: dict[str, Item], passes: Callable[[str], bool]
) -> dict[str, tuple[TreePath, str]] | None:
    """Return path and kind of each container that is listed, or None if the format lists none."""
    if source.containers is None:
        return None
    leaves = [item.path for item in chosen.values() if item.path is not None]
    kept = remaining(source.containers, leaves, passes)
    holding = {path[:depth] for path in leaves for depth in range(len(path))}
    return {
        name_of(c.path): (c.path, c.kind if c.path in holding else f"empty {c.kind}")
        for c in kept
        if c.path or c.kind != "dict"
    }


def _container_differences(
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


def _describe(item: Item) -> str:
    return "value" if item.dtype is None else f"{_dtype_name(item)} {list(item.shape)}"


def _dtype_name(item: Item) -> str:
    return str(item.dtype).removeprefix("torch.")


def difference(
    left: Source, one: Item, right: Source, other: Item, tolerance: float = 0.0
) -> Difference | None:
    """Compare an entry of ``left`` with one of ``right``, and return their difference, if any."""
    if (one.dtype is None) != (other.dtype is None):
        return Difference(one.name, "kind", _describe(one), _describe(other))
    if one.dtype is None or other.dtype is None:
        return _value_difference(one.name, left.value(one), right.value(other))
    if one.shape != other.shape:
        return Difference(one.name, "shape", str(list(one.shape)), str(list(other.shape)))
    elements, largest = _compare_elements(left, one, right, other)
    if one.dtype != other.dtype:
        return Difference(
            one.name, "dtype", _dtype_name(one), _dtype_name(other), elements, largest
        )
    if elements and not (largest is not None and largest <= tolerance and tolerance > 0):
        return Difference(one.name, "elements", elements=elements, max_abs=largest)
    return None


def _value_difference(name: str, one: bytes, other: bytes) -> Difference | None:
    if one == other:
        return None
    try:
        # One value may have many pickles.
        a, b = (pickles.load(name, data, weights_only=True) for data in (one, other))
        return None if same(a, b) else Difference(name, "value", _short(a), _short(b))
    except Exception:  # noqa: BLE001  # classes that the caller allowed may raise anything
        return Difference(name, "value", f"{len(one)} bytes", f"{len(other)} bytes")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _compare_elements(
    left: Source, one: Item, right: Source, other: Item
) -> tuple[int, float | None]:
    """Return the number of elements that differ, and the largest difference.

    The difference is None for dtypes that torch cannot compute with, as complex32.
    """
    if one.dtype is None or other.dtype is None:
        raise TypeError(one.name)
    count = math.prod(one.shape)
    step = _PIECE_BYTES // max(one.dtype.itemsize, other.dtype.itemsize)
    differing, largest = 0, 0.0
    comparable = True
    for begin in range(0, count, step):
        a, b = (
            _read(
                source,
                item,
                begin,
                torch.empty(min(step, count - begin), dtype=item.dtype, device="cpu"),
            )
            for source, item in ((left, one), (right, other))
        )
        if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            continue
        number, by = _difference(a, b)
        differing += number
        comparable = comparable and by is not None
        if by is not None and not math.isnan(largest):
            largest = by if math.isnan(by) else max(largest, by)
    return differing, largest if comparable else None


def _read(source: Source, item: Item, begin: int, flat: torch.Tensor) -> torch.Tensor:
    source.read(
        [Request(item, None, offsets, into) for offsets, into in unflatten(item.shape, begin, flat)]
    )
    return flat


def _difference(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float | None]:
    same_bits = None
    if a.dtype == b.dtype:
        size = a.dtype.itemsize
        bits, bits_b = (tensor.view(torch.uint8).view(-1, size) for tensor in (a, b))
        same_bits = (bits == bits_b).all(1)
        if _is_integral(a) or bool((~same_bits).sum() * 8 < a.numel()):
            # Few differ. Older torch cannot index tensors of unsigned dtypes, so index the bytes.
            a, b = (some[~same_bits].view(a.dtype).view(-1) for some in (bits, bits_b))
    try:
        number, largest = _exactly(a, b) if _is_integral(a) and _is_integral(b) else _nearly(a, b)
    except (RuntimeError, NotImplementedError):
        number, largest = 0, None
    return number if same_bits is None else int((~same_bits).sum()), largest


def _is_integral(tensor: torch.Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


_INT64_MIN = torch.iinfo(torch.int64).min


def _exactly(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int]:
    """Compare integers, without the rounding of float64."""
    if a.dtype != b.dtype and torch.uint64 in (a.dtype, b.dtype):
        apart = [abs(x - y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        return sum(map(bool, apart)), max(apart, default=0)
    if a.dtype == torch.uint64:  # in the same order as signed numbers
        a, b = (tensor.view(torch.int64) ^ _INT64_MIN for tensor in (a, b))
    a, b = a.to(torch.int64), b.to(torch.int64)
    # The difference may overflow: its bits are those of an unsigned number.
    by = torch.maximum(a, b) - torch.minimum(a, b)
    largest = int((by ^ _INT64_MIN).max()) - _INT64_MIN if by.numel() else 0
    return int((by != 0).sum()), largest


def _nearly(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float]:
    """Compare numbers in float64, and complex numbers part by part."""
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
