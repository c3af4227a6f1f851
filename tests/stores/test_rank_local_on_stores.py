"""Indexes of single ranks on a store: only an answer that there is none of all ranks leads to them, and not one that says nothing of it."""

from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs import RsWriter
from dcp_rs.errors import (
    CheckpointExistsError,
    DcpRsError,
    StorageError,
    StoragePermissionError,
    StoragePreconditionError,
)
from support import rank_outcomes, run_ranks
from support.both import HAS_RANK_LOCAL
from support.object_server import Fault

pytestmark = pytest.mark.skipif(not HAS_RANK_LOCAL, reason="this torch has no rank-local saves")


def state(value):
    return {"w": torch.full((4,), float(value)), "step": value}


def save_rank_local(url, options):
    dcp.save(state(1), storage_writer=RsWriter(url, storage_options=options), use_collectives=False)


def load(url, options):
    got = state(0)
    try:
        dcp_rs.load(got, url, storage_options=options)
    except DcpRsError:
        assert got["step"] == 0
        raise
    return got["step"], got["w"].tolist()


def is_index_of_all(request):
    return request.key.endswith("/index.dcprs")


@pytest.mark.parametrize("status", [403, 500])
def test_only_that_there_is_none_leads_to_a_rank_s_own(server, status):
    options = server.options(max_retries=0)
    run_ranks(2, save_rank_local, server.url("ckpt"), options)
    assert run_ranks(2, load, server.url("ckpt"), options) == [(1, [1.0] * 4)] * 2
    kept = {key: server.objects[key].data for key in server.keys("ckpt/")}
    dcp_rs.save(state(2), server.url("ckpt"), storage_options=options)
    for key, data in kept.items():  # as after a kill before they were removed
        server.put(key, data)
    assert run_ranks(2, load, server.url("ckpt"), options) == [(2, [2.0] * 4)] * 2
    server.faults.append(
        Fault(
            status=status,
            code="AccessDenied" if status == 403 else "InternalError",
            matches=is_index_of_all,
        )
    )
    for outcome in rank_outcomes(2, load, server.url("ckpt"), options):
        assert isinstance(
            outcome.error, StoragePermissionError if status == 403 else StorageError
        ), outcome
    assert run_ranks(2, load, server.url("ckpt"), options) == [(2, [2.0] * 4)] * 2


def test_a_save_that_may_replace_nothing_replaces_none_of_them(server):
    url, options = server.url("ckpt"), server.options()
    run_ranks(2, save_rank_local, url, options)
    before = {key: server.objects[key].data for key in server.keys("ckpt/")}
    with pytest.raises(CheckpointExistsError, match="overwrite=False"):
        dcp_rs.save(state(2), url, overwrite=False, storage_options=options)
    assert {key: server.objects[key].data for key in server.keys("ckpt/")} == before
    dcp_rs.save(state(2), url, storage_options=options)
    assert len(server.keys("ckpt/")) == 2  # it replaces them


@pytest.mark.parametrize("way", ["save", "convert"])
def test_rank_local_save_made_meanwhile_stays(server, tmp_path, way):
    url, options = server.url("ckpt"), server.options()
    saved = []
    dcp_rs.save(state(2), tmp_path / "source", no_dist=True)

    def other(*_):
        if not saved:
            saved.append(run_ranks(1, save_rank_local, url, options))

    ways = {
        "save": partial(dcp_rs.save, state(2), url, storage_options=options),
        "convert": partial(dcp_rs.convert, tmp_path / "source", url, out_storage_options=options),
    }
    with pytest.raises(StoragePreconditionError):
        ways[way](overwrite=False, progress=other)
    assert run_ranks(1, load, url, options) == [(1, [1.0] * 4)]
    assert len(server.keys("ckpt/")) == 2
