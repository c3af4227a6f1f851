"""Counters keep their dtype. Adam's ``step`` in bfloat16 stood still at 256, as one more is rounded away."""

from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import dcp_rs
from dcp_rs import RsSavePlanner, RsWriter
from dcp_rs.optim import (
    load_optim_state_dict,
    load_training_state,
    save_training_state,
    training_state,
)
from support import run_ranks
from support.training import parallelize, quiet, train_step

STEPS = 301.0


def start(steps=0):
    model = nn.Linear(4, 4)
    model.register_buffer("scale", torch.tensor(1.5))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    if steps:
        optimizer.step()
        for state in optimizer.state.values():
            state["step"].fill_(steps)
    return model, optimizer


def saved_by_torch(state, path):
    dcp.save(state, storage_writer=RsWriter(path), planner=RsSavePlanner(dtype=torch.bfloat16))


@pytest.mark.parametrize("save", [partial(dcp_rs.save, dtype=torch.bfloat16), saved_by_torch])
def test_a_save_as_bfloat16_stores_counters_as_they_are(ckpt, save):
    model, optimizer = start(STEPS)
    save(training_state(model, optimizer), ckpt)
    with dcp_rs.open(ckpt) as opened:
        assert opened["optim.state.weight.step"].dtype == torch.float32
        assert opened["optim.state.weight.step"].item() == STEPS
        assert opened["optim.state.weight.exp_avg"].dtype == torch.bfloat16
        assert opened["model.weight"].dtype == opened["model.scale"].dtype == torch.bfloat16
    other, resumed = start()
    with quiet():
        load_training_state(ckpt, other, resumed)
    resumed.step()
    assert [state["step"].item() for state in resumed.state.values()] == [STEPS + 1] * 2
    # So does a save of a state dict that torch made.
    state = {
        "optim": {"state": {"weight": {"step": torch.tensor(1.0)}}},
        "state": torch.tensor(1.0),
    }
    save(state, ckpt)
    with dcp_rs.open(ckpt) as opened:
        assert opened["optim.state.weight.step"].dtype == torch.float32
        assert opened["state"].dtype == torch.bfloat16


@pytest.mark.parametrize("steps", [0, 1.0])
@pytest.mark.parametrize("alone", [False, True], ids=["training", "optim"])
def test_a_load_as_bfloat16_leaves_counters_as_they_are(ckpt, alone, steps):
    save_training_state(ckpt, *start(STEPS), fsync=False)
    model, optimizer = start(steps)
    load = load_optim_state_dict if alone else load_training_state
    load(ckpt, model, optimizer, dtype=torch.bfloat16)
    assert model.weight.dtype == (torch.float32 if alone else model.weight.dtype)
    for state in optimizer.state.values():
        assert (state["step"].dtype, state["step"].item()) == (torch.float32, STEPS)
        assert state["exp_avg"].dtype == torch.float32  # as the parameter is
    optimizer.step()


def test_a_conversion_to_bfloat16_leaves_counters_as_they_are(ckpt, tmp_path):
    save_training_state(ckpt, *start(STEPS), fsync=False)
    dcp_rs.convert(ckpt, tmp_path / "half", dtype=torch.bfloat16)
    dcp_rs.merge(
        [ckpt, ckpt], tmp_path / "mean", include="*", dtype=torch.bfloat16, conflicts="first"
    )
    for out in (tmp_path / "half", tmp_path / "mean"):
        with dcp_rs.open(out) as opened:
            step = opened["optim.state.weight.step"]
            assert (step.dtype, step.item()) == (torch.float32, STEPS)
            assert opened["optim.state.weight.exp_avg"].dtype == torch.bfloat16


def on_ranks(path):
    with quiet():
        model = parallelize("fsdp2", 0)
        optimizer = torch.optim.Adam([param for param in model.parameters() if param.requires_grad])
        train_step(model, [optimizer], 0)
        save_training_state(path, model, optimizer, dtype=torch.bfloat16, fsync=False)
    with dcp_rs.open(path) as opened:
        kinds = {
            name.rsplit(".", 1)[1]: opened[name].dtype
            for name in opened
            if name.startswith("optim.state.")
        }
    assert kinds == {"step": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}


def test_counters_of_a_sharded_model(tmp_path):
    run_ranks(2, on_ranks, tmp_path)
