"""Views: the tensors of a checkpoint as a model uses them, over those that are stored."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from dcp_rs import _core
from dcp_rs.checkpoint.names import hint
from dcp_rs.errors import PlanError
from dcp_rs.options import ReadOptions

if TYPE_CHECKING:
    import torch

__all__ = ["Concat", "Layout", "LayoutView", "Split", "Stack", "Transpose", "Unstack", "views_in"]

_FIELD = re.compile(r"\{(\w+)\}")
_TARGETS = ("bfloat16", "float16", "float32")

#: A rectangle of a tensor (its number, offsets, sizes), for each dimension of the view that of the
#: tensor or None, and where it goes.
Rectangle: TypeAlias = tuple[int, list[int], list[int], list[int | None], list[int]]
#: Name, shape, and what it is made of.
Tensor: TypeAlias = tuple[str, list[int], list[Rectangle]]


def _fields(pattern: str) -> list[str]:
    return _FIELD.findall(pattern)


def _filled(pattern: str, fields: Mapping[str, object]) -> str:
    """Return a name: the pattern with what its fields stand for."""
    return _FIELD.sub(lambda field: str(fields[field[1]]), pattern)


def _regex(pattern: str) -> re.Pattern[str]:
    """Return what matches the names of a pattern, with a group for each field. A field that comes again has the same text."""
    parts, seen = [], set()
    for i, part in enumerate(_FIELD.split(pattern)):
        if i % 2 == 0:
            parts.append(re.escape(part))
        elif part in seen:
            parts.append(f"(?P={part})")
        else:
            seen.add(part)
            parts.append(rf"(?P<{part}>[^.]+)")
    return re.compile("".join(parts))


class LayoutView(ABC):
    """A view that joins, cuts or turns stored tensors."""

    @abstractmethod
    def _tensors(self, found: _Names) -> Iterator[Tensor]:
        """Yield the tensors that the view makes. What they are made of is no entry any more."""


class _Names:
    """The tensors of an index, as patterns find them; and which were found."""

    def __init__(self, index: _core.Index) -> None:
        self._index = index
        self.used: set[int] = set()
        self._names = index.names()

    def fail(self, reason: str, tensor: str | None = None) -> PlanError:
        return PlanError(f"{self._index.path}: {reason}", path=self._index.path, tensor=tensor)

    def match(self, pattern: str) -> list[tuple[dict[str, str], str, int, tuple[int, ...]]]:
        """Return (fields, name, number, shape) of the tensors that match, in the order of names.

        Raises:
            PlanError: there are none.
        """
        regex, found = _regex(pattern), []
        for number, name in enumerate(self._names):
            match = regex.fullmatch(name)
            if match is not None and not (entry := self._index.tensor(number)).is_bytes:
                found.append((match.groupdict(), name, number, entry.shape))
        if not found:
            if pattern in self._names:
                raise self.fail(f"{pattern!r} is a value, not a tensor")
            raise self.fail(f"no tensor matches {pattern!r}{hint(pattern, self._names)}")
        self.used.update(number for _, _, number, _ in found)
        return found

    def groups(
        self, patterns: Sequence[str], into: str
    ) -> dict[str, list[tuple[str, int, tuple[int, ...]]]]:
        """Return for each name of ``into`` the (name, number, shape) of what is joined there, in order."""
        groups: dict[str, dict[tuple[int, int], tuple[str, int, tuple[int, ...]]]] = {}
        for place, pattern in enumerate(patterns):
            joined = [field for field in _fields(pattern) if field not in _fields(into)]
            unknown = [field for field in _fields(into) if field not in _fields(pattern)]
            if unknown or len(set(joined)) > 1:
                what = (
                    f"{unknown} are in no name"
                    if unknown
                    else f"{joined} are more than one field to join over"
                )
                raise self.fail(f"{pattern!r} does not go into {into!r}: {what}")
            for fields, tensor, number, shape in self.match(pattern):
                at = fields[joined[0]] if joined else "0"
                if not at.isdecimal():
                    raise self.fail(
                        f"tensor {tensor!r}: {at!r} is no number, and {{{joined[0]}}} is joined over",
                        tensor,
                    )
                group = groups.setdefault(_filled(into, fields), {})
                if (place, int(at)) in group:
                    raise self.fail(
                        f"tensor {tensor!r} and another one have the same number", tensor
                    )
                group[place, int(at)] = tensor, number, shape
        for name, group in groups.items():
            numbers = sorted(group)
            for place in range(len(patterns)):
                own = [number for of, number in numbers if of == place]
                if own != list(range(len(own))) or not own:
                    gap = next(n for n in range(len(own) + 1) if n not in own)
                    raise self.fail(
                        f"{name!r} lacks a part: {patterns[place]!r} has numbers {own[:8]}, and no {gap}",
                        name,
                    )
        return {name: [group[at] for at in sorted(group)] for name, group in groups.items()}

    def dim(self, dim: int, ndim: int, name: str) -> int:
        """Return a dimension as a number from 0."""
        if not -ndim <= dim < ndim:
            raise self.fail(f"tensor {name!r} has {ndim} dimensions, and no dim {dim}", name)
        return dim % ndim


def _moved(zero: Sequence[int], dim: int, by: int) -> list[int]:
    return [by if d == dim else 0 for d in range(len(zero))]


def _sized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [size if d == dim else n for d, n in enumerate(shape)]


@dataclass(frozen=True)
class Stack(LayoutView):
    """Join tensors of one shape along a new dimension, as ``torch.stack`` does.

    Attributes:
        pattern: names of stored tensors. ``{field}`` matches one component of a name.
        into: the name of what they become. The field that it lacks is the one joined over, in
            numeric order from 0.
        dim: where the new dimension goes.

    Example:
        ```python
        views = [dcp_rs.Unstack("weight", into="rows.{row}"), dcp_rs.Stack("rows.{row}", into="weight", dim=1)]
        assert dcp_rs.open("hf_model", views=views)["weight"].shape == (2, 3)
        ```
    """

    pattern: str
    into: str
    dim: int = 0

    def _tensors(self, found: _Names) -> Iterator[Tensor]:
        """Yield one tensor for each name of ``into``."""
        for name, parts in found.groups([self.pattern], self.into).items():
            shape = parts[0][2]
            dim = found.dim(self.dim, len(shape) + 1, name)
            dims: list[int | None] = [*range(len(shape))]
            dims.insert(dim, None)
            zero = [0] * len(shape)
            for part, _, other in parts:
                if other != shape:
                    raise found.fail(
                        f"{parts[0][0]!r} is {list(shape)} and {part!r} is {list(other)}: they cannot be stacked",
                        name,
                    )
            yield (
                name,
                [*shape[:dim], len(parts), *shape[dim:]],
                [
                    (number, zero, list(shape), dims, _moved(dims, dim, i))
                    for i, (_, number, _) in enumerate(parts)
                ],  # type: ignore[arg-type]
            )


@dataclass(frozen=True)
class Concat(LayoutView):
    """Join tensors along a dimension that they have, as ``torch.cat`` does.

    Attributes:
        names: one pattern, joined over the field that ``into`` lacks, in numeric order from 0; or
            several, joined in their order.
        into: the name of what they become.
        dim: the dimension.

    Example:
        ```python
        views = [dcp_rs.Unstack("weight", into="rows.{row}"), dcp_rs.Concat(["rows.0", "rows.2"], into="outer")]
        assert dcp_rs.open("hf_model", views=views)["outer"].shape == (4,)
        ```
    """

    names: str | Sequence[str]
    into: str
    dim: int = 0

    def _tensors(self, found: _Names) -> Iterator[Tensor]:
        """Yield one tensor for each name of ``into``."""
        patterns = [self.names] if isinstance(self.names, str) else list(self.names)
        if not patterns:
            raise found.fail(f"Concat into {self.into!r} has no names to join")
        for name, parts in found.groups(patterns, self.into).items():
            first = parts[0][2]
            dim, at, made = found.dim(self.dim, len(first), name), 0, []
            for part, number, shape in parts:
                if len(shape) != len(first) or _sized(shape, dim, 0) != _sized(first, dim, 0):
                    raise found.fail(
                        f"{parts[0][0]!r} is {list(first)} and {part!r} is {list(shape)}: they differ beside dim {dim}",
                        name,
                    )
                made.append(
                    (
                        number,
                        [0] * len(shape),
                        list(shape),
                        [*range(len(shape))],
                        _moved(shape, dim, at),
                    )
                )
                at += shape[dim]
            yield name, _sized(first, dim, at), made


@dataclass(frozen=True)
class Unstack(LayoutView):
    """Cut a tensor into those that were stacked, as ``torch.unbind`` does.

    Attributes:
        pattern: names of stored tensors.
        into: names of what they become. The field that ``pattern`` lacks is the number along the
            dimension.
        dim: the dimension, which is gone then.

    Example:
        ```python
        views = dcp_rs.Unstack("weight", into="rows.{row}")
        assert dcp_rs.open("hf_model", views=views)["rows.2"].shape == (2,)
        ```
    """

    pattern: str
    into: str
    dim: int = 0

    def _tensors(self, found: _Names) -> Iterator[Tensor]:
        """Yield a tensor for each step along the dimension of each stored one."""
        new = [field for field in _fields(self.into) if field not in _fields(self.pattern)]
        if len(new) != 1:
            raise found.fail(
                f"{self.pattern!r} does not go into {self.into!r}, which needs one field more, for the numbers"
            )
        for fields, name, number, shape in found.match(self.pattern):
            dim = found.dim(self.dim, len(shape), name)
            dims: list[int | None] = [d for d in range(len(shape)) if d != dim]
            rest = [shape[d] for d in range(len(shape)) if d != dim]
            for i in range(shape[dim]):
                part = (number, _moved(shape, dim, i), _sized(shape, dim, 1), dims, [0] * len(rest))
                yield _filled(self.into, {**fields, new[0]: i}), rest, [part]


@dataclass(frozen=True)
class Split(LayoutView):
    """Cut a tensor into several along a dimension, as ``torch.split`` does.

    Attributes:
        pattern: names of stored tensors.
        into: names of the parts, in their order.
        dim: the dimension.
        sizes: of the parts along it; default: all the same.

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

    def _tensors(self, found: _Names) -> Iterator[Tensor]:
        """Yield the parts of each stored tensor."""
        if isinstance(self.into, str) or not self.into:
            raise found.fail(f"Split of {self.pattern!r}: into={self.into!r} is no list of names")
        for fields, name, number, shape in found.match(self.pattern):
            dim, at = found.dim(self.dim, len(shape), name), 0
            sizes = (
                [shape[dim] // len(self.into)] * len(self.into)
                if self.sizes is None
                else list(self.sizes)
            )
            if len(sizes) != len(self.into) or sum(sizes) != shape[dim] or min(sizes) < 0:
                msg = f"tensor {name!r} is {list(shape)}: {sizes} are no sizes of {len(self.into)} parts along dim {dim}"
                raise found.fail(msg, name)
            for into, size in zip(self.into, sizes, strict=True):
                if unknown := [field for field in _fields(into) if field not in fields]:
                    raise found.fail(
                        f"{self.pattern!r} does not go into {into!r}: {unknown} are in no name"
                    )
                part = (
                    number,
                    _moved(shape, dim, at),
                    _sized(shape, dim, size),
                    [*range(len(shape))],
                    [0] * len(shape),
                )
                yield _filled(into, fields), _sized(shape, dim, size), [part]
                at += size


@dataclass(frozen=True)
class Transpose(LayoutView):
    """Change the order of dimensions, as ``torch.permute`` does. Names stay.

    Attributes:
        pattern: names of stored tensors.
        dims: for each new dimension the stored one; a permutation.

    Example:
        ```python
        views = dcp_rs.Transpose("weight", (1, 0))
        assert dcp_rs.open("hf_model", views=views)["weight"].shape == (2, 3)
        ```
    """

    pattern: str
    dims: Sequence[int]

    def _tensors(self, found: _Names) -> Iterator[Tensor]:
        """Yield each stored tensor, turned."""
        for _, name, number, shape in found.match(self.pattern):
            dims: list[int | None] = [found.dim(dim, len(shape), name) for dim in self.dims]
            if sorted(d for d in dims if d is not None) != [*range(len(shape))]:
                raise found.fail(
                    f"tensor {name!r} is {list(shape)}: {tuple(self.dims)} is no permutation of its dimensions",
                    name,
                )
            zero = [0] * len(shape)
            yield (
                name,
                [shape[d] for d in dims if d is not None],
                [(number, zero, list(shape), dims, zero)],
            )


@dataclass(frozen=True)
class Layout:
    """How the stored tensors of a checkpoint are seen.

    Attributes:
        dequantize: the name of the dtype that quantized weights become; None: they stay as they
            are.
        views: are applied after that, one after another.
    """

    dequantize: str | None = None
    views: tuple[LayoutView, ...] = ()

    @classmethod
    def of(
        cls,
        dequantize: bool | torch.dtype | str | None,
        views: LayoutView | Iterable[LayoutView] | None,
    ) -> Layout:
        """Return the layout for the arguments that users give.

        Raises:
            ValueError: a dtype that weights cannot become.
            TypeError: something else than a view.
        """
        target = None
        if dequantize is not None and dequantize is not False:
            target = "bfloat16" if dequantize is True else str(dequantize).removeprefix("torch.")
            if target not in _TARGETS:
                msg = f"dequantize={dequantize!r}: True, or one of {', '.join(f'torch.{name}' for name in _TARGETS)}"
                raise ValueError(msg)
        given: tuple[Any, ...] = ()
        if isinstance(views, Iterable):
            given = tuple(views)
        elif views is not None:
            given = (views,)
        for view in given:
            if not isinstance(view, LayoutView):
                msg = f"views={view!r}: Stack, Concat, Unstack, Split or Transpose"
                raise TypeError(msg)
        return cls(target, given)

    def apply(self, index: _core.Index, options: ReadOptions | None = None) -> _core.Index:
        """Return the index of what is seen; the same one where nothing is to be done.

        Raises:
            QuantizationError: a format that is not known, or a part of a weight that is missing or
                does not fit.
            PlanError: a view does not fit the tensors, or makes a second tensor of one name.
        """
        if self.dequantize is not None:
            how = {} if options is None else options.engine()
            index = index.dequantize(self.dequantize, **how) or index
        for view in self.views:
            names = _Names(index)
            tensors = list(view._tensors(names))  # noqa: SLF001  # of this module
            index = index.derive(sorted(names.used), tensors)
        return index


def views_in(path: str | os.PathLike[str]) -> tuple[LayoutView, ...]:
    """Return the views that a JSON file lists: ``[{"stack": "a.{n}.b", "into": "a.b"}, ...]``.

    Raises:
        PlanError: it is no such file.
    """
    import json
    from pathlib import Path

    kinds = {kind.__name__.lower(): kind for kind in (Stack, Concat, Unstack, Split, Transpose)}

    def view(item: Any) -> LayoutView:
        kind = (
            next((kind for kind in kinds if kind in item), None) if isinstance(item, dict) else None
        )
        if kind is None:
            msg = f"{path}: {item!r} is none of {', '.join(kinds)}"
            raise PlanError(msg, path=path)
        rest = {name: value for name, value in item.items() if name != kind}
        try:
            made: LayoutView = kinds[kind](item[kind], **rest)
        except TypeError as error:
            msg = f"{path}: {item!r}: {error}"
            raise PlanError(msg, path=path) from None
        return made

    try:
        listed = json.loads(Path(path).read_text())
    except ValueError as error:
        msg = f"{path}: {error}"
        raise PlanError(msg, path=path) from None
    if not isinstance(listed, list):
        msg = f"{path}: a list of views is wanted"
        raise PlanError(msg, path=path)
    return tuple(view(item) for item in listed)
