"""``io="gds"`` where there is no device for it. With one: ``device/test_device_gds.py``."""

import pytest
import torch

import dcp_rs
from dcp_rs.options import ReadOptions
from support import assert_state_equal
from support.slabs import state


def test_host_memory_is_read_as_ever(ckpt):
    want = state()
    dcp_rs.save(want, ckpt)
    got = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in want.items()}
    dcp_rs.load(got, ckpt, io="gds", planner=dcp_rs.RsLoadPlanner(dtype_policy="cast"))
    assert_state_equal(got, {name: tensor.double() for name, tensor in want.items()})
    with dcp_rs.open(ckpt, io="gds") as source:
        assert_state_equal(dict(source.stream()), want)


def test_it_cannot_verify():
    with pytest.raises(ValueError, match="verify"):
        ReadOptions(io="gds", verify=True)
