"""Checkpoints on a server of objects."""

import pytest
import torch

import dcp_rs


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(no_store_settings):
    """What a developer's environment says is not what is tested."""


def model_state():
    """Tensors of several sizes and dtypes, one of them strided over blocks, and values."""
    torch.manual_seed(0)
    return {
        "model": {
            "big": torch.randn(1500, 1024),
            "half": torch.randn(300, 257).to(torch.bfloat16),
            "small": torch.arange(7),
            "empty": torch.empty(0, 4),
            "scalar": torch.tensor(3.5),
        },
        "many": {f"t{i}": torch.full((5, 3), float(i)) for i in range(40)},
        "step": 17,
        "name": "run",
    }


@pytest.fixture
def saved(tmp_path, server):
    """(state, the local folder) of a checkpoint that is on the server under ``ckpt``."""
    state = model_state()
    folder = tmp_path / "local"
    dcp_rs.save(state, folder)
    server.put_folder(folder, "runs/ckpt")
    return state, folder
