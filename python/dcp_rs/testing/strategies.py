"""Strategies of hypothesis for what a checkpoint can hold, and for how it lies on ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "dcp_rs.testing.strategies needs hypothesis: pip install 'dcp-rs[testing]'"
    ) from error

from dcp_rs.testing.states import ALL_DTYPES, can_copy, random_tensor

__all__ = ["dtypes", "meshes", "names", "placements", "state_dicts", "tensors", "values"]


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """The dtypes that the format has and the installed torch can copy: older ones cannot copy their youngest."""
    return st.sampled_from([dtype for dtype in ALL_DTYPES if can_copy(dtype)])


@st.composite
def tensors(
    draw: st.DrawFn,
    dtype: st.SearchStrategy[torch.dtype] | None = None,
    max_dims: int = 4,
    max_side: int = 4,
) -> torch.Tensor:
    """Tensors on the CPU of random bits, so that NaNs with payloads and infinities occur.

    They are views of every kind: with steps, permuted or expanded dimensions, lazily conjugated or
    negated; scalars, empty ones; some are parameters.

    Args:
        draw: hypothesis gives it.
        dtype: default: :func:`dtypes`.
        max_dims: how many dimensions at most; one more where it is expanded.
        max_side: how many elements at most along each.
    """
    kind = draw(dtypes() if dtype is None else dtype)
    shape = tuple(draw(st.lists(st.integers(0, max_side), max_size=max_dims)))
    tensor = random_tensor(shape, kind, draw(st.integers(0, 99)))
    for dim in range(tensor.dim()):
        cut = draw(st.sampled_from(["whole", "whole", "step", "narrow"]))
        size = tensor.shape[dim]
        if cut == "step":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
        elif cut == "narrow" and size:
            start = draw(st.integers(0, size - 1))
            tensor = tensor.narrow(dim, start, draw(st.integers(0, size - start)))
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if draw(st.integers(0, 5)) == 0:
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    if kind in (torch.complex64, torch.complex128) and draw(st.booleans()):
        tensor = tensor.conj()
        if draw(st.booleans()):
            tensor = tensor.imag
    if tensor.is_floating_point() and kind.itemsize > 1 and draw(st.integers(0, 3)) == 0:
        tensor = torch.nn.Parameter(tensor)
    return tensor


def values() -> st.SearchStrategy[Any]:
    """Values that are no tensors, and load under ``torch.load(weights_only=True)``."""
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.binary(max_size=5),
    )


def names() -> st.SearchStrategy[str]:
    """Keys of state dicts: any text, and those that are awkward as anything else."""
    awkward = ["", "__metadata__", "__metadata__~", "a.b", "a/b", "@"]
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(awkward)


def state_dicts(max_leaves: int = 8) -> st.SearchStrategy[dict[str, Any]]:
    """State dicts: tensors and values in dicts (also with numbers for keys), lists and tuples.

    Some have two paths of one name (``{"a.b": 1, "a": {"b": 2}}``): torch refuses these with a
    ``ValueError``, and so does dcp-rs.

    Args:
        max_leaves: how many tensors and values a top-level entry has at most.
    """
    inner = st.recursive(
        tensors() | values(),
        lambda below: (
            st.lists(below, max_size=3)
            | st.tuples(below, below)
            | st.dictionaries(names() | st.integers(0, 3), below, max_size=3)
        ),
        max_leaves=max_leaves,
    )
    return st.dictionaries(names(), inner, max_size=5)


def meshes(ranks: int, max_dims: int = 2) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of device meshes with that many ranks: ``(4,)``, ``(2, 2)``, ``(1, 4)``.

    Args:
        ranks: how many.
        max_dims: how many dimensions at most.
    """
    shapes: list[tuple[int, ...]] = [()]
    for _ in range(max_dims - 1):
        shapes += [
            (*shape, side) for shape in shapes for side in range(1, ranks + 1) if ranks % side == 0
        ]
    whole = {
        (*shape, ranks // math.prod(shape)) for shape in shapes if ranks % math.prod(shape) == 0
    }
    return st.sampled_from(sorted(whole, key=lambda shape: (len(shape), shape)))


def placements(
    mesh: Sequence[int], dims: int, *, partial: bool = False
) -> st.SearchStrategy[tuple[Placement, ...]]:
    """Where a ``DTensor`` lies on a mesh: a placement for each dimension of the mesh.

    Args:
        mesh: the shape of the mesh.
        dims: how many dimensions the tensor has.
        partial: draw pending sums, too, which cannot be saved.
    """
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(dims))]
    if partial:
        kinds.append(Partial())
    return st.tuples(*(st.sampled_from(kinds) for _ in mesh))
