"""Checkpoints saved to a store: what is there is what a folder would have, and loads back as it was."""

import json
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_rs
from dcp_rs import RsReader, RsWriter
from dcp_rs.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    StoragePreconditionError,
    UnsupportedError,
)
from support import assert_state_equal, blank, rank_outcomes, run_ranks
from support.both import HAS_RANK_LOCAL
from support.object_server import Fault
from support.stored import large_state, loaded, names, small_state

MIB = 1 << 20


@pytest.mark.parametrize("make", [small_state, large_state])
@pytest.mark.parametrize("write", [{}, {"max_inflight_bytes": 1 << 20}, {"threads": 1}], ids=str)
def test_save_loads_back(server, tmp_path, make, write):
    state = make()
    dcp_rs.save(state, server.url("ckpt"), storage_options=server.options(), **write)
    assert_state_equal(loaded(server, state), state)
    assert [re.sub(r"-[0-9a-f]{16}-", "-", name) for name in names(server)] == [
        "g00000001-r00000-f00000.safetensors",
        "index.dcprs",
    ]
    assert server.open_uploads() == []
    # The same files, as others read them.
    server.get_folder("ckpt", tmp_path / "copy")
    assert dcp_rs.verify(tmp_path / "copy").ok
    into = blank(state)
    dcp_rs.load(into, tmp_path / "copy")
    assert_state_equal(into, state)


def test_stock_save_through_our_writer(server):
    state = large_state()
    dcp.save(state, storage_writer=RsWriter(server.url("ckpt"), storage_options=server.options()))
    into = blank(state)
    dcp.load(into, storage_reader=RsReader(server.url("ckpt"), storage_options=server.options()))
    assert_state_equal(into, state)


def test_an_empty_state(server):
    dcp_rs.save({}, server.url("ckpt"), storage_options=server.options())
    with dcp_rs.open(server.url("ckpt"), storage_options=server.options()) as ckpt:
        assert list(ckpt) == []


def test_parts_go_straight_from_memory(server):
    """A large tensor is sent as it lies: parts of one length, each once."""
    dcp_rs.save({"w": torch.randn(8 * MIB)}, server.url("ckpt"), storage_options=server.options())
    parts = [request.length for request in server.requests if request.kind == "part"]
    assert len(parts) == 5
    assert sorted(parts)[1:] == [8 * MIB] * 4
    assert server.counts()["complete"] == 1


def test_mixed_layouts_are_written_in_order(server):
    """Contiguous and strided tensors in turn: each part that both were in waited in memory for the second, up to the whole checkpoint."""
    state = {
        f"{i}": torch.full((512, 512), float(i)) if i % 2 else torch.full((512, 512), float(i)).t()
        for i in range(40)
    }
    state |= {f"text{i}": "x" * 4096 for i in range(3)}
    dcp_rs.save(state, server.url("ckpt"), storage_options=server.options())
    (file,) = [name for name in names(server) if name.endswith(".safetensors")]
    data = server.objects[f"ckpt/{file}"].data
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    at = {
        name: about["data_offsets"][0] for name, about in header.items() if name != "__metadata__"
    }
    order = sorted((name for name in at if not name.startswith("text")), key=at.__getitem__)
    assert order == [str(i) for i in [*range(1, 40, 2), *range(0, 40, 2)]]
    assert_state_equal(loaded(server, state), state)


def test_a_save_replaces_the_one_before(server):
    first, second = large_state(1), large_state(2)
    writer = RsWriter(server.url("ckpt"), storage_options=server.options())
    dcp.save(first, storage_writer=writer)
    server.put("ckpt/notes.txt", b"of others")
    old = set(names(server))
    dcp.save(second, storage_writer=writer)
    assert_state_equal(loaded(server, second), second)
    now = set(names(server))
    assert now & old == {"index.dcprs", "notes.txt"}
    assert len(now) == 3
    assert any(name.startswith("g00000002-") for name in now)
    put = [
        request
        for request in server.requests
        if request.kind == "put" and request.key == "ckpt/index.dcprs"
    ]
    assert [request.condition.partition(":")[0] for request in put] == ["If-None-Match", "If-Match"]


def test_undeletable_file_is_a_warning(server):
    state = small_state()
    dcp_rs.save(state, server.url("ckpt"), storage_options=server.options())
    old = next(name for name in names(server) if name.endswith(".safetensors"))
    server.undeletable.add(f"ckpt/{old}")
    with pytest.warns(UserWarning, match="a file of the one before is still there.*403"):
        dcp_rs.save(state, server.url("ckpt"), storage_options=server.options())
    assert_state_equal(loaded(server, state), state)


def test_overwrite_false(server):
    state = small_state()
    options = {"storage_options": server.options(), "overwrite": False}
    dcp_rs.save(state, server.url("ckpt"), **options)
    before = names(server)
    with pytest.raises(CheckpointExistsError, match="overwrite=False"):
        dcp_rs.save(state, server.url("ckpt"), **options)
    assert names(server) == before


def another_save(server, state):
    """A fault that is none: while the first request for a part is on its way, a save of another process is committed to the same place."""
    dcp_rs.save(state, server.url("another"), storage_options=server.options())
    objects = {
        key.replace("another/", "ckpt/"): server.objects.pop(key).data
        for key in server.keys("another/")
    }

    def is_committed(request):
        if request.kind == "create" and objects:
            for key in server.keys("ckpt/"):
                server.objects.pop(key)
            for key, data in sorted(objects.items()):
                server.put(key, data)
            objects.clear()
        return False

    return Fault(matches=is_committed)


@pytest.mark.parametrize("existing", [False, True])
def test_two_savers_one_wins_whole(server, existing):
    """The other one's save is committed after this one began."""
    if existing:
        dcp_rs.save(large_state(3), server.url("ckpt"), storage_options=server.options())
    other = large_state(2)
    server.faults.append(another_save(server, other))
    with pytest.raises(StoragePreconditionError, match="another save to this place") as caught:
        dcp_rs.save(large_state(1), server.url("ckpt"), storage_options=server.options())
    assert caught.value.path == server.url("ckpt/index.dcprs")
    assert_state_equal(loaded(server, other), other)
    assert len(names(server)) == 2
    assert server.open_uploads() == []


def test_a_store_that_ignores_conditions_is_told_of(server):
    server.ignores_conditions = True
    state = small_state()
    with pytest.warns(UserWarning, match="ignores conditions"):
        dcp_rs.save(state, server.url("ckpt"), storage_options=server.options())
    assert len(names(server)) == 2  # nothing is left of the question
    with pytest.warns(UserWarning, match="ignores conditions"):
        dcp_rs.save(state, server.url("ckpt"), storage_options=server.options())
    assert_state_equal(loaded(server, state), state)
    assert len(names(server)) == 2


def test_a_store_without_conditions_is_told_of(server):
    server.refuses_conditions = True
    state = small_state()
    with pytest.warns(UserWarning, match="ignores conditions"):
        dcp_rs.save(state, server.url("ckpt"), storage_options=server.options())
    assert_state_equal(loaded(server, state), state)


@pytest.mark.filterwarnings("ignore:the store of")
@pytest.mark.parametrize("existing", [False, True])
def test_a_race_is_seen_where_conditions_are_ignored(server, existing):
    server.ignores_conditions = True
    if existing:
        dcp_rs.save(large_state(3), server.url("ckpt"), storage_options=server.options())
    other = large_state(2)
    server.faults.append(another_save(server, other))
    with pytest.raises(StoragePreconditionError):
        dcp_rs.save(large_state(1), server.url("ckpt"), storage_options=server.options())
    assert_state_equal(loaded(server, other), other)


def test_the_store_is_asked_once_whether_it_keeps_conditions(server):
    for _ in range(2):
        dcp_rs.save({"a": 1}, server.url("ckpt"), storage_options=server.options())
    asked = [request for request in server.requests if ".dcp-rs-asks-" in request.key]
    assert len(asked) == 1


def test_async_save(server):
    state = large_state()
    future = dcp_rs.async_save(state, server.url("ckpt"), storage_options=server.options())
    expected = large_state()
    state["big"].zero_()
    future.result(120)
    assert future.report.bytes_written > 12 * MIB
    assert_state_equal(loaded(server, expected), expected)


def test_a_web_server_is_read_only(server):
    with pytest.raises(UnsupportedError, match="read only"):
        dcp_rs.save({"a": 1}, server.http_url("ckpt"), storage_options={"allow_http": True})


def test_options_are_for_urls(tmp_path):
    with pytest.raises(UnsupportedError, match="storage_options"):
        dcp_rs.save({"a": 1}, tmp_path / "ckpt", storage_options={"aws_region": "x"})


def test_file_urls_are_paths(tmp_path):
    dcp_rs.save({"a": torch.ones(3)}, f"file://{tmp_path}/ckpt")
    assert dcp_rs.verify(tmp_path / "ckpt").ok


def save_sharded(url, options):
    """Each rank has a shard of its own, and all have the rest."""
    state = sharded_state()
    dcp_rs.save(state, url, storage_options=options)


def sharded_state():
    rank = dist.get_rank()
    return {**large_state(7), f"own{rank}": torch.full((3 * MIB,), float(rank))}


def load_sharded(url, options):
    state = sharded_state()
    into = blank(state)
    dcp_rs.load(into, url, storage_options=options)
    assert_state_equal(into, state)


def test_two_ranks(server):
    for generation in (1, 2):
        run_ranks(2, save_sharded, server.url("ckpt"), server.options())
        files = [name for name in names(server) if name.endswith(".safetensors")]
        assert [re.match(r"g0*(\d+)-[0-9a-f]{16}-r0*(\d)-", name).groups() for name in files] in (
            [(str(generation), ""), (str(generation), "1")],
            [(str(generation), "1"), (str(generation), "")],
            [(str(generation), "0"), (str(generation), "1")],
            [(str(generation), "1"), (str(generation), "0")],
        )
        assert len(names(server)) == 3
    run_ranks(2, load_sharded, server.url("ckpt"), server.options())
    assert server.open_uploads() == []


def save_where_one_fails(url, options):
    state = sharded_state()
    if dist.get_rank() == 2:
        options = {**options, "aws_access_key_id": "may-not"}
    dcp_rs.save(state, url, storage_options=options)


def test_rank_without_permission_fails_the_save_of_all(server):
    run_ranks(4, save_sharded, server.url("ckpt"), server.options())
    before = names(server)
    server.access_key = "test-access-key"
    for outcome in rank_outcomes(4, save_where_one_fails, server.url("ckpt"), server.options()):
        assert isinstance(outcome.error, PermissionError), outcome
    assert names(server) == before
    assert server.open_uploads() == []


def save_rank_local(url, options):
    writer = RsWriter(url, storage_options=options)
    dcp.save(sharded_state(), storage_writer=writer, use_collectives=False)


@pytest.mark.skipif(not HAS_RANK_LOCAL, reason="this torch has no rank-local saves")
def test_rank_local_saves(server):
    run_ranks(2, save_rank_local, server.url("ckpt"), server.options())
    assert {name for name in names(server) if name.endswith(".dcprs")} == {
        "__0.index.dcprs",
        "__1.index.dcprs",
    }
    run_ranks(2, save_sharded, server.url("ckpt"), server.options())
    assert {name for name in names(server) if name.endswith(".dcprs")} == {"index.dcprs"}
    assert len(names(server)) == 3
    for outcome in rank_outcomes(2, save_rank_local, server.url("ckpt"), server.options()):
        assert isinstance(outcome.error, (CheckpointException, CheckpointExistsError))


@pytest.mark.parametrize("at", ["store", "folder"])
def test_a_star_in_the_name(server, tmp_path, at):
    """The name was taken for a pattern of files: the checkpoint was saved, and not there."""
    folder = tmp_path / "run*"
    where = server.url("run*") if at == "store" else folder
    options = server.options() if at == "store" else None
    assert not dcp_rs.exists(where, storage_options=options)
    for step in (1, 2):
        state = {"a": torch.arange(9), "step": step}
        dcp_rs.save(state, where, storage_options=options)
        assert dcp_rs.exists(where, storage_options=options)
        into = blank(state)
        dcp_rs.load(into, where, storage_options=options, verify=True)
        assert_state_equal(into, state)
        assert dcp_rs.verify(where, storage_options=options)


def test_a_pattern_without_files(server, tmp_path):
    for where, options in ((server.url("x*.pt"), server.options()), (tmp_path / "x*.pt", None)):
        with pytest.raises(CheckpointNotFoundError, match="no files of ranks"):
            dcp_rs.open(where, storage_options=options)
