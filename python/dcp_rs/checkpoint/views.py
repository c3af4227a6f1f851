"""Views: logical tensors, as a model uses them, over the stored ones."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from dcp_rs import _core
from dcp_rs.checkpoint.folders import checkpoint_path
from dcp_rs.checkpoint.names import hint
from dcp_rs.errors import PlanError

if TYPE_CHECKING:
    import torch

_FIELD = re.compile(r"\{(\w+)\}")
#: The most digits of a number to join over. Python does not convert thousands of them.
_MAX_DIGITS = 18
_TARGETS = ("bfloat16", "float16", "float32")

#: (number, offsets, sizes, dims, place): a rectangle of a stored tensor, for each dimension of the
#: view that of the stored tensor or None, and the offsets in the view.
Rectangle: TypeAlias = tuple[int, list[int], list[int], list[int | None], list[int]]
#: (name, shape, rectangles) of a logical tensor.
Tensor: TypeAlias = tuple[str, list[int], list[Rectangle]]


def _fields(pattern: str) -> set[str]:
    return set(_FIELD.findall(pattern))


def _filled(pattern: str, fields: Mapping[str, str]) -> str:
    """Return the name of a pattern with values for its fields."""
    return _FIELD.sub(lambda field: fields[field[1]], pattern)


def _regex(pattern: str) -> re.Pattern[str]:
    """Return a regex with a group for each field. A repeated field has one value."""
    parts = _FIELD.split(pattern)
    fields = parts[1::2]
    parts[::2] = map(re.escape, parts[::2])
    parts[1::2] = [
        f"(?P={field})" if field in fields[:i] else f"(?P<{field}>[^.]+)"
        for i, field in enumerate(fields)
    ]
    return re.compile("".join(parts))


class View(ABC):
    """A view that joins, cuts or transposes stored tensors."""

    @abstractmethod
    def _tensors(self, names: _Names) -> Iterator[Tensor]:
        """Yield the logical tensors. The stored tensors they consist of are no entries any more."""


class _Stored(NamedTuple):
    """A stored tensor that a pattern matches.

    Attributes:
        fields: the values of the pattern's fields.
        name, number, shape: the tensor.
    """

    fields: dict[str, str]
    name: str
    number: int
    shape: list[int]

    def part(
        self,
        *,
        begin: int = 0,
        size: int | None = None,
        dim: int = 0,
        dims: list[int | None] | None = None,
        to: tuple[int, int] = (0, 0),
    ) -> Rectangle:
        """Return a rectangle of the tensor.

        Args:
            begin, size, dim: the indices along one dimension; default: all.
            dims: for each dimension of the view that of the tensor or None; default: the same.
            to: the dimension of the view along which the rectangle is moved, and by how much.
        """
        sizes = self.shape if size is None else _replaced(self.shape, dim, size)
        offsets = _replaced([0] * len(sizes), dim, begin)
        dims = [*range(len(sizes))] if dims is None else dims
        return self.number, offsets, sizes, dims, _replaced([0] * len(dims), *to)


def _replaced(values: Sequence[int], place: int | None, value: int) -> list[int]:
    return [value if i == place else known for i, known in enumerate(values)]


class _Names:
    """The tensors of an index, to be found by patterns.

    Attributes:
        used: the numbers of the tensors that were found.
    """

    def __init__(self, index: _core.Index) -> None:
        self._index = index
        self.used: set[int] = set()
        self._names = index.names()

    def fail(self, reason: str, tensor: str | None = None) -> PlanError:
        """Return an error about the checkpoint."""
        path = checkpoint_path(self._index)
        return PlanError(f"{path}: {reason}", path=path, tensor=tensor)

    def match(self, pattern: str) -> list[_Stored]:
        """Return the tensors that match a pattern, in the order of their names.

        Raises:
            PlanError: no tensor matches.
        """
        regex, found = _regex(pattern), []
        for number, name in enumerate(self._names):
            match = regex.fullmatch(name)
            if match is not None and not (entry := self._index.tensor(number)).is_bytes:
                found.append(_Stored(match.groupdict(), name, number, list(entry.shape)))
        if not found:
            if pattern in self._names:
                raise self.fail(f"{pattern!r} is a value, not a tensor")
            raise self.fail(f"no tensor matches {pattern!r}{hint(pattern, self._names)}")
        self.used.update(stored.number for stored in found)
        return found

    def groups(self, patterns: Sequence[str], into: str) -> dict[str, list[_Stored]]:
        """Return the tensors to join under each name of ``into``, in order."""
        groups: dict[str, list[tuple[int, int, _Stored]]] = {}
        for place, pattern in enumerate(patterns):
            joined = _fields(pattern) - _fields(into)
            if len(joined) > 1 or not _fields(into) <= _fields(pattern):
                raise self.fail(
                    f"{pattern!r} does not go into {into!r}: it needs the same fields, or one more "
                    "to join over"
                )
            for stored in self.match(pattern):
                number = stored.fields[next(iter(joined))] if joined else "0"
                if not number.isdecimal() or len(number) > _MAX_DIGITS:
                    raise self.fail(
                        f"tensor {stored.name!r}: {number!r} is not a number to join over",
                        stored.name,
                    )
                group = groups.setdefault(_filled(into, stored.fields), [])
                group.append((place, int(number), stored))
        for name, group in groups.items():
            group.sort(key=itemgetter(0, 1))
            for place, pattern in enumerate(patterns):
                numbers = [number for of, number, _ in group if of == place]
                lacking = min({*range(len(numbers) + 1)} - {*numbers})
                if not numbers or lacking < len(numbers):
                    raise self.fail(
                        f"{name!r} lacks a part: {pattern!r} has numbers {numbers[:8]}, and no "
                        f"{lacking}",
                        name,
                    )
        return {name: [stored for *_, stored in group] for name, group in groups.items()}

    def check_alike(self, name: str, parts: Sequence[_Stored], dim: int | None) -> None:
        """Raise unless all parts of a tensor have one shape, but for a dimension."""
        first = parts[0]
        for part in parts:
            if _replaced(part.shape, dim, 0) != _replaced(first.shape, dim, 0):
                raise self.fail(
                    f"{first.name!r} is {first.shape} and {part.name!r} is {part.shape}: they "
                    "cannot be joined",
                    name,
                )

    def dim(self, dim: int, ndim: int, name: str) -> int:
        """Return a dimension as a number from 0."""
        if not -ndim <= dim < ndim:
            raise self.fail(f"tensor {name!r} has {ndim} dimensions, and no dim {dim}", name)
        return dim % ndim


@dataclass(frozen=True)
class Stack(View):
    """Join tensors of one shape along a new dimension, as ``torch.stack`` does.

    Attributes:
        pattern: the names of stored tensors. ``{field}`` matches one component of a name.
        into: the name of the stack. Tensors are joined over the field that it lacks, in numeric
            order from 0.
        dim: the new dimension.

    Example:
        ```python
        rows = dcp_rs.Unstack("weight", into="rows.{row}")
        views = [rows, dcp_rs.Stack("rows.{row}", into="weight", dim=1)]
        assert dcp_rs.open("hf_model", views=views)["weight"].shape == (2, 3)
        ```
    """

    pattern: str
    into: str
    dim: int = 0

    def _tensors(self, names: _Names) -> Iterator[Tensor]:
        for name, parts in names.groups([self.pattern], self.into).items():
            shape = parts[0].shape
            dim = names.dim(self.dim, len(shape) + 1, name)
            dims = [*range(dim), None, *range(dim, len(shape))]
            names.check_alike(name, parts, None)
            rectangles = [part.part(dims=dims, to=(dim, i)) for i, part in enumerate(parts)]
            yield name, [*shape[:dim], len(parts), *shape[dim:]], rectangles


@dataclass(frozen=True)
class Concat(View):
    """Join tensors along an existing dimension, as ``torch.cat`` does.

    Attributes:
        names: a pattern, joined over the field that ``into`` lacks, in numeric order from 0; or
            several patterns, joined in their order.
        into: the name of the joined tensor.
        dim: the dimension.

    Example:
        ```python
        rows = dcp_rs.Unstack("weight", into="rows.{row}")
        views = [rows, dcp_rs.Concat(["rows.0", "rows.2"], into="outer")]
        assert dcp_rs.open("hf_model", views=views)["outer"].shape == (4,)
        ```
    """

    names: str | Sequence[str]
    into: str
    dim: int = 0

    def _tensors(self, names: _Names) -> Iterator[Tensor]:
        patterns = [self.names] if isinstance(self.names, str) else list(self.names)
        if not patterns:
            raise names.fail(f"Concat into {self.into!r} has no names to join")
        for name, parts in names.groups(patterns, self.into).items():
            shape = parts[0].shape
            dim = names.dim(self.dim, len(shape), name)
            names.check_alike(name, parts, dim)
            ends = [*accumulate((part.shape[dim] for part in parts), initial=0)]
            rectangles = [part.part(to=(dim, at)) for part, at in zip(parts, ends, strict=False)]
            yield name, _replaced(shape, dim, ends[-1]), rectangles


@dataclass(frozen=True)
class Unstack(View):
    """Cut a tensor along a dimension and remove the dimension, as ``torch.unbind`` does.

    Attributes:
        pattern: the names of stored tensors.
        into: the names of the parts. The field that ``pattern`` lacks is the number of the part.
        dim: the dimension.

    Example:
        ```python
        views = dcp_rs.Unstack("weight", into="rows.{row}")
        assert dcp_rs.open("hf_model", views=views)["rows.2"].shape == (2,)
        ```
    """

    pattern: str
    into: str
    dim: int = 0

    def _tensors(self, names: _Names) -> Iterator[Tensor]:
        new = _fields(self.into) - _fields(self.pattern)
        if len(new) != 1:
            raise names.fail(
                f"{self.pattern!r} does not go into {self.into!r}, which needs one field more, for "
                "the numbers"
            )
        for stored in names.match(self.pattern):
            dim = names.dim(self.dim, len(stored.shape), stored.name)
            dims: list[int | None] = [d for d in range(len(stored.shape)) if d != dim]
            rest = [size for d, size in enumerate(stored.shape) if d != dim]
            for i in range(stored.shape[dim]):
                part = stored.part(begin=i, size=1, dim=dim, dims=dims)
                yield _filled(self.into, stored.fields | dict.fromkeys(new, str(i))), rest, [part]


@dataclass(frozen=True)
class Split(View):
    """Cut a tensor into several along a dimension, as ``torch.split`` does.

    Attributes:
        pattern: the names of stored tensors.
        into: the names of the parts, in order.
        dim: the dimension.
        sizes: the sizes of the parts along it; default: equal ones.

    Example:
        ```python
        views = dcp_rs.Split("weight", into=["first", "rest"], sizes=[1, 2])
        assert dcp_rs.open("hf_model", views=views)["rest"].shape == (2, 2)
        ```
    """

    pattern: str
    into: Sequence[str]
    dim: int = 0
    sizes: Sequence[int] | None = None

    def _tensors(self, names: _Names) -> Iterator[Tensor]:
        if isinstance(self.into, str) or not self.into:
            raise names.fail(
                f"Split of {self.pattern!r}: into={self.into!r} is not a list of names"
            )
        count = len(self.into)
        for stored in names.match(self.pattern):
            dim, at = names.dim(self.dim, len(stored.shape), stored.name), 0
            whole = stored.shape[dim]
            sizes = [whole // count] * count if self.sizes is None else list(self.sizes)
            if len(sizes) != count or sum(sizes) != whole or min(sizes) < 0:
                msg = (
                    f"tensor {stored.name!r} is {stored.shape}: {sizes} are not sizes of {count} "
                    f"parts along dim {dim}"
                )
                raise names.fail(msg, stored.name)
            for into, size in zip(self.into, sizes, strict=True):
                if unknown := _fields(into) - stored.fields.keys():
                    raise names.fail(
                        f"{self.pattern!r} does not go into {into!r}: {sorted(unknown)} are in no "
                        "name"
                    )
                part = stored.part(begin=at, size=size, dim=dim)
                yield _filled(into, stored.fields), _replaced(stored.shape, dim, size), [part]
                at += size


@dataclass(frozen=True)
class Transpose(View):
    """Change the order of dimensions, as ``torch.permute`` does. Names stay.

    Attributes:
        pattern: the names of stored tensors.
        dims: for each new dimension the stored one; a permutation.

    Example:
        ```python
        views = dcp_rs.Transpose("weight", (1, 0))
        assert dcp_rs.open("hf_model", views=views)["weight"].shape == (2, 3)
        ```
    """

    pattern: str
    dims: Sequence[int]

    def _tensors(self, names: _Names) -> Iterator[Tensor]:
        for stored in names.match(self.pattern):
            shape = stored.shape
            dims = [names.dim(dim, len(shape), stored.name) for dim in self.dims]
            if sorted(dims) != [*range(len(shape))]:
                raise names.fail(
                    f"tensor {stored.name!r} is {shape}: {tuple(self.dims)} is not a permutation "
                    "of its dimensions",
                    stored.name,
                )
            yield stored.name, [shape[d] for d in dims], [stored.part(dims=[*dims])]


@dataclass(frozen=True)
class Views:
    """The views of a checkpoint.

    Attributes:
        dequantize: the name of the dtype to dequantize weights to; None keeps them as stored.
        views: the views to apply after that, in order.
    """

    dequantize: str | None = None
    views: tuple[View, ...] = ()

    @classmethod
    def of(
        cls,
        dequantize: bool | torch.dtype | str | None,
        views: View | Iterable[View] | None,
    ) -> Views:
        """Return the views for a user's arguments.

        Raises:
            ValueError: weights cannot be dequantized to the dtype.
            TypeError: an object is not a view.
        """
        target = None
        if dequantize is not None and dequantize is not False:
            target = "bfloat16" if dequantize is True else str(dequantize).removeprefix("torch.")
            if target not in _TARGETS:
                known = ", ".join(f"torch.{name}" for name in _TARGETS)
                msg = f"dequantize={dequantize!r}: pass True, or one of {known}"
                raise ValueError(msg)
        one: tuple[Any, ...] = () if views is None else (views,)
        given = tuple(views) if isinstance(views, Iterable) else one
        for view in given:
            if not isinstance(view, View):
                msg = (
                    f"views={view!r}: pass a Stack, Concat, Unstack, Split or Transpose, or several"
                )
                raise TypeError(msg)
        return cls(target, given)

    def apply(self, index: _core.Index) -> _core.Index:
        """Return the index of the logical tensors, or the same index if it needs no views.

        Raises:
            QuantizationError: the quantization is not known, or a part of a weight is missing or
                does not fit.
            PlanError: a view does not fit the tensors, or makes a second tensor of one name.
        """
        if self.dequantize is not None:
            index = index.dequantize(self.dequantize) or index
        for view in self.views:
            names = _Names(index)
            tensors = list(view._tensors(names))  # noqa: SLF001
            index = index.derive(sorted(names.used), tensors)
        return index
