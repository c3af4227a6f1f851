"""Arguments and states that no load can take are refused in one sentence, when they are saved if possible."""

import enum
from pathlib import Path

import pytest
import torch
from torch import nn

from dcp_rs.errors import UnsafePickleError
from dcp_rs.optim import load_training_state, save_training_state, training_state
from support import assert_state_equal


def job():
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Wrapper:
    """Around an optimizer, as some libraries have it, and none itself. Its save worked, its load did not."""

    def __init__(self, optimizer):
        self.optimizer, self.state = optimizer, optimizer.state
        self.param_groups = optimizer.param_groups

    def state_dict(self):
        return self.optimizer.state_dict()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda m, o: (m.state_dict(), o),
            r"model is OrderedDict: pass a torch.nn.Module",
        ),
        (lambda m, o: (None, o), r"model is NoneType: pass a torch.nn.Module"),
        (lambda m, o: ([m, 3], o), r"model is int: pass"),
        (lambda m, o: (m, Wrapper(o)), r"is Wrapper: pass a torch.optim.Optimizer"),
        (lambda m, o: (m, [o, m]), r"is Linear: pass a torch.optim.Optimizer"),
        (
            lambda m, o: (m, o.state_dict()),
            r"an optimizer is dict: pass a torch.optim.Optimizer",
        ),
        (lambda m, o: (m, o, [3]), r"extra is of type list: pass a dict"),
    ],
)
def test_wrong_type(ckpt, wrong, message):
    save_training_state(ckpt, *job(), fsync=False)
    for call in (
        lambda *a: load_training_state(ckpt, *a),
        lambda *a: save_training_state(ckpt, *a),
        training_state,
    ):
        with pytest.raises(TypeError, match=message) as caught:
            call(*wrong(*job()))
        assert len(str(caught.value)) < 240


def test_no_optimizer_is_none(ckpt):
    model, _ = job()
    save_training_state(ckpt, model, None, fsync=False)
    load_training_state(ckpt, model, None)


class Mode(enum.Enum):
    FAST = 1


@pytest.mark.parametrize("value", [Mode.FAST, Path("a"), (Mode.FAST,)])
@pytest.mark.parametrize("where", ["state", "group"])
def test_value_of_an_optimizer_that_will_not_load(ckpt, where, value):
    """It was saved with a warning, and the restart failed."""
    model, optimizer = job()
    if where == "state":
        optimizer.state[model.weight]["mode"] = value
    else:
        optimizer.param_groups[0]["mode"] = value
    for save in (
        lambda: save_training_state(ckpt, model, optimizer),
        lambda: training_state(model, optimizer),
    ):
        with pytest.raises(UnsafePickleError, match=r"value 'optim.*mode' will not load"):
            save()
    assert not ckpt.exists()
    with pytest.warns(UserWarning, match="will not load"):
        save_training_state(ckpt, model, optimizer, strict_values=False, fsync=False)
    load_training_state(ckpt, model, optimizer, weights_only=False)


class Hooked(nn.Linear):
    """A hook of ``state_dict`` that adds a key, renames one, or divides one."""

    def __init__(self, way):
        super().__init__(4, 4)
        self.way = way
        self.register_state_dict_post_hook(changed)

    def _load_from_state_dict(self, state, prefix, *rest):
        if self.way == "adds":
            assert state.pop(f"{prefix}added").tolist() == [1.0]
        if self.way == "divides":
            state[f"{prefix}weight"] = torch.cat([state.pop(f"{prefix}weight.{n}") for n in "qk"])
        if self.way == "renames":
            state[f"{prefix}weight"] = state.pop(f"{prefix}w")
        super()._load_from_state_dict(state, prefix, *rest)


def changed(module, state, prefix, _):
    if module.way == "adds":
        state[f"{prefix}added"] = torch.ones(1)
    if module.way == "divides":
        halves = state.pop(f"{prefix}weight").chunk(2)
        state.update({f"{prefix}weight.{n}": half for n, half in zip("qk", halves, strict=True)})
    if module.way == "renames":
        state[f"{prefix}w"] = state.pop(f"{prefix}weight")


@pytest.mark.parametrize("way", ["adds", "divides", "renames"])
def test_hooks_of_state_dict(ckpt, way):
    """``get_model_state_dict`` of torch fails for such keys."""
    saved, model = (nn.Sequential(Hooked(way)) for _ in range(2))
    save_training_state(ckpt, saved, fsync=False)
    load_training_state(ckpt, model)
    assert_state_equal(model.state_dict(), saved.state_dict())


def test_module_without_parameters(ckpt):
    save_training_state(ckpt, nn.ReLU(), extra={"step": 1}, fsync=False)
    extra = {"step": 0}
    load_training_state(ckpt, nn.ReLU(), extra=extra)
    assert extra == {"step": 1}


def test_wrappers_within_a_model(ckpt):
    """The name of a compiled layer had its prefix in the middle."""
    saved, model, plain = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3))
    saved[0] = torch.compile(saved[0])
    optimizer = torch.optim.SGD(saved.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    save_training_state(ckpt, saved, optimizer, fsync=False)
    model[1] = torch.compile(model[1])
    for other in (model, plain, torch.compile(plain)):
        load_training_state(ckpt, other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
        assert all(map(torch.equal, other.parameters(), saved.parameters()))
