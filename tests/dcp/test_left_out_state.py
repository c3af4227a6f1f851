"""An optimizer that is new has no place for the state that a checkpoint has: that is said."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import dcp_rs

WORDS = r"state of an optimizer, optim\.state\.\*"


def trained(steps=1, make=torch.optim.AdamW):
    model = torch.nn.Linear(3, 2)
    optimizer = make(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(model, optimizer):
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3}


@pytest.fixture
def saved(ckpt):
    dcp_rs.save(state_of(*trained()), ckpt)
    return ckpt


def load_ours(state, path):
    dcp_rs.load(state, path)


def load_with_torchs_planner(state, path):
    dcp.load(state, storage_reader=dcp_rs.RsReader(path), no_dist=True)


@pytest.mark.parametrize("load", [load_ours, load_with_torchs_planner])
def test_a_new_optimizer(saved, load):
    with pytest.warns(UserWarning, match=WORDS):
        load(state_of(*trained(0)), saved)


def test_an_optimizer_as_an_object(saved):
    model, optimizer = trained(0)
    with pytest.warns(UserWarning, match=WORDS):
        dcp_rs.load({"model": model, "optim": optimizer}, saved)


@pytest.mark.parametrize("load", [load_ours, load_with_torchs_planner])
def test_nothing_is_said_where_nothing_is_lost(saved, tmp_path, load):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="torch.distributed is")
        load(state_of(*trained(2)), saved)
        model, optimizer = trained(0)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp_rs.save({"model": model_state, "optim": optimizer_state}, tmp_path / "named")
        load({"model": model_state, "optim": optimizer_state}, tmp_path / "named")
        load({"model": trained()[0].state_dict()}, saved)  # no optimizer is loaded
        dcp_rs.save(state_of(*trained(1, torch.optim.SGD)), tmp_path / "sgd")  # it has no state
        load(state_of(*trained(0, torch.optim.SGD)), tmp_path / "sgd")


def test_at_the_top(tmp_path):
    dcp_rs.save(trained()[1].state_dict(), tmp_path)
    with pytest.warns(UserWarning, match=r"optimizer, state\.\*"):
        dcp_rs.load(trained(0)[1].state_dict(), tmp_path)
