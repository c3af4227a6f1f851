"""Checkpoints that several test files of this room begin with."""

import pytest
import torch

from support import failures, run_ranks
from support.both import save_rs
from support.layouts import WHOLE, save_sharded


@pytest.fixture
def saved(ckpt):
    """Of `failures.SMALL_STATE`: small enough to change each of its bytes."""
    save_rs(failures.SMALL_STATE, ckpt)
    return ckpt


@pytest.fixture
def saved_blocks(ckpt):
    """Of `failures.STATE`, whose largest tensor has three blocks."""
    save_rs(failures.STATE, ckpt)
    return ckpt


@pytest.fixture
def saved_whole(ckpt):
    """Of a tensor in one piece, another, a value."""
    save_rs({"w": WHOLE, "b": torch.arange(5), "step": 7}, ckpt)
    return ckpt


@pytest.fixture(scope="session")
def sharded(tmp_path_factory):
    """Saved by 4 ranks, in many pieces; never changed."""
    path = tmp_path_factory.mktemp("sharded") / "ckpt"
    run_ranks(4, save_sharded, path)
    return path
