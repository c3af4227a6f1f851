"""The source of a merge: the weighted sums of the tensors of several checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from dcp_rs import _core
from dcp_rs.checkpoint.compare import Difference, difference
from dcp_rs.checkpoint.names import globs
from dcp_rs.checkpoint.source import IndexSource, Item, Request
from dcp_rs.conversion.job import new_dtype
from dcp_rs.errors import PlanError, UnsupportedError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.dtypes import BY_NAME
from dcp_rs.tensors.nesting import Container

__all__ = ["Conflicts", "Input", "MergedSource"]

Conflicts = Literal["error", "first", "last", "drop"]

#: The dtypes that are summed. Tensors of other dtypes have to be equal.
_SUMMED = frozenset(
    BY_NAME[name]
    for name in (
        *("float16", "bfloat16", "float32", "float64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if name in BY_NAME
)
#: The keys of optimizer state in a state dict.
_OPTIMIZERS = frozenset({"optim", "optimizer", "optimizers", "optimizer_states"})
#: The endings of the names of quantized tensors, and of their scales.
_PACKED = ("", "_packed", "_blocks", ".qweight", ".weight")
_SCALES = ("_scale_inv", "_scale", "_scales", "_global_scale", "_scale_2")
#: The endings of scales of GPTQ, AWQ and bitsandbytes, which ``dequantize`` does not decode.
_NOT_DECODED = (".scales", ".absmax", ".nested_absmax", ".SCB")
#: The number of names in a message.
_SOME = 5


@dataclass(frozen=True)
class Input:
    """An input of a merge: its path as the caller gave it, its entries and its weight."""

    path: Path
    source: IndexSource
    weight: float

    def describe(self) -> dict[str, Any]:
        """Return the description of the input that is stored with the result."""
        return {"path": str(self.path), "save_id": self.source.index.save_id, "weight": self.weight}


class MergedSource:
    """Weighted sums of floating-point tensors, and the other entries of the inputs.

    Entries have the order and the nesting of the first input, and sums have its chunks.

    Args:
        inputs: at least one input.
        include, exclude: globs over names.
        conflicts: as for :func:`dcp_rs.merge`.
        dtype: the dtype of floating-point tensors in the result; None: as in the first input.
        options: the options to read with.

    Raises:
        PlanError: an entry differs between inputs; the message names the entry and both inputs.
        UnsupportedError: tensors are quantized, so their stored values cannot be summed.
    """

    def __init__(
        self,
        inputs: Sequence[Input],
        *,
        include: str | Iterable[str] | None,
        exclude: str | Iterable[str] | None,
        conflicts: Conflicts,
        dtype: torch.dtype | None,
        options: ReadOptions,
    ) -> None:
        self.inputs = inputs
        self._dtype, self._options = dtype, options
        first = inputs[0].source
        names = [_chosen(one.source, include, exclude) for one in inputs]
        self.left_out = [
            item.name for item in first.items if include is None and _is_of_optimizer(item)
        ]
        for one, chosen in zip(inputs, names, strict=True):
            _check_not_quantized(one.source, chosen)
        _check_names(inputs, names)
        self._sums, self._copies, self.conflicts = _sort(inputs, names, conflicts)
        self.summed = list(self._sums)
        self.kind = first.kind
        self.root = first.root
        self.containers: list[Container] | None = first.containers
        if self.containers is not None and include is None:
            self.containers = [
                c for c in self.containers if not (c.path and c.path[0] in _OPTIMIZERS)
            ]
        self.path = first.path
        self.files = [path for one in inputs for path in one.source.files]
        self.items = [item for name in names[0] for item in self._items(name)]
        if first.items and not self.items:
            msg = (
                f"nothing is left of the {len(first.items)} entries of {inputs[0].path} by "
                f"include={include!r}, exclude={exclude!r}, conflicts={conflicts!r}"
            )
            raise PlanError(msg)

    def _items(self, name: str) -> list[Item]:
        """Return the entry of this name in the result; nothing if it was dropped."""
        if name in self._sums:
            item = self._sums[name][0]
            # The engine rounds to bfloat16 itself, while the sums are in the CPU's cache.
            rounds = new_dtype(item, self._dtype) == torch.bfloat16
            narrow = torch.bfloat16 if rounds else torch.float32
            return [replace(item, read_as=torch.float64 if self._is_double(name) else narrow)]
        return [self._copies[name][0]] if name in self._copies else []

    def _is_double(self, name: str) -> bool:
        """Return whether a tensor is summed in float64."""
        return any(item.dtype == torch.float64 for item in self._sums[name])

    def check(self, items: Sequence[Item]) -> None:
        """Raise unless the items are complete in every input that they come from."""
        for number, one in enumerate(self.inputs):
            copied = [item for item in items if self._origin(item) is one.source]
            one.source.check(self._summands(items, number) + copied)

    def _summands(self, items: Sequence[Item], number: int) -> list[Item]:
        """Return the entries of one input for the items that are summed."""
        return [self._sums[item.name][number] for item in items if item.name in self._sums]

    def _origin(self, item: Item) -> IndexSource | None:
        """Return the input that an entry is copied from; None if it is summed."""
        found = self._copies.get(item.name)
        return None if found is None else found[1]

    def check_again(self) -> None:
        """Raise if a file of an input changed."""
        for one in self.inputs:
            one.source.check_again()

    def read(self, requests: Sequence[Request]) -> None:
        """Fill the destinations with sums, or with copies."""
        for double in (False, True):
            sums = [
                request
                for request in requests
                if request.item.name in self._sums and self._is_double(request.item.name) == double
            ]
            if sums:
                self._sum(sums, double=double)
        for one in {id(one.source): one.source for one in self.inputs}.values():
            copies = [request for request in requests if self._origin(request.item) is one]
            if copies:
                one.read(copies)

    def _sum(self, requests: Sequence[Request], *, double: bool) -> None:
        sums = []
        for request in requests:
            tensors = [item.number for item in self._sums[request.item.name]]
            into = request.into
            is_bfloat16 = into.dtype == torch.bfloat16
            sums.append((tensors, _offsets(request), into.shape, into.data_ptr(), is_bfloat16))
        _core.sum_regions(
            [(one.source.index, one.weight) for one in self.inputs],
            sums,
            double=double,
            **self._options.engine(),
        )

    def value(self, item: Item) -> bytes:
        """Return the bytes of a value."""
        return self._copies[item.name][1].value(item)

    def measured(self, item: Item) -> Item:
        """Return the item, a value of a file of ``torch.save`` with its exact length."""
        origin = self._origin(item)
        return item if origin is None else origin.measured(item)

    def metadata(self) -> dict[str, str]:
        """Return the metadata of the files of the first input."""
        return self.inputs[0].source.metadata()

    def tied(self, items: Sequence[Item]) -> dict[str, str]:
        """Return second names of tensors, with the first name, that are tied in every input."""
        first, *others = (
            one.source.tied(self._summands(items, n)) for n, one in enumerate(self.inputs)
        )
        return {
            name: kept
            for name, kept in first.items()
            if all(other.get(name) == kept for other in others)
        }


def _offsets(request: Request) -> list[int]:
    """Return the offsets of a request in the whole tensor."""
    if request.chunk is None:
        return list(request.offsets)
    chunk = request.item.chunks[request.chunk]
    return [begin + offset for begin, offset in zip(chunk.offsets, request.offsets, strict=True)]


def _is_of_optimizer(item: Item) -> bool:
    top = item.path[0] if item.path else item.name.partition(".")[0]
    return top in _OPTIMIZERS


def _chosen(
    source: IndexSource, include: str | Iterable[str] | None, exclude: str | Iterable[str] | None
) -> dict[str, Item]:
    wanted, unwanted = globs(include), globs(exclude)
    return {
        item.name: item
        for item in source.items
        if (not _is_of_optimizer(item) if wanted is None else wanted.match(item.name))
        and not (unwanted is not None and unwanted.match(item.name))
    }


def _check_names(inputs: Sequence[Input], names: Sequence[dict[str, Item]]) -> None:
    """Raise unless all inputs have the same names."""
    for one, own in zip(inputs[1:], names[1:], strict=True):
        for has, lacks, path, without in (
            (names[0], own, inputs[0].path, one.path),
            (own, names[0], one.path, inputs[0].path),
        ):
            missing = [name for name in has if name not in lacks]
            if missing:
                msg = (
                    f"{_listed(missing)}: in {path}, but not in {without}; a merge needs every "
                    "entry in all inputs: leave it out with exclude=, or say with include= what is "
                    "to be merged"
                )
                raise PlanError(msg, tensor=missing[0])


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SOME} more" if len(names) > _SOME else ""
    return ", ".join(map(repr, names[:_SOME])) + more


def _sort(
    inputs: Sequence[Input], names: Sequence[dict[str, Item]], conflicts: Conflicts
) -> tuple[dict[str, tuple[Item, ...]], dict[str, tuple[Item, IndexSource]], list[str]]:
    """Decide which entries are summed, and which are copied.

    Returns:
        The summed entries of all inputs, by name; the copied entries with their inputs, by name;
        and the names of entries that are not summed and differ.
    """
    sums: dict[str, tuple[Item, ...]] = {}
    copies: dict[str, tuple[Item, IndexSource]] = {}
    found: list[tuple[Difference, Path]] = []
    first = inputs[0]
    for name in names[0]:
        items = tuple(of_input[name] for of_input in names)
        if all(item.dtype in _SUMMED for item in items):
            _check_shapes(inputs, items)
            sums[name] = items
            continue
        others = zip(inputs[1:], items[1:], strict=True)
        differences = (
            (difference(first.source, items[0], one.source, item), one.path) for one, item in others
        )
        unlike = next(((what, path) for what, path in differences if what is not None), None)
        if unlike is not None:
            found.append(unlike)
        if unlike is None or conflicts == "first":
            copies[name] = (items[0], first.source)
        elif conflicts == "last":
            last = replace(items[-1], path=items[0].path, position=items[0].position)
            copies[name] = (last, inputs[-1].source)
    if found and conflicts == "error":
        raise _conflict(first.path, found)
    return sums, copies, [unlike.name for unlike, _ in found]


def _conflict(first: Path, found: Sequence[tuple[Difference, Path]]) -> PlanError:
    unlike, path = found[0]
    what = f": {unlike.a} and {unlike.b}" if unlike.a and unlike.b else ""
    more = (
        f" The same goes for {_listed([other.name for other, _ in found[1:]])}."
        if len(found) > 1
        else ""
    )
    msg = (
        f"{unlike.name!r} is not the same in {first} and in {path}{what}. Only floating-point "
        f"tensors are summed.{more} conflicts='first' or 'last' takes what that input has, "
        "conflicts='drop' leaves such entries out, and exclude= leaves out what it names"
    )
    return PlanError(msg, tensor=unlike.name)


def _check_shapes(inputs: Sequence[Input], items: Sequence[Item]) -> None:
    for one, item in zip(inputs[1:], items[1:], strict=True):
        if item.shape != items[0].shape:
            msg = (
                f"{item.name!r} has shape {list(items[0].shape)} in {inputs[0].path}, and "
                f"{list(item.shape)} in {one.path}: leave it out with exclude=, or merge "
                "checkpoints of one model"
            )
            raise PlanError(msg, tensor=item.name)


def _check_not_quantized(source: IndexSource, chosen: dict[str, Item]) -> None:
    """Raise for quantized weights and their scales: they cannot be summed apart.

    Weights without their scales cannot be summed either, so all names of the source count.
    """
    stored = {item.name: item for item in source.items}
    for name, item in chosen.items():
        if item.dtype not in _SUMMED:
            continue
        if item.dtype.itemsize == 1:
            scale = next((name + end for end in _SCALES if name + end in stored), None)
            if scale is not None:
                raise _quantized(name, scale)
        for end in (*_SCALES, *_NOT_DECODED):
            base = name.removesuffix(end)
            if base == name:
                continue
            for packed in _PACKED:
                weights = stored.get(base + packed)
                if weights is not None and weights.dtype not in {None, *_SUMMED}:
                    raise _quantized(weights.name, name)


def _quantized(name: str, scale: str) -> UnsupportedError:
    decode = "" if scale.endswith(_NOT_DECODED) else "give dequantize=True (--dequantize), or "
    msg = (
        f"{name!r} is quantized, with its scales in {scale!r}: weights and scales cannot be summed "
        f"apart; {decode}merge the checkpoints that it was quantized from"
    )
    return UnsupportedError(msg, tensor=name)
