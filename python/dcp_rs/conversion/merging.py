"""Merging of checkpoints: the weighted sum of several."""

from __future__ import annotations

import numbers
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack, get_args

import torch

from dcp_rs._arguments import suggest_option
from dcp_rs._url import StrPath, location
from dcp_rs.conversion import ConvertReport, write_result
from dcp_rs.conversion.merged_source import Conflicts, Input, MergedSource
from dcp_rs.conversion.request import ConvertArguments, WriteRequest
from dcp_rs.options import check_choice, take_options


@dataclass(repr=False)
class MergeReport(ConvertReport):
    """Report of :func:`dcp_rs.merge`: a :class:`dcp_rs.ConvertReport` with more attributes.

    Attributes:
        summed: the names of tensors that are weighted sums.
        conflicts: the names of other entries that differ between inputs, with ``conflicts=`` other
            than ``"error"``.
        left_out: the names of the optimizer state that was left out.
        weights: the weight of each input.
    """

    summed: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


@suggest_option
def merge(
    inputs: Iterable[StrPath],
    out: StrPath,
    *,
    weights: Iterable[float] | None = None,
    conflicts: Conflicts = "error",
    **options: Unpack[ConvertArguments],
) -> MergeReport:
    """Write the weighted sum of checkpoints, by default their mean, in bounded memory.

    The result appears at ``out`` in one step, when it is complete. After an error or Ctrl-C there
    is nothing. The bound on memory is for tensors: all values that are no tensors are in memory
    together.

    Floating-point tensors are summed in float32, and in float64 where an input stores float64. The
    first input times its weight starts the sum. The others are added in the order of ``inputs``:
    ``sum = weight * element + sum`` by a fused multiply-add. At the end it is rounded once to the
    dtype of the result. On a CPU with that instruction, ``sum.add_(tensor.float(), alpha=weight)``
    gives the same bits.

    Integers, booleans, complex numbers and non-tensor values must be equal in all inputs, unless
    ``conflicts`` says which to take.

    The state of optimizers (``optim``, ``optimizer``, ``optimizers`` and ``optimizer_states`` at
    the top) is left out, unless ``include`` names it.

    Results of ``"dcp-rs"`` and ``"safetensors"`` name their inputs (path, save id and weight);
    ``dcp-rs inspect`` shows them.

    Args:
        inputs: checkpoints of any format, by paths or URLs. They may be sharded differently.
        out: as for :func:`dcp_rs.convert`.
        weights: a finite number for each input, used as given: they may be negative, and need not
            sum to 1. Default: ``1 / len(inputs)`` for each.
        include, exclude: one glob or several, over names in the inputs.
        conflicts: what to do with an entry that is not summed and differs between inputs:
            ``"error"``, take it from the ``"first"`` or the ``"last"`` input, or ``"drop"`` it.
        dtype: the dtype of floating-point tensors of 16 bits and more in the result. Default: as
            in the first input. Step counters of optimizers keep their dtype.
        to, shards, rename, name, skip_unsupported: as for :func:`dcp_rs.convert`.
        overwrite, progress, threads, fsync, max_inflight_bytes: as for :func:`dcp_rs.convert`.
        verify: check the digests of the inputs, if they have any.
        weights_only: as for :func:`dcp_rs.convert`.
        allow_external: read data files outside the folders of the inputs, if their indexes name
            any.
        storage_options: for inputs that are URLs, see :class:`dcp_rs.RsReader`.
        out_storage_options: those of ``out``. Default: ``storage_options``.
        dequantize, views: for all inputs, see :class:`dcp_rs.RsReader`.

    Returns:
        A :class:`MergeReport`.

    Raises:
        PlanError: an input lacks an entry, or has it in another shape; an entry that is not summed
            differs; or as for :func:`dcp_rs.convert`.
        UnsupportedError: the inputs are quantized, and not decoded by ``dequantize``; or as for
            :func:`dcp_rs.convert`.
        ValueError: invalid ``inputs`` or ``weights``; or as for :func:`dcp_rs.convert`.
        DcpRsError, OSError: as for :func:`dcp_rs.convert`.

    Example:
        ```python
        dcp_rs.merge(["run/step-1", "run/step-2"], "averaged", include="model.*")
        dcp_rs.merge(["run/step-1", "run/step-2"], "moved", weights=[-0.5, 1.5], include="model.*")
        ```
    """
    begin = time.perf_counter()
    given = take_options(merge, options)
    paths = _check_inputs(inputs)
    factors = _check_weights(weights, len(paths))
    check_choice("conflicts", conflicts, *get_args(Conflicts))
    request = WriteRequest.of(paths, out, given)
    opened = [
        Input(path, request.open(path), factor) for path, factor in zip(paths, factors, strict=True)
    ]
    source = MergedSource(opened, request, conflicts)
    report = MergeReport(
        summed=source.summed,
        conflicts=source.conflicts,
        left_out=source.left_out,
        weights=factors,
    )
    write_result(
        source,
        request,
        report,
        paths=[*paths, *(one.source.path for one in opened), *source.files],
        merged_from=[one.describe() for one in opened],
    )
    report.seconds = time.perf_counter() - begin
    return report


def _check_inputs(inputs: Iterable[StrPath]) -> list[Path]:
    if isinstance(inputs, (str, os.PathLike)):
        msg = f"inputs={os.fspath(inputs)!r}: pass a list, as in merge(['a', 'b'], 'out')"
        raise ValueError(msg)  # noqa: TRY004  # as for all arguments
    paths = [location(path) for path in inputs]
    if not paths:
        msg = "inputs=[]: pass at least one checkpoint"
        raise ValueError(msg)
    return paths


def _check_weights(weights: Iterable[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1 / count] * count
    if not isinstance(weights, Iterable) or isinstance(weights, str | Mapping):
        raise TypeError(f"weights={weights!r}: pass a list, with a number for each input")
    factors: list[Any] = list(weights)
    if len(factors) != count:
        msg = f"weights={factors!r}: {count} inputs need {count} weights, one for each"
        raise ValueError(msg)
    for factor in factors:
        is_number = isinstance(factor, numbers.Real) and not isinstance(factor, bool)
        if not is_number or not abs(factor) <= torch.finfo(torch.float32).max:  # or it is NaN
            msg = (
                f"weights={factors!r}: {factor!r} is not a finite Python or NumPy number within "
                "the range of float32"
            )
            raise ValueError(msg)
    return [float(factor) for factor in factors]
