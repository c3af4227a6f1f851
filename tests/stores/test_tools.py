"""``convert`` to a store, and ``clean`` of one."""

import os
import time

import pytest
import torch
from safetensors.torch import save_file

import dcp_rs
from dcp_rs.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptIndexError,
    DcpRsError,
    StorageError,
    StoragePermissionError,
    StoragePreconditionError,
    UnsupportedError,
)
from support import assert_state_equal, blank
from support.object_server import Fault

DAY = 24 * 60 * 60


def loaded(state, url, options):
    into = blank(state)
    dcp_rs.load(into, url, storage_options=options, verify=True)
    return into


@pytest.mark.parametrize("shards", [1, 3])
def test_from_a_folder(saved, server, shards):
    state, folder = saved
    report = dcp_rs.convert(
        folder, server.url("copy"), shards=shards, storage_options=server.options()
    )
    assert_state_equal(loaded(state, server.url("copy"), server.options()), state)
    assert report.files == shards
    assert len(server.keys("copy/")) == shards + 1
    assert server.open_uploads() == []


def test_from_store_to_store(saved, server):
    state, _ = saved
    begin = len(server.requests)
    dcp_rs.convert(
        server.url("runs/ckpt"), server.url("half"), dtype="bf16", storage_options=server.options()
    )
    assert {request.kind for request in server.requests[begin:]} >= {"get", "put"}
    with dcp_rs.open(server.url("half"), storage_options=server.options()) as ckpt:
        assert ckpt["model.big"].equal(state["model"]["big"].bfloat16())
        assert ckpt["step"] == 17


def test_overwrite_replaces_on_request(saved, server, tmp_path):
    dcp_rs.save({"w": torch.ones(3)}, tmp_path / "other")
    url, options = server.url("runs/ckpt"), server.options()
    before = dict(server.objects)
    with pytest.raises(CheckpointExistsError):
        dcp_rs.convert(tmp_path / "other", url, storage_options=options)
    assert server.objects == before
    with pytest.raises(ValueError, match="is the source"):
        dcp_rs.convert(url, url, overwrite=True, storage_options=options)
    dcp_rs.convert(tmp_path / "other", url, overwrite=True, storage_options=options)
    with dcp_rs.open(url, storage_options=options) as ckpt:
        assert list(ckpt.keys()) == ["w"]
    assert set(server.keys("runs/ckpt/")).isdisjoint(
        key for key in before if key.endswith(".safetensors")
    )


def test_after_a_failure_nothing_of_it_is_left(saved, server):
    _, folder = saved
    server.faults.append(
        Fault(
            status=403,
            code="AccessDenied",
            matches=lambda r: r.kind == "put" and r.key == "copy/index.dcprs",
        )
    )
    with pytest.raises(StoragePermissionError):
        dcp_rs.convert(folder, server.url("copy"), shards=2, storage_options=server.options())
    assert server.keys("copy/") == []
    assert server.open_uploads() == []


def test_a_source_that_is_replaced_meanwhile(server, tmp_path):
    """Seen before the commit: a store takes nothing back."""
    data = tmp_path / "model.safetensors"
    save_file({"w": torch.randn(100, 100)}, data)

    def changes(request):
        if request.kind in ("put", "part") and request.key.endswith(".safetensors"):
            os.utime(data, ns=(1, 1))
        return False

    server.faults.append(Fault(matches=changes))
    with pytest.raises(DcpRsError, match=r"model\.safetensors"):
        dcp_rs.convert(data, server.url("copy"), storage_options=server.options())
    assert server.keys("copy/") == []


def test_another_who_is_faster(saved, server):
    _, folder = saved

    def commits(request):
        if (
            request.kind in ("put", "part")
            and request.key.startswith("copy/")
            and request.key.endswith(".safetensors")
        ):
            server.objects["copy/index.dcprs"] = server.objects["runs/ckpt/index.dcprs"]
        return False

    server.faults.append(Fault(matches=commits))
    with pytest.raises(StoragePreconditionError):
        dcp_rs.convert(folder, server.url("copy"), storage_options=server.options())
    assert server.keys("copy/") == ["copy/index.dcprs"]


def leave(server, key, age):
    """An object that nobody names, as a killed save leaves it."""
    server.put(key, server.objects[data_of(server)].data)
    server.objects[key].modified = time.time() - age


def data_of(server):
    """The key of the data file of the checkpoint."""
    return next(key for key in server.keys("runs/ckpt/g00000001-") if key.endswith(".safetensors"))


def orphan(server, generation):
    """The name of a data file of another save, from one that is there."""
    return data_of(server).rsplit("/", 1)[1].replace("00000001", f"{generation:08}", 1)


def test_clean_removes_what_no_index_names(saved, server):
    state, _ = saved
    url, options = server.url("runs/ckpt"), server.options()
    old, young = f"runs/ckpt/{orphan(server, 7)}", f"runs/ckpt/{orphan(server, 8)}"
    leave(server, old, 2 * DAY)
    leave(server, young, 60)
    server.put("runs/ckpt/notes.txt", b"mine")
    server.put(f"runs/ckpt/deeper/{orphan(server, 7)}", b"not in this folder")
    report = dcp_rs.clean(url, storage_options=options)
    assert [leftover.path for leftover in report.found] == [server.url(old)]
    assert [(leftover.path, leftover.verdict) for leftover in report.kept] == [
        (server.url(young), "young")
    ]
    assert report.removed == []
    assert old in server.objects
    assert dcp_rs.clean(url, yes=True, older_than=3 * DAY, storage_options=options).removed == []
    report = dcp_rs.clean(url, yes=True, storage_options=options)
    assert [leftover.path for leftover in report.removed] == [server.url(old)]
    assert report.nbytes > 0
    assert old not in server.objects
    assert young in server.objects
    assert {"runs/ckpt/notes.txt", "runs/ckpt/index.dcprs", data_of(server)} < set(server.keys())
    assert dcp_rs.clean(url, yes=True, older_than=0, storage_options=options).removed[
        0
    ].path == server.url(young)
    assert_state_equal(loaded(state, url, options), state)


def test_clean_keeps_a_whole_save_without_its_index(saved, server):
    url, options = server.url("runs/ckpt"), server.options()
    del server.objects["runs/ckpt/index.dcprs"]
    report = dcp_rs.clean(url, yes=True, older_than=0, storage_options=options)
    assert report.removed == []
    assert [leftover.verdict for leftover in report.kept] == ["whole"]
    assert data_of(server) in server.objects


def test_clean_removes_nothing_where_it_cannot_know(saved, server):
    url, options = server.url("runs/ckpt"), server.options()
    leave(server, f"runs/ckpt/{orphan(server, 7)}", 2 * DAY)
    before = server.keys()
    index = server.objects["runs/ckpt/index.dcprs"]
    server.put("runs/ckpt/index.dcprs", index.data[:100] + b"x" + index.data[101:])
    with pytest.raises(CorruptIndexError):
        dcp_rs.clean(url, yes=True, storage_options=options)
    with pytest.raises(CheckpointNotFoundError):
        dcp_rs.clean(server.url("nothing"), yes=True, storage_options=options)
    server.objects["runs/ckpt/index.dcprs"] = index
    server.faults.append(
        Fault(status=503, times=None, matches=lambda request: request.kind == "list")
    )
    with pytest.raises(StorageError):
        dcp_rs.clean(url, yes=True, storage_options={**options, "max_retries": 1})
    with pytest.raises(UnsupportedError):
        dcp_rs.clean(server.http_url("runs/ckpt"), yes=True)
    assert server.keys() == before


def test_clean_says_what_it_may_not_remove(saved, server):
    url, options = server.url("runs/ckpt"), server.options()
    kept, gone = (f"runs/ckpt/{orphan(server, i)}" for i in (7, 8))
    leave(server, kept, 2 * DAY)
    leave(server, gone, 2 * DAY)
    server.undeletable.add(kept)
    with pytest.warns(UserWarning, match="still there.*AccessDenied"):
        report = dcp_rs.clean(url, yes=True, storage_options=options)
    assert [leftover.path for leftover in report.removed] == [server.url(gone)]
    assert len(report.failed) == 1
    assert server.url(kept) in report.failed[0]
