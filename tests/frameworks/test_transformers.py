"""Models of transformers, diffusers and peft: from training checkpoints, and into folders that they load. `make test-frameworks` runs it."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: make test-frameworks"
)

import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import dcp_rs
from dcp_rs.errors import CheckpointExistsError, PlanError
from dcp_rs.integrations.transformers import from_pretrained, save_pretrained
from frameworks import transformers_run
from frameworks.launch import launch
from frameworks.transformers_run import MODELS, make

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def llama(*, tied=False, dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


def trained(model):
    """A training state: the model, and an optimizer that has taken a step."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}


def same(model, expected):
    mine, theirs = model.state_dict(), expected.state_dict()
    assert list(mine) == list(theirs)
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name], tensor), name


def is_tied(model):
    return (
        model.get_input_embeddings().weight.data_ptr()
        == model.get_output_embeddings().weight.data_ptr()
    )


def tokenizer_files(folder):
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 7}')
    (folder / "merges.txt").write_text("a b")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["native", "stock", "torch", "hf"])
def test_a_model_from_a_checkpoint_of_any_kind(tmp_path, kind, tied):
    model = llama(tied=tied)
    state = trained(model)
    path = tmp_path / "ckpt"
    if kind == "native":
        dcp_rs.save(state, path)
    elif kind == "stock":
        dcp.save(state, checkpoint_id=path)
    elif kind == "torch":
        torch.save(state, path)
    else:
        model.save_pretrained(path, max_shard_size="20KB")
    config = None if kind == "hf" else model.config
    for cls in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        loaded = from_pretrained(cls, path, config=config)
        same(loaded, model)
        assert not loaded.training
        assert is_tied(loaded) == tied
    half = from_pretrained(transformers.LlamaForCausalLM, path, config=config, dtype=torch.bfloat16)
    same(half, llama_like(model, torch.bfloat16))


def llama_like(model, dtype):
    copy = transformers.LlamaForCausalLM(model.config).to(dtype)
    copy.load_state_dict(model.state_dict())
    return copy


def test_the_model_owns_its_memory(tmp_path):
    model = llama()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = from_pretrained(
        transformers.LlamaForCausalLM, tmp_path / "model.pt", config=model.config
    )
    (tmp_path / "model.pt").write_bytes(b"")
    same(loaded, model)


def test_names_by_prefix_by_callable_and_found_out(tmp_path):
    model = llama()
    state = model.state_dict()
    wrapped = {f"module.net.{name}": value for name, value in state.items()}
    dcp_rs.save(wrapped | {"module.other": torch.ones(3)}, tmp_path / "ckpt")
    cls = transformers.LlamaForCausalLM
    for rename in (None, {"module.net": ""}, lambda name: name.removeprefix("module.net.")):
        same(
            from_pretrained(
                cls, tmp_path / "ckpt", config=model.config, rename=rename, exclude="*.other"
            ),
            model,
        )
    dcp_rs.save({"ema": state, "model": state}, tmp_path / "two")
    with pytest.raises(PlanError, match=r"'ema\.' and 'model\.'.*include='ema"):
        from_pretrained(cls, tmp_path / "two", config=model.config)
    same(from_pretrained(cls, tmp_path / "two", config=model.config, include="ema.*"), model)


def test_weights_that_are_missing_are_no_random_ones(tmp_path):
    model = llama()
    state = {name: value for name, value in model.state_dict().items() if "layers.1" not in name}
    dcp_rs.save({"model": state}, tmp_path / "ckpt")
    with pytest.raises(PlanError, match=r"lacks 9 weights of the model, 'model\.layers\.1"):
        from_pretrained(transformers.LlamaForCausalLM, tmp_path / "ckpt", config=model.config)
    loaded, info = from_pretrained(
        transformers.LlamaForCausalLM,
        tmp_path / "ckpt",
        config=model.config,
        allow_partial_load=True,
        output_loading_info=True,
    )
    assert len(info["missing_keys"]) == 9
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        from_pretrained(transformers.LlamaForCausalLM, tmp_path / "ckpt")


@pytest.mark.parametrize("cls", [transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM])
def test_generation_is_configured_as_by_transformers(tmp_path, cls):
    """Only the configuration of the model was read: what ends a text, and how it is drawn, was lost."""
    model = llama()
    model.generation_config.update(eos_token_id=[5, 7, 9], temperature=0.3, do_sample=True)
    model.save_pretrained(tmp_path / "hf")
    dcp_rs.save({"model": model.state_dict()}, tmp_path / "ckpt")
    want = cls.from_pretrained(tmp_path / "hf").generation_config
    assert want.eos_token_id == [5, 7, 9]
    own = transformers.GenerationConfig(eos_token_id=4)
    for config in (tmp_path / "hf", str(tmp_path / "hf" / "config.json")):
        loaded = from_pretrained(cls, tmp_path / "ckpt", config=config)
        assert loaded.generation_config == want
    assert from_pretrained(cls, tmp_path / "hf").generation_config == want
    assert from_pretrained(cls, tmp_path / "hf", config=model.config).generation_config == want
    assert (
        from_pretrained(cls, tmp_path / "hf", generation_config=own).generation_config.eos_token_id
        == 4
    )
    # Where no file says so, the configuration of the model does, as in models that are older than
    # that file.
    (tmp_path / "hf" / "generation_config.json").unlink()
    fields = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(fields | {"num_beams": 3}))
    assert cls.from_pretrained(tmp_path / "hf").generation_config.num_beams == 3
    assert (
        from_pretrained(cls, tmp_path / "ckpt", config=tmp_path / "hf").generation_config.num_beams
        == 3
    )
    assert (
        from_pretrained(cls, tmp_path / "ckpt", config=model.config).generation_config.num_beams
        is None
    )


def test_fields_of_the_configuration_may_be_given(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "hf")
    classifier = from_pretrained(
        transformers.AutoModelForSequenceClassification,
        tmp_path / "hf",
        num_labels=3,
        allow_partial_load=True,
    )
    assert classifier.score.weight.shape == (3, 16)
    for cls in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        loaded = from_pretrained(
            cls, tmp_path / "hf", use_cache=False, dtype=torch.bfloat16, attn_implementation="eager"
        )
        assert not loaded.config.use_cache
        assert loaded.config._attn_implementation == "eager"
        same(loaded, llama_like(model, torch.bfloat16))


def test_a_model_for_text_of_a_composite_configuration(tmp_path):
    torch.manual_seed(0)
    text = transformers.Qwen3_5TextConfig(
        **SMALL, num_key_value_heads=2, head_dim=8, layer_types=["full_attention"] * 2
    )
    model = transformers.Qwen3_5ForCausalLM(text).eval()
    transformers.Qwen3_5Config(text_config=text.to_dict()).save_pretrained(tmp_path / "config")
    dcp_rs.save({"model": model.state_dict()}, tmp_path / "ckpt")
    for cls in (transformers.AutoModelForCausalLM, transformers.Qwen3_5ForCausalLM):
        loaded = from_pretrained(cls, tmp_path / "ckpt", config=tmp_path / "config")
        assert type(loaded) is transformers.Qwen3_5ForCausalLM
        same(loaded, model)


CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel

class OwnConfig(PreTrainedConfig):
    model_type = "of-ones-own"

    def __init__(self, width=4, **more):
        self.width = width
        super().__init__(**more)

class Own(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.inner = torch.nn.Linear(config.width, config.width)
        self.post_init()
"""


def test_a_model_whose_code_is_beside_it(tmp_path, monkeypatch):
    """That its code is trusted was told to the configuration alone."""
    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    base = tmp_path / "base"
    base.mkdir()
    (base / "own.py").write_text(CODE)
    classes = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.Own"}
    (base / "config.json").write_text(
        json.dumps({"model_type": "of-ones-own", "width": 3, "auto_map": classes})
    )
    state = {"inner.weight": torch.ones(3, 3), "inner.bias": torch.ones(3)}
    dcp_rs.save({"model": state}, tmp_path / "ckpt")
    loaded = from_pretrained(
        transformers.AutoModel, tmp_path / "ckpt", config=base, trust_remote_code=True
    )
    assert {name: tensor.sum().item() for name, tensor in loaded.state_dict().items()} == {
        "inner.weight": 9,
        "inner.bias": 3,
    }
    with pytest.raises(ValueError, match="trust_remote_code"):
        from_pretrained(
            transformers.AutoModel, tmp_path / "ckpt", config=base, trust_remote_code=False
        )


def test_a_device_map_of_accelerate(tmp_path):
    pytest.importorskip("accelerate")
    model = llama(tied=True)
    dcp_rs.save({"model": model.state_dict()}, tmp_path / "ckpt")
    loaded = from_pretrained(
        transformers.LlamaForCausalLM,
        tmp_path / "ckpt",
        config=model.config,
        device_map={"": "cpu"},
    )
    same(loaded, model)
    auto = from_pretrained(
        transformers.AutoModelForCausalLM, tmp_path / "ckpt", config=model.config, device_map="auto"
    )
    same(auto.cpu(), model)


def test_fused_experts_load_from_both_forms(tmp_path):
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=2)
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval()
    dcp_rs.save({"model": model.state_dict()}, tmp_path / "training")
    model.save_pretrained(tmp_path / "hf")
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) != set(model.state_dict())
    for folder in ("training", "hf"):
        same(
            from_pretrained(transformers.MixtralForCausalLM, tmp_path / folder, config=config),
            model,
        )


@pytest.mark.timeout(900)  # a start of transformers on every rank
def test_two_ranks_read_their_slices(tmp_path):
    for name in MODELS:
        model = make(name)
        dcp_rs.save({"model": model.state_dict()}, tmp_path / name / "training")
        model.save_pretrained(tmp_path / name / "hf")
    printed = launch(Path(transformers_run.__file__), tmp_path, ranks=2)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(found) == 2 * (3 + 4 + 4)
    for one in found:
        assert one["wrong"] == [], one
        assert one["agree"], one
        # Norms, routers and some projections are whole on each rank.
        assert one["held"] < 0.75 * one["whole"], one
        assert one["read"] <= 1.01 * one["held"], one


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_no_expert_is_lost_where_transformers_loads_what_was_saved(name, tmp_path):
    model = make(name)
    dcp_rs.save({"model": model.state_dict()}, tmp_path / "ckpt")
    model.config.save_pretrained(tmp_path / "base")
    save_pretrained(
        tmp_path / "ckpt",
        tmp_path / "out",
        config=tmp_path / "base",
        rename={"model": ""},
        include="model.*",
    )
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    same(loaded, model)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "theirs")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_transformers_loads_our_save(tmp_path):
    model = llama(tied=True)
    dcp_rs.save(trained(model), tmp_path / "ckpt")
    base = tmp_path / "base"
    model.save_pretrained(base)
    tokenizer_files(base)
    out = tmp_path / "out"
    with pytest.raises(FileNotFoundError, match="config="):
        save_pretrained(tmp_path / "ckpt", out)
    how = {"config": base, "rename": {"model": ""}, "include": "model.*"}
    save_pretrained(tmp_path / "ckpt", out, **how)
    assert sorted(os.listdir(out)) == sorted(os.listdir(base))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    same(loaded, model)
    assert is_tied(loaded)
    with pytest.raises(CheckpointExistsError, match="remove it first"):
        save_pretrained(tmp_path / "ckpt", out, **how)
    shutil.rmtree(out)
    save_pretrained(tmp_path / "ckpt", out, **how, shards=3, dtype="bf16")
    assert len(list(out.glob("model-0000?-of-00003.safetensors"))) == 3
    assert (out / "merges.txt").read_text() == "a b"
    assert not (out / "model.safetensors").exists()
    same(
        transformers.AutoModelForCausalLM.from_pretrained(out, dtype="bfloat16"),
        llama_like(model, torch.bfloat16),
    )
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["base", "ckpt", "out"]


def test_a_snapshot_of_the_hub_opens_indexes_and_converts(tmp_path):
    model = llama(tied=True)
    model.save_pretrained(tmp_path / "plain", max_shard_size="20KB")
    tokenizer_files(tmp_path / "plain")
    blobs, snapshot = (tmp_path / "models--org--name" / part for part in ("blobs", "snapshots/abc"))
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted((tmp_path / "plain").iterdir())):
        file.rename(blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    before = {blob: blob.read_bytes() for blob in blobs.iterdir()}
    same(from_pretrained(transformers.AutoModelForCausalLM, snapshot), model)
    save_pretrained(snapshot, tmp_path / "out")
    same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), model)
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())
    dcp_rs.index(snapshot)
    same(from_pretrained(transformers.AutoModelForCausalLM, snapshot), model)
    assert {blob: blob.read_bytes() for blob in blobs.iterdir()} == before
    same(transformers.AutoModelForCausalLM.from_pretrained(snapshot), model)


def test_diffusers_loads_our_save(tmp_path):
    diffusers = pytest.importorskip(
        "diffusers", reason="diffusers is not installed: make test-frameworks"
    )
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    unet.save_config(tmp_path / "config")
    dcp_rs.save({"unet": unet.state_dict(), "step": 1}, tmp_path / "ckpt")
    how = {"config": tmp_path / "config", "rename": {"unet": ""}, "include": "unet.*"}
    save_pretrained(tmp_path / "ckpt", tmp_path / "out", **how)
    assert (tmp_path / "out" / "diffusion_pytorch_model.safetensors").is_file()
    same(diffusers.UNet2DModel.from_pretrained(tmp_path / "out"), unet)
    shutil.rmtree(tmp_path / "out")
    save_pretrained(tmp_path / "ckpt", tmp_path / "out", **how, shards=2)
    index = json.loads(
        (tmp_path / "out" / "diffusion_pytorch_model.safetensors.index.json").read_text()
    )
    assert set(index["weight_map"]) == set(unet.state_dict())
    same(diffusers.UNet2DModel.from_pretrained(tmp_path / "out"), unet)


def test_peft_loads_our_save(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-frameworks")
    adapted = peft.get_peft_model(
        llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "theirs")
    dcp_rs.save({"model": adapted.state_dict()}, tmp_path / "ckpt")
    save_pretrained(
        tmp_path / "ckpt",
        tmp_path / "out",
        config=tmp_path / "theirs",
        include="*.lora_*",
        rename=lambda name: name.removeprefix("model.").replace(".default.", "."),
    )
    mine, theirs = (
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("out", "theirs")
    )
    assert set(mine) == set(theirs)
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "out")
    same(loaded, adapted)
