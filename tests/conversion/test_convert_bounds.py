"""What a conversion may take of memory, of time."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

import dcp_rs
import programs
from support import assert_state_equal
from support.formats import load_hf, make
from support.places import TESTS

GROWTH = """
import sys, warnings
warnings.simplefilter("ignore")
tests, src, dst, dtype = sys.argv[1:]
sys.path.insert(0, tests)
import dcp_rs
import torch.distributed.checkpoint
from support.memory import Growth

for to in ("dcp-rs", "dcp", "torch", "safetensors"):
    dcp_rs.convert(src + "-small", f"{dst}-{to}", to=to)  # what is loaded once is not the conversion's
    with Growth() as grown:
        dcp_rs.convert(src, f"{dst}-{to}", to=to, dtype=dtype or None, fsync=False, overwrite=True)
    print(to, grown.nbytes)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """400 MB: tensors of 2, 32 and 200 MB."""
    folder = tmp_path_factory.mktemp("large")
    state = {f"small.{i}": torch.full((512, 1024), i, dtype=torch.float32) for i in range(35)}
    state |= {f"middle.{i}": torch.full((2048, 4096), i, dtype=torch.float32) for i in range(4)}
    state["large"] = torch.full((50_000_000,), 3.0)
    make("dcp-rs", state, folder / "src")
    make("dcp-rs", {"w": torch.ones(4)}, folder / "src-small")
    yield folder / "src"
    shutil.rmtree(folder)


@pytest.mark.parametrize("dtype", ["", "bf16"])
@pytest.mark.slow
def test_memory_is_bounded(dtype: str, large: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", GROWTH, *map(str, (TESTS, large, tmp_path / "dst")), dtype]
    done = programs.run(command, check=True, capture_output=True, text=True, timeout=250)
    grown = {to: int(nbytes) for to, nbytes in map(str.split, done.stdout.splitlines())}
    assert len(grown) == 4
    assert max(grown.values()) < 120e6, grown


def test_many_small_tensors(tmp_path: Path) -> None:
    state = {f"layers.{i}.weight": torch.full((16,), i) for i in range(5000)}
    make("dcp-rs", state, tmp_path / "src")
    dcp_rs.convert(tmp_path / "src", tmp_path / "hf", to="safetensors")
    assert_state_equal(load_hf(tmp_path / "hf"), state)


@pytest.mark.parametrize("to", ["dcp-rs", "safetensors", "dcp", "torch"])
def test_a_bound_above_all_memory_is_no_reason_to_take_it(tmp_path, to):
    state = {"a": torch.randn(2, 3), "b": torch.randn(5)}
    dcp_rs.save(state, tmp_path / "src")
    how = {"max_inflight_bytes": 1 << 50, "dtype": "bf16"}
    dcp_rs.convert(tmp_path / "src", tmp_path / "out", to=to, **how)
    with dcp_rs.open(tmp_path / "out") as out:
        assert all(torch.equal(out[name], state[name].bfloat16()) for name in state)
    if to != "torch":
        dcp_rs.merge([tmp_path / "src"] * 2, tmp_path / "mean", to=to, **how)
        with dcp_rs.open(tmp_path / "mean") as out:
            assert all(torch.equal(out[name], state[name].bfloat16()) for name in state)
