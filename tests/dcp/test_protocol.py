"""The reader and the writer under DCP's protocol: what torch calls them with, and what it looks at."""

import dataclasses
import inspect
import pickle
import threading
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict_loader import (
    _load_state_dict,
    _load_state_dict_from_keys,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

import dcp_rs
from dcp_rs import RsReader, RsWriter, _core
from dcp_rs.errors import CheckpointNotFoundError
from support import assert_state_equal, blank, dtypes_state, nested_state, random_tensor
from support.both import load_rs, save_rs, save_stock

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


@pytest.fixture
def two(tmp_path):
    """Two checkpoints of the same names and different values."""
    states = [dtypes_state(seed=1), dtypes_state(seed=2)]
    paths = [tmp_path / "one", tmp_path / "two"]
    for state, path in zip(states, paths, strict=True):
        save_rs(state, path)
    return paths, states


# --- what torch looks at


@pytest.mark.parametrize("make", [RsReader, RsWriter])
def test_storage_is_of_torchs_classes(tmp_path, make):
    storage = make(tmp_path)
    assert isinstance(storage, StorageReader if make is RsReader else StorageWriter)
    assert storage  # torch asks `if storage:`
    assert storage.checkpoint_id == tmp_path
    storage.reset()
    storage.reset(None)
    storage.reset("")
    assert storage.checkpoint_id == tmp_path
    storage.reset(str(tmp_path / "other"))
    assert storage.checkpoint_id == tmp_path / "other"
    assert make.validate_checkpoint_id(tmp_path)
    assert make.validate_checkpoint_id("relative/path")
    assert make.validate_checkpoint_id("s3://bucket/key")
    assert not make.validate_checkpoint_id("ftp://host/key")


@pytest.mark.parametrize(
    "method",
    [RsReader.read_metadata, RsReader.set_up_storage_reader, RsWriter.set_up_storage_writer],
)
def test_newer_torch_finds_a_parameter_named_kwargs(method):
    kinds = {name: p.kind for name, p in inspect.signature(method).parameters.items()}
    assert kinds["kwargs"] is inspect.Parameter.VAR_KEYWORD


def test_ids_of_saves_and_loads(two):
    (path, _), _ = two
    reader = RsReader(path)
    meta = reader.read_metadata().storage_meta
    assert str(meta.checkpoint_id) == str(path)
    assert meta.load_id
    assert meta.save_id
    assert RsReader(path).read_metadata().storage_meta.save_id == meta.save_id
    before = meta.load_id
    reader.reset()
    assert reader.read_metadata().storage_meta.load_id != before
    writer = RsWriter(path)
    before = writer.storage_meta().save_id
    writer.reset()
    assert writer.storage_meta().save_id != before


def test_metadata_says_what_stock_metadata_says(tmp_path):
    state = nested_state()
    save_rs(state, tmp_path / "ours")
    save_stock(state, tmp_path / "stock")
    ours = RsReader(tmp_path / "ours").read_metadata()
    stock = dcp.FileSystemReader(tmp_path / "stock").read_metadata()
    assert dict(ours.planner_data) == stock.planner_data
    assert len(ours.planner_data) == len(stock.planner_data)
    assert set(ours.state_dict_metadata) == set(stock.state_dict_metadata)
    for name, theirs in stock.state_dict_metadata.items():
        own = ours.state_dict_metadata[name]
        assert type(own) is type(theirs), name
        if hasattr(theirs, "size"):
            assert (own.size, own.chunks) == (theirs.size, theirs.chunks)
            for field in ("dtype", "layout", "requires_grad", "memory_format", "pin_memory"):
                assert getattr(own.properties, field) == getattr(theirs.properties, field)
    assert getattr(ours, "version", None) == getattr(stock, "version", None)
    with pytest.raises(KeyError):
        ours.state_dict_metadata["no such name"]


def test_the_checkpoint_id_of_load_and_save_replaces_the_path(two, tmp_path):
    (one, other), (_, want) = two
    reader = RsReader(one)
    got = blank(want)
    dcp.load(got, checkpoint_id=other, storage_reader=reader, no_dist=True)
    assert_state_equal(got, want)
    assert reader.checkpoint_id == other
    dcp.save(want, checkpoint_id=tmp_path / "third", storage_writer=RsWriter(one), no_dist=True)
    assert_state_equal(load_rs(blank(want), tmp_path / "third"), want)


# --- one object, used again


def test_a_reader_serves_one_load_after_another(two):
    (path, _), (want, _) = two
    reader = RsReader(path)
    for _ in range(2):
        got = blank(want)
        dcp.load(got, storage_reader=reader, no_dist=True)
        assert_state_equal(got, want)


def test_a_reader_sees_a_checkpoint_that_was_overwritten(two):
    (path, _), (want, other) = two
    reader = RsReader(path)
    got = blank(want)
    dcp.load(got, storage_reader=reader, no_dist=True)
    save_rs(other, path)
    dcp.load(got, storage_reader=reader, no_dist=True)
    assert_state_equal(got, other)


def test_a_reader_follows_reset_to_another_path(two):
    (path, second), (want, other) = two
    reader = RsReader(path)
    got = blank(want)
    dcp.load(got, storage_reader=reader, no_dist=True)
    reader.reset(second)
    dcp.load(got, storage_reader=reader, no_dist=True)
    assert_state_equal(got, other)


def test_a_writer_serves_one_save_after_another(ckpt):
    writer = RsWriter(ckpt)
    for seed in range(3):
        want = nested_state(seed)
        dcp.save(dict(want), storage_writer=writer, no_dist=True)
        assert_state_equal(load_rs(blank(want), ckpt), want)
    assert len(list(ckpt.glob("*.safetensors"))) == 1


@pytest.mark.parametrize("used", [False, True])
def test_a_reader_pickles(two, used):
    (path, _), (want, _) = two
    reader = RsReader(path, verify=True, threads=1, io="buffered")
    if used:
        dcp.load(blank(want), storage_reader=reader, no_dist=True)
    copy = pickle.loads(pickle.dumps(reader))
    assert copy._source == reader._source
    got = blank(want)
    dcp.load(got, storage_reader=copy, no_dist=True)
    assert_state_equal(got, want)


@pytest.mark.parametrize("used", [False, True])
def test_a_writer_pickles(tmp_path, used):
    want = nested_state()
    writer = RsWriter(tmp_path / "one", fsync=False, overwrite=False)
    if used:
        dcp.save(dict(want), storage_writer=writer, no_dist=True)
        writer.reset(tmp_path / "two")
    copy = pickle.loads(pickle.dumps(writer))
    assert (copy.path, copy.options, copy.overwrite) == (writer.path, writer.options, False)
    dcp.save(dict(want), storage_writer=copy, no_dist=True)
    assert_state_equal(load_rs(blank(want), copy.path), want)


def test_threads_share_a_reader(two):
    (path, _), (want, _) = two
    reader = RsReader(path, threads=1)
    failures = []
    start = threading.Barrier(5)

    def load():
        start.wait()
        for _ in range(6):
            got = blank(want)
            _load_state_dict(got, reader, no_dist=True)
            try:
                assert_state_equal(got, want)
            except AssertionError as failure:
                failures.append(failure)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    for thread in threads:
        thread.join()
    assert failures == []


# --- torch's own ways to load


def test_the_deprecated_name_works(two):
    (path, _), (want, _) = two
    got = blank(want)
    with pytest.warns(FutureWarning):
        dcp.load_state_dict(got, RsReader(path), no_dist=True)
    assert_state_equal(got, want)


def test_our_load_state_dict_is_as_torch_s_but_silent(two):
    (path, _), (want, _) = two
    theirs = inspect.signature(dcp.load_state_dict).parameters
    ours = inspect.signature(dcp_rs.load_state_dict).parameters
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]
    for arguments in ({}, {"no_dist": True}, {"planner": DefaultLoadPlanner(), "no_dist": True}):
        got = blank(want)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dcp_rs.load_state_dict(got, RsReader(path), **arguments)
        assert_state_equal(got, want)


def test_an_empty_template_is_filled_with_the_whole_checkpoint(tmp_path):
    want = nested_state()
    save_rs(want, tmp_path)
    got = {}
    _load_state_dict(
        got, storage_reader=RsReader(tmp_path), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    assert_state_equal(got, want | {"buffers": got["buffers"]})
    assert_state_equal(list(got["buffers"]), want["buffers"])


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (None, {"model", "optimizer", "step", "loss", "name", "flag", "nothing", "buffers"}),
        ("model", {"model"}),
        ({"optimizer", "step"}, {"optimizer", "step"}),
    ],
)
def test_parts_are_loaded_by_their_keys(tmp_path, keys, names):
    want = nested_state()
    save_rs(want, tmp_path)
    got = _load_state_dict_from_keys(keys, storage_reader=RsReader(tmp_path))
    assert set(got) == names
    assert_state_equal(got, {name: want[name] for name in names})


class Counter(Stateful):
    def __init__(self, value):
        self.value, self.weight = value, torch.full((3,), float(value))

    def state_dict(self):
        return {"value": self.value, "weight": self.weight}

    def load_state_dict(self, state):
        self.value, self.weight = state["value"], state["weight"]


@pytest.mark.parametrize("ours", [False, True])
def test_stateful_objects_are_saved_and_loaded(ckpt, ours):
    if ours:
        dcp_rs.save({"counter": Counter(5)}, ckpt)
    else:
        save_rs({"counter": Counter(5)}, ckpt)
    counter = Counter(0)
    state = {"counter": counter}
    if ours:
        dcp_rs.load(state, ckpt)
    else:
        load_rs(state, ckpt)
    assert state["counter"] is counter
    assert counter.value == 5
    assert torch.equal(counter.weight, torch.full((3,), 5.0))


def test_our_save_and_load_take_the_options_of_writer_and_reader(ckpt):
    want = nested_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metadata = dcp_rs.save(want, ckpt, fsync=False, io="buffered", no_dist=True)
        got = blank(want)
        dcp_rs.load(got, ckpt, verify=True, io="buffered")
    assert set(metadata.state_dict_metadata) == set(
        RsReader(ckpt).read_metadata().state_dict_metadata
    )
    assert_state_equal(got, want)
    with pytest.raises(TypeError):
        dcp_rs.save(want, ckpt, no_such_option=1)
    for bad in ({"io": "fast"}, {"threads": 0}, {"threads": True}, {"max_inflight_bytes": -1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            dcp_rs.load(got, ckpt, **bad)


def test_planner_data_of_another_kind_is_kept(ckpt):
    """A planner that does not flatten gives no paths."""
    state = {"a": random_tensor((2,)), "b": random_tensor((3,), seed=1)}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(dict(state), storage_writer=RsWriter(ckpt), planner=planner, no_dist=True)
    assert RsReader(ckpt).read_metadata().planner_data is None
    got = blank(state)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(got, storage_reader=RsReader(ckpt), planner=planner, no_dist=True)
    assert_state_equal(got, state)
    with dcp_rs.open(ckpt) as checkpoint:
        assert_state_equal(checkpoint.state_dict(), state)


#: Only that of "c" is a path that a tensor may have.
ODD_PATHS = {"a": (), "b": (b"x", None), "c": ("c", 0), "d": (("d",),), "none": ("x",)}


class OddPaths(DefaultSavePlanner):
    def create_local_plan(self):
        return dataclasses.replace(super().create_local_plan(), planner_data=ODD_PATHS)


def test_paths_of_another_kind_are_kept(ckpt):
    state = {name: torch.tensor(number) for number, name in enumerate("abcd")}
    dcp.save(state, storage_writer=RsWriter(ckpt), planner=OddPaths(), no_dist=True)
    assert dict(RsReader(ckpt).read_metadata().planner_data) == ODD_PATHS
    index = _core.Index.open(str(ckpt), None, False)
    assert [index.planner_path(tensor) for tensor in range(4)] == [None, None, ("c", 0), None]


def test_reading_before_anything_was_saved(ckpt):
    with pytest.raises(CheckpointNotFoundError):
        RsReader(ckpt).read_metadata()
    assert not ckpt.exists()


def test_elements_that_a_job_cuts_come_whole(ckpt):
    """In stock's files tensors begin at any byte. Where a job ended within an element, all that followed was bytes too early."""
    want = {
        "odd": torch.ones(3, dtype=torch.uint8),
        "long": torch.arange(1 << 20, dtype=torch.float32),
    }
    dcp.save(want, checkpoint_id=ckpt, no_dist=True)
    got = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    dcp_rs.load(got, ckpt, no_dist=True)
    assert torch.equal(got["long"], want["long"])
