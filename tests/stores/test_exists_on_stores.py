"""``exists`` and ``latest`` of URLs. A store that does not answer is no new run."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs import RsWriter
from dcp_rs.checkpoint import locate
from dcp_rs.errors import CheckpointNotFoundError, InternalError, StorageError
from support.both import HAS_RANK_LOCAL, save_stock
from support.object_server import Fault

STATE = {"w": torch.ones(3)}


def test_checkpoints_of_each_kind(server, tmp_path):
    options = {"storage_options": server.options()}
    url = server.url("ckpt")
    assert not dcp_rs.exists(url, **options)
    dcp_rs.save(STATE, url, no_dist=True, **options)
    assert dcp_rs.exists(url, **options)
    over_http = {"storage_options": {"allow_http": True}}
    assert dcp_rs.exists(server.http_url("ckpt"), **over_http)
    assert not dcp_rs.exists(server.http_url("other"), **over_http)
    save_stock(STATE, tmp_path / "stock")
    server.put_folder(tmp_path / "stock", "stock")
    assert dcp_rs.exists(server.url("stock"), **options)
    server.objects["ckpt/index.dcprs"].pieces[:] = [b"damaged"]
    assert dcp_rs.exists(url, **options)


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "a.bin", "model.safetensors.index.json"])
def test_single_file_that_is_not_there(server, name):
    """A missing ``.safetensors`` file was called corrupt data."""
    options = {"storage_options": server.options()}
    assert not dcp_rs.exists(server.url(name), **options)
    with pytest.raises(CheckpointNotFoundError, match="nothing is there"):
        dcp_rs.open(server.url(name), **options)
    server.put(name, b"damaged")
    assert dcp_rs.exists(server.url(name), **options)


@pytest.mark.skipif(not HAS_RANK_LOCAL, reason="this torch has no rank-local saves")
def test_rank_local_save_exists(server):
    writer = RsWriter(server.url("ckpt"), storage_options=server.options())
    dcp.save(STATE, storage_writer=writer, no_dist=True, use_collectives=False)
    assert dcp_rs.exists(server.url("ckpt"), storage_options=server.options())


@pytest.mark.parametrize("status", [403, 500])
def test_store_that_does_not_answer_raises(server, status):
    options = {"storage_options": server.options(max_retries=0)}
    dcp_rs.save(STATE, server.url("run/step-1"), no_dist=True, **options)
    server.faults.append(Fault(status=status, times=None))
    for look in (dcp_rs.exists, dcp_rs.latest):
        with pytest.raises(StorageError):
            look(server.url("run/step-1"), **options)


def test_latest_step(server, tmp_path):
    options = {"storage_options": server.options()}
    root = server.url("run")
    assert dcp_rs.latest(root, **options) is None
    dcp_rs.save(STATE, f"{root}/epoch_1", no_dist=True, **options)
    with pytest.raises(CheckpointNotFoundError, match="'epoch_1'"):
        dcp_rs.latest(root, **options)
    for number in (9, 10):
        dcp_rs.save(STATE, f"{root}/step-{number}", no_dist=True, **options)
    assert str(dcp_rs.latest(root, **options)) == f"{root}/step-10"
    save_stock(STATE, tmp_path / "stock")
    server.put_folder(tmp_path / "stock", "run/step-11")
    assert str(dcp_rs.latest(root, **options)) == f"{root}/step-11"
    with pytest.raises(CheckpointNotFoundError, match="is a checkpoint itself"):
        dcp_rs.latest(f"{root}/step-9", **options)


def test_a_bug_is_no_damaged_checkpoint(monkeypatch):
    """``exists`` was true, as of a checkpoint that a later version wrote."""

    def fails(*_):
        raise InternalError("a bug")

    monkeypatch.setattr(locate._core, "Index", SimpleNamespace(open=fails))
    with pytest.raises(InternalError):
        dcp_rs.exists("s3://bucket/x")
