"""Parameter groups that differ between the save and the load.

One group was saved, and two were resumed: both got its settings, without a word.
"""

import re
import warnings

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from dcp_rs.errors import PlanError
from dcp_rs.optim import load_optim_state_dict, load_training_state, save_training_state
from support import run_ranks
from support.training import CPU, quiet


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        for name in "abcd":
            self.register_parameter(name, nn.Parameter(torch.ones(4)))

    def forward(self, x):
        return x * self.a + x * self.b + x * self.c + x * self.d


def job(*groups, steps=0, kind=optim.AdamW):
    """A job with these groups: names of parameters, and settings."""
    model = Model()
    params = [
        {"params": [getattr(model, name) for name in names]} | settings
        for names, settings in groups
    ]
    optimizer = kind(params, lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    return model, optimizer


def saved(ckpt, *groups):
    model, optimizer = job(*groups, steps=2)
    save_training_state(ckpt, model, optimizer, fsync=False)
    return optimizer


@pytest.fixture(autouse=True)
def strict():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def settings(optimizer, name):
    return [group[name] for group in optimizer.param_groups]


def refused(ckpt, model, optimizer, message):
    before = [group.copy() for group in optimizer.param_groups]
    for load in (load_training_state, load_optim_state_dict):
        with pytest.raises(PlanError, match=message):
            load(ckpt, model, optimizer)
    assert [group | {"params": 0} for group in optimizer.param_groups] == [
        group | {"params": 0} for group in before
    ]
    assert torch.equal(model.a, torch.ones(4))
    assert not optimizer.state


DECAY, NONE = {"weight_decay": 0.1}, {"weight_decay": 0.0}


def test_one_group_becomes_two(ckpt):
    saved(ckpt, ("abcd", DECAY))
    model, resumed = job(("ab", DECAY), ("cd", NONE))
    refused(
        ckpt,
        model,
        resumed,
        r"group 0 of optimizer 0 and group 1 of optimizer 0 were saved in one group, and differ in "
        r"weight_decay \(0.1 and 0.0\).*keep_settings=\{'weight_decay'\}",
    )
    load_training_state(ckpt, model, resumed, keep_settings={"weight_decay"})
    assert settings(resumed, "weight_decay") == [0.1, 0.0]
    assert len(resumed.state) == 4


def test_one_group_becomes_two_of_equal_settings(ckpt):
    saved(ckpt, ("abcd", DECAY))
    model, resumed = job(("ab", DECAY), ("cd", DECAY))
    load_training_state(ckpt, model, resumed)
    assert len(resumed.state) == 4


def test_two_groups_become_one(ckpt):
    saved(ckpt, ("ab", DECAY), ("cd", NONE))
    model, resumed = job(("abcd", DECAY))
    refused(ckpt, model, resumed, r"saved in groups that differ in weight_decay \(0.1 and 0.0\)")
    load_training_state(ckpt, model, resumed, keep_settings={"weight_decay"})
    assert settings(resumed, "weight_decay") == [0.1]
    saved(ckpt, ("ab", DECAY), ("cd", DECAY))
    load_training_state(ckpt, *job(("abcd", DECAY)))


def test_parameter_in_another_group(ckpt):
    saved(ckpt, ("abc", DECAY), ("d", NONE))
    model, resumed = job(("ab", DECAY), ("cd", NONE))
    refused(ckpt, model, resumed, r"parameters of group 1 .* differ in weight_decay")
    load_training_state(ckpt, model, resumed, keep_settings=True)
    assert settings(resumed, "weight_decay") == [0.1, 0.0]


def test_groups_in_another_order(ckpt):
    saved(ckpt, ("ab", DECAY), ("cd", NONE))
    model, resumed = job(("dc", NONE), ("ba", DECAY))
    load_training_state(ckpt, model, resumed)
    assert settings(resumed, "weight_decay") == [0.0, 0.1]


def scheduled(*groups, steps=0, kind):
    """A job with a scheduler, and the learning rates of its parameters after some steps."""
    model, optimizer = job(*groups, steps=steps)
    return model, optimizer, {"schedule": kind(optimizer)}


def rates(model, optimizer, extra, steps=3):
    for _ in range(steps):
        optimizer.step()
        extra["schedule"].step()
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    return [rate.get(id(param)) for param in model.parameters()]


def by_lambda(optimizer):
    return optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def in_sequence(optimizer):
    after = optim.lr_scheduler.ConstantLR(optimizer)
    return optim.lr_scheduler.SequentialLR(optimizer, [by_lambda(optimizer), after], [9])


FAST, SLOW = {"lr": 0.4}, {"lr": 0.2}


@pytest.mark.parametrize("kind", [by_lambda, in_sequence])
@pytest.mark.parametrize(
    ("before", "now"),
    [
        ([("ab", FAST), ("cd", SLOW)], [("cd", SLOW), ("ab", FAST)]),
        ([("ab", FAST), ("cd", SLOW)], [("cd", SLOW)]),
        ([("ab", FAST), ("cd", FAST)], [("abcd", FAST)]),
        ([("abcd", FAST)], [("ab", FAST), ("cd", FAST)]),
    ],
    ids=["order", "removed", "one", "two"],
)
def test_scheduler_of_groups_that_moved(ckpt, before, now, kind):
    """Its rates go by the number of the group: those of two groups were exchanged, silently."""
    saved = scheduled(*before, steps=2, kind=kind)
    rates(*saved)
    save_training_state(ckpt, *saved, fsync=False)
    resumed = scheduled(*now, kind=kind)
    load_training_state(ckpt, *resumed)
    found = rates(*resumed)
    assert all(rate in (None, want) for rate, want in zip(found, rates(*saved), strict=True))


def test_schedulers_of_several_optimizers(ckpt):
    def build(order):
        model, first = job(("ab", FAST))
        second = optim.AdamW([{"params": [getattr(model, name)]} | lr for name, lr in order])
        extra = {"first": by_lambda(first), "second": by_lambda(second)}
        for _ in range(2):
            model(torch.ones(4)).sum().backward()
            first.step()
            second.step()
        extra["first"].step()
        extra["second"].step()
        return model, [first, second], extra

    model, optimizers, extra = build([("c", FAST), ("d", SLOW)])
    save_training_state(ckpt, model, optimizers, extra, fsync=False)
    resumed, others, again = build([("d", SLOW), ("c", FAST)])
    load_training_state(ckpt, resumed, others, again)
    assert again["first"].state_dict() == extra["first"].state_dict()
    assert again["second"].base_lrs == [0.2, 0.4]
    assert extra["second"].base_lrs == [0.4, 0.2]


def test_numbers_with_names_of_parameters(ckpt):
    """An optimizer of named parameters has them in the file: they went by number, silently."""
    model = Model()
    optimizer = optim.AdamW(model.named_parameters())
    (model.a * 2 + model.b * 3 + model.c * 4 + model.d * 5).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{ckpt}.pt")
    other = Model()
    for resumed in (
        optim.AdamW(reversed(list(other.named_parameters()))),
        optim.AdamW([other.d, other.b, other.c, other.a]),
        optim.AdamW([other.b]),
    ):
        load_training_state(f"{ckpt}.pt", other, resumed)
        for name in "b" if len(resumed.state) == 1 else "abcd":
            found, want = resumed.state[getattr(other, name)], optimizer.state[getattr(model, name)]
            assert torch.equal(found["exp_avg"], want["exp_avg"])


def test_group_removed_and_added(ckpt):
    saved(ckpt, ("ab", DECAY), ("cd", NONE))
    model, resumed = job(("cd", NONE))
    load_training_state(ckpt, model, resumed)
    assert len(resumed.state) == 2
    saved(ckpt, ("ab", DECAY))
    model, resumed = job(("ab", DECAY), ("cd", NONE))
    refused(ckpt, model, resumed, r"parameter 'c' \(and 1 more\), which no saved optimizer has")
    load_training_state(ckpt, model, resumed, partial=True)
    assert settings(resumed, "weight_decay") == [0.1, 0.0]


def test_groups_without_parameters(ckpt):
    saved(ckpt, ("abcd", {}), ("", DECAY), ("", NONE))
    model, resumed = job(("abcd", {}), ("", DECAY), ("", NONE))
    load_training_state(ckpt, model, resumed)
    assert settings(resumed, "weight_decay")[1:] == [0.1, 0.0]
    model, resumed = job(("abcd", {}), ("", {"weight_decay": 0.7}))
    load_training_state(ckpt, model, resumed)  # nothing tells which of the two it is
    assert settings(resumed, "weight_decay")[1:] == [0.7]


def test_settings_that_are_replaced_are_named(ckpt):
    saved(ckpt, ("abcd", DECAY | {"betas": (0.8, 0.9)}))
    model, resumed = job(("abcd", {"lr": 0.7}))
    with pytest.warns(UserWarning, match="the saved settings replace") as caught:
        load_training_state(ckpt, model, resumed)
    (message,) = [str(warning.message) for warning in caught]
    assert "weight_decay 0.01 -> 0.1 (group 0 of optimizer 0)" in message
    assert "betas (0.9, 0.999) -> (0.8, 0.9)" in message
    assert "lr " not in message  # a scheduler changes it
    assert settings(resumed, "lr") == [0.1]


@pytest.mark.parametrize("keep", [True, {"weight_decay", "lr"}, ["lr", "weight_decay"]])
def test_settings_that_are_kept(ckpt, keep):
    optimizer = saved(ckpt, ("abcd", DECAY))
    for load in (load_training_state, load_optim_state_dict):
        model, resumed = job(("abcd", {"lr": 0.7} | NONE))
        load(ckpt, model, resumed, keep_settings=keep)
        assert settings(resumed, "lr") == [0.7]
        assert settings(resumed, "weight_decay") == [0.0]
        old = [state["exp_avg"] for state in optimizer.state.values()]
        new = [state["exp_avg"] for state in resumed.state.values()]
        assert all(map(torch.equal, old, new))


@pytest.mark.parametrize(
    ("keep", "error", "message"),
    [
        ({"wd"}, PlanError, r"no optimizer has a setting 'wd'; they have amsgrad, betas"),
        ("lr", TypeError, r"keep_settings='lr': pass True, or a set of names"),
        (3, TypeError, r"keep_settings=3"),
    ],
)
def test_setting_that_there_is_not(ckpt, keep, error, message):
    saved(ckpt, ("abcd", DECAY))
    with pytest.raises(error, match=message):
        load_training_state(ckpt, *job(("abcd", DECAY)), keep_settings=keep)


def wrapped(kind, optimizer, **settings):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with quiet():
        if kind == "fsdp2":
            fully_shard(model)
        else:
            model = FullyShardedDataParallel(
                model, device_id=CPU, use_orig_params=kind == "fsdp1_orig"
            )
    made = optimizer(model.parameters(), lr=0.1, **settings)
    model(torch.ones(1, 4)).sum().backward()
    return model, made


def other_class_and_groups(path):
    for kind in ("fsdp1", "fsdp1_orig", "fsdp2"):
        model, optimizer = wrapped(kind, optim.AdamW, weight_decay=0.1)
        optimizer.step()
        with quiet():
            save_training_state(f"{path}/{kind}", model, optimizer, fsync=False)
            for other, named in (
                (lambda p, **k: optim.SGD(p, momentum=0.9, **k), "momentum_buffer"),
                (lambda p, **k: optim.AdamW(p, amsgrad=True, **k), "max_exp_avg_sq"),
            ):
                model, resumed = wrapped(kind, other)
                with pytest.raises(PlanError, match=named):
                    load_training_state(f"{path}/{kind}", model, resumed)
                assert not resumed.state
            model, resumed = wrapped(kind, optim.AdamW)
            load_training_state(f"{path}/{kind}", model, resumed, keep_settings={"weight_decay"})
            assert settings(resumed, "weight_decay") == [0.01]
            resumed.step()


def test_sharded_optimizers_are_compared(tmp_path):
    run_ranks(2, other_class_and_groups, tmp_path)


def test_advice_works(ckpt):
    """The option that a message names makes the load succeed."""
    saved(ckpt, ("abcd", DECAY))
    model, resumed = job(("ab", DECAY | {"eps": 1e-6}), ("cd", NONE))
    with pytest.raises(PlanError) as caught:
        load_training_state(ckpt, model, resumed)
    names = set(re.findall(r"'(\w+)'", str(caught.value).partition("keep_settings=")[2]))
    assert names == {"weight_decay", "eps"}
    load_training_state(ckpt, model, resumed, keep_settings=names)
