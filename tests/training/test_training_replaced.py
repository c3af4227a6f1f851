"""Training state that another save replaces while it is loaded: groups were of the one save, and everything else of the other."""

import pytest
import torch
import torch.distributed as dist

import dcp_rs
from dcp_rs.errors import CheckpointReplacedError
from dcp_rs.optim import load_optim_state_dict, load_training_state, save_training_state
from dcp_rs.training.load_optimizer import OptimizerLoad
from support import run_ranks

ALWAYS = 1000


def made(value, rate):
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            optimizer.state[parameter]["exp_avg"].fill_(value)
    return model, optimizer


def save(path, number):
    save_training_state(
        path, *made(float(number), number / 100), extra={"step": number}, no_dist=True, fsync=False
    )


def seen(model, optimizer, extra):
    """The numbers of the saves that something is of."""
    values = [
        p
        for parameter in model.parameters()
        for p in (parameter, optimizer.state[parameter]["exp_avg"])
    ]
    numbers = {int(number) for tensor in values for number in tensor.flatten().tolist()}
    return (
        numbers | {round(group["lr"] * 100) for group in optimizer.param_groups} | {extra["step"]}
    )


def overtaking(path, times, numbers):
    """``OptimizerLoad``, which a load makes before it reads; then save after save is committed."""
    prepare = OptimizerLoad.__init__

    def overtaken(load, *args):
        prepare(load, *args)
        if len(numbers) < times:
            numbers.append(len(numbers) + 2)
            save(path, numbers[-1])

    return overtaken


@pytest.fixture
def overtaken_by(ckpt, monkeypatch):
    """Called with how many saves are to overtake the load of save 1. Gives the numbers of those that did."""

    def begin(times):
        save(ckpt, 1)
        numbers = []
        monkeypatch.setattr(OptimizerLoad, "__init__", overtaking(ckpt, times, numbers))
        return numbers

    return begin


def test_all_of_it_is_of_one_save(ckpt, overtaken_by):
    overtaken_by(3)
    model, optimizer = made(9.0, 0.9)
    extra = {"step": 9}
    report = load_training_state(ckpt, model, optimizer, extra)
    assert seen(model, optimizer, extra) == {4}
    assert not report.missing
    assert not report.unexpected


def test_an_optimizer_alone(ckpt, overtaken_by):
    overtaken_by(2)
    model, optimizer = made(3.0, 0.9)
    load_optim_state_dict(ckpt, model, optimizer)
    assert seen(model, optimizer, {"step": 3}) == {3}


def test_where_it_never_ends_nothing_is_changed(ckpt, overtaken_by):
    numbers = overtaken_by(ALWAYS)
    model, optimizer = made(90.0, 0.9)
    extra = {"step": 90}
    with pytest.raises(CheckpointReplacedError):
        load_training_state(ckpt, model, optimizer, extra)
    assert seen(model, optimizer, extra) == {90}
    assert 1 < len(numbers) < 80


def load_on_ranks(path):
    prepare = OptimizerLoad.__init__
    OptimizerLoad.__init__ = overtaking(path, 2 if dist.get_rank() == 0 else 0, [])
    try:
        model, optimizer = made(9.0, 0.9)
        extra = {"step": 9}
        load_training_state(path, model, optimizer, extra)
    finally:
        OptimizerLoad.__init__ = prepare
    return seen(model, optimizer, extra)


def test_ranks_have_all_the_same(ckpt):
    save(ckpt, 1)
    assert run_ranks(2, load_on_ranks, ckpt) == [{3}, {3}]


def test_views_of_an_iterator_count_for_the_save_that_came_meanwhile(ckpt, monkeypatch):
    """The load that began again had no views."""
    model, optimizer = made(0.0, 0.1)
    model.weight.data = torch.arange(9.0).view(3, 3)
    save_training_state(ckpt, model, optimizer, no_dist=True, fsync=False)
    prepare = OptimizerLoad.__init__

    def overtaken(load, *args):
        monkeypatch.undo()
        prepare(load, *args)
        save_training_state(ckpt, model, optimizer, no_dist=True, fsync=False)

    monkeypatch.setattr(OptimizerLoad, "__init__", overtaken)
    loaded, its_optimizer = made(9.0, 0.1)
    views = iter([dcp_rs.Transpose("model.weight", (1, 0))])
    load_training_state(ckpt, loaded, its_optimizer, views=views)
    assert OptimizerLoad.__init__ is prepare
    assert torch.equal(loaded.weight, model.weight.T)
