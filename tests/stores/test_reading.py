"""Checkpoints on a store, read in place: what comes is what stock torch, or the local folder, says."""

import json
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import dcp_rs
import programs
from dcp_rs import RsReader
from dcp_rs._url import StorageOptions, location
from dcp_rs.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptDataError,
    UnsupportedError,
)
from dcp_rs.options import ReadOptions
from dcp_rs.transfer.load import fill
from dcp_rs.transfer.target import Target
from support import assert_state_equal, blank, threads
from support.places import TESTS

MIB = 1 << 20


@pytest.fixture
def url(server):
    return server.url("runs/ckpt")


@pytest.fixture
def options(server):
    return server.options()


@pytest.mark.parametrize(
    "read", [{}, {"verify": True}, {"max_inflight_bytes": 1 << 16}, {"threads": 1}]
)
def test_load_gives_what_was_saved(saved, url, options, read):
    state, _ = saved
    into = blank(state)
    report = dcp_rs.load(into, url, storage_options=options, **read)
    assert_state_equal(into, state)
    assert report.path == url
    assert report.bytes_wanted == report.bytes_read or report.bytes_read >= report.bytes_wanted


def test_stock_load_through_our_reader(saved, url, options):
    state, _ = saved
    into = blank(state)
    dcp.load(into, storage_reader=RsReader(url, storage_options=options))
    assert_state_equal(into, state)
    again = blank(state)
    dcp_rs.load_state_dict(again, RsReader(url, storage_options=options))
    assert torch.equal(again["model"]["big"], state["model"]["big"])


def test_open_reads_what_is_asked_for(saved, server, url, options):
    state, _ = saved
    with dcp_rs.open(url, storage_options=options) as ckpt:
        assert ckpt.path == url
        assert len(server.requests) == 1  # the index, whole
        before = len(server.requests)
        rows = ckpt.get_slice("model.big")[100:102]
        assert torch.equal(rows, state["model"]["big"][100:102])
        fetched = [request.range for request in server.requests[before:] if request.method == "GET"]
        assert len(fetched) == 1
        start, end = map(int, fetched[0].removeprefix("bytes=").split("-"))
        assert end - start + 1 == 2 * 1024 * 4
        assert ckpt["step"] == 17
        assert torch.equal(ckpt["model.half"], state["model"]["half"])
        assert_state_equal(ckpt.state_dict(), state)
        assert {name: value for name, value in ckpt.stream() if name == "name"} == {"name": "run"}


def test_columns_are_read_through_and_not_row_by_row(saved, server, url, options):
    state, _ = saved
    with dcp_rs.open(url, storage_options=options) as ckpt:
        before = len(server.requests)
        got = ckpt.get_slice("model.big")[:, 256:512]
    assert torch.equal(got, state["model"]["big"][:, 256:512])
    assert (
        len([request for request in server.requests[before:] if request.method == "GET"]) <= 1 + 6
    )  # 6 MB, a MiB each at most


def test_a_column_shard_is_fetched_in_few_requests(tmp_path, server, options):
    """It was fetched in requests of 1 MiB, as their length went by the quarter that was wanted."""
    whole = torch.zeros(8192, 4096)
    whole[:, ::1024] = torch.arange(8192.0)[:, None]
    dcp_rs.save({"w": whole}, tmp_path / "x")
    server.put_folder(tmp_path / "x", "x")
    with dcp_rs.open(server.url("x"), storage_options=options) as ckpt:
        before = len(server.requests)
        got = ckpt.get_slice("w")[:, 1024:2048]
    assert torch.equal(got, whole[:, 1024:2048])
    assert len(server.requests) - before <= 64 + 2  # 128 MiB by 64 at a time


def test_ranks_of_a_machine_fetch_column_shards_in_larger_requests(
    tmp_path, server, options, monkeypatch
):
    """Each of four ranks fetched 32 MiB in 32 requests, as if it had the store for itself."""
    whole = torch.zeros(2048, 4096)
    whole[:, ::1024] = torch.arange(2048.0)[:, None]
    dcp_rs.save({"w": whole}, tmp_path / "x")
    server.put_folder(tmp_path / "x", "x")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with dcp_rs.open(server.url("x"), storage_options=options) as ckpt:
        before = len(server.requests)
        got = ckpt.get_slice("w")[:, 1024:2048]
    assert torch.equal(got, whole[:, 1024:2048])
    assert len(server.requests) - before <= 16 + 2


def test_overlapping_and_strided_destinations(saved, url, options):
    state, _ = saved
    into = {"model": {"big": torch.zeros(1024, 1500).t()}}
    dcp_rs.load(into, url, storage_options=options)
    assert torch.equal(into["model"]["big"], state["model"]["big"])


@pytest.mark.parametrize("index", [False, True])
def test_hugging_face_folders_in_place(tmp_path, server, options, index):
    tensors = {f"layer.{i}": torch.randn(64, 33) for i in range(6)}
    folder = tmp_path / "hf"
    folder.mkdir()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:3], names[3:]), start=1):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file({key: tensors[key] for key in part}, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    server.put_folder(folder, "hf")
    with dcp_rs.open(server.url("hf"), storage_options=options) as ckpt:
        assert ckpt.source == "safetensors"
        for key, value in tensors.items():
            assert torch.equal(ckpt[key], value)
    one = server.url("hf/model-00001-of-00002.safetensors")
    assert sorted(dcp_rs.open(one, storage_options=options)) == names[:3]
    if index:  # a server of plain files lists nothing
        with dcp_rs.open(server.http_url("hf")) as ckpt:
            assert torch.equal(ckpt["layer.5"], tensors["layer.5"])


def test_stock_folders_in_place(tmp_path, server, options):
    state = {
        "w": torch.randn(200, 300),
        "b": torch.randn(11),
        "n": {"deep": torch.arange(5)},
        "value": "text",
    }
    dcp.save(state, checkpoint_id=tmp_path / "stock")
    server.put_folder(tmp_path / "stock", "stock")
    into = blank(state)
    dcp_rs.load(into, server.url("stock"), storage_options=options)
    assert_state_equal(into, state)


def test_plain_http(saved, server):
    state, _ = saved
    into = blank(state)
    dcp_rs.load(into, server.http_url("runs/ckpt"))
    assert_state_equal(into, state)


def test_converting_from_a_store(saved, tmp_path, url, options):
    state, _ = saved
    dcp_rs.convert(url, tmp_path / "copy", storage_options=options)
    into = blank(state)
    dcp_rs.load(into, tmp_path / "copy")
    assert_state_equal(into, state)
    dcp_rs.convert(url, tmp_path / "stock", to="dcp", storage_options=options)
    into = blank(state)
    dcp.load(into, checkpoint_id=tmp_path / "stock")
    assert_state_equal(into, state)


def test_file_urls_are_paths(saved):
    state, folder = saved
    into = blank(state)
    dcp_rs.load(into, folder.as_uri())
    assert_state_equal(into, state)
    with pytest.raises(UnsupportedError, match="storage_options"):
        dcp_rs.open(folder, storage_options={"aws_region": "x"})


def test_verify_and_compare(saved, server, url, options, monkeypatch):
    _, folder = saved
    report = dcp_rs.verify(url, storage_options=options)
    assert report.ok
    assert report.bytes_verified > 6 * MIB
    from dcp_rs.checkpoint.compare import compare

    monkeypatch.setattr("dcp_rs._url._of_command_line", {"": StorageOptions(options)})
    assert compare(folder, url).differences == []
    (key,) = [key for key, stored in server.objects.items() if len(stored.data) > MIB]
    damaged = bytearray(server.objects[key].data)
    damaged[len(damaged) // 2] ^= 1
    server.put(key, bytes(damaged))
    report = dcp_rs.verify(url, storage_options=options)
    assert [problem.tensor for problem in report.problems] == ["model.big"]
    (found,) = compare(folder, url).differences
    assert (found.name, found.kind, found.elements) == ("model.big", "elements", 1)
    for verify in ({"verify": True}, {}):
        with pytest.raises(CorruptDataError, match=r"model\.big"):
            dcp_rs.load(
                {"model": {"big": torch.zeros(1500, 1024)}}, url, storage_options=options, **verify
            )
    server.put(key, bytes(damaged[:-1]))
    report = dcp_rs.verify(url, storage_options=options)
    assert "bytes long" in report.problems[0].got
    del server.objects[key]
    assert not dcp_rs.verify(url, storage_options=options).ok
    with pytest.raises(CorruptDataError, match="missing"):
        dcp_rs.load({"model": {"big": torch.zeros(1500, 1024)}}, url, storage_options=options)


def test_a_save_that_replaces_it_is_noticed(saved, server, url, options, tmp_path):
    state, _ = saved
    reader = RsReader(url, storage_options=options)
    metadata = reader.read_metadata()
    index = metadata.state_dict_metadata.index
    for key in list(server.objects):
        del server.objects[key]
    other = tmp_path / "other"
    dcp_rs.save({**state, "step": 18}, other)
    server.put_folder(other, "runs/ckpt")
    with pytest.raises(CheckpointReplacedError):
        index.read_bytes([index.first_chunk(index.find("step"))])
    into = blank(state)
    dcp_rs.load_state_dict(into, RsReader(url, storage_options=options))
    assert into["step"] == 18


def converted(index, name, shape):
    """A target that is filled through slabs, for its dtype is another one."""
    return Target(
        index.find(name),
        [0] * len(shape),
        torch.zeros(shape, dtype=torch.float64),
        name,
        torch.float32,
    )


def test_a_load_through_slabs_notices_it_too(saved, server, url, options, tmp_path):
    state, _ = saved
    reader = RsReader(url, storage_options=options)
    index = reader.read_metadata().state_dict_metadata.index
    for key in list(server.objects):
        del server.objects[key]
    dcp_rs.save(state, tmp_path / "other")
    server.put_folder(tmp_path / "other", "runs/ckpt")
    with pytest.raises(CheckpointReplacedError):
        fill(index, [converted(index, "model.big", (1500, 1024))], ReadOptions())


def test_metadata_pickles_to_where_it_came_from(saved, url, options, monkeypatch):
    state, _ = saved
    data = pickle.dumps(RsReader(url, storage_options=options).read_metadata())
    assert b"test-secret" not in data
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-access-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret-key-0123456789")
    copy = pickle.loads(data)
    assert copy.state_dict_metadata["model.big"].size == state["model"]["big"].shape


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_files_of_torch_save(tmp_path, server, options, zipped):
    """They were refused on a store, as was their conversion."""
    shared = torch.randn(64, 32)
    state = {
        "model": {"w": shared, "rows": shared[3:9], "turned": torch.randn(40, 24).t()},
        "many": {f"t{i}": torch.full((5,), float(i)) for i in range(40)},
        "step": 17,
        "moments": {"a": [torch.ones(3), "text"]},
    }
    torch.save(state, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
    server.put("runs/model.pt", (tmp_path / "model.pt").read_bytes())
    url = server.url("runs/model.pt")
    with (
        dcp_rs.open(url, storage_options=options) as ckpt,
        dcp_rs.open(tmp_path / "model.pt") as local,
    ):
        assert ckpt.keys() == local.keys()
        for name in local:
            if isinstance(local[name], torch.Tensor):
                assert torch.equal(ckpt[name], local[name]), name
            else:
                assert repr(ckpt[name]) == repr(local[name]), name
        assert torch.equal(ckpt.get_slice("model.turned")[2:4], state["model"]["turned"][2:4])
    into = blank(state)
    dcp_rs.load(into, url, storage_options=options)
    assert_state_equal(into, state)
    assert (
        dcp_rs.verify(url, storage_options=options).problems
        == dcp_rs.verify(tmp_path / "model.pt").problems
    )
    dcp_rs.convert(url, tmp_path / "native", storage_options=options)
    into = blank(state)
    dcp_rs.load(into, tmp_path / "native")
    assert_state_equal(into, state)


def test_damage_in_a_file_of_torch_save_is_found(tmp_path, server, options):
    torch.save({"w": torch.zeros(1000)}, tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[len(data) // 2] ^= 1  # in the zeros
    server.put("x.pt", bytes(data))
    (problem,) = dcp_rs.verify(server.url("x.pt"), storage_options=options).problems
    assert problem.tensor == "w"


def test_names_that_a_path_would_change_are_refused():
    for path in (
        "s3://b/a//x",
        "s3://b//x",
        "https://h/a//",
        Path("s3://b/x"),
        Path("https://h/x"),
    ):
        with pytest.raises(UnsupportedError, match="slash"):
            location(path)
    with pytest.raises(TypeError, match=r"this one is bytes.*fsdecode"):
        dcp_rs.open(b"s3://b/a")
    assert str(location("s3://b/a/")) == "s3://b/a"
    assert str(location("http://[::1]:9000/run@1")) == "http://[::1]:9000/run@1"
    assert location(location("s3://b/a")) == location("s3://b/a")


@pytest.mark.parametrize("url", ["s3://", "s3:///run/step-1", "gs:///x", "https:///host/x"])
def test_a_url_without_a_bucket_is_refused(url):
    """Its first folder was taken for the bucket."""
    with pytest.raises(UnsupportedError, match="without a bucket or a host"):
        location(url)


def test_a_path_object_whose_text_is_a_url_is_that_url(tmp_path):
    """A save to one of cloudpathlib or universal_pathlib went to a local folder."""

    class CloudPath:
        def __str__(self):
            return "s3://bucket/run"

        def __fspath__(self):
            return str(tmp_path / "cache")

    class UPath(type(Path())):
        def __str__(self):
            return "s3://bucket/run"

    class Local:
        def __fspath__(self):
            return str(tmp_path)

    for path in (CloudPath(), UPath("run")):
        assert location(path) == location("s3://bucket/run")
    assert location(Local()) == tmp_path


def test_missing_checkpoint_is_named(server, options, saved):
    server.put("junk/readme.txt", b"x")
    for url, what in [
        (server.url("nothing"), "nothing is there"),
        (server.url("junk"), r"no index\.dcprs"),
    ]:
        with pytest.raises(CheckpointNotFoundError, match=what):
            dcp_rs.open(url, storage_options=options)
    with pytest.raises(CheckpointNotFoundError, match="lists no files"):
        dcp_rs.open(server.http_url("nothing"))
    with pytest.raises(CheckpointNotFoundError, match="nothing is there"):
        dcp_rs.open(server.url("x/model.pth"), storage_options=options)
    with pytest.raises(UnsupportedError, match="ftp"):
        dcp_rs.open("ftp://host/x")
    with pytest.raises(UnsupportedError, match="aws_regoin"):
        dcp_rs.open(server.url("x"), storage_options={"aws_regoin": "x"})


def test_names_that_lead_out_of_the_folder_are_not_followed(tmp_path, server, options, saved):
    _, folder = saved
    elsewhere = tmp_path / "elsewhere"
    dcp_rs.index(folder, out=elsewhere)
    server.put_folder(elsewhere, "elsewhere")
    ckpt = dcp_rs.open(server.url("elsewhere"), storage_options=options, allow_external=True)
    with pytest.raises(UnsupportedError, match="outside its folder"):
        ckpt["model.big"]


def test_an_open_checkpoint_pickles_without_its_secrets(saved, server, url, options, monkeypatch):
    state, _ = saved
    data = pickle.dumps(dcp_rs.open(url, storage_options=options))
    assert b"test-secret" not in data
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-access-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret-key-0123456789")
    copy = pickle.loads(data)
    assert torch.equal(copy["model.small"], state["model"]["small"])


def test_the_environment_tells_the_rest(saved, server, url, monkeypatch):
    state, _ = saved
    server.access_key = "test-access-key"
    for name, value in server.options().items():
        if name.startswith("aws_"):
            monkeypatch.setenv(
                name.upper(), str(value).lower() if isinstance(value, bool) else value
            )
    into = blank(state)
    dcp_rs.load(into, url)
    assert_state_equal(into, state)


def test_large_indexes_come_in_several_parts(tmp_path, server, options):
    state = {f"some.long.name.of.a.tensor.{i:06}": torch.tensor([i]) for i in range(30_000)}
    dcp_rs.save(state, tmp_path / "many")
    server.put_folder(tmp_path / "many", "many")
    assert len(server.objects["many/index.dcprs"].data) > 4 * MIB
    into = {name: torch.zeros(1, dtype=torch.int64) for name in state}
    dcp_rs.load(into, server.url("many"), storage_options=options)
    assert all(torch.equal(into[name], state[name]) for name in state)
    assert len(server.asked("GET")) < 12


def test_nothing_of_it_runs_for_a_local_load(tmp_path):
    """No thread, and nothing imported, that a load from the file system did not need."""
    code = """
import sys, torch, dcp_rs
from support import threads
dcp_rs.save({"a": torch.ones(4)}, sys.argv[1])
dcp_rs.load({"a": torch.ones(4)}, sys.argv[1])
assert not [name for name in threads.names() if name.startswith("dcp-rs-store")]
"""
    programs.run(
        [sys.executable, "-c", code, str(tmp_path / "x")],
        check=True,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    )


def test_nothing_is_left_running_after_a_remote_one(saved, server, url, options):

    state, _ = saved
    dcp_rs.load(blank(state), url, storage_options=options)
    assert threads.none_of("dcp-rs")


def test_a_fork_may_load_too(saved, server, url, options):
    state, _ = saved
    dcp_rs.load(blank(state), url, storage_options=options)
    child = os.fork()
    if child == 0:
        try:
            into = {"model": {"small": torch.zeros(7, dtype=torch.int64)}}
            dcp_rs.load(into, url, storage_options=options, no_dist=True, threads=1)
            os._exit(0 if into["model"]["small"].equal(state["model"]["small"]) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_requests_are_large(saved, server, url, options):
    """One for the index, a look at each file, and a MiB of data each at the least."""
    state, _ = saved
    dcp_rs.load(blank(state), url, storage_options=options)
    files = len([key for key in server.objects if key.endswith(".safetensors")])
    assert (
        len(server.requests)
        <= 2 + 2 * files + sum(len(stored.data) for stored in server.objects.values()) // MIB
    )
