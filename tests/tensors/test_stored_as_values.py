"""Tensors of the state dict that the checkpoint holds as values: quantized, sparse and other classes.

Each took the place of the caller's tensor in the dict: the model kept its old weights, and the
report counted the entry as loaded.
"""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader
from dcp_rs.errors import PlanError
from support import run_ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(quantize_per|torch.quint8|dtypes|sparse|prototype)"
)

WAYS = {
    "load": lambda state, path, **o: dcp_rs.load(
        state, path, no_dist=True, weights_only=False, **o
    ),
    "state dict": lambda state, path: dcp_rs.load_state_dict(
        state, RsReader(path, weights_only=False), no_dist=True
    ),
    "reader": lambda state, path: dcp.load(
        state, storage_reader=RsReader(path, weights_only=False), no_dist=True
    ),
    "planner": lambda state, path: dcp.load(
        state,
        storage_reader=RsReader(path, weights_only=False),
        planner=RsLoadPlanner(),
        no_dist=True,
    ),
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def load(request):
    return request.param


def per_tensor(values, scale=0.5, dtype=torch.qint8):
    return torch.quantize_per_tensor(values, scale, 3, dtype)


def per_channel(values):
    scales = torch.tensor([0.5, 0.25])
    return torch.quantize_per_channel(values, scales, torch.tensor([0, 0]), 0, torch.qint8)


ONES = torch.ones(2, 2)
#: What is saved, and a template of other values.
KINDS = {
    "qint8": (per_tensor(torch.arange(4.0)), per_tensor(torch.zeros(4))),
    "quint8": (
        per_tensor(torch.arange(4.0), dtype=torch.quint8),
        per_tensor(torch.zeros(4), dtype=torch.quint8),
    ),
    "channels": (per_channel(ONES), per_channel(ONES * 0)),
    "coo": (torch.eye(3).to_sparse(), torch.eye(3)[[1, 2, 0]].to_sparse() * 2),
    "csr": (torch.eye(3).to_sparse_csr(), torch.eye(3)[[1, 2, 0]].to_sparse_csr()),
    "two": (TwoTensor(ONES, ONES * 2), TwoTensor(ONES * 0, ONES * 0)),
    "parameter": (
        TwoTensor(ONES, ONES * 2),
        torch.nn.Parameter(TwoTensor(ONES * 0, ONES * 0)),
    ),
}


def same(got, want):
    if isinstance(want, TwoTensor):
        got = got.detach()
        return torch.equal(got.a, want.a) and torch.equal(got.b, want.b)
    if want.is_quantized:
        return torch.equal(got.dequantize(), want.dequantize()) and got.dtype == want.dtype
    return torch.equal(got.to_dense(), want.to_dense())


@pytest.mark.parametrize("kind", KINDS)
def test_the_callers_tensor_is_filled(kind, load, tmp_path):
    saved, template = KINDS[kind]
    with torch.serialization.safe_globals([TwoTensor]):
        dcp_rs.save({"model": {"w": saved, "x": torch.ones(3)}}, tmp_path, no_dist=True)
    template = template.clone() if kind != "parameter" else template
    # As in a model's state dict: it holds views of the model's memory.
    view = template.detach()
    state = {"model": {"w": view, "x": torch.zeros(3)}}
    load(state, tmp_path)
    assert state["model"]["w"] is view
    assert same(template, saved)
    assert bool(state["model"]["x"].all())


REFUSED = {
    "int": (5, torch.zeros(3), "int"),
    "list": ([1.0, 2.0], torch.zeros(2), "list"),
    "text": ("a", torch.zeros(2), "str"),
    "none": (None, torch.zeros(2), "NoneType"),
    "fraction": (2.5, torch.zeros((), dtype=torch.int64), "float"),
    "quantized": (per_tensor(torch.arange(4.0)), torch.zeros(4), "Tensor of torch.qint8"),
    "scale": (per_tensor(ONES), per_tensor(ONES * 0, 1.0), "scales differ"),
    "elements": (torch.eye(3).to_sparse(), torch.zeros(3, 3).to_sparse(), "elements differ"),
    "scheme": (per_channel(ONES), per_tensor(ONES * 0), "Tensor of torch.qint8"),
    "layout": (torch.eye(3).to_sparse(), torch.zeros(3, 3), "Tensor with layout torch.sparse_coo"),
    "shape": (torch.eye(3).to_sparse(), torch.zeros(4, 4).to_sparse(), r"shape \(3, 3\)"),
    "number on meta": (5, torch.zeros(3, device="meta"), "int"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_value_that_fills_no_tensor_is_refused_by_class(kind, load, tmp_path):
    saved, template, named = REFUSED[kind]
    if template.is_meta and load in (WAYS["reader"], WAYS["planner"]):
        return  # torch makes it real itself
    dcp_rs.save({"w": saved}, tmp_path, no_dist=True)
    state = {"w": template}
    with pytest.raises((PlanError, CheckpointException), match=f"'w'.*{named}"):
        load(state, tmp_path)
    assert state["w"] is template


def test_a_partial_load_leaves_it_and_says_so(tmp_path):
    dcp_rs.save({"w": 5, "x": torch.ones(2)}, tmp_path, no_dist=True)
    state = {"w": torch.zeros(3), "x": torch.zeros(2)}
    report = dcp_rs.load(state, tmp_path, allow_partial_load=True, no_dist=True)
    assert not state["w"].any()
    assert state["x"].all()
    assert [odd.name for odd in report.shape_mismatched] == ["w"]
    assert report.entries_loaded == 1


@pytest.mark.parametrize(
    ("number", "dtype"),
    [(7, torch.float32), (7, torch.int64), (2.5, torch.float64), (True, torch.int8)],
)
def test_a_number_fills_a_tensor_without_dimensions(number, dtype, load, tmp_path):
    """As the step of an optimizer, which was a number in older torch."""
    dcp_rs.save({"step": number}, tmp_path, no_dist=True)
    step = torch.zeros((), dtype=dtype)
    state = {"step": step}
    load(state, tmp_path)
    assert state["step"] is step
    assert step.item() == number


class Holder(torch.nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("w", buffer)


@pytest.mark.parametrize("kind", ["scale", "elements"])
def test_a_module_gets_what_was_saved(kind, tmp_path):
    """Its own load_state_dict copies into its own tensors, and so can change scales."""
    saved, template, _ = REFUSED[kind]
    dcp_rs.save({"model": Holder(saved)}, tmp_path, no_dist=True)
    module = Holder(template.clone())
    mine = module.w
    dcp_rs.load({"model": module}, tmp_path, no_dist=True)
    assert module.w is mine
    assert same(mine, saved)


def test_casts_of_values_follow_the_policy(tmp_path):
    dcp_rs.save({"w": torch.eye(3).double().to_sparse()}, tmp_path, no_dist=True)
    state = {"w": torch.eye(3).to_sparse() * 2}
    with pytest.raises(PlanError, match="dtype_policy"):
        dcp_rs.load(state, tmp_path, dtype_policy="error", no_dist=True)
    with pytest.warns(UserWarning, match="cast"):
        report = dcp_rs.load(state, tmp_path, no_dist=True)
    assert len(report.dtype_mismatched) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cast")
        dcp_rs.load(state, tmp_path, dtype_policy="cast", no_dist=True)
    assert torch.equal(state["w"].to_dense(), torch.eye(3))


def load_shard(path):
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)])}
    with pytest.raises(PlanError, match=r"'w'.*DTensor.*torch.qint8"):
        dcp_rs.load(state, path, weights_only=False)
    return bool(state["w"].to_local().any())


def test_a_shard_of_a_tensor_is_refused(tmp_path):
    dcp_rs.save({"w": per_tensor(torch.ones(4, 2))}, tmp_path, no_dist=True)
    assert run_ranks(2, load_shard, tmp_path) == [False, False]
