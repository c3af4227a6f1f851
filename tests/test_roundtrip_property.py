"""Random state dicts: what comes back through `RsWriter` and `RsReader` is what comes back through stock DCP, bit for bit."""

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import dcp_rs
from support import ALL_DTYPES, assert_state_equal, blank, random_tensor
from support.both import can_copy, load_stock, save_stock

DTYPES = [dtype for dtype in ALL_DTYPES if can_copy(dtype)]


@st.composite
def tensors(draw):
    """A view of random bits: steps, permuted dimensions, expanded ones, lazily conjugated or negated, or a parameter."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    tensor = random_tensor(shape, dtype, draw(st.integers(0, 99)))
    for dim in range(tensor.dim()):
        kind = draw(st.sampled_from(["whole", "whole", "step", "narrow"]))
        size = tensor.shape[dim]
        if kind == "step":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
        elif kind == "narrow" and size:
            start = draw(st.integers(0, size - 1))
            tensor = tensor.narrow(dim, start, draw(st.integers(0, size - start)))
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if draw(st.integers(0, 5)) == 0:
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    if dtype in (torch.complex64, torch.complex128) and draw(st.booleans()):
        tensor = tensor.conj()
        if draw(st.booleans()):
            tensor = tensor.imag
    if tensor.is_floating_point() and dtype.itemsize > 1 and draw(st.integers(0, 3)) == 0:
        tensor = torch.nn.Parameter(tensor)
    return tensor


VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5))
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ["", "__metadata__", "__metadata__~", "a.b", "a/b", "@"]
)
STATES = st.dictionaries(
    NAMES,
    st.recursive(
        tensors() | VALUES,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(NAMES | st.integers(0, 3), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=5,
)


def template(state):
    """As `blank`, and of the same structure: what is in it decides whether DCP flattens a list."""
    if isinstance(state, tuple):
        return tuple(template(value) for value in state)
    if isinstance(state, dict):
        return {key: template(value) for key, value in state.items()}
    if isinstance(state, list):
        return [template(value) for value in state]
    return blank(state)


_NOTHING = object()


def in_place(at, beside, like):
    """What stock loads, where ``dcp_rs.load`` has it: stock puts values to text keys beside those of the state dict that are none.

    Args:
        at: what is at the place of ``like``.
        beside: what is at the place where stock has put values; ``_NOTHING``: that is the same one.
        like: what was saved.
    """
    if isinstance(like, dict):
        made = {}
        for key, value in like.items():
            other = beside.get(str(key), _NOTHING) if isinstance(beside, dict) else _NOTHING
            if type(key) is not str and str(key) in at:
                other = at[str(key)]
            made[key] = in_place(at[key], other, value)
        return made
    if isinstance(like, list):
        others = beside if isinstance(beside, list) else []
        return [
            in_place(value, others[i] if i < len(others) else _NOTHING, inner)
            for i, (value, inner) in enumerate(zip(at, like, strict=True))
        ]
    return at if beside is _NOTHING or isinstance(like, torch.Tensor) else beside


@pytest.mark.parametrize("planners", ["ours", "stock"])
@given(state=STATES, small=st.booleans())
def test_random_states_come_back_as_through_stock_dcp(tmp_path_factory, planners, state, small):
    path = tmp_path_factory.mktemp("ckpt")
    ours, stock = template(state), template(state)
    try:
        save_stock(state, path / "stock")
        load_stock(stock, path / "stock")
    except (CheckpointException, ValueError):  # two paths of one name, above all
        reject()
    limits = {"max_inflight_bytes": 1} if small else {}
    save, load = {}, {}
    if planners == "stock":
        save, load = {"planner": DefaultSavePlanner()}, {"planner": DefaultLoadPlanner()}
    dcp_rs.save(dict(state), path / "ours", fsync=False, **save, **limits)
    dcp_rs.load(ours, path / "ours", **load, **limits)
    assert_state_equal(ours, in_place(stock, _NOTHING, state) if planners == "ours" else stock)
