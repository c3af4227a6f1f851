"""``exists``: a loop that looked for ``.metadata`` began at step 1 after a restart.

Folders of RsWriter have no such file. The loop's first save replaced the good checkpoint.
"""

import os

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs import RsReader, RsWriter
from dcp_rs.errors import CorruptIndexError, UnsupportedError
from support.both import HAS_RANK_LOCAL, save_rs, save_stock
from support.forged import INDEX

STATE = {"w": torch.arange(4.0), "step": 3}


def save_safetensors(state, path):
    path.mkdir()
    safetensors.torch.save_file({"w": state["w"]}, path / "model.safetensors")


def save_bin(state, path):
    path.mkdir()
    torch.save(state, path / "pytorch_model.bin")


@pytest.mark.parametrize("save", [save_rs, save_stock, save_safetensors, save_bin, torch.save])
def test_a_checkpoint_of_each_format_exists(ckpt, save):
    assert not dcp_rs.exists(ckpt)
    save(STATE, ckpt)
    assert dcp_rs.exists(ckpt)
    assert dcp_rs.exists(str(ckpt))
    assert dcp_rs.exists(f"file://{ckpt}")


def test_loop_of_stock_torch_resumes_after_the_move(ckpt):
    """The loop of N1, as from-dcp.md changes it."""
    for run in (1, 2):
        state = {"w": torch.zeros(4), "step": 0}
        if dcp_rs.exists(ckpt):
            dcp.load(state, storage_reader=RsReader(ckpt), no_dist=True)
        assert state["step"] == (run - 1) * 5
        state["step"] += 5
        dcp.save(state, storage_writer=RsWriter(ckpt), no_dist=True)


@pytest.mark.parametrize("make", [os.mkdir, lambda path: path.write_text("no checkpoint")])
def test_folder_and_file_of_something_else_do_not_exist(ckpt, make):
    make(ckpt)
    assert not dcp_rs.exists(ckpt)


def test_first_save_that_was_killed_does_not_exist(ckpt):
    save_rs(STATE, ckpt)
    (ckpt / INDEX).unlink()
    assert not dcp_rs.exists(ckpt)


@pytest.mark.parametrize("damage", ["cut", "folder", "link", "later"])
def test_damaged_checkpoint_exists_and_its_load_raises(ckpt, damage):
    """A run must not begin anew over it."""
    save_rs(STATE, ckpt)
    index = ckpt / INDEX
    data = bytearray(index.read_bytes())
    index.unlink()
    if damage == "cut":
        index.write_bytes(data[:40])
    elif damage == "folder":
        index.mkdir()
    elif damage == "link":
        index.symlink_to("gone")
    else:
        data[8] = 99  # the version
        index.write_bytes(data)
    assert dcp_rs.exists(ckpt)
    with pytest.raises((CorruptIndexError, UnsupportedError, FileNotFoundError)):
        dcp_rs.load({"w": torch.zeros(4)}, ckpt, no_dist=True)


def test_damaged_files_of_others_exist(ckpt):
    save_stock(STATE, ckpt)
    (ckpt / ".metadata").write_bytes(b"")
    assert dcp_rs.exists(ckpt)
    torch.save(STATE, file := ckpt / "state.pt")
    file.write_bytes(file.read_bytes()[:200])
    assert dcp_rs.exists(file)


@pytest.mark.skipif(not HAS_RANK_LOCAL, reason="this torch has no rank-local saves")
def test_rank_local_save_exists(ckpt):
    writer = RsWriter(ckpt)
    dcp.save(STATE, storage_writer=writer, no_dist=True, use_collectives=False)
    assert dcp_rs.exists(ckpt)
    (ckpt / "__0.index.dcprs").rename(ckpt / "__7.index.dcprs")  # of a node without rank 0
    assert dcp_rs.exists(ckpt)


def test_folder_that_cannot_be_read_raises(ckpt):
    save_rs(STATE, ckpt)
    ckpt.chmod(0)
    try:
        if os.access(ckpt / INDEX, os.F_OK):
            pytest.skip("root may read everything")
        with pytest.raises(PermissionError):
            dcp_rs.exists(ckpt)
    finally:
        ckpt.chmod(0o700)


def test_wrong_paths_raise(ckpt):
    ckpt.write_text("a file")
    with pytest.raises(NotADirectoryError):
        dcp_rs.exists(ckpt / "deeper")
    with pytest.raises(ValueError, match="empty"):
        dcp_rs.exists("")
    with pytest.raises(UnsupportedError, match="hdfs"):
        dcp_rs.exists("hdfs://host/ckpt")
    for path, option in ((ckpt, "region"), ("s3://bucket/x", "typo"), ("https://host/x", "typo")):
        with pytest.raises(UnsupportedError, match="storage_options"):
            dcp_rs.exists(path, storage_options={option: "x"})
    with pytest.raises(TypeError, match="path"):
        dcp_rs.exists({"w": 1})
