"""What is told apart, and what is not: by whoever tests with it."""

from argparse import Namespace
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp_rs.testing.compare import assert_state_equal, same_bits, state_differences

NAN = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)


def quantized(scale: float, value: float = 1.0) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.full((3,), value), scale, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore")  # torch means to give these types up
def test_tensors_that_have_no_plain_bytes():
    """A quantized one ended the process, and a sparse one was an error of torch."""
    for one, other in (
        (quantized(0.1), quantized(0.2)),
        (quantized(0.1), quantized(0.1, 2.0)),
        (torch.eye(3).to_sparse(), torch.eye(3)[:, [1, 0, 2]].to_sparse()),
        (torch.eye(3).to_sparse(), torch.eye(3)),
        (torch.eye(3).to_sparse_csr(), torch.eye(3).to_sparse_csc()),
    ):
        assert same_bits(one, one.clone())
        assert not same_bits(one, other)
        assert not state_differences([one], [one.clone()])
        (line,) = state_differences({"a": one}, {"a": other})
        assert line.startswith("state['a']: ")


def test_sharded_and_plain(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        plain = torch.arange(6.0).reshape(2, 3)
        mesh = dist.init_device_mesh("cpu", (1,))
        rows, copies = (distribute_tensor(plain, mesh, [placement]) for placement in (Shard(0), Replicate()))
        assert same_bits(rows, rows.clone())
        assert not same_bits(rows, copies)
        assert state_differences(rows, plain) == ["state: got a DTensor, want a plain tensor"]
        assert state_differences(plain, rows) == ["state: got a plain tensor, want a DTensor"]
        assert not same_bits(rows, rows + 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (complex(float("nan"), -0.0), complex(float("nan"), 0.0)),
        (-0.0, 0.0),
        (np.float64("nan"), np.float64(1)),
        (np.array([float("nan"), 0.0]), np.array([float("nan"), -0.0])),
        (np.array([-0.0]), np.array([0.0])),
        (np.zeros(2), np.zeros(3)),
        (NAN[:1], NAN[1:]),
        (True, 1),
        ([1, (2, {"a": None})], [1, (2, {"b": None})]),
        (OrderedDict(a=1), {"a": 1}),
        (Namespace(t=torch.ones(2)), Namespace(t=torch.zeros(2))),
        ({1, 2}, {1, 3}),
        (torch.float16, torch.float32),
    ],
    ids=repr,
)
def test_values(one, other):
    """NaNs of complex numbers differed from themselves, and arrays were an error of NumPy."""
    assert not state_differences(one, one)
    assert state_differences(one, other)
    assert state_differences(other, one)
    with pytest.raises(AssertionError, match="differences:"):
        assert_state_equal(one, other)
