"""Several modules at once, as torchtitan has the stages of a pipeline, and flags that are given once.

A list of modules was `TypeError: unhashable type`, a tuple an `AttributeError`.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dcp_rs
from dcp_rs import CheckpointManager, RsReader
from dcp_rs.errors import PlanError
from dcp_rs.optim import (
    load_optim_state_dict,
    load_training_state,
    save_training_state,
    training_state,
)
from support import assert_state_equal, rank_outcomes
from support.training import parallelize


class Stage(nn.Module):
    """Some layers of a model, under the names that they have in the whole."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): nn.Linear(3, 3) for layer in layers})
        self.register_buffer(f"seen_{layers[0]}", torch.zeros(()))

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def parts(seed, stages=((0, 1), (2,))):
    torch.manual_seed(seed)
    models = [Stage(layers) for layers in stages]
    return models, [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]


def train(models, optimizers):
    x = torch.ones(2, 3)
    for model in models:
        x = model(x)
    x.square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_modules_and_optimizers_are_merged_by_name(ckpt, kind):
    models, optimizers = parts(0)
    train(models, optimizers)
    state = training_state(kind(models), optimizers)
    assert set(state["model"]) == {name for model in models for name in model.state_dict()}
    save_training_state(ckpt, kind(models), optimizers, no_dist=True, fsync=False)
    others, resumed = parts(1)
    load_training_state(ckpt, kind(others), resumed, no_dist=True)
    for other, model, one, optimizer in zip(others, models, resumed, optimizers, strict=True):
        assert_state_equal(other.state_dict(), model.state_dict())
        assert_state_equal(one.state_dict(), optimizer.state_dict())
    train(others, resumed)
    # Cut in other places, and with one optimizer for all.
    cut, _ = parts(2, ((0,), (1, 2)))
    one = torch.optim.Adam([param for model in cut for param in model.parameters()], lr=0.1)
    load_training_state(ckpt, cut, one, no_dist=True, partial=True)
    assert torch.equal(cut[1].layers["2"].weight, models[1].layers["2"].weight)
    assert len(one.state) == 6


def test_a_manager_resumes_several_modules(tmp_path):
    models, optimizers = parts(0)
    train(models, optimizers)
    with CheckpointManager(tmp_path, no_dist=True, fsync=False) as manager:
        manager.save(3, training_state(models, optimizers))
        others, resumed = parts(1)
        assert manager.load_training_state(others, resumed) == 3
    assert_state_equal(others[1].state_dict(), models[1].state_dict())


def test_names_that_two_modules_have_are_refused():
    models, _ = parts(0, ((0, 1), (1, 2)))
    with pytest.raises(PlanError, match=r"two of the modules have a 'layers\.1\.weight'"):
        training_state(models)
    for nothing in ([], [1], None):
        with pytest.raises(TypeError):
            training_state(nothing)


def test_a_partial_load_is_asked_for_once(ckpt):
    """LoRA: the flag of the planner was not enough, and that of the call renames nothing."""
    base = nn.Sequential(nn.Linear(3, 3))
    optimizer = torch.optim.Adam(base.parameters())
    train([base], [optimizer])
    save_training_state(ckpt, base, optimizer, no_dist=True, fsync=False)
    adapted = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    resumed = torch.optim.Adam(adapted.parameters())
    report = load_training_state(ckpt, adapted, resumed, no_dist=True, partial=True)
    assert {"model.1.weight", "optim.state.1.weight"} <= set(report.missing)
    assert torch.equal(adapted[0].weight, base[0].weight)
    again = torch.optim.Adam(adapted.parameters())
    report = load_optim_state_dict(ckpt, adapted, again, no_dist=True, partial=True)
    assert_state_equal(again.state_dict(), resumed.state_dict())
    assert "optim.state.1.weight" in report.missing
    renamed = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3))
    rename = {"model": "model.0"}
    load_training_state(ckpt, renamed, (), no_dist=True, rename=rename, partial=True)
    assert torch.equal(renamed[0][0].weight, base[0].weight)
    assert dcp_rs.open(ckpt)


def load_what_one_rank_cannot_read(path):
    model = parallelize("fsdp1", 0)
    optimizer = torch.optim.Adam(model.parameters())
    if dist.get_rank() == 1:
        RsReader._read_value = fail
    load_optim_state_dict(path, model, optimizer)


def fail(*args):
    raise OSError("unplugged")


def test_a_rank_that_cannot_read_groups_keeps_nobody_waiting(ckpt):
    """The others had begun a collective of FSDP1, and gloo ended the process."""
    model = parallelize("plain", 0)
    optimizer = torch.optim.Adam(model.parameters())
    save_training_state(ckpt, model, optimizer, no_dist=True, fsync=False)
    way = load_what_one_rank_cannot_read
    for outcome in rank_outcomes(2, way, ckpt, timeout=60, fresh=True):
        assert "unplugged" in str(outcome.error), outcome


def load_without_modules_on_one_rank(path):
    load_training_state(path, [] if dist.get_rank() == 1 else torch.nn.Linear(3, 3))


def save_without_modules_on_one_rank(path):
    save_training_state(path, [] if dist.get_rank() == 1 else torch.nn.Linear(3, 3))


def test_a_rank_without_modules_keeps_nobody_waiting(ckpt):
    save_training_state(ckpt, torch.nn.Linear(3, 3), no_dist=True, fsync=False)
    for way in (load_without_modules_on_one_rank, save_without_modules_on_one_rank):
        for outcome in rank_outcomes(2, way, ckpt, timeout=60):
            assert type(outcome.error) is TypeError, outcome
