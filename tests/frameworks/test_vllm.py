"""Models that vLLM serves from training checkpoints. `make test-frameworks` runs it."""

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed: make test-frameworks")

import torch.distributed.checkpoint as dcp
import transformers
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader

import dcp_rs
from dcp_rs.errors import CheckpointNotFoundError, PlanError
from dcp_rs.integrations.vllm import DcpRsModelLoader, register
from frameworks.launch import launch
from support.places import ROOT

pytestmark = pytest.mark.timeout(1800)  # an engine takes its time to start

RUN = Path(__file__).with_name("vllm_run.py")


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128
    )
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.float32
    return transformers.LlamaForCausalLM(config).float()


def training_state(model):
    return {"model": model.state_dict(), "optimizer": {"moment": torch.ones(3)}, "step": 3}


def test_a_training_checkpoint_is_served_as_what_transformers_saved(tmp_path, monkeypatch):
    """The engine is vLLM's own, on CPUs; its plug-in is found by the entry point."""
    model = llama()
    model.save_pretrained(tmp_path / "hf")
    model.config.save_pretrained(tmp_path / "config")
    dcp_rs.save(training_state(model), tmp_path / "ckpt")
    # As pip lays out an entry point.
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "vllm.general_plugins"
    ]
    installed = tmp_path / "site" / "dcp_rs-0.2.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: dcp-rs\nVersion: 0.2.0\n")
    named = [f"{name} = {where}" for name, where in points.items()]
    (installed / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *named]))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'python'}:{tmp_path / 'site'}")
    launch(
        RUN,
        tmp_path / "result",
        f"dcp_rs={tmp_path / 'config'}={tmp_path / 'ckpt'}",
        f"dcp_rs={tmp_path / 'hf'}",
        f"auto={tmp_path / 'hf'}",
    )
    from_training, from_hf, by_vllm = json.loads((tmp_path / "result").read_text())
    assert len(by_vllm) == 8
    assert from_training == from_hf == by_vllm


class Model(torch.nn.Module):
    """What a loader knows of a model of vLLM: parameters under names of its own, and ``load_weights``."""

    def __init__(self, like):
        super().__init__()
        self.weights = torch.nn.ParameterDict()
        self.given = {}
        for name, tensor in like.items():
            self.weights[name.replace(".", "_")] = torch.nn.Parameter(torch.zeros_like(tensor))

    def load_weights(self, weights):
        loaded = set()
        for name, tensor in weights:
            self.given[name] = tensor.clone()
            loaded.add("weights." + name.replace(".", "_"))
        return loaded


def loader(**extra):
    register()
    register()
    made = get_model_loader(LoadConfig(load_format="dcp_rs", model_loader_extra_config=extra))
    assert type(made) is DcpRsModelLoader
    return made


@pytest.mark.parametrize("kind", ["native", "stock", "torch", "hf"])
def test_the_weights_of_the_model_are_given_and_nothing_else(tmp_path, kind):
    model, path = llama(), tmp_path / "ckpt"
    state = training_state(model)
    if kind == "native":
        dcp_rs.save(state, path)
    elif kind == "stock":
        dcp.save(state, checkpoint_id=path, no_dist=True)
    elif kind == "torch":
        torch.save(state, path)
    else:
        model.save_pretrained(path, max_shard_size="100KB")
    config = SimpleNamespace(model=str(path), hf_config=model.config, quantization=None)
    renames = (
        [{}]
        if kind == "hf"
        else [{}, {"include": "model.*", "rename": {"model": ""}, "threads": 2}]
    )
    for extra in renames:
        served = Model(model.state_dict())
        loader(**extra).load_weights(served, config)
        assert served.given.keys() == model.state_dict().keys()
        assert all(
            torch.equal(served.given[name], tensor) for name, tensor in model.state_dict().items()
        )


def test_weights_that_are_missing_are_an_error(tmp_path):
    model = llama()
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.1" not in name}
    dcp_rs.save({"model": state}, tmp_path / "ckpt")
    config = SimpleNamespace(
        model=str(tmp_path / "ckpt"), hf_config=model.config, quantization=None
    )
    with pytest.raises(PlanError, match=r"lacks 9 weights of the model, 'weights\.model_layers_1"):
        loader().load_weights(Model(model.state_dict()), config)
    loader(allow_partial_load=True).load_weights(Model(model.state_dict()), config)
    config.quantization = "fp8"
    loader().load_weights(Model(model.state_dict()), config)
    with pytest.raises(CheckpointNotFoundError):
        loader(checkpoint=str(tmp_path / "none")).download_model(config)
    loader().download_model(config)
    with pytest.raises(TypeError, match="treads"):
        loader(treads=2)
