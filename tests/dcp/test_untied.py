"""A checkpoint of a model whose weights are not tied loaded into one that ties them, without a word: one of two values won."""

import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_rs
from support import run_ranks
from support.both import save_rs, save_stock

EMBED, HEAD = torch.arange(600_000.0).reshape(600, 1000), -torch.ones(600, 1000)


def tied(dtype=torch.float32):
    weight = torch.nn.Parameter(torch.zeros(600, 1000, dtype=dtype))
    return {"embed": weight, "norm": torch.zeros(3), "lm_head": weight}


@pytest.mark.parametrize("save", [save_rs, save_stock])
@pytest.mark.filterwarnings("ignore:.*cast on loading")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["plain", "cast"])
def test_two_values_for_one_tensor_are_warned_of(tmp_path, save, dtype):
    save({"embed": EMBED, "norm": torch.ones(3), "lm_head": HEAD}, tmp_path)
    state = tied(dtype)
    with pytest.warns(
        UserWarning, match=r"'embed' and 'lm_head' are one tensor.*two that differ.*exclude='embed'"
    ):
        dcp_rs.load(state, tmp_path)
    assert state["embed"].eq(-1).all()  # as stock has it: the last
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if dtype == torch.float32:
            dcp_rs.load(state, tmp_path, exclude="lm_head")
            assert torch.equal(state["embed"], EMBED)


@pytest.mark.parametrize("save", [save_rs, save_stock])
def test_one_value_for_both_is_none(tmp_path, save):
    save({"embed": EMBED, "norm": torch.ones(3), "lm_head": EMBED.clone()}, tmp_path)
    state = tied()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dcp_rs.load(state, tmp_path)
    assert torch.equal(state["lm_head"], EMBED)


def load_shards(folder):
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.zeros(600, 1000), mesh, [Shard(0)])
    with pytest.warns(UserWarning, match="'embed' and 'lm_head' are one tensor"):
        dcp_rs.load({"embed": weight, "norm": torch.zeros(3), "lm_head": weight}, folder)


def test_shards(tmp_path):
    save_rs({"embed": EMBED, "norm": torch.ones(3), "lm_head": HEAD}, tmp_path)
    run_ranks(2, load_shards, tmp_path)
