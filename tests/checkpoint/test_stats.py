"""`dcp-rs stats` and `tree`: numbers as torch has them, of every dtype and however a tensor is cut, and sizes that add up."""

import json
import math
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_rs
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.checkpoint.source import IndexSource
from dcp_rs.checkpoint.stats import stats
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.dtypes import BY_NAME
from support import dtypes_state, run_ranks, shapes_state
from support.both import save_rs, save_stock


def of(path, **options):
    source = IndexSource(open_index(path), ReadOptions())
    return {one.name: one for one in stats(source, source.items, **options)}


def numbers(tensor):
    """The elements as torch makes float64 of them; of complex ones, of both parts."""
    name = str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if name == "float4_e2m1fn_x2":
        raw = tensor.view(torch.uint8)
        halves = torch.stack([raw & 15, raw >> 4])
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        return torch.where(halves < 8, table[(halves % 8).long()], -table[(halves % 8).long()])
    if name in ("complex32", "bcomplex32"):
        tensor = tensor.view(torch.int16).view(
            torch.float16 if name == "complex32" else torch.bfloat16
        )
    elif tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    return tensor.double()


def check(one, tensor):
    expected = numbers(tensor)
    finite = expected[expected.isfinite()]
    assert one.nan == int(expected.isnan().sum())
    assert one.inf == int(expected.isinf().sum())
    assert (one.shape, one.elements) == (tuple(tensor.shape), tensor.numel())
    if finite.numel() == 0:
        assert (one.min, one.max, one.mean) == (None, None, None)
        return
    assert (float(one.min), float(one.max)) == (float(finite.min()), float(finite.max()))
    scale = float(finite.abs().max()) or 1.0
    assert math.isclose(one.mean / scale, float((finite / scale).mean()), abs_tol=1e-12)


def save_torch(state, path):
    torch.save(state, path)


@pytest.mark.parametrize("save", [save_rs, save_stock, save_torch])
def test_every_dtype_and_shape(ckpt, save):
    every_byte = {
        str(d).removeprefix("torch."): torch.arange(256, dtype=torch.uint8).view(d)
        for d in (
            torch.float8_e4m3fn,
            torch.float8_e4m3fnuz,
            torch.float8_e5m2,
            torch.float8_e5m2fnuz,
        )
    }
    state = {
        **shapes_state(),
        **dtypes_state((77, 31)),
        "e8m0": torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    }
    state["half"] = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    state["brain"] = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    state |= every_byte
    if save is save_torch:
        del state["negative"], state["two_blocks"]  # torch does not save one memory as two types
    save(state, ckpt)
    found = of(ckpt)
    assert set(found) == set(state)
    for name, tensor in state.items():
        check(found[name], tensor)


def test_large_integers_are_exact(ckpt):
    save_rs({"w": torch.tensor([2**62 + 1, -(2**62) - 1])}, ckpt)
    one = of(ckpt)["w"]
    assert (one.min, one.max) == (-(2**62) - 1, 2**62 + 1)


def test_large_finite_numbers_have_finite_statistics(ckpt):
    """Sums of finite float64 overflowed: the mean was NaN."""
    large = torch.tensor([1.7e308, 1.7e308, -1.7e308, 1.0], dtype=torch.float64).repeat(20_000)
    save_rs({"w": large, "uint64": torch.tensor([2**64 - 1, 1 << 63, 3], dtype=torch.uint64)}, ckpt)
    found = of(ckpt)
    assert math.isclose(found["w"].mean, 1.7e308 / 4, rel_tol=1e-12)
    assert (found["uint64"].min, found["uint64"].max) == (3, 2**64 - 1)


#: Rows that need two slabs.
CUT = 1_300_000


def save_cut(path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(CUT * 7, dtype=torch.float32).reshape(CUT, 7)
    dcp_rs.save({"w": distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None)}, path)


def test_tensors_are_put_together_from_slabs_and_chunks(ckpt, tmp_path):
    run_ranks(2, save_cut, ckpt)
    seen = []
    found = of(ckpt, progress=lambda done, total: seen.append((done, total)))
    check(found["w"], torch.arange(CUT * 7, dtype=torch.float32).reshape(CUT, 7))
    assert len(seen) == 2
    assert seen[-1] == (CUT * 28, CUT * 28)
    state = {
        f"t{i}": torch.randn(i * 17, generator=torch.Generator().manual_seed(i)) for i in range(60)
    }
    save_rs(state, tmp_path / "many")
    for name, one in of(tmp_path / "many").items():
        check(one, state[name])


def test_the_command(dcp_rs_cli, ckpt):
    bad = torch.tensor([float("nan"), 1.0, float("inf"), 0.0])
    save_rs({"m.10.w": bad, "m.2.w": torch.full((3,), -2, dtype=torch.int32), "step": 3}, ckpt)
    status, out, err = dcp_rs_cli("stats", ckpt)
    assert (status, err) == (0, "")
    header, integers, floats, total = out.splitlines()
    assert header.split() == ["dtype", "shape", "min", "max", "mean", "nan", "inf", "name"]
    assert integers.split() == ["int32", "[3]", "-2", "-2", "-2", "0", "0", "m.2.w"]
    assert floats.split() == ["float32", "[4]", "0", "1", "0.5", "1", "1", "m.10.w"]
    assert "NaN in 1 tensor" in total
    assert dcp_rs_cli("stats", ckpt, "--fail-on-nan")[0] == 1
    assert dcp_rs_cli("stats", ckpt, "--fail-on-nan", "--exclude", "m.10.*")[0] == 0
    assert dcp_rs_cli("stats", ckpt, "m.2.*", "--fail-on-nan", "--json")[0] == 0
    status, out, err = dcp_rs_cli("stats", ckpt, "m", "--fail-on-nan")
    assert (status, out, "no tensor matches" in err) == (2, "", True)  # it was 0
    status, out, _ = dcp_rs_cli("stats", ckpt, "--json", "--fail-on-nan", "--sort", "max")
    assert status == 1
    assert [one["name"] for one in json.loads(out)["tensors"]] == ["m.10.w", "m.2.w"]
    next(ckpt.glob("*.safetensors")).unlink()
    assert dcp_rs_cli("stats", ckpt)[0] == 2


def test_a_dtype_that_this_torch_lacks_can_be_left_out(dcp_rs_cli, ckpt, monkeypatch):
    save_rs({"w": torch.ones(3), "new": torch.ones(3, dtype=torch.int16)}, ckpt)
    monkeypatch.setattr(
        "dcp_rs.transfer.target.BY_NAME", {k: v for k, v in BY_NAME.items() if k != "int16"}
    )
    assert "'new' is of dtype int16" in dcp_rs_cli("stats", ckpt)[2]
    status, out, _ = dcp_rs_cli("stats", ckpt, "--exclude", "new")
    assert (status, out.splitlines()[-1].split(",")[0]) == (0, "1 tensor")


def test_the_tree_adds_up(dcp_rs_cli, ckpt):
    state = {
        f"model.layers.{i}.{part}.weight": torch.ones(i + 1)
        for i in range(11)
        for part in ("a", "b")
    }
    save_rs({**state, "model.head": torch.ones(100), "step": 3}, ckpt)
    status, out, err = dcp_rs_cli("tree", ckpt, "--exclude", "step")
    assert (status, err) == (0, "")
    assert [line.split()[-1] for line in out.splitlines()[3:]] == ["layers", *map(str, range(11))][
        :12
    ]
    assert out.splitlines()[1].split()[:2] == ["928", "B"]
    torch.save({**state, "step": 3}, ckpt.with_name("x.pth"))
    assert (
        json.loads(dcp_rs_cli("tree", ckpt.with_name("x.pth"), "model.layers.*", "--json")[1])[
            "bytes"
        ]
        == 528
    )
    top = json.loads(dcp_rs_cli("tree", ckpt, "model.*", "--depth", 0, "--json")[1])
    assert (top["bytes"], top["entries"]) == (928, 23)
    layers = top["modules"][0]["modules"][0]
    assert layers["name"] == "layers"
    assert sum(layer["bytes"] for layer in layers["modules"]) == layers["bytes"] == 528
    assert [module["name"] for module in layers["modules"][0]["modules"]] == ["a", "b"]
    largest = json.loads(dcp_rs_cli("tree", ckpt, "model.*", "--sort", "size", "--json")[1])[
        "modules"
    ][0]["modules"][0]
    assert largest["modules"][0]["name"] == "10"


@pytest.mark.parametrize("save", [save_rs, save_torch])
def test_the_tree_imports_no_torch(ckpt, save):
    save({"m.w": torch.ones(3)}, ckpt)
    script = (
        "import sys\nfrom dcp_rs.cli import main\n"
        "try: main(['tree', sys.argv[1]])\n"
        "except SystemExit as ended: assert ended.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(ckpt)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
