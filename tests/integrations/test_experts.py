"""Experts of mixtures, for servers: which ones a rank reads, and what fused ones are exported as. It needs no framework."""

import json

import pytest
import torch
from safetensors.torch import load_file

import dcp_rs
from dcp_rs.integrations._experts import names_of_rank, single_experts
from dcp_rs.integrations.transformers import save_pretrained

LAYER = "model.layers.0.mlp.experts"
SHARED = {
    "model.norm.weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.mlp.shared_experts.up_proj.weight",
}


def weights(experts, end="up_proj.weight", layer=LAYER):
    return {f"{layer}.{number}.{end}" for number in experts}


@pytest.mark.parametrize(
    ("experts", "rank", "size", "placement", "own"),
    [
        (8, 0, 2, "linear", {0, 1, 2, 3}),
        (8, 1, 2, "linear", {4, 5, 6, 7}),
        (8, 0, 3, "linear", {0, 1, 2}),  # the first ranks have one more
        (8, 1, 3, "linear", {3, 4, 5}),
        (8, 2, 3, "linear", {6, 7}),
        (8, 0, 1, "linear", set(range(8))),
        (2, 2, 4, "linear", set()),
        (8, 1, 2, "round_robin", {1, 3, 5, 7, 4, 6}),  # vLLM may place them linearly all the same
        (8, 0, 4, "round_robin", {0, 4, 1}),
        (8, 1, 2, "of tomorrow", set(range(8))),
    ],
)
def test_a_rank_reads_its_experts(experts, rank, size, placement, own):
    names = weights(range(experts)) | SHARED
    read = names_of_rank(names, rank=rank, size=size, experts=experts, placement=placement)
    assert read == weights(own) | SHARED


@pytest.mark.parametrize("experts", [1, 7, 60, 256])
@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_together_the_ranks_read_every_expert(experts, placement):
    names = weights(range(experts))
    read = [
        names_of_rank(names, rank=r, size=8, experts=experts, placement=placement) for r in range(8)
    ]
    assert set().union(*read) == names
    assert placement != "linear" or sum(map(len, read)) == experts


@pytest.mark.parametrize(
    "end", ["up_proj.weight_scale", "w13.input_scale", "up_proj.weight_scale_2", "up_proj.bias"]
)
def test_scales_of_all_experts_are_read(end):
    """Kernels take the greatest scale over all experts: vLLM's own filter once left the others' as they were, at random."""
    names = weights(range(8)) | weights(range(8), "up_proj.weight_packed") | weights(range(8), end)
    read = names_of_rank(names, rank=0, size=8, experts=8, placement="linear")
    assert read == weights([0]) | weights([0], "up_proj.weight_packed") | weights(range(8), end)


@pytest.mark.parametrize(
    "names",
    [
        {f"{LAYER}.up_proj.weight"},  # fused
        weights(range(4)),  # of another number: it is not placed as the others
        weights(range(1, 9)),
        weights(range(16)),
        weights(range(8), layer="model.layers.0.mlp.shared_experts"),
    ],
)
def test_names_without_all_experts_are_all_read(names):
    assert names_of_rank(names, rank=1, size=2, experts=8, placement="linear") == names


def test_the_names_may_begin_with_the_experts():
    names = weights(range(4), layer="experts")
    assert names_of_rank(names, rank=1, size=2, experts=4, placement="linear") == weights(
        [2, 3], layer="experts"
    )


FUSED = {
    "model.layers.0.mlp.gate.weight": torch.rand(4, 6),
    f"{LAYER}.gate_up_proj": torch.rand(4, 10, 6),
    f"{LAYER}.down_proj": torch.rand(4, 6, 5),
    "model.norm.weight": torch.ones(6),
}
CONFIG = {"model_type": "qwen3_moe", "num_experts": 4}


def test_fused_experts_are_exported_one_by_one(tmp_path):
    """They had names that no server but transformers knows."""
    dcp_rs.save(
        {"model": FUSED, "optimizer": {"m": torch.zeros(2)}}, tmp_path / "ckpt", no_dist=True
    )
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(CONFIG))
    how = {"config": tmp_path / "base", "rename": {"model": ""}, "include": "model.*"}
    save_pretrained(tmp_path / "ckpt", tmp_path / "out", **how)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    expected = {"model.norm.weight": FUSED["model.norm.weight"]}
    expected["model.layers.0.mlp.gate.weight"] = FUSED["model.layers.0.mlp.gate.weight"]
    for number in range(4):
        gate, up = FUSED[f"{LAYER}.gate_up_proj"][number].chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": FUSED[f"{LAYER}.down_proj"][number]}
        expected |= {f"{LAYER}.{number}.{part}.weight": tensor for part, tensor in parts.items()}
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("names", "config"),
    [
        ({f"model.{name}": name for name in FUSED if "gate_up" not in name}, CONFIG),
        ({name: name for name in FUSED}, {"model_type": "llama"}),
        ({name: name for name in FUSED}, {"model_type": "of_tomorrow", "num_experts": 4}),
        (
            {f"x{number}": name for number, name in enumerate(FUSED)},
            CONFIG,
        ),  # renamed beyond a prefix
    ],
)
def test_other_names_stay_as_they_are(names, config):
    assert single_experts(names, config) == []
