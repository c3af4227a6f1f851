"""Quantized weights and layout views on the simulated device, by way of slabs."""

import torch

import dcp_rs
from support import quantized
from support.quantized import same
from support.simulated import host


def test_weights_are_decoded_into_slabs(tmp_path, device):
    stored, whole = {}, {}
    for expert in range(3):
        made, whole[expert] = quantized.fp8(f"experts.{expert}", 300, 200, seed=expert)
        stored |= made
    stored |= (blocks := quantized.mxfp4("m", 2, 70, 64, seed=7))[0]
    quantized.write(tmp_path / "q", stored, files=2)
    stacked = torch.stack([tensor.bfloat16() for tensor in whole.values()], -1)
    views = dcp_rs.Stack("experts.{n}.weight", into="experts", dim=-1)
    for options in ({}, {"max_inflight_bytes": 1 << 17}):
        checkpoint = dcp_rs.open(
            tmp_path / "q", device=device, dequantize=True, views=views, **options
        )
        got = host(dict(checkpoint.stream()))
        assert same(got["experts"], stacked)
        assert same(got["m"], blocks[1].bfloat16())
        assert same(checkpoint.get_slice("experts")[5:9, 150:, 1].cpu(), stacked[5:9, 150:, 1])
    state = {"experts": torch.zeros(300, 200, 3, dtype=torch.float32, device=device)}
    dcp_rs.load(state, tmp_path / "q", dequantize=True, views=views, dtype_policy="cast")
    assert same(state["experts"].cpu(), stacked.float())
