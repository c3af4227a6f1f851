"""The state of every class of ``torch.optim``, loaded into every other one, with stock torch's judgment beside ours.

AdamW's checkpoint went into SGD without a word: its learning rate came, its momentum did not. So it was with
``amsgrad``, and Adafactor failed at its next step.
"""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from dcp_rs.errors import PlanError
from dcp_rs.optim import load_optim_state_dict, load_training_state, save_training_state
from support import assert_state_equal

KINDS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "Muon": lambda p: optim.Muon(p, lr=0.1),
    "Adam": optim.Adam,
    "AdamW": optim.AdamW,
    "amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "Adamax": optim.Adamax,
    "SparseAdam": optim.SparseAdam,
    "Adagrad": optim.Adagrad,
    "Adadelta": optim.Adadelta,
    "Adafactor": optim.Adafactor,
    "RMSprop": optim.RMSprop,
    "centered": lambda p: optim.RMSprop(p, centered=True, momentum=0.5),
    "Rprop": optim.Rprop,
    "ASGD": optim.ASGD,
    "LBFGS": optim.LBFGS,
}


def job(kind, steps):
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    optimizer = KINDS[kind](model.parameters())
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 4)) - 1).square().sum()
        loss.backward()
        if isinstance(optimizer, optim.SparseAdam):
            model.weight.grad = model.weight.grad.to_sparse()
        return loss

    closure()
    optimizer.step(closure if isinstance(optimizer, optim.LBFGS) else None)


def by_stock(path, kind):
    """Raises, or resumes."""
    model, optimizer = job(kind, 0)
    try:
        state = get_optimizer_state_dict(model, optimizer)
        dcp.load({"optim": state}, checkpoint_id=path, no_dist=True)
        set_optimizer_state_dict(model, optimizer, state)
        step(model, optimizer)
    except (Exception, CheckpointException):  # noqa: BLE001  # whatever it raises, it does not resume
        return "-"
    return "+"


def by_ours(path, kind, saved):
    """Raises, resumes, or warns and resumes."""
    model, optimizer = job(kind, 0)
    before = optimizer.state_dict()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            load_training_state(path, model, optimizer, no_dist=True)
        except PlanError:
            assert_state_equal(optimizer.state_dict(), before)
            assert torch.equal(model.weight, job(kind, 0)[0].weight)
            return "-"
    if kind == saved:
        old_model, old = job(saved, 3)
        assert_state_equal(optimizer.state_dict(), old.state_dict())
        step(old_model, old)
        step(model, optimizer)
        assert torch.equal(old_model.weight, model.weight)
    else:
        step(model, optimizer)  # it works
    return "w" if caught else "+"


#: What a load does, for the saved class in each row and the resumed one in each column: ours, then stock torch's.
#: "+" it resumes, and its next step works; "w" it warns and resumes; "-" it raises, and nothing has changed.
TABLE = """
            SGD mome Muon Adam Adam amsg NAda RAda Adam Spar Adag Adad Adaf RMSp cent Rpro ASGD LBFG
SGD         ++   --   --   --   --   --   --   --   --   --   --   --   --   --   --   --   --   --
momentum    -+   ++   w-   --   --   --   --   --   --   --   --   --   --   --   --   --   --   --
Muon        --   w-   ++   --   --   --   --   --   --   --   --   --   --   --   --   --   --   --
Adam        --   --   --   ++   w+   --   --   ++   --   +-   --   --   --   --   --   --   --   --
AdamW       --   --   --   w+   ++   --   --   w+   --   +-   --   --   --   --   --   --   --   --
amsgrad     --   --   --   --   --   ++   --   -+   --   --   --   --   --   --   --   --   --   --
NAdam       --   --   --   --   --   --   ++   -+   --   --   --   --   --   --   --   --   --   --
RAdam       --   --   --   +-   w-   --   --   ++   --   +-   --   --   --   --   --   --   --   --
Adamax      --   --   --   --   --   --   --   --   ++   --   --   --   --   --   --   --   --   --
SparseAdam  --   --   --   +-   +-   --   --   +-   --   +-   --   --   --   --   --   --   --   --
Adagrad     --   --   --   --   --   --   --   --   --   --   ++   --   --   --   --   --   --   --
Adadelta    --   --   --   --   --   --   --   --   --   --   --   ++   --   --   --   --   --   --
Adafactor   --   --   --   --   --   --   --   --   --   --   --   --   ++   --   --   --   --   --
RMSprop     --   --   --   --   --   --   --   --   --   --   --   --   --   ++   --   --   --   --
centered    --   --   --   --   --   --   --   --   --   --   --   --   --   --   ++   --   --   --
Rprop       --   --   --   --   --   --   --   --   --   --   --   --   --   --   --   ++   --   --
ASGD        --   --   --   --   --   --   --   --   --   --   --   --   --   --   --   --   ++   --
LBFGS       --   --   --   --   --   --   --   --   --   --   --   --   --   --   --   --   --   +-
"""
ROWS = {line.split()[0]: line.split()[1:] for line in TABLE.strip().splitlines()[1:]}
if not hasattr(optim, "Muon"):  # torch 2.8
    column = list(ROWS).index("Muon")
    del KINDS["Muon"], ROWS["Muon"]
    ROWS = {kind: cells[:column] + cells[column + 1 :] for kind, cells in ROWS.items()}


def test_table_has_every_optimizer():
    assert list(ROWS) == list(KINDS)
    classes = {
        value
        for value in vars(optim).values()
        if isinstance(value, type) and issubclass(value, optim.Optimizer)
    }
    assert classes - {optim.Optimizer} == {type(job(kind, 0)[1]) for kind in KINDS}


@pytest.mark.parametrize(
    "saved",
    [k if k in ("AdamW", "momentum") else pytest.param(k, marks=pytest.mark.slow) for k in KINDS],
)
def test_state_of_one_class_in_another(ckpt, saved):
    save_training_state(ckpt, *job(saved, 3), fsync=False, no_dist=True)
    assert [by_ours(ckpt, kind, saved) for kind in KINDS] == [cell[0] for cell in ROWS[saved]]


@pytest.mark.slow
@pytest.mark.parametrize("saved", KINDS)
def test_what_stock_does(ckpt, saved):
    _, optimizer = job(saved, 3)
    osd = optimizer.state_dict()
    named = {
        "state": {"weight": osd["state"].get(0, {})},
        "param_groups": [group | {"params": ["weight"]} for group in osd["param_groups"]],
    }
    dcp.save({"optim": named}, checkpoint_id=ckpt, no_dist=True)
    assert [by_stock(ckpt, kind) for kind in KINDS] == [cell[1] for cell in ROWS[saved]]


def test_message_names_both_sides(ckpt):
    save_training_state(ckpt, *job("Adam", 1), fsync=False)
    model, optimizer = job("amsgrad", 0)
    message = (
        r"checkpoint has exp_avg, exp_avg_sq, step of parameter 'weight'.*\(AdamW\).*makes in its "
        r"next step, exp_avg, exp_avg_sq, max_exp_avg_sq, step.*amsgrad \(True and False\)"
    )
    for load in (load_training_state, load_optim_state_dict):
        with pytest.raises(PlanError, match=message):
            load(ckpt, model, optimizer)
    report = load_training_state(ckpt, model, optimizer, partial=True)
    assert report.missing == ["optim.state.weight.max_exp_avg_sq"]
    assert optimizer.param_groups[0]["amsgrad"] is True
    assert not optimizer.state
    assert torch.equal(model.weight, job("Adam", 1)[0].weight)
    step(model, optimizer)


class Late(optim.SGD):
    """Makes a kind of state in its third step, as Lookahead does."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["at"] = state.get("at", 0) + 1
                if state["at"] == 3:
                    state["slow"] = param.detach().clone()


def test_optimizer_that_makes_state_late(ckpt):
    model = nn.Linear(4, 4, bias=False)

    def late(weight_decay=0.0):
        return Late(model.parameters(), lr=0.1, momentum=0.9, weight_decay=weight_decay)

    optimizer = late()
    for steps in (1, 3):
        while optimizer.state.get(model.weight, {}).get("at", 0) < steps:
            step(model, optimizer)
        save_training_state(f"{ckpt}/{steps}", model, optimizer, fsync=False)
        resumed = late()
        load_training_state(f"{ckpt}/{steps}", model, resumed)
        assert_state_equal(resumed.state_dict(), optimizer.state_dict())
    load_training_state(f"{ckpt}/1", model, optimizer)  # back to a step before there was any
    assert "slow" not in optimizer.state[model.weight]
    with pytest.raises(PlanError, match=r"at, momentum_buffer, slow.*weight_decay \(0.5 and 0.0\)"):
        load_training_state(f"{ckpt}/3", model, late(0.5))
    resumed = late(0.5)
    load_training_state(f"{ckpt}/3", model, resumed, keep_settings={"weight_decay"})
    assert "slow" in resumed.state[model.weight]


def test_checkpoint_of_an_older_torch(ckpt):
    """Settings that only one side has are no reason to refuse: older versions lack some, and schedulers add some."""
    model, optimizer = job("AdamW", 1)
    optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    del optimizer.param_groups[0]["decoupled_weight_decay"]
    save_training_state(ckpt, model, optimizer, fsync=False)
    model, resumed = job("AdamW", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_training_state(ckpt, model, resumed)
    assert resumed.param_groups[0]["decoupled_weight_decay"] is True
    assert resumed.param_groups[0]["initial_lr"] == optimizer.param_groups[0]["initial_lr"]
    step(model, resumed)


def test_error_changes_nothing(ckpt):
    """An optimizer that draws random numbers in its step changed the random state of the job."""

    class Noisy(optim.SGD):
        def step(self, closure=None):
            torch.rand(1)
            return super().step(closure)

    save_training_state(ckpt, *job("Adam", 1), fsync=False)
    model = nn.Linear(4, 4, bias=False)
    optimizer = Noisy(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    rate, random = optimizer.param_groups[0]["lr"], torch.get_rng_state()
    weight = model.weight.clone()
    gradient = model.weight.grad = torch.ones(4, 4)
    with pytest.raises(PlanError, match=r"\(Noisy\)"):
        load_training_state(ckpt, model, optimizer)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model.weight, weight)
    assert model.weight.grad is gradient
    assert optimizer.param_groups[0]["lr"] is rate
    assert not optimizer.state
