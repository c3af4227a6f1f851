"""``convert`` to a store, into formats of others."""

import pickle
from contextlib import ExitStack

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import dcp_rs
from dcp_rs.errors import (
    CheckpointExistsError,
    DcpRsError,
    StoragePermissionError,
    StoragePreconditionError,
)
from support import assert_state_equal, blank
from support.object_server import Fault

TENSORS = ("model.*", "many.*")


def converted(saved, server, out, **how):
    _, folder = saved
    return dcp_rs.convert(folder, server.url(out), storage_options=server.options(), **how)


@pytest.fixture
def large(tmp_path, server):
    """(state, folder): what is sent in several parts."""
    state = {"w": torch.arange(5 << 20).float(), "b": torch.ones(3), "step": 4}
    dcp_rs.save(state, tmp_path / "large")
    return state, tmp_path / "large"


def test_into_stock_dcp(large, server, tmp_path):
    state, _ = large
    converted(large, server, "copy", to="dcp", shards=2)
    assert server.counts()["part"] > 2
    assert server.open_uploads() == []
    assert server.keys("copy/") == ["copy/.metadata", "copy/__0_0.distcp", "copy/__1_0.distcp"]
    server.get_folder("copy", tmp_path / "stock")
    into = blank(state)
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / "stock"), no_dist=True)
    assert_state_equal(into, state)
    in_place = blank(state)
    dcp_rs.load(in_place, server.url("copy"), storage_options=server.options())
    assert_state_equal(in_place, state)


@pytest.mark.parametrize("shards", [1, 3])
def test_into_a_folder_of_safetensors(saved, server, tmp_path, shards):
    state, _ = saved
    converted(saved, server, "copy", to="safetensors", include=TENSORS, shards=shards)
    server.get_folder("copy", tmp_path / "hf")
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) == shards
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file() == (shards > 1)
    got = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert got.keys() == {f"{part}.{name}" for part in ("model", "many") for name in state[part]}
    assert got["model.big"].equal(state["model"]["big"])


def test_into_one_file(large, server, tmp_path):
    state, _ = large
    converted(large, server, "out/model.safetensors", to="safetensors", include=["w", "b"])
    converted(large, server, "out/all.pt", to="torch")
    assert server.keys("out/") == ["out/all.pt", "out/model.safetensors"]
    server.get_folder("out", tmp_path)
    assert_state_equal(torch.load(tmp_path / "all.pt"), state)
    assert load_file(tmp_path / "model.safetensors")["w"].equal(state["w"])
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        converted(large, server, "out/all.pt", to="torch")
    converted(large, server, "out/all.pt", to="torch", include="step", overwrite=True)
    server.get_folder("out", tmp_path)
    assert torch.load(tmp_path / "all.pt") == {"step": 4}


def test_a_folder_that_holds_something_is_not_written_to(saved, server):
    server.put("copy/notes/readme.txt", b"mine")
    for overwrite in (False, True):
        with pytest.raises(CheckpointExistsError, match="cannot replace"):
            converted(saved, server, "copy", to="dcp", overwrite=overwrite)
    assert server.keys("copy/") == ["copy/notes/readme.txt"]


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_the_native_format_is_not_put_beside_another(saved, server, to):
    """Two checkpoints were in one folder: each library read its own."""
    converted(saved, server, "copy", to=to, include=TENSORS)
    before = server.keys("copy/")
    for overwrite in (False, True):
        with pytest.raises(CheckpointExistsError, match="of another format"):
            converted(saved, server, "copy", overwrite=overwrite)
    assert server.keys("copy/") == before


def test_two_at_a_time(saved, server, tmp_path):
    """Their files have the same names: the second is told before it writes one."""
    told = []

    def progress(*_):
        if not told:
            with pytest.raises(CheckpointExistsError, match="under way"):
                converted(saved, server, "copy", to="dcp", dtype="bf16")
            told.append(True)

    converted(saved, server, "copy", to="dcp", progress=progress)
    assert told
    server.get_folder("copy", tmp_path / "stock")
    with (tmp_path / "stock" / ".metadata").open("rb") as file:
        assert pickle.load(file).state_dict_metadata["model.big"].properties.dtype == torch.float32


@pytest.mark.parametrize("kind", ["part", "complete", "put"])
def test_after_a_failure_nothing_of_it_is_left(large, server, kind):
    denied = {"status": 403, "code": "AccessDenied", "times": None}
    server.faults.append(
        Fault(**denied, matches=lambda r: r.kind == kind and "converting" not in r.key)
    )
    with pytest.raises(StoragePermissionError):
        converted(large, server, "copy", to="dcp")
    assert server.keys("copy/") == []
    assert server.open_uploads() == []


@pytest.mark.parametrize(("kind", "what"), [("part", "*"), ("complete", "*"), ("put", "step")])
def test_a_file_that_was_not_replaced_is_as_it_was(large, server, kind, what):
    """It is the old one until the new one is whole, whatever fails."""
    server.put("out/all.pt", b"the old one")
    server.faults.append(
        Fault(status=403, code="AccessDenied", times=None, matches=lambda r: r.kind == kind)
    )
    with pytest.raises(StoragePermissionError):
        converted(large, server, "out/all.pt", to="torch", include=what, overwrite=True)
    assert server.objects["out/all.pt"].data == b"the old one"
    assert server.open_uploads() == []


def test_another_who_writes_what_names_the_files(saved, server):
    def commits(request):
        if request.key.endswith(".distcp"):
            server.put("copy/.metadata", b"theirs")
        return False

    server.faults.append(Fault(matches=commits))
    with pytest.raises(StoragePreconditionError):
        converted(saved, server, "copy", to="dcp")
    assert server.keys("copy/") == ["copy/.metadata"]


def test_a_source_that_changes_meanwhile(large, server):
    _, folder = large

    def progress(*_):
        (file,) = folder.glob("*.safetensors")
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size + 1)

    with pytest.raises(DcpRsError):
        converted(large, server, "copy", to="torch", progress=progress)
    assert server.keys("copy") == []


def test_requests_that_fail_at_random_end_well(large, server, tmp_path):
    state, _ = large
    with ExitStack() as stack:
        for fault in ({"status": 503}, {"reset": True}, {"lose": True}):
            server.faults.append(Fault(**fault, times=None, chance=0.05))
        stack.callback(server.faults.clear)
        converted(large, server, "copy/all.pt", to="torch")
    server.get_folder("copy", tmp_path)
    assert_state_equal(torch.load(tmp_path / "all.pt"), state)
