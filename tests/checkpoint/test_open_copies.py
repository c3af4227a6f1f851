"""An opened checkpoint that is sent to another process."""

import copy
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import dcp_rs
from dcp_rs.errors import CheckpointNotFoundError, CheckpointReplacedError, DcpRsError
from support.both import save_rs
from support.layouts import WHOLE


class Rows(torch.utils.data.Dataset):
    def __init__(self, checkpoint):
        self.checkpoint = checkpoint

    def __len__(self):
        return 11

    def __getitem__(self, row):
        return self.checkpoint.get_slice("w")[row], os.getpid()


@pytest.mark.slow
def test_workers_of_a_data_loader_open_it_again(saved_whole, monkeypatch):
    monkeypatch.chdir(saved_whole.parent)
    with dcp_rs.open(saved_whole.name) as checkpoint:
        monkeypatch.chdir("/")
        loader = torch.utils.data.DataLoader(
            Rows(checkpoint), batch_size=4, num_workers=1, multiprocessing_context="spawn"
        )
        batches = list(loader)
    assert torch.equal(torch.cat([rows for rows, _ in batches]), WHOLE)
    assert os.getpid() not in torch.cat([pids for _, pids in batches]).tolist()


def test_a_copy_opens_what_it_was_and_nothing_else(saved_whole, tmp_path):
    checkpoint = dcp_rs.open(saved_whole, verify=True, device="meta", weights_only=False)
    data = pickle.dumps(checkpoint)
    assert len(data) < 1000
    copied = pickle.loads(data)
    assert type(copied) is type(checkpoint)
    assert copied._options == checkpoint._options
    assert repr(copied) == repr(checkpoint)
    assert copied["step"] == 7
    save_rs({"w": WHOLE, "b": torch.arange(5), "step": 8}, saved_whole)
    with pytest.raises(CheckpointReplacedError, match="was replaced by another save"):
        pickle.loads(data)
    shutil.rmtree(saved_whole)
    with pytest.raises(CheckpointNotFoundError):
        pickle.loads(data)
    checkpoint.close()
    with pytest.raises(DcpRsError, match="closed"):
        pickle.dumps(checkpoint)


def test_a_slice_goes_with_its_checkpoint(saved_whole):
    part = dcp_rs.open(saved_whole).get_slice("w")
    for copied in (pickle.loads(pickle.dumps(part)), copy.deepcopy(part)):
        assert repr(copied) == repr(part)
        assert (copied[1:3] == part[1:3]).all()


def test_copies_of_others_checkpoints_see_that_they_were_replaced(tmp_path):
    save_file({"w": WHOLE}, tmp_path / "model.safetensors")
    dcp.save({"w": WHOLE}, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    for path in (tmp_path / "model.safetensors", tmp_path / "stock"):
        data = pickle.dumps(dcp_rs.open(path))
        assert torch.equal(pickle.loads(data)["w"], WHOLE)
        if path.is_dir():
            dcp.save({"w": WHOLE[:5]}, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
        else:
            save_file({"w": WHOLE[:5]}, path)
        with pytest.raises(CheckpointReplacedError):
            pickle.loads(data)
