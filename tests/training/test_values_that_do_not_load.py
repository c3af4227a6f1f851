"""Values in ``extra`` that will not load again only warned when they were saved: the restart failed, with all of the run behind it."""

import datetime as dt
import enum
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import dcp_rs
from dcp_rs.errors import UnsafePickleError
from dcp_rs.optim import PerRank, load_training_state, save_training_state, training_state


class Mode(enum.Enum):
    FAST = 1


@dataclass
class Position:
    at: int = 3


class Holder:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return {"inner": {"value": self.state}}

    def load_state_dict(self, state):
        self.state = state["inner"]["value"]


@pytest.mark.parametrize(
    "value",
    [
        *(np.ones(2), Path("a"), Mode.FAST, Position(), deque([1]), dt.date(2026, 1, 2)),
        (torch.ones(1).expand(5_000_000),),  # a load bounds the memory
    ],
    ids=lambda v: type(v).__name__,
)
@pytest.mark.parametrize(
    "way", [lambda v: v, lambda v: {"a": [v]}, Holder, lambda v: PerRank(Holder(v), key=0)]
)
def test_a_value_that_will_not_load_is_refused_when_it_is_saved(tmp_path, value, way):
    model = torch.nn.Linear(1, 1)
    for save in (
        lambda extra: save_training_state(tmp_path / "ckpt", model, (), extra),
        lambda extra: training_state(model, (), extra),
    ):
        with pytest.raises(
            UnsafePickleError, match=r"extra\.it.*will not load.*strict_values=False"
        ):
            save({"it": way(value)})
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.*will not load")
def test_who_says_so_may_save_it(tmp_path):
    model, extra = torch.nn.Linear(1, 1), {"it": Mode.FAST}
    save_training_state(tmp_path, model, (), extra, strict_values=False)
    extra["it"] = None
    load_training_state(tmp_path, model, (), extra, weights_only=False)
    assert extra == {"it": Mode.FAST}
    dcp_rs.save(training_state(model, (), extra, strict_values=False), tmp_path)


@pytest.mark.filterwarnings("ignore:.*will not load")
def test_an_array_loads_into_an_array(tmp_path):
    model, extra = torch.nn.Linear(1, 1), {"it": np.zeros(3)}
    save_training_state(tmp_path, model, (), {"it": np.arange(3)}, strict_values=False)
    load_training_state(tmp_path, model, (), extra, weights_only=False)
    assert extra["it"].tolist() == [0, 1, 2]


def test_what_torch_allows_is_saved(tmp_path):
    model = torch.nn.Linear(1, 1)
    extra = {
        "a": OrderedDict(b=1),
        "c": Counter(x=2),
        "n": np.float64(1.5),
        "t": (1, "x", None),
        "e": {},
        "d": torch.float32,
    }
    save_training_state(tmp_path, model, (), extra)
    got = dict.fromkeys(extra)
    load_training_state(tmp_path, model, (), got)
    assert got == extra
