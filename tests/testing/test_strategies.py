"""The strategies that are given to others: they draw what they say, and hypothesis is asked for by name where it is missing."""

import math
import sys

import pytest
import torch
from hypothesis import find, given
from torch.distributed.tensor import Partial, Replicate, Shard

import dcp_rs
import programs
from dcp_rs.testing import strategies
from support import assert_state_equal
from support.states import blank


@pytest.mark.parametrize(
    "wanted",
    [
        lambda tensor: tensor.dim() == 0,
        lambda tensor: tensor.numel() == 0,
        lambda tensor: not tensor.is_contiguous(),
        lambda tensor: tensor.is_conj(),
        lambda tensor: 0 in tensor.stride(),
        lambda tensor: isinstance(tensor, torch.nn.Parameter),
    ],
)
def test_tensors_are_of_every_kind(wanted):
    find(strategies.tensors(), wanted)


@given(tensor=strategies.tensors(max_dims=2, max_side=3))
def test_tensors_come_back(tmp_path_factory, tensor):
    path = tmp_path_factory.mktemp("ckpt")
    assert tensor.dim() <= 3
    into = {"t": blank(tensor)}
    dcp_rs.save({"t": tensor}, path, no_dist=True, fsync=False)
    dcp_rs.load(into, path, no_dist=True)
    assert_state_equal(into["t"], tensor.detach())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_meshes_have_all_ranks(ranks):
    @given(shape=strategies.meshes(ranks, max_dims=3))
    def holds(shape):
        assert math.prod(shape) == ranks
        assert 1 <= len(shape) <= 3

    holds()


def test_placements_are_of_every_kind():
    assert find(strategies.placements((2, 2), 2), lambda drawn: drawn == (Shard(1), Replicate()))
    assert find(
        strategies.placements((2,), 0, partial=True), lambda drawn: isinstance(drawn[0], Partial)
    )


def test_without_hypothesis_it_says_what_to_install():
    code = "import sys; sys.modules['hypothesis'] = None; import dcp_rs.testing.strategies"
    done = programs.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert "pip install 'dcp-rs[testing]'" in done.stderr.splitlines()[-1]


def test_the_rest_needs_no_hypothesis():
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "from dcp_rs.testing import compare, conformance, disk, states\n"
        "assert len(conformance.cases()) > 20"
    )
    programs.run([sys.executable, "-c", code], check=True, timeout=120)
