"""Under torch's ``FakeTensorMode`` what is made has no memory: address 0 went to the engine, whose threads wrote there."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dcp_rs
from dcp_rs.errors import UnsupportedError
from support.places import data_files

WIDE = torch.arange(12.0).reshape(3, 4)


@pytest.fixture
def fake():
    return FakeTensorMode(allow_non_fake_inputs=True)


@pytest.fixture
def saved(ckpt):
    dcp_rs.save({"w": WIDE}, ckpt)
    return ckpt


def test_a_load_that_needs_memory_is_refused(saved, fake):
    state = {"w": torch.zeros(3, 4, dtype=torch.float64)}
    with fake, pytest.raises(UnsupportedError, match=r"no memory.*FakeTensorMode"):
        dcp_rs.load(state, saved, dtype_policy="cast")
    dcp_rs.load(state, saved, dtype_policy="cast")
    assert torch.equal(state["w"], WIDE.double())


def test_a_load_in_place_needs_none(saved, fake):
    state = {"w": torch.zeros(3, 4)}
    with fake:
        dcp_rs.load(state, saved)
    assert torch.equal(state["w"], WIDE)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_tensor_without_memory_is_refused(saved, fake):
    with fake:
        state = {"w": torch.empty(3, 4)}
    with pytest.raises(UnsupportedError, match=r"no memory"), fake:
        dcp_rs.load(state, saved)


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}])
def test_a_save_that_needs_memory_is_refused(ckpt, fake, options):
    state = {"w": WIDE.t()}
    with fake, pytest.raises(UnsupportedError, match=r"no memory"):
        dcp_rs.save(state, ckpt, **options)
    assert not data_files(ckpt)
