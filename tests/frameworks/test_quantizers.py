"""Weights that compressed-tensors, modelopt and comfy-kitchen quantized, loaded as these libraries decode them. `make test-frameworks` runs it."""

import json

import pytest
import torch

compressed_tensors = pytest.importorskip(
    "compressed_tensors", reason="compressed-tensors is not installed: make test-frameworks"
)
comfy_kitchen = pytest.importorskip(
    "comfy_kitchen.tensor", reason="comfy-kitchen is not installed: make test-frameworks"
)
modelopt = pytest.importorskip(
    "modelopt.torch.quantization", reason="nvidia-modelopt is not installed: make test-frameworks"
)

import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import (
    FP8QTensor,
    MXFP4QTensor,
    MXFP8QTensor,
    NVFP4QTensor,
)
from safetensors.torch import load_file, save_file

import dcp_rs

SHAPE = 256, 384


def ranges(weight, args):
    """The smallest and the largest element of each part with a scale."""
    rows, columns = weight.shape
    parts = {
        "tensor": lambda: weight.reshape(1, -1),
        "channel": lambda: weight[:, None],
        "group": lambda: weight.unflatten(-1, (-1, args.group_size)),
        "tensor_group": lambda: weight.unflatten(-1, (-1, args.group_size)),
        "block": lambda: (
            weight.reshape(rows // 128, 128, columns // 128, 128).transpose(1, 2).flatten(2)
        ),
    }[args.strategy]()
    return parts.amin(-1), parts.amax(-1)


@pytest.mark.parametrize(
    "preset",
    ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "MXFP4", "NVFP4", "W4A16", "W4A16_ASYM"],
)
def test_compressed_tensors(tmp_path, preset):
    torch.manual_seed(0)
    weight = torch.randn(SHAPE)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    args = scheme.weights
    global_scale = {}
    if preset == "NVFP4":
        global_scale["global_scale"] = generate_gparam(weight.amin(), weight.amax())
    scale, zero_point = calculate_qparams(*ranges(weight, args), args, **global_scale)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    state |= {f"weight_{name}": tensor for name, tensor in global_scale.items()}
    kind = infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(kind.value)
    stored = compressor.compress(dict(state), scheme)
    stored = {name: tensor.detach().contiguous() for name, tensor in stored.items()}
    save_file(
        {f"m.{name}": tensor for name, tensor in stored.items()}, tmp_path / "model.safetensors"
    )
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=kind.value)
    config = {"quantization_config": config.model_dump(mode="json")}
    (tmp_path / "config.json").write_text(json.dumps(config))

    loaded = dcp_rs.open(tmp_path, dequantize=torch.float32)
    assert list(loaded) == ["m.weight"]
    whole = compressor.decompress(dict(stored), scheme)
    expected = whole["weight"].float()
    if preset == "NVFP4":  # it decodes in bfloat16, which has too few digits for these scales
        numbers = unpack_fp4_from_uint8(stored["weight_packed"], *SHAPE, dtype=torch.float32)
        scale = stored["weight_scale"].float()
        expected = dequantize(numbers, scale, args=args, dtype=torch.float32, **global_scale)
    assert torch.equal(loaded["m.weight"], expected)
    assert (loaded["m.weight"] - weight).abs().max() < 1


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).bfloat16().eval()


@pytest.mark.parametrize(
    ("config", "kind", "group"),
    [
        ("FP8_DEFAULT_CFG", FP8QTensor, None),
        ("FP8_PER_CHANNEL_PER_TOKEN_CFG", FP8QTensor, None),
        ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", FP8QTensor, 128),
        ("MXFP8_DEFAULT_CFG", MXFP8QTensor, 32),
        ("MXFP4_DEFAULT_CFG", MXFP4QTensor, 32),
        ("NVFP4_DEFAULT_CFG", NVFP4QTensor, 16),
    ],
)
def test_modelopt(tmp_path, config, kind, group):
    model = llama()
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    text = torch.arange(32)[None]
    modelopt.quantize(model, getattr(modelopt, config), forward_loop=lambda model: model(text))
    export_hf_checkpoint(model, export_dir=str(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")

    loaded = dcp_rs.open(tmp_path, dequantize=torch.float32)
    assert {name: loaded.info(name).shape for name in loaded} == shapes
    codes = [name for name in loaded if f"{name}_scale" in stored]
    assert len(codes) == 7
    for name in codes:
        scale = stored[f"{name}_scale"]
        how = {"scale": scale if group else scale.reshape(-1, 1)}
        if group:
            how["block_sizes"] = {-1: group}
        if kind is FP8QTensor and group:  # scales keep the dimensions within a block
            how = {
                "scale": scale.reshape(scale.shape[::2] or (1, 1)),
                "block_sizes": {-1: group, -2: group},
            }
        if kind is NVFP4QTensor:
            how["double_scale"] = stored[f"{name}_scale_2"]
        whole = kind(shapes[name], torch.float32, stored[name])
        assert torch.equal(loaded[name], whole.dequantize(dtype=torch.float32, **how)), name


@pytest.mark.parametrize("config", ["FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG"])
def test_fused_experts_of_modelopt(tmp_path, config):
    """One scale for all experts, or one for each."""
    torch.manual_seed(0)
    sizes = transformers.Llama4TextConfig(
        architectures=["Llama4ForCausalLM"],
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        intermediate_size_mlp=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=3,
        interleave_moe_layer_step=1,
    )
    model = transformers.Llama4ForCausalLM(sizes).bfloat16().eval()
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    text = torch.arange(32)[None]
    modelopt.quantize(model, getattr(modelopt, config), forward_loop=lambda model: model(text))
    export_hf_checkpoint(model, export_dir=str(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")

    loaded = dcp_rs.open(tmp_path, dequantize=torch.float32)
    assert {name: loaded.info(name).shape for name in loaded} == shapes
    experts = [name for name in loaded if f"{name}_weight_scale" in stored]
    assert len(experts) == 2
    for name in experts:
        scale = stored[f"{name}_weight_scale"]
        how = {"scale": scale.reshape(-1, 1, 1) if scale.ndim else scale}
        whole = FP8QTensor(shapes[name], torch.float32, stored[name])
        assert torch.equal(loaded[name], whole.dequantize(dtype=torch.float32, **how)), name


@pytest.mark.parametrize("shape", [(128, 128), (160, 224), (96, 2048)])
@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ("float8_e4m3fn", comfy_kitchen.TensorCoreFP8Layout),
        ("mxfp8", comfy_kitchen.TensorCoreMXFP8Layout),
        ("nvfp4", comfy_kitchen.TensorCoreNVFP4Layout),
    ],
)
def test_comfy_kitchen(tmp_path, form, layout, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    stored, params = layout.quantize(weight)
    tensors = layout.state_dict_tensors(stored, params)
    about = torch.tensor(list(json.dumps({"format": form}).encode()), dtype=torch.uint8)
    file = tmp_path / "model.safetensors"
    tensors = {f"m.weight{end}": tensor for end, tensor in tensors.items()}
    save_file({**tensors, "m.comfy_quant": about}, file)

    loaded = dcp_rs.open(file, dequantize=torch.float32)
    assert list(loaded) == ["m.weight"]
    assert torch.equal(loaded["m.weight"], layout.dequantize(stored, params))
    assert (loaded["m.weight"] - weight).abs().max() < 1
