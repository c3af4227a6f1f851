"""Paths where no checkpoint is, or something that is none."""

import os
import shutil

import pytest
import torch

import dcp_rs
from dcp_rs import RsReader
from dcp_rs.errors import CheckpointNotFoundError, CorruptIndexError, DcpRsError, UnsupportedError
from support import blank
from support.both import load_rs, save_rs
from support.failures import STATE, WAYS, failure, read_whole
from support.places import STOCK


@pytest.mark.parametrize("way", WAYS)
def test_no_checkpoint_at_the_path(tmp_path, way):
    (tmp_path / "empty").mkdir()
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes.txt").write_text("nothing to see")
    for path in (tmp_path / "nowhere", tmp_path / "empty", tmp_path / "others"):
        error = failure(CheckpointNotFoundError, way, path)
        assert str(path) in str(error)
        assert isinstance(error, FileNotFoundError)


def test_a_url_where_there_has_to_be_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_rs({"w": torch.ones(1)}, tmp_path / "src")
    error = failure(UnsupportedError, lambda url: dcp_rs.index("src", out=url), "s3://bucket/ckpt")
    assert error.path == "s3://bucket/ckpt"
    assert "s3://bucket/ckpt" in str(error)
    assert "this needs a local path, not a URL" in str(error)
    assert [entry.name for entry in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize(
    "use",
    [
        dcp_rs.open,
        dcp_rs.verify,
        dcp_rs.index,
        dcp_rs.CheckpointManager,
        RsReader,
        lambda url: RsReader("ckpt").reset(url),
        lambda url: dcp_rs.load({}, url, no_dist=True),
        lambda url: dcp_rs.convert(url, "dst"),
    ],
)
def test_a_scheme_of_no_store(tmp_path, monkeypatch, use):
    monkeypatch.chdir(tmp_path)
    error = failure(UnsupportedError, use, "hdfs://host/ckpt")
    assert error.path == "hdfs://host/ckpt"
    assert "hdfs:// is not supported" in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_is_no_checkpoint(tmp_path, way):
    path = tmp_path / "file.txt"
    path.write_text("not a folder, and not a checkpoint")
    error = failure(DcpRsError, way, path)
    assert str(path) in str(error)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_an_index_that_is_no_file(ckpt, way, make):
    ckpt.mkdir()
    make(ckpt / "index.dcprs")
    error = failure(CorruptIndexError, way, ckpt)
    assert error.path == str(ckpt / "index.dcprs")


def test_torch_s_load_says_why_too(tmp_path):
    with pytest.raises(BaseException, match=r"nowhere|metadata is None\n$") as raised:
        load_rs(blank(STATE), tmp_path / "nowhere")
    assert not isinstance(raised.value, TypeError | AttributeError)
    if "nowhere" not in str(raised.value):
        pytest.skip("this torch (2.11) says 'metadata is None', whatever the reason")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["model.safetensors", "stock/.metadata"])
def test_a_pipe_in_the_place_of_a_foreign_file_is_not_waited_for(tmp_path, name):
    shutil.copytree(STOCK / "torch-2.15.0" / "plain", tmp_path / "stock")
    path = tmp_path / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises((DcpRsError, OSError)):
        read_whole(path if name == "model.safetensors" else path.parent, verify=True)


@pytest.mark.parametrize("name", ["model.pt", "folder"])
def test_a_link_that_leads_nowhere_is_called_one(tmp_path, name):
    """The path itself was suggested."""
    (tmp_path / name).symlink_to("gone")
    with pytest.raises(CheckpointNotFoundError) as raised:
        dcp_rs.open(tmp_path / name)
    assert str(raised.value).endswith("; it is a dangling link to gone")
