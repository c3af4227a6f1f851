"""The commands on quantized weights and layout views."""

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
    path = quantized.write(tmp_path_factory.mktemp("cli") / "q", tensors)
    (path / "views.json").write_text(
        json.dumps([{"stack": "experts.{i}.w.weight", "into": "experts.w", "dim": 0}])
    )
    return path


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
    views = ["--dequantize", "--views", folder / "views.json"]
    status, out, _ = dcp_rs_cli("stats", folder, *views, "--json")
    names = {tensor["name"]: tensor["shape"] for tensor in json.loads(out)["tensors"]}
    assert (status, names) == (0, {"experts.w": [2, 130, 70], "norm.weight": [4]})
    _, out, _ = dcp_rs_cli("tree", folder, *views, "--json")
    assert json.loads(out)["entries"] == 2
    status, _, _ = dcp_rs_cli("convert", folder, tmp_path / "out", "--dequantize")
    assert status == 0
    status, out, _ = dcp_rs_cli("diff", folder, tmp_path / "out", "--dequantize")
    assert status == 0, out


def test_a_joined_tensor_of_a_file_of_torch_save_is_inspected(dcp_rs_cli, tmp_path: Path) -> None:
    """It has several chunks, and the search for tensors that share bytes with it took one."""
    both = torch.ones(3)
    torch.save({"a": {"0": both[:2], "1": torch.ones(2)}, "tied": both}, tmp_path / "x.pt")
    (tmp_path / "views.json").write_text(json.dumps([{"stack": "a.{i}", "into": "a.w"}]))
    status, out, err = dcp_rs_cli(
        "inspect", tmp_path / "x.pt", "a.w", "--views", tmp_path / "views.json"
    )
    assert (status, err) == (0, "")
    assert "2 chunks" in out
    assert "shares its bytes with  tied" in out


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_convert_rounds_once(dcp_rs_cli, folder: Path, tmp_path: Path, dtype: str) -> None:
    """A dtype that is wanted beside the dequantization is what weights are decoded to: through bfloat16, they were rounded twice."""
    views = ["--views", folder / "views.json"]
    status, _, err = dcp_rs_cli(
        "convert", folder, tmp_path / "out", "--dequantize", "--dtype", dtype, *views
    )
    assert status == 0, err
    whole = torch.stack([quantized.fp8("x", 130, 70, seed=expert)[1] for expert in range(2)])
    written = dcp_rs.open(tmp_path / "out")["experts.w"]
    assert written.dtype == getattr(torch, dtype)
    assert quantized.same(written.float(), whole)


@pytest.mark.parametrize(
    "text", ["[", "{}", '["x"]', '[{"stick": "a"}]', '[{"stack": "a", "from": "b"}]']
)
def test_a_file_of_views_that_is_none_is_refused(
    dcp_rs_cli, folder: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "views.json").write_text(text)
    status, _, err = dcp_rs_cli("ls", folder, "--views", tmp_path / "views.json")
    assert status == 2
    assert "views.json" in err
