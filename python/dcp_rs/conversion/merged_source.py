"""The source of a merge: the weighted sums of the tensors of several checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from dcp_rs import _core
from dcp_rs.checkpoint.compare import Difference, entry_differences
from dcp_rs.checkpoint.names import selector, some
from dcp_rs.checkpoint.source import IndexSource, Item, Request
from dcp_rs.conversion.job import new_dtype
from dcp_rs.conversion.request import WriteRequest
from dcp_rs.errors import PlanError, UnsupportedError
from dcp_rs.tensors.dtypes import BY_NAME

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
#: The endings of scales of GPTQ, AWQ and bitsandbytes, which ``dequantize`` does not decode.
_NOT_DECODED = (".scales", ".absmax", ".nested_absmax", ".SCB")


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
        request: the result: which entries it has, and the dtype of sums.
        conflicts: as for :func:`dcp_rs.merge`.

    Attributes:
        summed: the names of the sums.
        conflicts: the names of other entries that differ.
        left_out: the names of the optimizer state that is left out.

    Raises:
        PlanError: an entry differs between inputs; the message names the entry and both inputs.
        UnsupportedError: tensors are quantized, so their stored values cannot be summed.
    """

    def __init__(
        self, inputs: Sequence[Input], request: WriteRequest, conflicts: Conflicts
    ) -> None:
        self._inputs, self._request = inputs, request
        first = inputs[0].source
        self.format, self.root, self.path = first.format, first.root, first.path
        self.files = [path for one in inputs for path in one.source.files]
        self.containers = first.containers
        self.left_out: list[str] = []
        if request.include is None:
            self.left_out = [item.name for item in first.items if _is_of_optimizer(item)]
            if self.containers is not None:
                self.containers = [
                    c for c in self.containers if not (c.path and c.path[0] in _OPTIMIZERS)
                ]
        chosen = [_choose(one.source, request) for one in inputs]
        for one, of_input in zip(inputs, chosen, strict=True):
            _check_not_quantized(one.source, of_input)
        _check_names(inputs, chosen)
        self.items: list[Item] = []
        #: The entries of all inputs that are summed, and the inputs of entries that are copied.
        self._sums: dict[str, list[Item]] = {}
        self._origins: dict[str, IndexSource] = {}
        for name in chosen[0]:
            items = [of_input[name] for of_input in chosen]
            if all(item.dtype in _SUMMED for item in items):
                _check_shapes(inputs, items)
                self._sums[name] = items
        unlike = _differences(inputs, chosen, [n for n in chosen[0] if n not in self._sums])
        if unlike and conflicts == "error":
            raise _conflict(inputs[0].path, list(unlike.values()))
        for name, item in chosen[0].items():
            if name in self._sums:
                self.items.append(_sum_of(self._sums[name], request.dtype))
            elif name not in unlike or conflicts != "drop":
                taken = -1 if name in unlike and conflicts == "last" else 0
                place: dict[str, Any] = {"path": item.path, "position": item.position}
                self.items.append(replace(chosen[taken][name], **place))
                self._origins[name] = inputs[taken].source
        self.summed = list(self._sums)
        self.conflicts = list(unlike)
        if first.items and not self.items:
            msg = (
                f"nothing is left of the {len(first.items)} entries of {inputs[0].path} by "
                + ", ".join(filter(None, [request.globs, f"conflicts={conflicts!r}"]))
            )
            raise PlanError(msg)

    def check(self, items: Sequence[Item]) -> None:
        """Raise unless the items are complete in every input that they come from."""
        for number, one in enumerate(self._inputs):
            copied = [item for item in items if self._origins.get(item.name) is one.source]
            one.source.check(self._summands(items, number) + copied)

    def _summands(self, items: Sequence[Item], number: int) -> list[Item]:
        """Return the entries of one input for the items that are summed."""
        return [self._sums[item.name][number] for item in items if item.name in self._sums]

    def check_again(self) -> None:
        """Raise if a file of an input changed."""
        for one in self._inputs:
            one.source.check_again()

    def read(self, requests: Sequence[Request]) -> None:
        """Fill the destinations with sums, or with copies."""
        sums = [request for request in requests if request.item.name in self._sums]
        for double in (False, True):
            self._sum([r for r in sums if (r.into.dtype == torch.float64) == double], double=double)
        for one in self._inputs:
            one.source.read([r for r in requests if self._origins.get(r.item.name) is one.source])

    def _sum(self, requests: Sequence[Request], *, double: bool) -> None:
        sums = []
        for request in requests:
            tensors = [item.number for item in self._sums[request.item.name]]
            into = request.into
            is_bfloat16 = into.dtype == torch.bfloat16
            sums.append((tensors, _offsets(request), into.shape, into.data_ptr(), is_bfloat16))
        if sums:
            _core.sum_regions(
                [(one.source.index, one.weight) for one in self._inputs],
                sums,
                double=double,
                **self._request.read_options.engine(),
            )

    def value(self, item: Item) -> bytes:
        """Return the bytes of a value."""
        return self._origins[item.name].value(item)

    def metadata(self) -> dict[str, str]:
        """Return the metadata of the files of the first input."""
        return self._inputs[0].source.metadata()

    def tied(self, items: Sequence[Item]) -> dict[str, str]:
        """Return second names of tensors, with the first name, that are tied in every input."""
        first, *others = (
            one.source.tied(self._summands(items, n)) for n, one in enumerate(self._inputs)
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


def _choose(source: IndexSource, request: WriteRequest) -> dict[str, Item]:
    """Return the included entries by name. Optimizer state has to be included by name."""
    passes = selector(request.include, request.exclude)
    return {
        item.name: item
        for item in source.items
        if passes(item.name) and not (request.include is None and _is_of_optimizer(item))
    }


def _check_names(inputs: Sequence[Input], chosen: Sequence[dict[str, Item]]) -> None:
    """Raise unless all inputs have the same names."""
    first = inputs[0], chosen[0]
    for other in zip(inputs[1:], chosen[1:], strict=True):
        for (one, has), (without, lacks) in ((first, other), (other, first)):
            missing = [name for name in has if name not in lacks]
            if missing:
                msg = (
                    f"{some(missing)}: in {one.path}, but not in {without.path}; a merge needs "
                    "every entry in all inputs: leave it out with exclude=, or say with include= "
                    "what is to be merged"
                )
                raise PlanError(msg, tensor=missing[0])


def _sum_of(items: Sequence[Item], dtype: torch.dtype | None) -> Item:
    """Return the sum of entries of all inputs, with the dtype in which it is delivered."""
    item, delivered = items[0], torch.float32
    if any(item.dtype == torch.float64 for item in items):
        delivered = torch.float64
    elif new_dtype(item, dtype) == torch.bfloat16:
        # The engine rounds to it itself, while the sums are in the CPU's cache.
        delivered = torch.bfloat16
    return replace(item, read_as=delivered)


def _differences(
    inputs: Sequence[Input], chosen: Sequence[dict[str, Item]], names: Sequence[str]
) -> dict[str, tuple[Difference, Path]]:
    """Return which entries differ from those of the first input, how, and in which input first."""
    found: dict[str, tuple[Difference, Path]] = {}
    for one, own in zip(inputs[1:], chosen[1:], strict=True):
        pairs = [(chosen[0][name], own[name]) for name in names]
        for what in entry_differences(inputs[0].source, one.source, pairs):
            found.setdefault(what.name, (what, one.path))
    return {name: found[name] for name in names if name in found}


def _conflict(first: Path, found: Sequence[tuple[Difference, Path]]) -> PlanError:
    unlike, path = found[0]
    what = f": {unlike.a} and {unlike.b}" if unlike.a and unlike.b else ""
    others = [other.name for other, _ in found[1:]]
    more = f" The same goes for {some(others)}." if others else ""
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
    """Raise if quantized weights or their scales would be summed, one without the other.

    Both count if they are left out: codes without their scales are no numbers either.
    """
    for codes, scale in source.index.codes_beside_scales():
        for name in (codes, scale):
            if name in chosen and chosen[name].dtype in _SUMMED:
                decode = "give dequantize=True (--dequantize), or "
                msg = (
                    f"{codes!r} is quantized, with its scales in {scale!r}: weights and scales "
                    "cannot be summed apart; "
                    f"{'' if scale.endswith(_NOT_DECODED) else decode}merge the checkpoints that "
                    "it was quantized from"
                )
                raise UnsupportedError(msg, tensor=codes)
