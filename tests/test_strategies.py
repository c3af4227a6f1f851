"""The strategies of hypothesis draw tensors, meshes and placements of every kind."""

import math

import pytest
import torch
from hypothesis import find, given
from torch.distributed.tensor import Partial, Replicate, Shard

import dcp_rs
from support import assert_state_equal, strategies
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
