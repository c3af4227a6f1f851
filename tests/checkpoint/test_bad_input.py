"""Checkpoints that are missing, damaged or not what the state dict expects.

One typed error each, that names file, tensor and place, and crosses ranks.
"""

import os
import pickle
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader
from dcp_rs.errors import (
    CheckpointNotFoundError,
    CorruptDataError,
    CorruptIndexError,
    DcpRsError,
    PlanError,
    UnsupportedError,
)
from support import assert_state_equal, blank, nested_state, random_tensor
from support.both import load_rs, save_rs, save_stock

STATE = {
    "large": random_tensor((1 << 20, 3), torch.uint8, seed=1),
    "small": random_tensor((5, 3), seed=2),
    "step": 7,
}


def loaded(path, template=None, **options):
    """What `dcp_rs.load` makes of it."""
    template = blank(STATE) if template is None else template
    dcp_rs.load(template, path, **options)
    return template


def read_whole(path):
    with dcp_rs.open(path) as checkpoint:
        return {name: checkpoint[name] for name in checkpoint}


WAYS = [loaded, read_whole]


def failure(kind, function, *args, **kwargs):
    """The error, which must be of this kind and survive pickling with all that it says."""
    with pytest.raises(kind) as raised:
        function(*args, **kwargs)
    error = raised.value
    assert isinstance(error, DcpRsError)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    for name in ("path", "tensor", "offset"):
        assert getattr(copy, name) == getattr(error, name)
    assert str(copy) == str(error)
    assert "panick" not in str(error)
    return error


@pytest.fixture
def saved(ckpt):
    save_rs(STATE, ckpt)
    return ckpt


def data_file(path):
    return next(path.glob("*.safetensors"))


def place_of(path, name):
    with dcp_rs.open(path) as checkpoint:
        chunk = checkpoint.chunks(name)[0]
    return path / chunk.file, chunk.offset


def flip(file, at, bit=0):
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ (1 << bit)]))


# --- no checkpoint ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_no_checkpoint_at_the_path(tmp_path, way):
    (tmp_path / "empty").mkdir()
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes.txt").write_text("nothing to see")
    for path in (tmp_path / "nowhere", tmp_path / "empty", tmp_path / "others"):
        error = failure(CheckpointNotFoundError, way, path)
        assert str(path) in str(error)
        assert isinstance(error, FileNotFoundError)


@pytest.mark.parametrize(
    "use",
    [
        dcp_rs.index,
        lambda url: dcp_rs.index("src", out=url),
    ],
)
def test_a_url_where_there_has_to_be_a_path(tmp_path, monkeypatch, use):
    monkeypatch.chdir(tmp_path)
    save_rs({"w": torch.ones(1)}, tmp_path / "src")
    error = failure(UnsupportedError, use, "s3://bucket/ckpt")
    assert error.path == "s3://bucket/ckpt"
    assert "s3://bucket/ckpt" in str(error)
    assert "paths of the file system are supported" in str(error)
    assert [entry.name for entry in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize(
    "use",
    [
        dcp_rs.open,
        dcp_rs.verify,
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


# --- the index -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [0, 1, 8, 255, 256, 300, -8, -1])
def test_a_truncated_index(saved, way, size):
    index = saved / "index.dcprs"
    raw = index.read_bytes()
    index.write_bytes(raw[:size])
    error = failure(CorruptIndexError, way, saved)
    assert str(index) in str(error)
    assert error.path == str(index)


@pytest.mark.parametrize("way", WAYS)
def test_an_index_with_more_behind_it(saved, way):
    with (saved / "index.dcprs").open("ab") as file:
        file.write(bytes(8))
    failure(CorruptIndexError, way, saved)


def test_every_flipped_byte_of_an_index_is_found(tmp_path):
    want = {"w": random_tensor((4, 3)), "b": random_tensor((2,), torch.int16), "n": 3}
    save_rs(want, tmp_path)
    index = tmp_path / "index.dcprs"
    raw = index.read_bytes()
    for at in range(len(raw)):
        altered = bytearray(raw)
        altered[at] ^= 1 << (at % 8)
        index.write_bytes(altered)
        error = failure((CorruptIndexError, UnsupportedError), read_whole, tmp_path)
        assert str(index) in str(error), at


def test_an_index_of_a_later_version_is_not_called_corrupt(tmp_path):
    save_rs({"w": torch.ones(1)}, tmp_path)
    index = tmp_path / "index.dcprs"
    raw = bytearray(index.read_bytes())
    raw[8] = 2
    index.write_bytes(raw)
    error = failure(UnsupportedError, read_whole, tmp_path)
    assert "version 2" in str(error)
    raw[8], raw[24] = 1, 4
    index.write_bytes(raw)
    error = failure((UnsupportedError, CorruptIndexError), read_whole, tmp_path)


@given(data=st.data())
def test_an_index_of_noise(tmp_path_factory, data):
    """Anything at all in place of the index, with a head and a digest that are right."""
    path = tmp_path_factory.mktemp("ckpt")
    save_rs({"w": random_tensor((4, 3)), "n": [1]}, path)
    index = path / "index.dcprs"
    raw = bytearray(index.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 8))
        value = data.draw(st.sampled_from([0, 1, 255, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]))
        raw[at : at + 8] = value.to_bytes(8, "little")
    raw[:8] = index.read_bytes()[:8]
    raw[40:48] = digest_of(raw).to_bytes(8, "little")
    index.write_bytes(raw)
    try:
        read_whole(path)
        with dcp_rs.open(path) as checkpoint:
            checkpoint.state_dict()
    except (DcpRsError, OSError):
        pass


def digest_of(raw):
    """As section 3.1 of the format has it."""
    from support.second_reader import xxh3_64  # the one in pure Python

    zeroed = bytes(raw[:40]) + bytes(8) + bytes(raw[48:])
    return xxh3_64(zeroed)


def test_an_index_of_another_checkpoint(tmp_path):
    save_rs(STATE, tmp_path / "one")
    save_rs(STATE, tmp_path / "two")
    shutil.copy(tmp_path / "two" / "index.dcprs", tmp_path / "one" / "index.dcprs")
    for way in WAYS:
        error = failure(CorruptDataError, way, tmp_path / "one")
        assert data_file(tmp_path / "two").name in str(error)


# --- two checkpoints in one folder, and digests that are not there ----------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("newer", [".metadata", "index.dcprs"])
def test_a_checkpoint_of_torch_in_the_same_folder_is_warned_of(ckpt, way, newer):
    save_stock({"small": blank(STATE["small"])}, ckpt)
    save_rs(STATE, ckpt)
    times = {".metadata": 2_000_000_000, "index.dcprs": 2_000_000_000} | {newer: 2_000_000_001}
    for name, time in times.items():
        os.utime(ckpt / name, (time, time))
    said = rf"{ckpt} holds two checkpoints.*index\.dcprs.*\.metadata.*that of dcp-rs is read, {newer} is newer"
    with pytest.warns(UserWarning, match=said):
        got = way(ckpt)
    assert_state_equal(got["small"], STATE["small"])


@pytest.mark.parametrize("way", WAYS)
def test_an_index_over_a_checkpoint_of_torch_is_no_second_one(ckpt, way):
    save_stock(STATE, ckpt)
    dcp_rs.index(ckpt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="torch.distributed")
        way(ckpt)


VERIFYING = [
    lambda path: dcp_rs.load(blank(STATE), path, no_dist=True, verify=True),
    lambda path: dcp_rs.open(path, verify=True).close(),
    lambda path: load_rs(blank(STATE), path, verify=True),
]


@pytest.mark.parametrize("use", VERIFYING)
def test_verifying_without_digests_warns(tmp_path, use):
    save_stock(STATE, tmp_path / "stock")
    with pytest.warns(UserWarning, match=f"verify=True checks nothing in {tmp_path / 'stock'}: it has no digests"):
        use(tmp_path / "stock")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="torch.distributed")
        # What the warning says to do does it.
        dcp_rs.convert(tmp_path / "stock", tmp_path / "converted")
        use(tmp_path / "converted")
        dcp_rs.index(tmp_path / "stock", digests=True)
        use(tmp_path / "stock")


# --- data files ------------------------------------------------------------------------------------


def test_a_missing_data_file(saved):
    file = data_file(saved)
    file.unlink()
    for way in WAYS:
        error = failure(CorruptDataError, way, saved)
        assert str(file) in str(error)
        assert (error.path, error.tensor, error.offset) == (str(file), None, None)


@pytest.mark.parametrize("change", [-1, -4096, 1, 4096])
@pytest.mark.parametrize("mode", ["auto", "mmap", "direct", "buffered"])
def test_a_data_file_of_another_length(saved, change, mode):
    file = data_file(saved)
    size = file.stat().st_size
    os.truncate(file, size + change)
    template = blank(STATE)
    before = blank(STATE)
    error = failure(CorruptDataError, loaded, saved, template, io=mode)
    assert (error.path, error.tensor, error.offset) == (str(file), None, None)
    assert str(size) in str(error)
    assert str(size + change) in str(error)
    assert_state_equal(template, before)
    failure(CorruptDataError, read_whole, saved)


@pytest.mark.parametrize("way", WAYS)
def test_an_indexed_folder_that_was_copied_says_the_way_out(tmp_path, way):
    save_stock(STATE, tmp_path / "stock")
    dcp_rs.index(tmp_path / "stock")
    shutil.copytree(
        tmp_path / "stock", tmp_path / "copy", copy_function=shutil.copy
    )  # as `cp -r`, with times of its own
    error = failure(CorruptDataError, way, tmp_path / "copy")
    assert (error.tensor, error.offset) == (None, None)
    assert "dcp_rs.index(path, overwrite=True)" in str(error)
    assert " ns" not in str(error)
    dcp_rs.index(tmp_path / "copy", overwrite=True)
    way(tmp_path / "copy")


def test_an_empty_data_file(saved):
    file = data_file(saved)
    file.write_bytes(b"")
    for way in WAYS:
        assert failure(CorruptDataError, way, saved).path == str(file)


def test_a_data_file_that_is_a_link(saved, tmp_path):
    file = data_file(saved)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    for way in WAYS:
        error = failure((CorruptDataError, UnsupportedError), way, saved)
        assert str(file) in str(error)


def test_a_data_file_that_is_a_folder_or_a_pipe(saved):
    file = data_file(saved)
    file.unlink()
    file.mkdir()
    for way in WAYS:
        assert str(file) in str(failure(CorruptDataError, way, saved))
    file.rmdir()
    os.mkfifo(file)
    for way in WAYS:
        assert str(file) in str(failure(CorruptDataError, way, saved))


def test_a_folder_that_is_a_link_is_followed(saved, tmp_path):
    (tmp_path / "link").symlink_to(saved)
    assert_state_equal(loaded(tmp_path / "link"), STATE)


@pytest.mark.parametrize("mode", ["auto", "mmap", "direct", "buffered"])
@pytest.mark.parametrize(("name", "block"), [("large", 0), ("large", 1), ("large", 2), ("small", 0)])
def test_a_flipped_bit_is_found_by_verification(saved, mode, name, block):
    file, offset = place_of(saved, name)
    flip(file, offset + block * (1 << 20) + 17, bit=3)
    committed = []

    class Planner(DefaultLoadPlanner):
        def commit_tensor(self, read_item, tensor):
            committed.append(read_item.dest_index.fqn)
            super().commit_tensor(read_item, tensor)

    for planner in (None, Planner()):
        template = {name: blank(STATE[name])}
        error = failure(CorruptDataError, loaded, saved, template, planner=planner, verify=True, io=mode)
        assert error.tensor == name
        assert error.offset == offset + block * (1 << 20)
        assert error.path == str(file)
    assert committed == []
    # What is whole still loads, and without verification no one looks.
    other = "small" if name == "large" else "large"
    rest = loaded(saved, {other: blank(STATE[other])}, verify=True, io=mode)
    assert_state_equal(rest[other], STATE[other])
    loaded(saved, blank(STATE), io=mode)


def test_a_flipped_bit_of_a_value_is_found_by_verification(saved):
    file, offset = place_of(saved, "step")
    flip(file, offset + 5)
    error = failure(CorruptDataError, loaded, saved, {"step": 0}, verify=True)
    assert (error.tensor, error.offset) == ("step", offset)


def test_a_part_of_a_damaged_tensor_loads_where_it_is_whole(saved):
    file, offset = place_of(saved, "large")
    flip(file, offset + (2 << 20) + 5)
    with dcp_rs.open(saved, verify=True) as checkpoint:
        failure(CorruptDataError, checkpoint.__getitem__, "large")
    with dcp_rs.open(saved) as checkpoint:
        assert_state_equal(checkpoint.get_slice("large")[:100], STATE["large"][:100])


# --- a state dict that does not fit ----------------------------------------------------------------


def test_a_missing_key(saved):
    template = {"small": blank(STATE["small"]), "unheard.of": torch.zeros(2)}
    before = template["small"].clone()
    error = failure(PlanError, dcp_rs.load_state_dict, template, RsReader(saved), planner=RsLoadPlanner())
    assert error.tensor == "unheard.of"
    assert_state_equal(template["small"], before)
    with pytest.raises(CheckpointException, match=r"unheard\.of"):
        load_rs(template, saved)


@pytest.mark.parametrize("shape", [(5, 4), (5,), (), (15,), (5, 3, 1), (0, 3)])
def test_another_shape(saved, shape):
    template = {"small": torch.zeros(shape)}
    error = failure(PlanError, dcp_rs.load_state_dict, template, RsReader(saved), planner=RsLoadPlanner())
    assert error.tensor == "small"
    assert "(5, 3)" in str(error) or "[5, 3]" in str(error)
    with pytest.raises(CheckpointException, match="small"):
        load_rs(template, saved)


def test_a_value_where_a_tensor_was_saved(saved):
    """Stock DCP fails with an AttributeError here; what matters is that it fails by name."""
    failure(PlanError, dcp_rs.load_state_dict, {"small": 3}, RsReader(saved), planner=RsLoadPlanner())


def test_a_plan_for_another_checkpoint(saved, tmp_path):
    """A planner set up with one checkpoint's metadata, a reader of another."""
    other = {"small": random_tensor((5, 3)), "else": torch.ones(2)}
    save_rs(other, tmp_path / "other")

    class Stale(RsReader):
        def set_up_storage_reader(self, metadata, is_coordinator, *args, **kwargs):
            super().set_up_storage_reader(RsReader(saved).read_metadata(), is_coordinator, *args, **kwargs)

    with pytest.raises(CheckpointException) as raised:
        dcp.load(blank(other), storage_reader=Stale(tmp_path / "other"), no_dist=True)
    error = raised.value.failures[0][0]
    assert isinstance(error, PlanError)
    assert "else" in str(error)


def test_nested_values_survive_a_failed_load(tmp_path):
    want = nested_state()
    save_rs(want, tmp_path / "nested")
    data_file(tmp_path / "nested").unlink()
    template = blank(want)
    failure(CorruptDataError, loaded, tmp_path / "nested", template)
    assert_state_equal(template, blank(want))
