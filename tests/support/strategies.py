"""Strategies of hypothesis for state dicts and for their sharding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from support.states import ALL_DTYPES, can_copy, random_tensor


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """Return a strategy for the dtypes of the format that the installed torch can copy."""
    return st.sampled_from([dtype for dtype in ALL_DTYPES if can_copy(dtype)])


@st.composite
def tensors(
    draw: st.DrawFn,
    dtype: st.SearchStrategy[torch.dtype] | None = None,
    max_dims: int = 4,
    max_side: int = 4,
) -> torch.Tensor:
    """Draw a tensor of random bits on the CPU, so that NaNs with payloads and infinities occur.

    It may be a scalar, empty, a parameter, or a view: with steps, permuted or expanded, lazily
    conjugated or negated.

    Args:
        draw: passed by hypothesis.
        dtype: a strategy for the dtype. Default: :func:`dtypes`.
        max_dims: the most dimensions. An expanded tensor has one more.
        max_side: the most elements along a dimension.
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
    """Return a strategy for non-tensor values that ``torch.load(weights_only=True)`` loads."""
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.binary(max_size=5),
    )


def names() -> st.SearchStrategy[str]:
    """Return a strategy for keys of state dicts: any text, and awkward names."""
    awkward = ["", "__metadata__", "__metadata__~", "a.b", "a/b", "@"]
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(awkward)


def state_dicts(max_leaves: int = 8) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for tensors and values in dicts, lists and tuples.

    Some keys are numbers. Some state dicts have two paths with one name
    (``{"a.b": 1, "a": {"b": 2}}``), which torch and dcp-rs refuse with a ``ValueError``.

    Args:
        max_leaves: the most tensors and values below a top-level key.
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
    """Return a strategy for shapes of device meshes: ``(4,)``, ``(2, 2)``, ``(1, 4)``.

    Args:
        ranks: the number of ranks.
        max_dims: the most dimensions.
    """

    def shapes(ranks: int, dims: int) -> Iterator[tuple[int, ...]]:
        yield (ranks,)
        for side in range(1, ranks + 1) if dims > 1 else ():
            if ranks % side == 0:
                yield from ((side, *rest) for rest in shapes(ranks // side, dims - 1))

    # The simplest first, which hypothesis shrinks to.
    return st.sampled_from(
        sorted(set(shapes(ranks, max_dims)), key=lambda shape: (len(shape), shape))
    )


def placements(
    mesh: Sequence[int], dims: int, *, partial: bool = False
) -> st.SearchStrategy[tuple[Placement, ...]]:
    """Return a strategy for the placements of a ``DTensor``, one for each mesh dimension.

    Args:
        mesh: the shape of the mesh.
        dims: the number of dimensions of the tensor.
        partial: also draw ``Partial``, which cannot be saved.
    """
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(dims))]
    if partial:
        kinds.append(Partial())
    return st.tuples(*(st.sampled_from(kinds) for _ in mesh))
