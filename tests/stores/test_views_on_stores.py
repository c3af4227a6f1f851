"""Quantized weights and layout views of a folder on a store: only what a slice needs is fetched."""

import json

import pytest
import torch

import dcp_rs
from support import quantized
from support.quantized import same


def test_views_of_a_folder_on_a_store(server, tmp_path):
    made = [quantized.fp8(f"experts.{i}", 96, 64, seed=i, block=(32, 32)) for i in range(2)]
    tensors = {name: tensor for stored, _ in made for name, tensor in stored.items()}
    quantized.write(tmp_path / "q", tensors, {"quant_method": "fp8", "weight_block_size": [32, 32]})
    server.put_folder(tmp_path / "q", "q")
    whole = torch.stack([tensor for _, tensor in made]).bfloat16()
    how = {
        "storage_options": server.options(),
        "views": dcp_rs.Stack("experts.{n}.weight", into="experts"),
    }
    checkpoint = dcp_rs.open(server.url("q"), dequantize=True, **how)
    assert same(checkpoint["experts"], whole)
    state = {"experts": torch.zeros(2, 96, 64, dtype=torch.bfloat16)}
    dcp_rs.load(state, server.url("q"), dequantize=True, **how)
    assert same(state["experts"], whole)
    rows = dcp_rs.open(server.url("q"), dequantize=True, **how)
    assert same(rows.get_slice("experts")[1, 32:64], whole[1, 32:64])
    assert rows.report.requests == 1
    config = json.dumps({"quantization_config": {"quant_method": "awq"}})
    (tmp_path / "q" / "config.json").write_text(config)
    server.put_folder(tmp_path / "q", "q")
    with pytest.raises(dcp_rs.QuantizationError, match="awq"):
        dcp_rs.open(server.url("q"), dequantize=True, **how)
