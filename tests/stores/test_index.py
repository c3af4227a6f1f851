"""``dcp_rs.index`` of data on a store: of others, and of a save that lost its index."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import dcp_rs
from dcp_rs.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DcpRsError,
    StorageError,
    StoragePreconditionError,
    UnsupportedError,
)
from support import assert_state_equal, blank
from support.object_server import Fault

INDEX = "hf/index.dcprs"


@pytest.fixture
def hf(server, tmp_path):
    """The tensors of a model in two files of Hugging Face, on the server under ``hf``."""
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(700, 1024),
        "b": torch.randn(300, 7).bfloat16(),
        "c": torch.arange(5),
    }
    folder = tmp_path / "hf"
    folder.mkdir()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_file({"a": tensors["a"]}, folder / names[0])
    save_file({"b": tensors["b"], "c": tensors["c"]}, folder / names[1])
    of = {"a": names[0], "b": names[1], "c": names[1]}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": of, "metadata": {}})
    )
    server.put_folder(folder, "hf")
    return tensors, folder


def is_index(request):
    return request.kind == "put" and request.key.endswith("index.dcprs")


def opened(server, prefix="hf"):
    with dcp_rs.open(server.url(prefix), storage_options=server.options()) as ckpt:
        return {name: ckpt[name] for name in ckpt}


@pytest.mark.parametrize("at", ["hf", "hf/model.safetensors.index.json"])
def test_beside_a_model_of_others(hf, server, at):
    tensors, _ = hf
    before = dict(server.objects)
    begin = len(server.requests)
    made = dcp_rs.index(server.url(at), storage_options=server.options())
    assert str(made) == server.url(INDEX)
    assert {key: server.objects[key] for key in before} == before
    stored = [request for request in server.requests[begin:] if is_index(request)]
    assert [request.condition for request in stored] == ["If-None-Match: *"]
    begin = len(server.requests)
    assert_state_equal(opened(server), tensors)
    assert {request.key for request in server.requests[begin:] if request.kind == "get"} >= {INDEX}
    assert not any(request.key.endswith(".json") for request in server.requests[begin:])


def test_with_digests_what_is_damaged_later_is_found(hf, server):
    _, folder = hf
    url, options = server.url("hf"), server.options()
    told = []
    dcp_rs.index(
        url,
        digests=True,
        storage_options=options,
        progress=lambda done, total: told.append((done, total)),
    )
    nbytes = 700 * 1024 * 4 + 300 * 7 * 2 + 5 * 8
    assert told[-1] == (nbytes, nbytes)
    report = dcp_rs.verify(url, storage_options=options)
    assert report.ok
    assert (report.bytes_verified, report.bytes_without_digest) == (nbytes, 0)
    # The same as of the folder.
    dcp_rs.index(folder, digests=True)
    here, there = (folder / "index.dcprs").read_bytes(), server.objects[INDEX].data
    assert len(here) == len(there)
    key = "hf/model-00001-of-00002.safetensors"
    data = bytearray(server.objects[key].data)
    data[1_500_000] ^= 1
    server.put(key, bytes(data))
    report = dcp_rs.verify(url, storage_options=options)
    assert [(problem.tensor, problem.block) for problem in report.problems] == [("a", 1)]


def test_stock_folder_is_indexed(server, tmp_path):
    state = {"w": torch.randn(100, 10), "n": 3}
    dcp.save(dict(state), checkpoint_id=tmp_path / "stock", no_dist=True)
    server.put_folder(tmp_path / "stock", "stock")
    dcp_rs.index(server.url("stock"), digests=True, storage_options=server.options())
    into = blank(state)
    dcp_rs.load(into, server.url("stock"), storage_options=server.options(), verify=True)
    assert_state_equal(into, state)


def test_an_index_that_is_lost_is_made_anew(saved, server):
    state, _ = saved
    url, options = server.url("runs/ckpt"), server.options()
    del server.objects["runs/ckpt/index.dcprs"]
    with pytest.raises(CheckpointNotFoundError):
        dcp_rs.load(blank(state), url, storage_options=options)
    made = dcp_rs.index(url, storage_options=options)
    assert str(made) == server.url("runs/ckpt/index.dcprs")
    into = blank(state)
    dcp_rs.load(into, url, storage_options=options, verify=True)
    assert_state_equal(into, state)
    with dcp_rs.open(url, storage_options=options) as ckpt:
        assert dcp_rs.verify(url, storage_options=options).bytes_without_digest == 0
        assert ckpt["step"] == 17


def test_recovered_index_equals_that_of_a_folder(saved, server):
    _, folder = saved
    (folder / "index.dcprs").unlink()
    del server.objects["runs/ckpt/index.dcprs"]
    dcp_rs.index(folder)
    dcp_rs.index(server.url("runs/ckpt"), storage_options=server.options())
    assert server.objects["runs/ckpt/index.dcprs"].data == (folder / "index.dcprs").read_bytes()


def test_data_that_is_not_complete_is_not_indexed(saved, server):
    del server.objects["runs/ckpt/index.dcprs"]
    key = next(iter(server.keys("runs/ckpt/g")))
    server.put(key, server.objects[key].data[:-1])
    with pytest.raises(CheckpointNotFoundError, match="generation 1 is not complete"):
        dcp_rs.index(server.url("runs/ckpt"), storage_options=server.options())
    assert "runs/ckpt/index.dcprs" not in server.objects


def test_one_that_is_there_is_replaced_when_that_is_asked_for(hf, server):
    url, options = server.url("hf"), server.options()
    dcp_rs.index(url, storage_options=options)
    first = server.objects[INDEX]
    with pytest.raises(CheckpointExistsError, match="pass overwrite=True"):
        dcp_rs.index(url, storage_options=options)
    assert server.objects[INDEX] is first
    dcp_rs.index(url, overwrite=True, digests=True, storage_options=options)
    assert dcp_rs.verify(url, storage_options=options).bytes_without_digest == 0


@pytest.mark.parametrize("overwrite", [False, True])
def test_another_who_is_faster_is_not_touched(hf, server, overwrite):
    if overwrite:
        dcp_rs.index(server.url("hf"), storage_options=server.options())

    def commits(request):
        if is_index(request):
            server.put(INDEX, b"another")
        return False

    server.faults.append(Fault(matches=commits, times=None))
    with pytest.raises(StoragePreconditionError):
        dcp_rs.index(server.url("hf"), overwrite=overwrite, storage_options=server.options())
    assert server.objects[INDEX].data == b"another"


@pytest.mark.parametrize(
    "fault", [{"lose": True}, {"status": 503, "done": True}, {"status": 503}, {"reset": True}]
)
def test_a_lost_answer(hf, server, fault):
    tensors, _ = hf
    server.faults.append(Fault(**fault, matches=is_index, times=2))
    dcp_rs.index(server.url("hf"), storage_options=server.options())
    assert server.faults[0].times == 0
    assert_state_equal(opened(server), tensors)


def test_a_store_that_is_busy_while_data_is_hashed(hf, server):
    tensors, _ = hf
    server.faults.extend(
        Fault(**kind, times=None, chance=0.1, matches=lambda request: request.kind == "get")
        for kind in ({"status": 503}, {"cut": 1000}, {"reset": True})
    )
    dcp_rs.index(server.url("hf"), digests=True, storage_options=server.options())
    server.faults[:] = [
        Fault(status=503, times=None, matches=lambda request: request.key.endswith("2.safetensors"))
    ]
    with pytest.raises(StorageError, match="503"):
        dcp_rs.index(
            server.url("hf"),
            digests=True,
            overwrite=True,
            storage_options=server.options(max_retries=1),
        )
    server.faults.clear()
    assert dcp_rs.verify(server.url("hf"), storage_options=server.options()).ok
    assert_state_equal(opened(server), tensors)


def test_unindexable_prefix_is_refused(hf, server, tmp_path):
    options = server.options()
    with pytest.raises(CheckpointNotFoundError):
        dcp_rs.index(server.url("nothing"), storage_options=options)
    with pytest.raises(UnsupportedError, match="beside it"):
        dcp_rs.index(server.url("hf"), out=tmp_path, storage_options=options)
    with pytest.raises(UnsupportedError):
        dcp_rs.index(hf[1], out=server.url("hf"))
    with pytest.raises(UnsupportedError, match="read only"):
        dcp_rs.index(server.http_url("hf"))
    with pytest.raises(UnsupportedError, match="no storage_options"):
        dcp_rs.index(hf[1], storage_options=options)
    server.put("hf/__0.index.dcprs", b"")
    with pytest.raises(DcpRsError, match="rank-local"):
        dcp_rs.index(server.url("hf"), storage_options=options)
    assert INDEX not in server.objects
