"""The oracle of the tests finds every difference of two states, and only differences."""

import ctypes
import re
from argparse import Namespace
from collections import OrderedDict, defaultdict
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from support import oracle
from support.places import TESTS
from support.states import ALL_DTYPES, blank, can_copy, random_tensor, shapes_state

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
        assert oracle.same_bits(one, one.clone())
        assert not oracle.same_bits(one, other)
        assert not oracle.state_differences([one], [one.clone()])
        (line,) = oracle.state_differences({"a": one}, {"a": other})
        assert line.startswith("state['a']: ")


def test_sharded_and_plain(tmp_path):
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        plain = torch.arange(6.0).reshape(2, 3)
        mesh = dist.init_device_mesh("cpu", (1,))
        rows, copies = (
            distribute_tensor(plain, mesh, [placement]) for placement in (Shard(0), Replicate())
        )
        assert oracle.same_bits(rows, rows.clone())
        assert not oracle.same_bits(rows, copies)
        assert oracle.state_differences(rows, plain) == [
            "state: got a DTensor, want a plain tensor"
        ]
        assert oracle.state_differences(plain, rows) == [
            "state: got a plain tensor, want a DTensor"
        ]
        assert not oracle.same_bits(rows, rows + 1)
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
    assert not oracle.state_differences(one, one)
    assert oracle.state_differences(one, other)
    assert oracle.state_differences(other, one)
    with pytest.raises(AssertionError, match="differences:"):
        oracle.assert_state_equal(one, other)


@pytest.mark.parametrize("dtype", filter(can_copy, ALL_DTYPES), ids=str)
def test_every_bit_of_every_dtype_counts(dtype):
    want = random_tensor((3, 2), dtype)
    for byte in range(want.nbytes):
        got = want.clone()
        oracle.memory_of(got)[byte] ^= 1
        (line,) = oracle.state_differences(got, want)
        assert (
            f"1 bytes of {dtype} (3, 2) differ, the first in element {byte // dtype.itemsize}"
            in line
        )
    assert not oracle.state_differences(want.clone(), want)


def test_views_are_compared_by_value():
    """Not what its memory holds: strides, lazy conjugates and negations are no difference, the elements are."""
    for name, want in shapes_state().items():
        got = want.resolve_conj().resolve_neg().contiguous().clone()
        assert not oracle.state_differences(got, want), name
        assert not oracle.state_differences(want, got), name
        if want.numel():
            assert oracle.state_differences(blank(want), want), name
            oracle.memory_of(got)[-1] ^= 0x80
            assert oracle.state_differences(got, want), name


def test_the_oracle_reads_bytes_as_torch_does():
    for name, tensor in shapes_state().items():
        plain = tensor.resolve_conj().resolve_neg().contiguous().clone()
        storage = plain.untyped_storage()
        assert oracle.raw_bytes(tensor) == ctypes.string_at(storage.data_ptr(), storage.nbytes()), (
            name
        )


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (defaultdict(list), defaultdict(set)),
        ({1: 0}, {True: 0}),
        ({0.0: 0}, {-0.0: 0}),
        ({0.0}, {-0.0}),
        (Holder(t=[NAN[:1]]), Holder(t=[NAN[1:]])),
        (partial(max, -0.0), partial(max, 0.0)),
        (torch.Size([1]), (1,)),
        (torch.zeros(0, 2), torch.zeros(2, 0)),
        (torch.zeros(()), torch.zeros(1)),
        (torch.zeros(2, device="meta"), torch.zeros(2)),
        (np.array([[1, -0.0]], object), np.array([[1, 0.0]], object)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_oracle_looks_into_containers_and_objects(one, other):
    assert not oracle.state_differences({"k": (one,)}, {"k": (one,)})
    assert oracle.state_differences({"k": (one,)}, {"k": (other,)})
    assert oracle.state_differences({"k": (other,)}, {"k": (one,)})


def test_the_oracle_ends_where_a_state_holds_itself():
    one, other = {"x": 1}, {"x": 1}
    one["self"], other["self"] = one, other
    assert not oracle.state_differences(one, other)
    other["x"] = 2
    assert len(oracle.state_differences(one, other)) == 1


def test_the_oracle_uses_nothing_of_the_package():
    """A mistake in the package's comparison hid on both sides of every test."""
    for module in ("oracle", "states", "second_reader"):
        assert "dcp_rs" not in re.sub(
            r"\.dcprs|dcp_rs/|`[^`]*`", "", (TESTS / "support" / f"{module}.py").read_text()
        )
