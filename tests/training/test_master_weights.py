"""Fp32 state of bf16 parameters (master weights, momentum) came back as bf16: ``Optimizer.load_state_dict`` casts it."""

import pytest
import torch

from dcp_rs.optim import load_training_state, save_training_state


class WithMasterWeights(torch.optim.SGD):
    """Steps in fp32, and rounds once."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
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
