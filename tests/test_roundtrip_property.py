"""Random state dicts: what comes back through `RsWriter` and `RsReader` is what comes back through stock DCP, bit for bit."""

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

import dcp_rs
from support import assert_state_equal, blank
from support.both import load_rs, load_stock, save_rs, save_stock
from support.strategies import state_dicts


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
@given(state=state_dicts(), small=st.booleans())
def test_random_states_come_back_as_through_stock_dcp(tmp_path_factory, planners, state, small):
    path = tmp_path_factory.mktemp("ckpt")
    ours, stock = template(state), template(state)
    try:
        save_stock(state, path / "stock")
        load_stock(stock, path / "stock")
    except (CheckpointException, ValueError):  # two paths of one name, above all
        reject()
    limits = {"max_inflight_bytes": 1} if small else {}
    if planners == "stock":
        save_rs(state, path / "ours", fsync=False, **limits)
        load_rs(ours, path / "ours", **limits)
    else:
        dcp_rs.save(dict(state), path / "ours", fsync=False, **limits)
        dcp_rs.load(ours, path / "ours", **limits)
    assert_state_equal(ours, in_place(stock, _NOTHING, state) if planners == "ours" else stock)
