"""vLLM's plug-in without vLLM: a loader of the same name stands in for its own. `make test-frameworks` runs it with the real one."""

import importlib
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

    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
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
    dcp_rs.save({"model": {"w": torch.ones(3)}, "ema": {"w": torch.full((3,), 2.0)}}, tmp_path / "ckpt", no_dist=True)
    serve = SimpleNamespace(model=str(tmp_path / "ckpt"), hf_config=None, quantization=None)
    model = Model()
    with pytest.raises(PlanError, match=r"'ema\.w' and 'model\.w' would both be named 'w'"):
        loader(rename={"model": "", "ema": ""}).load_weights(model, serve)
    assert not model.w.any()
    loader(rename={"model": ""}, include="model.*").load_weights(model, serve)
    assert torch.equal(model.w, torch.ones(3))
