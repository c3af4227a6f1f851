"""Tensors that a save makes anew on their way: cast, strided, conjugated."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs import RsSavePlanner
from support import assert_state_equal


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
)
def test_floating_tensors_are_cast(ckpt, dtype):
    state = {
        "f": torch.linspace(-2, 2, 4096).reshape(64, 64),
        "t": torch.linspace(-2, 2, 4096).reshape(64, 64).t(),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "i": torch.arange(5),
        "c": torch.ones(2, dtype=torch.complex64),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0),
    }
    dcp_rs.save(state, ckpt, dtype=dtype)
    with dcp_rs.open(ckpt) as checkpoint:
        for name, tensor in state.items():
            want = tensor.to(dtype) if tensor.is_floating_point() else tensor
            assert_state_equal({name: checkpoint[name]}, {name: want.contiguous()})


def test_large_casts_take_bounded_memory(ckpt):
    state = {f"w{i}": torch.randn(1100, 1000) for i in range(3)} | {"t": torch.randn(900, 1000).t()}
    dcp_rs.save(state, ckpt, dtype=torch.float64, max_inflight_bytes=4 << 20)
    with dcp_rs.open(ckpt) as checkpoint:
        assert all(torch.equal(checkpoint[name], tensor.double()) for name, tensor in state.items())


def test_a_bound_above_all_memory_is_no_reason_to_take_it(ckpt):
    state = {"t": torch.randn(3, 2).t(), "cast": torch.randn(5)}
    dcp_rs.save(state, ckpt, dtype=torch.bfloat16, max_inflight_bytes=1 << 50)
    with dcp_rs.open(ckpt) as checkpoint:
        assert all(torch.equal(checkpoint[name], state[name].bfloat16()) for name in state)


def test_strided_and_conjugated_tensors_take_bounded_memory(ckpt):
    state = {
        "wide": torch.randn(3, 700_001).t(),
        "deep": torch.randn(2, 3, 5, 70_001).permute(3, 1, 0, 2),
        "conj": torch.randn(600_000, dtype=torch.complex64).conj(),
        "one_row": torch.randn(1_000_000, 2)[:, 0].unsqueeze(0),
    }
    dcp_rs.save(state, ckpt, max_inflight_bytes=2 << 20)
    with dcp_rs.open(ckpt) as checkpoint:
        assert all(torch.equal(checkpoint[name], tensor) for name, tensor in state.items())


def test_casts_reach_other_writers(tmp_path):
    state = {"f": torch.ones(3), "i": torch.arange(2)}
    planner = RsSavePlanner(dtype=torch.bfloat16, exclude="nothing*")
    metadata = dcp.save(
        state, storage_writer=dcp.FileSystemWriter(tmp_path), planner=planner, no_dist=True
    )
    assert metadata.state_dict_metadata["f"].properties.dtype == torch.bfloat16
    got = {"f": torch.zeros(3, dtype=torch.bfloat16), "i": torch.zeros(2, dtype=torch.int64)}
    dcp.load(got, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert_state_equal(got, {"f": torch.ones(3, dtype=torch.bfloat16), "i": torch.arange(2)})


def test_a_dtype_that_is_no_float_is_refused():
    with pytest.raises(ValueError, match="must be one of float64"):
        RsSavePlanner(dtype=torch.int8)


def test_types_of_eight_bits_stay(ckpt, tmp_path):
    """As in conversions: what their elements are worth is in scales, elsewhere."""
    weight = torch.linspace(-2, 2, 64).reshape(8, 8)
    state = {
        "plain": weight.to(torch.float8_e4m3fn),
        "turned": weight.to(torch.float8_e5m2).t(),
        "scale": weight[0],
    }
    want = {name: tensor.contiguous() for name, tensor in state.items()} | {
        "scale": weight[0].bfloat16()
    }
    dcp_rs.save(state, ckpt, dtype=torch.bfloat16)
    with dcp_rs.open(ckpt) as checkpoint:
        assert_state_equal(dict(checkpoint), want)
    dcp_rs.save(state, tmp_path / "whole")
    dcp_rs.convert(tmp_path / "whole", tmp_path / "cast", dtype="bf16")
    with dcp_rs.open(tmp_path / "cast") as checkpoint:
        assert_state_equal(dict(checkpoint), want)
    planner = RsSavePlanner(dtype=torch.bfloat16)
    stored = dcp.save(
        state, storage_writer=dcp.FileSystemWriter(tmp_path / "s"), planner=planner, no_dist=True
    )
    dtypes = {name: entry.properties.dtype for name, entry in stored.state_dict_metadata.items()}
    assert dtypes == {name: tensor.dtype for name, tensor in want.items()}
