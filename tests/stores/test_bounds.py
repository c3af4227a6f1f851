"""What a load from a store takes: requests at a time, memory, time for a listing, threads, and only as long as it lasts."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import dcp_rs
from dcp_rs import _core
from dcp_rs._url import StorageOptions
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.errors import CorruptIndexError
from dcp_rs.options import ReadOptions
from dcp_rs.transfer.upload import SlabLoad
from support import threads
from support.object_server import Fault
from support.slabs import batch_of

MIB = 1 << 20


def test_one_buffered_tensor_leaves_the_others_parallel(tmp_path, server):
    """One tensor that goes by way of a buffer once had all the others wait: two at a time here."""
    state = {f"t{i}": torch.randn(256, 1024) for i in range(24)}
    state["turned"] = torch.randn(1500, 1024)
    dcp_rs.save(state, tmp_path / "x")
    server.put_folder(tmp_path / "x", "x")
    server.latency = 0.4
    into = {
        name: torch.empty(1024, 1500).t() if name == "turned" else torch.empty(256, 1024)
        for name in state
    }
    dcp_rs.load(into, server.url("x"), storage_options=server.options(), max_inflight_bytes=4 * MIB)
    assert all(into[name].equal(state[name]) for name in state)
    assert server.most_at_once >= 8


def test_index_of_another_length_than_its_header_says_is_not_fetched(server):
    """One of a terabyte took 1.1 GB before its error."""
    dcp_rs.save({"w": torch.ones(2)}, server.url("x"), storage_options=server.options())
    key = "x/index.dcprs"
    server.put(key, server.objects[key].data + bytes(64 * MIB))
    server.requests.clear()
    with pytest.raises(CorruptIndexError, match="its header says"):
        dcp_rs.open(server.url("x"), storage_options=server.options())
    (asked,) = (request for request in server.asked("GET") if request.key == key)
    assert asked.range is not None


def many(value):
    """8,000 tensors of 4 KiB: 31 MiB."""
    return {f"layers.{i}.weight": torch.full((1024,), value(i)) for i in range(8000)}


@pytest.mark.slow
def test_many_small_tensors_are_few_requests(server):
    """One for each MiB that they lie in at most, and a few for the index, however many of them are wanted, and however far apart they are."""
    state = many(float)
    most = 8000 * 4096 // MIB + 1 + 4
    dcp_rs.save(state, server.url("x"), storage_options=server.options())
    stored = server.counts()
    assert (
        stored["part"] + stored["put"] <= 12 + 2
    )  # with the index, and the question whether conditions are kept
    assert sum(stored.values()) <= 32
    for step in (1, 2, 10, 100):
        server.requests.clear()
        into = {name: torch.zeros(1024) for name in list(state)[::step]}
        dcp_rs.load(into, server.url("x"), storage_options=server.options())
        assert all(tensor.equal(state[name]) for name, tensor in into.items())
        assert sum(server.counts().values()) <= most, step
    server.requests.clear()
    into = many(lambda _: 0.0)
    reader = dcp_rs.RsReader(server.url("x"), storage_options=server.options())
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert all(tensor.equal(state[name]) for name, tensor in into.items())
    assert sum(server.counts().values()) <= most


@pytest.mark.slow
def test_each_page_of_a_listing_has_a_time_of_its_own(tmp_path, server):
    for i in range(12):
        save_file(
            {f"t{i}": torch.full((3,), float(i))},
            tmp_path / f"model-{i + 1:05}-of-00012.safetensors",
        )
    server.put_folder(tmp_path, "model")
    server.page = 1
    pages = [Fault(delay=0.3, times=None, matches=lambda request: request.kind == "list")]
    third = [Fault(status=503, matches=lambda request: "00001-of" in request.query)]
    server.faults += third + pages
    with dcp_rs.open(server.url("model"), storage_options=server.options(read_timeout=3)) as ckpt:
        assert ckpt["t11"].equal(torch.full((3,), 11.0))
    assert server.counts()["list"] == 12 + 1


def test_the_threads_of_a_load_by_slabs_end_with_it_and_not_with_its_reader(saved, server):
    state, _ = saved
    options = StorageOptions.of(server.options())
    index = open_index(
        server.url("runs/ckpt"), rank=None, allow_external=False, storage_options=options
    )
    batch = batch_of(index)
    reading = ReadOptions(max_inflight_bytes=MIB)
    # All but the empty one.
    load = SlabLoad(batch, range(44), sort=True, accelerator=False, options=reading)
    got = 0
    with load:
        for _, copies, _ in load:
            got += sum(copy.nbytes for copy in copies)
            assert isinstance(copies[0], _core.Copy)
    assert got == sum(
        tensor.nbytes for tensor in [*state["model"].values(), *state["many"].values()]
    )
    assert threads.none_of("dcp-rs")
    assert load.stats().wanted == got
