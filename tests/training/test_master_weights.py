"""Fp32 state of bf16 parameters (master weights, momentum) came back as bf16: ``Optimizer.load_state_dict`` casts it."""

import pytest
import torch

from dcp_rs.errors import PlanError
from dcp_rs.optim import load_optim_state_dict, load_training_state, save_training_state
from support import assert_state_equal, run_ranks
from support.training import Model, fsdp1, quiet, train_step


class WithMasterWeights(torch.optim.SGD):
    """Steps in fp32, and rounds once."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue  # FSDP1 has no part of it on this rank
                state = self.state[param]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["master"], state["momentum"] = (
                        param.float(),
                        torch.zeros_like(param, dtype=torch.float32),
                    )
                state["step"] += 1
                state["momentum"].mul_(0.9).add_(param.grad.float())
                state["master"].add_(state["momentum"], alpha=-group["lr"])
                param.copy_(state["master"])


def start(seed, dtype=torch.bfloat16, kind=WithMasterWeights):
    torch.manual_seed(seed)
    model = torch.nn.Linear(7, 3, dtype=dtype)
    return model, kind(model.parameters(), lr=0.01)


def train(model, optimizer, steps):
    for i in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 7), 1.0 + i, dtype=model.weight.dtype)).sum().backward()
        optimizer.step()


def test_master_weights_come_back_bit_for_bit(tmp_path):
    model, optimizer = start(0)
    train(model, optimizer, 3)
    save_training_state(tmp_path, model, optimizer)
    again, resumed = start(1)
    load_training_state(tmp_path, again, resumed)
    for param, other in zip(model.parameters(), again.parameters(), strict=True):
        for name, value in optimizer.state[param].items():
            assert resumed.state[other][name].dtype == torch.float32
            assert torch.equal(resumed.state[other][name], value), name
    train(model, optimizer, 3)
    train(again, resumed, 3)
    assert all(map(torch.equal, again.parameters(), model.parameters()))


def test_master_weights_that_a_load_leaves_out_stay_as_they_are(tmp_path):
    model, optimizer = start(0)
    train(model, optimizer, 3)
    save_training_state(tmp_path, model, optimizer)
    again, resumed = start(1)
    train(again, resumed, 2)
    before = {name: value.clone() for name, value in resumed.state[again.bias].items()}
    load_training_state(tmp_path, again, resumed, exclude="*bias*")
    assert_state_equal(dict(resumed.state[again.bias]), before)


class Nested(torch.optim.SGD):
    """Has its state one dict down, and a list in that."""

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            new = {"master": param.float() / 3, "counts": [torch.tensor(0)]}
            self.state[param].setdefault("inner", new)["counts"][0] += 257


@pytest.mark.filterwarnings("error")
def test_nested_state_keeps_its_dtype(tmp_path):
    model, optimizer = start(0, kind=Nested)
    train(model, optimizer, 1)
    save_training_state(tmp_path, model, optimizer)
    again, resumed = start(1, kind=Nested)
    load_training_state(tmp_path, again, resumed)
    assert_state_equal(resumed.state_dict()["state"], optimizer.state_dict()["state"])


def on_ranks(path):
    def sharded(seed, use_orig_params):
        torch.manual_seed(seed)
        model = Model().bfloat16()
        del model.frozen  # flat parameters are trained or frozen as a whole
        model = fsdp1(model, use_orig_params=use_orig_params)
        return model, WithMasterWeights(model.parameters(), lr=0.01)

    with quiet():
        for use_orig_params in (True, False):
            where = f"{path}/{use_orig_params}"
            model, optimizer = sharded(0, use_orig_params)
            train_step(model, [optimizer], 0)
            save_training_state(where, model, optimizer, fsync=False)
            again, resumed = sharded(1, use_orig_params)
            train_step(again, [resumed], 1)
            load_training_state(where, again, resumed)
            assert_state_equal(resumed.state_dict()["state"], optimizer.state_dict()["state"])


def test_master_weights_under_fsdp1(tmp_path):
    run_ranks(2, on_ranks, tmp_path)


@pytest.mark.filterwarnings("ignore:.*cast on loading")
def test_state_of_a_model_in_another_dtype_goes_with_it(tmp_path):
    """Adam cannot step a bf16 parameter with moments in fp32: what was trained in fp32 and goes on in bf16 is cast."""
    model, optimizer = start(0, torch.float32, torch.optim.Adam)
    train(model, optimizer, 2)
    save_training_state(tmp_path, model, optimizer)
    again, resumed = start(1, torch.bfloat16, torch.optim.Adam)
    load_training_state(tmp_path, again, resumed)
    assert resumed.state[again.weight]["exp_avg"].dtype == torch.bfloat16
    train(again, resumed, 1)


def test_counters_that_the_optimizer_does_not_make_keep_their_dtype(tmp_path):
    model, optimizer = start(0, torch.float32, torch.optim.SGD)
    state = {"inner": {"step": torch.tensor(257.0)}, "seen": torch.tensor(257)}
    optimizer.state[model.weight] = state
    save_training_state(tmp_path, model, optimizer)
    again, resumed = start(1, torch.bfloat16, torch.optim.SGD)
    load_optim_state_dict(tmp_path, again, resumed)
    assert_state_equal(dict(resumed.state[again.weight]), state)


@pytest.mark.filterwarnings("ignore:.*cast on loading")
@pytest.mark.parametrize("steps", [0, 1])
def test_master_weights_of_a_model_in_another_dtype_stay(tmp_path, steps):
    """The optimizer makes them in fp32 whatever the model is in, and they came back as bf16."""
    model, optimizer = start(0, torch.float32)
    train(model, optimizer, 2)
    save_training_state(tmp_path, model, optimizer)
    again, resumed = start(1, torch.bfloat16)
    train(again, resumed, steps)
    load_training_state(tmp_path, again, resumed)
    for name in ("master", "momentum"):
        state = resumed.state[again.weight][name]
        assert state.dtype == torch.float32
        assert torch.equal(state, optimizer.state[model.weight][name])


class Outer:
    """Trains float32 copies of the parameters by another optimizer, as some libraries do."""

    def __init__(self, model):
        self.copies = [param.detach().float() for param in model.parameters()]
        self.optimizer = torch.optim.Adam(self.copies)

    def step(self):
        for copy in self.copies:
            copy.grad = torch.ones_like(copy)
        self.optimizer.step()

    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict(), "copies": self.copies}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["optimizer"])
        for copy, saved in zip(self.copies, state["copies"], strict=True):
            copy.copy_(saved)


def test_errors_say_where_an_optimizer_of_copies_goes(tmp_path):
    """They led to its inner optimizer, which is none of the model, and to names={'optimizer': 'extra...'}."""
    model, optimizer = start(0)
    outer = Outer(model)
    outer.step()
    with pytest.raises(TypeError, match=r"if it trains copies of the parameters, all of it in ext"):
        save_training_state(tmp_path, model, outer)
    with pytest.raises(PlanError, match=r"pass the optimizer and the copies in extra="):
        save_training_state(tmp_path, model, outer.optimizer)
    save_training_state(tmp_path, model, None, {"outer": outer})
    with pytest.raises(PlanError, match=r"or load it in extra= if it was saved there"):
        load_training_state(tmp_path, model, optimizer)
    again = Outer(start(1)[0])
    load_training_state(tmp_path, model, None, {"outer": again})
    assert_state_equal(again.state_dict(), outer.state_dict())


def test_errors_name_the_part_that_may_be_left_out(tmp_path):
    model, optimizer = start(0)
    save_training_state(tmp_path, model, None)
    with pytest.raises(PlanError, match=r"To load the rest, pass partial=\{'optimizer'\}"):
        load_training_state(tmp_path, model, optimizer)
    load_training_state(tmp_path, model, optimizer, partial={"optimizer"})
    with pytest.raises(PlanError, match=r"no 'extra.step'. To keep .* pass partial=\{'extra'\}"):
        load_training_state(tmp_path, model, None, {"step": 0})
    load_training_state(tmp_path, model, None, extra := {"step": 5}, partial={"extra"})
    assert extra == {"step": 5}
    part = torch.nn.Linear(7, 3, bias=False)
    save_training_state(tmp_path, part, torch.optim.SGD(part.parameters()))
    with pytest.raises(PlanError, match=r"no saved .* pass partial=\{'optimizer'\}"):
        load_optim_state_dict(tmp_path, model, torch.optim.SGD(model.parameters()))
