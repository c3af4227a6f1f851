"""What the tests of the command line look at."""

import pytest
import torch

import dcp_rs
from support import nested_state
from support.both import save_rs, save_stock


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A checkpoint of each kind, never changed."""
    folder = tmp_path_factory.mktemp("world")
    state = nested_state()
    save_rs(state, folder / "ckpt")
    save_stock(state, folder / "stock")
    torch.save(state, folder / "x.pt")
    dcp_rs.convert(folder / "ckpt", folder / "hf", to="safetensors", include="model.*")
    return folder
