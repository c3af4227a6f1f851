"""vLLM's plug-in without vLLM: a loader of the same name stands in for its own. `make test-frameworks` runs it with the real one."""

import importlib
import logging
import sys
import types
from types import SimpleNamespace

import pytest
import torch

import dcp_rs
from dcp_rs.errors import PlanError


@pytest.fixture
def loader(monkeypatch):
    class BaseModelLoader:
        def __init__(self, load_config):
            self.load_config = load_config

    modules = ("model_executor", "model_executor.model_loader", "config", "distributed")
    for name in ("vllm", *(f"vllm.{module}" for module in modules)):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["vllm.config"].get_current_vllm_config_or_none = lambda: None
    sys.modules["vllm.model_executor.model_loader"].BaseModelLoader = BaseModelLoader
    monkeypatch.delitem(sys.modules, "dcp_rs.integrations.vllm", raising=False)
    module = importlib.import_module("dcp_rs.integrations.vllm")
    yield lambda **extra: module.DcpRsModelLoader(SimpleNamespace(model_loader_extra_config=extra))
    sys.modules.pop("dcp_rs.integrations.vllm", None)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(3))

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
        return {"w"}


def test_two_weights_of_one_name_are_no_weight(loader, tmp_path):
    """The one that came last was served."""
    dcp_rs.save(
        {"model": {"w": torch.ones(3)}, "ema": {"w": torch.full((3,), 2.0)}},
        tmp_path / "ckpt",
        no_dist=True,
    )
    serve = SimpleNamespace(model=str(tmp_path / "ckpt"), hf_config=None, quantization=None)
    model = Model()
    with pytest.raises(PlanError, match=r"'ema\.w' and 'model\.w' would both be named 'w'"):
        loader(rename={"model": "", "ema": ""}).load_weights(model, serve)
    assert not model.w.any()
    loader(rename={"model": ""}, include="model.*").load_weights(model, serve)
    assert torch.equal(model.w, torch.ones(3))


class Mixture(torch.nn.Module):
    """A model of vLLM with four experts, of which this rank holds two: it takes what it is given."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.Parameter(torch.zeros(3))
        self.given = {}

    def load_weights(self, weights):
        self.given = dict(weights)
        return {"norm"}


EXPERT = "model.layers.0.mlp.experts"
ON = {"enable_expert_parallel": True, "enable_ep_weight_filter": True, "enable_eplb": False}


@pytest.mark.parametrize("form", ["single", "fused"])
@pytest.mark.parametrize(
    ("parallel", "is_moe", "read"),
    [
        (ON, True, {2, 3}),
        (ON | {"enable_eplb": True}, True, {0, 1, 2, 3}),  # copies of any expert may be wanted
        (ON | {"enable_ep_weight_filter": False}, True, {0, 1, 2, 3}),
        (ON | {"enable_expert_parallel": False}, True, {0, 1, 2, 3}),
        (
            {"enable_expert_parallel": True, "enable_eplb": False},
            True,
            {0, 1, 2, 3},
        ),  # before the filter
        (ON, False, {0, 1, 2, 3}),
    ],
)
def test_experts_of_other_ranks_are_not_read(
    loader, tmp_path, caplog, form, parallel, is_moe, read
):
    """Every rank read all of them, and vLLM threw most away. Fused experts had names that it does not know."""
    gate_up, down = torch.rand(4, 512, 64), torch.rand(4, 64, 256)
    single = {}
    for number in range(4):
        gate, up = gate_up[number].chunk(2)
        for part, tensor in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[number])):
            single[f"{EXPERT}.{number}.{part}.weight"] = tensor.clone()
    experts = (
        single
        if form == "single"
        else {f"{EXPERT}.gate_up_proj": gate_up, f"{EXPERT}.down_proj": down}
    )
    dcp_rs.save(
        {"model": experts | {"norm": torch.ones(3)}, "step": 3}, tmp_path / "ckpt", no_dist=True
    )
    config = {"model_type": "qwen3_moe", "num_experts": 4}
    serve = SimpleNamespace(model=str(tmp_path / "ckpt"), hf_config=config, quantization=None)
    serve.is_moe, serve.get_num_experts = is_moe, lambda: 4
    current = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel, expert_placement_strategy="linear")
    )
    sys.modules["vllm.config"].get_current_vllm_config_or_none = lambda: current
    sys.modules["vllm.distributed"].get_ep_group = lambda: SimpleNamespace(
        rank_in_group=1, world_size=2
    )
    model = Mixture()
    with caplog.at_level(logging.INFO, "vllm"):
        loader(rename={"model": ""}, include="model.*").load_weights(model, serve)
    expected = {name: tensor for name, tensor in single.items() if int(name.split(".")[5]) in read}
    assert model.given.keys() == expected.keys() | {"norm"}
    assert all(torch.equal(model.given[name], tensor) for name, tensor in expected.items())
    # 4 experts of 196,608 bytes.
    said = "read 393 kB" if len(read) == 2 else "read 786 kB"
    assert caplog.messages[-1].startswith(said)
    assert caplog.messages[-1].endswith(
        f"skipped {'393 kB' if len(read) == 2 else '0 B'} of experts of other ranks"
    )
