"""Modules in a state dict have the names that torch gives them, with prefixes of wrappers.

A checkpoint of a plain save is one of stock DCP in other files. Only training states drop prefixes.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException

import dcp_rs
from dcp_rs import RsReader
from dcp_rs.errors import PlanError


def model_of(seed, wrap=lambda module: module):
    torch.manual_seed(seed)
    return torch.nn.Sequential(wrap(torch.nn.Linear(2, 2)))


WRAPS = {
    "compiled": lambda seed: torch.compile(model_of(seed)),
    "part": lambda seed: model_of(seed, torch.compile),
    "checkpointed": lambda seed: model_of(seed, checkpoint_wrapper),
    "parallel": lambda seed: torch.nn.DataParallel(model_of(seed)),
}


@pytest.mark.parametrize("kind", WRAPS)
def test_names_are_those_of_stock(tmp_path, kind):
    saved, model, plain = WRAPS[kind](0), WRAPS[kind](1), model_of(2)
    dcp.save({"model": saved}, checkpoint_id=tmp_path / "stock", no_dist=True)
    dcp_rs.save({"model": saved}, tmp_path / "native", no_dist=True)
    with dcp_rs.open(tmp_path / "native") as own, dcp_rs.open(tmp_path / "stock") as stock:
        assert set(own) == set(stock)
    for load in (
        lambda state: dcp_rs.load(state, tmp_path / "native", no_dist=True),
        lambda state: dcp.load(state, storage_reader=RsReader(tmp_path / "native"), no_dist=True),
    ):
        model = WRAPS[kind](1)
        load({"model": model})
        found = zip(model.state_dict().values(), saved.state_dict().values(), strict=True)
        assert all(one.equal(other) for one, other in found)
    if kind == "checkpointed":  # its state dict has no prefix
        return
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp.load({"model": plain}, checkpoint_id=tmp_path / "stock", no_dist=True)
    with pytest.raises(PlanError, match=r"_orig_mod\.|module\."):
        dcp_rs.load({"model": plain}, tmp_path / "native", no_dist=True)
    dcp_rs.optim.load_training_state(tmp_path / "native", plain, no_dist=True)
    found = zip(plain.state_dict().values(), saved.state_dict().values(), strict=True)
    assert all(one.equal(other) for one, other in found)
