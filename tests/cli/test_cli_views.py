"""The commands on quantized weights."""

import json
from pathlib import Path

import pytest
import torch

import dcp_rs
from support import quantized


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two experts in blocks of float8, and a norm."""
    tensors: dict[str, torch.Tensor] = {"norm.weight": torch.ones(4)}
    for expert in range(2):
        tensors |= quantized.fp8(f"experts.{expert}.w", 130, 70, seed=expert)[0]
    return quantized.write(tmp_path_factory.mktemp("cli") / "q", tensors)


def test_listings_say_what_is_logical_and_what_is_stored(dcp_rs_cli, folder: Path) -> None:
    status, out, _ = dcp_rs_cli("ls", folder, "--dequantize")
    names = [line.split()[-1] for line in out.splitlines()[1:-1]]
    assert (status, names) == (0, ["experts.0.w.weight", "experts.1.w.weight", "norm.weight"])
    assert "2 of them decoded from 18.2 kB that are stored" in out
    assert "bfloat16 [130, 70]" in " ".join(out.split())
    _, out, _ = dcp_rs_cli("inspect", folder, "experts.0.w.weight", "--dequantize")
    assert "decoded from  fp8: experts.0.w.weight, experts.0.w.weight_scale_inv" in out
    _, out, _ = dcp_rs_cli("inspect", folder, "--dequantize", "--json")
    assert json.loads(out)["decoded"] == {"tensors": 2, "stored_bytes": 2 * (130 * 70 + 8)}
    _, out, _ = dcp_rs_cli("ls", folder, "--json")
    assert len(json.loads(out)["entries"]) == 5


def test_statistics_trees_and_differences(dcp_rs_cli, folder: Path, tmp_path: Path) -> None:
    status, out, _ = dcp_rs_cli("stats", folder, "--dequantize", "--json")
    names = {tensor["name"]: tensor["shape"] for tensor in json.loads(out)["tensors"]}
    shapes = {f"experts.{i}.w.weight": [130, 70] for i in range(2)} | {"norm.weight": [4]}
    assert (status, names) == (0, shapes)
    _, out, _ = dcp_rs_cli("tree", folder, "--dequantize", "--json")
    assert json.loads(out)["entries"] == 3
    status, _, _ = dcp_rs_cli("convert", folder, tmp_path / "out", "--dequantize")
    assert status == 0
    status, out, _ = dcp_rs_cli("diff", folder, tmp_path / "out", "--dequantize")
    assert status == 0, out


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_convert_rounds_once(dcp_rs_cli, folder: Path, tmp_path: Path, dtype: str) -> None:
    """A dtype that is wanted beside the dequantization is what weights are decoded to: through bfloat16, they were rounded twice."""
    arguments = [folder, tmp_path / "out", "--dequantize", "--dtype", dtype]
    status, _, err = dcp_rs_cli("convert", *arguments)
    assert status == 0, err
    for expert in range(2):
        written = dcp_rs.open(tmp_path / "out")[f"experts.{expert}.w.weight"]
        assert written.dtype == getattr(torch, dtype)
        assert quantized.same(written.float(), quantized.fp8("x", 130, 70, seed=expert)[1])
