"""Options that choose what an index is rebuilt of: each has an effect, or is refused by its name."""

import pytest
import torch
from safetensors.torch import save_file

import dcp_rs
from dcp_rs import RsWriter
from dcp_rs.errors import CheckpointNotFoundError
from support.both import save_rs


@pytest.fixture
def lost(tmp_path):
    path = tmp_path / "lost"
    save_rs({"w": torch.ones(2)}, path)
    (path / "index.dcprs").unlink()
    return path


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"generation": -1}, "generation=-1"),
        ({"save_id": "mine"}, "save_id='mine': must be a UUID"),
        ({"save_id": 3}, "save_id=3: must be a UUID"),
        ({"threads": -1}, "threads=-1: must be a positive integer"),
        ({"threads": 0}, "threads=0: must be a positive integer"),
    ],
)
def test_contradicting_options_are_named(lost, option, says):
    """It was an OverflowError, or a badly formed string of somebody's."""
    with pytest.raises(ValueError, match=says):
        dcp_rs.index(lost, **option)
    assert not (lost / "index.dcprs").exists()


def test_the_same_elsewhere(tmp_path):
    save_rs({"w": torch.ones(2)}, tmp_path / "ckpt")
    with pytest.raises(ValueError, match="threads=-1"):
        dcp_rs.verify(tmp_path / "ckpt", threads=-1)
    with pytest.raises(ValueError, match="save_id='mine': must be a UUID"):
        RsWriter(tmp_path / "ckpt", save_id="mine")


def test_there_is_nothing_to_choose_among_data_of_others(tmp_path):
    """The option was passed over, and the index was of all that is there."""
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "hf" / "model.safetensors")
    for option in ({"generation": 2}, {"save_id": "0" * 32}):
        with pytest.raises(ValueError, match="choose among saves of dcp-rs"):
            dcp_rs.index(tmp_path / "hf", **option)
    assert not (tmp_path / "hf" / "index.dcprs").exists()


def test_generation_that_is_there_is_indexed(lost):
    with pytest.raises(CheckpointNotFoundError):
        dcp_rs.index(lost, generation=2)
    dcp_rs.index(lost, generation=1)
    assert dcp_rs.verify(lost).ok
