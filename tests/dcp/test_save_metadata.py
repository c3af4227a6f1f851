"""The metadata that a save gives back."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import dcp_rs
from dcp_rs.errors import CheckpointNotFoundError
from support import nested_state


def test_metadata_says_what_torchs_says(tmp_path):
    state = nested_state()
    ours = dcp_rs.save(state, tmp_path / "ours")
    stock = dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    assert dict(ours.planner_data) == dict(stock.planner_data)
    assert set(ours.state_dict_metadata) == set(stock.state_dict_metadata)
    for fqn, entry in stock.state_dict_metadata.items():
        got = ours.state_dict_metadata[fqn]
        assert type(got) is type(entry)
        if hasattr(entry, "size"):
            assert (got.size, got.chunks) == (entry.size, entry.chunks)
            assert got.properties.dtype == entry.properties.dtype


def test_metadata_pickles_to_a_few_bytes_and_knows_when_it_is_out_of_date(ckpt):
    metadata = dcp_rs.save({f"layer.{i}": torch.ones(3) for i in range(500)}, ckpt)
    data = pickle.dumps(metadata)
    assert len(data) < 2000
    copy = pickle.loads(data)
    assert len(copy.state_dict_metadata) == len(copy.planner_data) == 500
    assert copy.state_dict_metadata["layer.7"].size == (3,)
    late = pickle.loads(data)
    dcp_rs.save({"w": torch.ones(1)}, ckpt)
    assert len(metadata.state_dict_metadata) == 500  # this one holds the old index open
    with pytest.raises(CheckpointNotFoundError, match="has been replaced"):
        len(late.state_dict_metadata)


def test_metadata_of_what_others_wrote_pickles_to_the_path_that_was_opened(tmp_path):
    """It once opened the folder of a file: here that is another model, in silence."""
    save_file({"other": torch.zeros(2)}, tmp_path / "model.safetensors")
    save_file({"w": torch.ones(3)}, tmp_path / "part.safetensors")
    torch.save({"x": torch.ones(4)}, tmp_path / "file.pt")
    for rank in range(2):
        dcp.save(
            {"r": torch.full((rank + 1,), 1.0)}, checkpoint_id=tmp_path / f"of{rank}", no_dist=True
        )
        (tmp_path / f"of{rank}/.metadata").rename(tmp_path / f"of{rank}/__{rank}.metadata")
    for name, rank, size in [
        ("part.safetensors", None, {"w": (3,)}),
        ("file.pt", None, {"x": (4,)}),
        ("of0", 0, {"r": (1,)}),
        ("of1", 1, {"r": (2,)}),
    ]:
        metadata = dcp_rs.RsReader(tmp_path / name).read_metadata(rank=rank)
        assert repr(metadata.state_dict_metadata).endswith(f"{name}>")
        data = pickle.dumps(metadata)
        assert len(data) < 2000
        copy = pickle.loads(data)
        assert {fqn: entry.size for fqn, entry in copy.state_dict_metadata.items()} == size
