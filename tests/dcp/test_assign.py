"""Tensors that have memory are filled, whatever `dtype=` and `device=` say, unless `assign=True`.

`dcp_rs.load(model.state_dict(), path, dtype=torch.bfloat16)` replaced the entries of a dict that
nobody kept: it said "loaded 4.41 MB", and the model was as before. So it was with a model on meta.
"""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_rs
from support import assert_state_equal, run_ranks


def build():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].running_mean.fill_(1)
    return model


@pytest.fixture
def saved(tmp_path):
    model = build()
    dcp_rs.save(model.state_dict(), tmp_path, no_dist=True)
    return model, tmp_path


def test_the_model_of_a_state_dict_is_filled(saved, load):
    trained, path = saved
    model = build().bfloat16()
    with pytest.warns(UserWarning, match="dtype=torch.float64 does not change tensors"):
        load(model.state_dict(), path, dtype=torch.float64)
    assert_state_equal(model.state_dict(), copy.deepcopy(trained).bfloat16().state_dict())


def test_a_dtype_that_all_have_is_no_reason_to_warn(saved):
    trained, path = saved
    model = build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = dcp_rs.load(
            model.state_dict(), path, dtype=torch.float32, device="cpu", no_dist=True
        )
    assert_state_equal(model.state_dict(), trained.state_dict())
    assert report.replaced == 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_load_into_a_state_dict_on_meta_says_that_it_fills_no_model(saved, load, dtype):
    trained, path = saved
    with torch.device("meta"):
        model = build()
    state = model.state_dict()
    with pytest.warns(UserWarning, match=r"fills no tensor .*assign=True"):
        load(state, path, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the load fills no tensor")
        load(model.state_dict(), path, dtype=dtype, assign=True)  # it is meant
    model.load_state_dict(state, assign=True)
    want = trained if dtype is None else copy.deepcopy(trained).to(dtype)
    assert_state_equal(model.state_dict(), want.state_dict())


def test_a_model_that_is_in_part_on_meta_does_not_warn(saved):
    _, path = saved
    model = build()
    state = model.state_dict() | {"0.weight": torch.empty(4, 3, device="meta")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = dcp_rs.load(state, path, no_dist=True)
    assert report.replaced == 1
    assert "1 replaced" in str(report)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_assign_gives_a_module_the_new_tensors(tmp_path, dtype, device):
    trained = build()
    dcp_rs.save({"model": trained}, tmp_path, no_dist=True)
    with torch.device(device):
        model = build()
    report = dcp_rs.load({"model": model}, tmp_path, dtype=dtype, assign=True, no_dist=True)
    want = trained if dtype is None else copy.deepcopy(trained).to(dtype)
    assert_state_equal(model.state_dict(), want.state_dict())
    assert report.replaced == (9 if device == "meta" else 0 if dtype is None else 8)


def test_assign_replaces_tensors_of_another_dtype(saved, load):
    trained, path = saved
    state = build().state_dict()
    before = dict(state)
    load(state, path, dtype=torch.float64, assign=True)
    assert_state_equal(state, copy.deepcopy(trained).double().state_dict())
    assert state["0.weight"] is not before["0.weight"]
    assert state["1.num_batches_tracked"] is before["1.num_batches_tracked"]


def fill_shards(path):
    mesh = init_device_mesh("cpu", (2,))
    local = torch.zeros(2, 3)
    state = {"w": DTensor.from_local(local, mesh, [Shard(0)])}
    with pytest.warns(UserWarning, match="does not change tensors that have memory"):
        report = dcp_rs.load(state, path, dtype=torch.bfloat16)
    return state["w"].dtype, state["w"].to_local().sum().item(), report.replaced


def test_shards_are_filled_too(tmp_path):
    dcp_rs.save({"w": torch.ones(4, 3)}, tmp_path, no_dist=True)
    assert run_ranks(2, fill_shards, tmp_path) == [(torch.float32, 6.0, 0)] * 2
