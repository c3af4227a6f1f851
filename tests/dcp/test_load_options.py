"""The options of `dcp_rs.load` itself: `rename=`, `dtype=` and their like were refused ("no option 'rename'")."""

import inspect

import pytest
import torch
import torch.distributed as dist

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader
from dcp_rs.errors import CorruptDataError
from support import run_ranks

W = torch.arange(24.0).reshape(4, 6)


@pytest.fixture
def saved(ckpt):
    dcp_rs.save({"model": {"w": W, "b": W[0].clone()}, "step": 3}, ckpt, no_dist=True)
    return ckpt


def zeros(**options):
    return {"w": torch.zeros(4, 6, **options), "b": torch.zeros(6, **options)}


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("strict", "allow_partial_load=True"),
        ("map_location", "device="),
        ("includ", "did you mean 'include'"),
        ("storage_reader", "dcp_rs.load_state_dict() takes a reader"),
    ],
)
def test_options_of_others_are_answered_with_the_one_that_is_meant(saved, option, meant):
    with pytest.raises(TypeError) as raised:
        dcp_rs.load({"model": zeros()}, saved, **{option: None})
    assert f"has no option {option!r}" in str(raised.value)
    assert meant in str(raised.value)


def test_the_signature_names_every_option_of_the_reader_and_of_the_planner():
    named = set(inspect.signature(dcp_rs.load).parameters)
    for kind in (RsReader, RsLoadPlanner):
        options = {name for name in inspect.signature(kind).parameters if not name.startswith("_")}
        # Those of torch's own classes, and what a planner needs where there is no path.
        assert options - named <= {
            "thread_count",
            "token",
            "checkpoint",
            "flatten_state_dict",
            "flatten_sharded_tensors",
        }


def unknown_on_one(path):
    """What one rank gives wrongly, all ranks hear of."""
    options = {"strict": False} if dist.get_rank() == 1 else {}
    with pytest.raises(TypeError, match="no option 'strict'"):
        dcp_rs.load({"model": zeros()}, path, **options)
    return True


def test_an_option_that_one_rank_gets_wrong(saved):
    assert run_ranks(2, unknown_on_one, saved) == [True, True]


def fails_on_one(path):
    """Rank 1 alone reads the tensor whose bytes are damaged."""
    mine = zeros() if dist.get_rank() else {"b": torch.zeros(6)}
    state = {"model": mine, "step": 0}
    before = dict(mine)
    with pytest.raises(CorruptDataError, match=r'"model\.w"'):
        dcp_rs.load(state, path, dtype=torch.bfloat16, verify=True)
    return all(mine[name] is tensor for name, tensor in before.items()) and state["step"] == 0


def test_failed_read_of_one_rank_replaces_nothing(saved):
    """Rank 0 had put its new tensors and values into the state dict by then, and kept them."""
    (data,) = saved.glob("*.safetensors")
    raw = data.read_bytes()
    at = raw.index(W[2:].numpy().tobytes())
    data.write_bytes(raw[:at] + b"\xff" + raw[at + 1 :])
    assert run_ranks(2, fails_on_one, saved) == [True, True]
