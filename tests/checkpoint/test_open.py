"""`dcp_rs.open`: a checkpoint as a mapping, whose tensors are views of files until they are in several pieces."""

import gc
import os
import pickle
import shutil
import threading
import uuid
from collections import OrderedDict
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_rs
from dcp_rs import RsReader, RsWriter
from dcp_rs.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptDataError,
    DcpRsError,
    UnsafePickleError,
)
from support import (
    assert_state_equal,
    dtypes_state,
    nested_state,
    run_ranks,
    shapes_state,
    strange_names_state,
)
from support.both import HAS_RANK_LOCAL, save_rs

WHOLE = torch.arange(11 * 7, dtype=torch.float64).reshape(11, 7)
CUBE = torch.arange(4 * 5 * 6, dtype=torch.int32).reshape(4, 5, 6)


def save_sharded(path):
    size = dist.get_world_size()
    flat = init_device_mesh("cpu", (size,))
    square = init_device_mesh("cpu", (2, size // 2))
    state = {
        "rows": distribute_tensor(WHOLE, flat, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(WHOLE, flat, [Shard(1)], src_data_rank=None),
        "blocks": distribute_tensor(WHOLE, square, [Shard(0), Shard(1)], src_data_rank=None),
        "cube": distribute_tensor(CUBE, flat, [Shard(2)], src_data_rank=None),
        "alone": WHOLE,
        "step": 4,
    }
    dcp.save(state, storage_writer=RsWriter(path))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Saved by 4 ranks."""
    path = tmp_path_factory.mktemp("sharded") / "ckpt"
    run_ranks(4, save_sharded, path)
    return path


@pytest.fixture
def saved(ckpt):
    save_rs({"w": WHOLE, "b": torch.arange(5), "step": 7}, ckpt)
    return ckpt


def test_a_part_of_a_checkpoint_is_not_opened_alone(sharded, saved, tmp_path):
    """Of the first rank it looks like a whole one of smaller tensors, of the others like one that misses shards."""
    for rank in range(4):
        (file,) = sharded.glob(f"g*-r0000{rank}-f00000.safetensors")
        with pytest.raises(CheckpointNotFoundError, match=f"rank {rank}, of 4 ranks.*open the folder"):
            dcp_rs.open(file)
    (whole,) = saved.glob("g*.safetensors")
    with dcp_rs.open(whole) as checkpoint:
        assert torch.equal(checkpoint["w"], WHOLE)
    if HAS_RANK_LOCAL:
        alone = tmp_path / "alone"
        dcp.save({"w": WHOLE}, storage_writer=RsWriter(alone), use_collectives=False, no_dist=True)
        with pytest.raises(CheckpointNotFoundError, match="what rank 0 saved for itself"):
            dcp_rs.open(next(alone.glob("g*.safetensors")))


# --- as a mapping ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [dtypes_state, shapes_state, strange_names_state], ids=lambda f: f.__name__)
def test_every_entry_is_found_by_its_name(ckpt, make):
    want = make()
    save_rs(want, ckpt)
    with dcp_rs.open(ckpt) as checkpoint:
        assert isinstance(checkpoint, Mapping)
        assert len(checkpoint) == len(want)
        assert set(checkpoint) == set(want)
        for name, tensor in want.items():
            assert name in checkpoint
            assert_state_equal(checkpoint[name], tensor)


def test_a_name_that_is_not_there(saved):
    with dcp_rs.open(saved) as checkpoint:
        assert "nothing" not in checkpoint
        assert 3 not in checkpoint
        assert checkpoint.get("nothing", 5) == 5
        for look_up in (
            checkpoint.__getitem__,
            checkpoint.get_slice,
            checkpoint.info,
            checkpoint.chunks,
        ):
            with pytest.raises(KeyError, match="nothing"):
                look_up("nothing")


def test_the_nesting_is_rebuilt(ckpt):
    want = nested_state()
    save_rs(want, ckpt)
    with dcp_rs.open(ckpt) as checkpoint:
        assert_state_equal(checkpoint.state_dict(), want)
        assert checkpoint["step"] == 12
        assert checkpoint["optimizer.param_groups.0.betas"] == (0.9, 0.95)
        assert str(uuid.UUID(checkpoint.save_id)) == checkpoint.save_id
        assert checkpoint.save_id == RsReader(ckpt).read_metadata().storage_meta.save_id
        assert str(ckpt) in repr(checkpoint)


def test_an_empty_checkpoint_is_still_true(ckpt):
    save_rs({}, ckpt)
    with dcp_rs.open(ckpt) as checkpoint:
        assert checkpoint
        assert checkpoint.state_dict() == {}


def test_info_and_chunks_of_a_sharded_tensor(sharded):
    with dcp_rs.open(sharded) as checkpoint:
        info = checkpoint.info("rows")
        assert (info.name, info.dtype, info.shape) == ("rows", torch.float64, WHOLE.shape)
        assert (info.chunks, info.nbytes) == (4, WHOLE.nbytes)
        chunks = checkpoint.chunks("rows")
        assert [chunk.offsets for chunk in chunks] == [(0, 0), (3, 0), (6, 0), (9, 0)]
        assert [chunk.sizes for chunk in chunks] == [(3, 7), (3, 7), (3, 7), (2, 7)]
        assert len({chunk.file for chunk in chunks}) == 4
        for chunk in chunks:
            data = (sharded / chunk.file).read_bytes()[chunk.offset : chunk.offset + chunk.nbytes]
            rows = slice(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
            assert data == WHOLE[rows].numpy().tobytes()
        value = checkpoint.info("step")
        assert (value.dtype, value.shape, value.chunks) == (None, torch.Size(()), 1)
        assert checkpoint.chunks("step")[0].nbytes == value.nbytes


def test_everything_streams_in_the_order_of_the_files(sharded):
    with dcp_rs.open(sharded) as checkpoint:
        streamed = dict(checkpoint.stream())
        assert_state_equal(streamed, dict(checkpoint))
        places = [(c.file, c.offset) for c in (checkpoint.chunks(name)[0] for name in streamed)]
        files = list(dict.fromkeys(file for file, _ in places))
        # Each file once, from its beginning to its end.
        assert places == sorted(places, key=lambda place: (files.index(place[0]), place[1]))
        assert_state_equal(dict(checkpoint.stream(device="cpu")), streamed)


def test_values_that_are_not_safe_need_leave(ckpt):
    save_rs({"w": torch.ones(1), "odd": _Custom()}, ckpt)
    with dcp_rs.open(ckpt) as checkpoint:
        assert checkpoint["w"] == 1
        with pytest.raises(UnsafePickleError, match="_Custom") as raised:
            checkpoint["odd"]
        assert raised.value.tensor == "odd"
    with dcp_rs.open(ckpt, weights_only=False) as checkpoint:
        assert isinstance(checkpoint["odd"], _Custom)


class _Custom:
    pass


# --- whose memory it is ----------------------------------------------------------------------------


def test_two_look_ups_share_memory(saved):
    with dcp_rs.open(saved) as checkpoint:
        one, two = checkpoint["w"], checkpoint["w"]
        assert one.data_ptr() == two.data_ptr()
        one[0, 0] = -1
        assert two[0, 0] == -1
        assert checkpoint.get_slice("w")[0, 0] == -1


def test_writing_changes_no_file(saved):
    files = {file: file.read_bytes() for file in saved.iterdir()}
    with dcp_rs.open(saved) as checkpoint:
        checkpoint["w"].fill_(-1)
        checkpoint["b"].mul_(2)
        checkpoint.get_slice("b")[1:3].zero_()
    assert {file: file.read_bytes() for file in saved.iterdir()} == files
    with dcp_rs.open(saved) as checkpoint:
        assert_state_equal(checkpoint["w"], WHOLE)


def test_tensors_outlive_the_checkpoint_and_its_folder(sharded, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(sharded, path)
    checkpoint = dcp_rs.open(path)
    alone, rows, cut = (
        checkpoint["alone"],
        checkpoint["rows"],
        checkpoint.get_slice("alone")[2:9:3, 1],
    )
    untouched = checkpoint.get_slice("alone")[5]
    checkpoint.close()
    del checkpoint
    shutil.rmtree(path)
    gc.collect()
    assert_state_equal(alone, WHOLE)
    assert_state_equal(rows, WHOLE)
    assert_state_equal(cut, WHOLE[2:9:3, 1])
    assert_state_equal(untouched, WHOLE[5])


def test_a_closed_checkpoint_says_so(saved):
    checkpoint = dcp_rs.open(saved)
    sliced = checkpoint.get_slice("w")
    checkpoint.close()
    checkpoint.close()
    for use in (lambda: checkpoint["w"], lambda: checkpoint.info("w"), lambda: sliced[0]):
        with pytest.raises(DcpRsError, match="closed"):
            use()


def test_a_tensor_in_one_piece_is_not_copied(ckpt):
    save_rs({"large": torch.zeros(64 << 20, dtype=torch.uint8)}, ckpt, fsync=False)
    with dcp_rs.open(ckpt) as checkpoint:
        before = resident_bytes()
        tensor = checkpoint["large"]
        assert resident_bytes() - before < 8 << 20
        assert int(tensor[::4096].sum()) == 0


def resident_bytes():
    """Anonymous memory of this process, in bytes: what was allocated, not what is mapped."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024


def test_threads_share_a_checkpoint(sharded):
    failures = []
    with dcp_rs.open(sharded) as checkpoint:

        def use():
            try:
                for _ in range(20):
                    assert_state_equal(checkpoint["rows"], WHOLE)
                    assert_state_equal(checkpoint["alone"], WHOLE)
                    assert_state_equal(checkpoint.get_slice("blocks")[3:8, 2], WHOLE[3:8, 2])
            except BaseException as failure:  # noqa: BLE001
                failures.append(failure)

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


# --- parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows", "columns", "blocks", "alone"])
def test_a_tensor_in_any_pieces_is_whole(sharded, name):
    with dcp_rs.open(sharded) as checkpoint:
        assert_state_equal(checkpoint[name], WHOLE)
        assert_state_equal(checkpoint.get_slice(name)[...], WHOLE)
        assert_state_equal(checkpoint.get_slice(name)[:], WHOLE)
        assert checkpoint.get_slice(name).get_shape() == [11, 7]
        assert checkpoint.get_slice(name).dtype == torch.float64
    with dcp_rs.open(sharded, verify=True) as checkpoint:
        assert_state_equal(checkpoint[name], WHOLE)


def indices(size):
    bound = st.none() | st.integers(-size - 3, size + 3)
    slices = st.builds(slice, bound, bound, st.none() | st.integers(1, 4))
    return st.integers(-size - 1, size) | slices


@given(
    name=st.sampled_from(["rows", "columns", "blocks", "alone", "cube"]),
    data=st.data(),
    verify=st.booleans(),
)
def test_slices_are_those_of_torch(sharded, name, data, verify):
    whole = CUBE if name == "cube" else WHOLE
    count = data.draw(st.integers(0, whole.dim()))
    key = [data.draw(indices(whole.shape[dim])) for dim in range(count)]
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(key)))
        tail = len(key) - at
        # What comes after the dots is for the last dimensions.
        key[at:] = [data.draw(indices(whole.shape[whole.dim() - tail + i])) for i in range(tail)]
        key.insert(at, Ellipsis)
    key = key[0] if len(key) == 1 and data.draw(st.booleans()) else tuple(key)
    with dcp_rs.open(sharded, verify=verify) as checkpoint:
        sliced = checkpoint.get_slice(name)
        try:
            want = whole[key]
        except IndexError:
            with pytest.raises(IndexError):
                sliced[key]
        else:
            assert_state_equal(sliced[key], want)


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ((0, 0, 0), IndexError),
        (11, IndexError),
        ((0, -8), IndexError),
        ((..., ...), IndexError),
        (slice(None, None, -1), ValueError),
        (None, TypeError),
        ("0", TypeError),
        (True, TypeError),
        ([0, 1], TypeError),
        (torch.tensor([0, 1]), TypeError),
    ],
)
def test_indices_that_make_no_slice(sharded, key, error):
    with dcp_rs.open(sharded) as checkpoint:
        for name in ("rows", "alone"):
            with pytest.raises(error):
                checkpoint.get_slice(name)[key]


def test_scalars_and_empty_tensors_slice_too(ckpt):
    save_rs({"s": torch.tensor(5.0), "e": torch.empty(3, 0, 2), "v": 1}, ckpt)
    with dcp_rs.open(ckpt) as checkpoint:
        assert_state_equal(checkpoint.get_slice("s")[...], torch.tensor(5.0))
        assert_state_equal(checkpoint.get_slice("s")[()], torch.tensor(5.0))
        assert checkpoint.get_slice("e")[1:, :, 0].shape == (2, 0)
        with pytest.raises(TypeError, match="not a tensor"):
            checkpoint.get_slice("v")


def test_a_slice_reads_only_what_it_needs(sharded, tmp_path):
    """With the files of all other ranks gone, the rows of one rank are still there."""
    path = tmp_path / "copy"
    shutil.copytree(sharded, path)
    with dcp_rs.open(path) as checkpoint:
        keep = checkpoint.chunks("rows")[1].file
        for file in path.glob("*.safetensors"):
            if file.name != keep:
                file.unlink()
        assert_state_equal(checkpoint.get_slice("rows")[3:6], WHOLE[3:6])
        assert_state_equal(checkpoint.get_slice("rows")[4, 1:3], WHOLE[4, 1:3])
        with pytest.raises(CorruptDataError):
            checkpoint.get_slice("rows")[2:6]


def test_verification_of_a_look_up(saved):
    with dcp_rs.open(saved) as checkpoint:
        chunk = checkpoint.chunks("w")[0]
    with (saved / chunk.file).open("r+b") as file:
        file.seek(chunk.offset + 100)
        file.write(b"\x99")
    with dcp_rs.open(saved, verify=True) as checkpoint:
        assert_state_equal(checkpoint["b"], torch.arange(5))
        for look_up in (checkpoint.__getitem__, lambda name: checkpoint.get_slice(name)[0]):
            with pytest.raises(CorruptDataError) as raised:
                look_up("w")
            assert raised.value.tensor == "w"
            assert raised.value.offset == chunk.offset
            assert raised.value.path == str(saved / chunk.file)


# --- a skeleton on meta ----------------------------------------------------------------------------


def test_a_skeleton_reads_no_tensor(sharded, tmp_path):
    state = dtypes_state() | {"p": torch.nn.Parameter(torch.ones(2, 3)), "empty": torch.empty(0, 3)}
    dcp_rs.save({"model": state}, tmp_path / "ckpt", no_dist=True)
    for file in (tmp_path / "ckpt").glob("g*.safetensors"):
        file.unlink()
    with dcp_rs.open(tmp_path / "ckpt", device="meta") as checkpoint:
        skeleton = checkpoint.state_dict()["model"]
        assert checkpoint.get_slice("model.p")[1:].shape == (1, 3)
        assert checkpoint.get_slice("model.p")[1:].is_meta
        with pytest.raises(ValueError, match="state_dict"):
            checkpoint.stream()
    assert skeleton.keys() == state.keys()
    for name, want in state.items():
        got = skeleton[name]
        assert got.is_meta
        assert (got.shape, got.dtype, got.requires_grad) == (want.shape, want.dtype, want.requires_grad), name
    with dcp_rs.open(sharded, device="meta") as checkpoint:
        assert checkpoint["blocks"].shape == WHOLE.shape
        assert checkpoint["step"] == 4  # a value is one anywhere
        target = checkpoint.state_dict()
    dcp_rs.load(target, sharded, no_dist=True)  # what people want it for
    assert torch.equal(target["columns"], WHOLE)


# --- in another process ----------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset):
    def __init__(self, checkpoint):
        self.checkpoint = checkpoint

    def __len__(self):
        return 11

    def __getitem__(self, row):
        return self.checkpoint.get_slice("w")[row], os.getpid()


def test_workers_of_a_data_loader_open_it_again(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    with dcp_rs.open(saved.name) as checkpoint:
        monkeypatch.chdir("/")
        loader = torch.utils.data.DataLoader(
            Rows(checkpoint), batch_size=4, num_workers=1, multiprocessing_context="spawn"
        )
        batches = list(loader)
    assert torch.equal(torch.cat([rows for rows, _ in batches]), WHOLE)
    assert os.getpid() not in torch.cat([pids for _, pids in batches]).tolist()


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_a_copy_opens_what_it_was_and_nothing_else(saved, tmp_path, framework):
    how = {"framework": "np"} if framework == "np" else {"device": "meta", "weights_only": False}
    checkpoint = dcp_rs.open(saved, verify=True, **how)
    data = pickle.dumps(checkpoint)
    assert len(data) < 1000
    copy = pickle.loads(data)
    assert type(copy) is type(checkpoint)
    assert copy._options == checkpoint._options
    assert repr(copy) == repr(checkpoint)
    assert copy["step"] == 7
    save_rs({"w": WHOLE, "b": torch.arange(5), "step": 8}, saved)
    with pytest.raises(CheckpointReplacedError, match="was replaced by another save"):
        pickle.loads(data)
    shutil.rmtree(saved)
    with pytest.raises(CheckpointNotFoundError):
        pickle.loads(data)
    checkpoint.close()
    with pytest.raises(DcpRsError, match="closed"):
        pickle.dumps(checkpoint)


def test_copies_of_others_checkpoints_see_that_they_were_replaced(tmp_path):
    save_file({"w": WHOLE}, tmp_path / "model.safetensors")
    dcp.save({"w": WHOLE}, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    for path in (tmp_path / "model.safetensors", tmp_path / "stock"):
        data = pickle.dumps(dcp_rs.open(path))
        assert torch.equal(pickle.loads(data)["w"], WHOLE)
        if path.is_dir():
            dcp.save({"w": WHOLE[:5]}, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
        else:
            save_file({"w": WHOLE[:5]}, path)
        with pytest.raises(CheckpointReplacedError):
            pickle.loads(data)


def test_a_load_unwraps_what_was_kept_whole(ckpt):
    kept = {5: {}, "six": OrderedDict(a=[])}
    dcp_rs.save(
        {"a": ("dcp_rs.whole", kept), "deep": {"b": [torch.ones(1), ("dcp_rs.whole", [{}])]}}, ckpt, no_dist=True
    )
    got = {"a": None, "deep": {"b": [torch.zeros(1), None]}}
    dcp_rs.load(got, ckpt, no_dist=True)
    assert got == {"a": kept, "deep": {"b": [torch.ones(1), [{}]]}}
    assert type(got["a"]["six"]) is OrderedDict


def test_a_state_dict_with_memory_of_its_own(saved):
    with dcp_rs.open(saved) as checkpoint:
        views, copied = checkpoint.state_dict(), checkpoint.state_dict(copy=True)
        views["w"].zero_()  # of the mapping, which no copy sees
        assert torch.equal(copied["w"], WHOLE)
        assert list(copied) == list(views)
        assert copied["step"] == 7
    for file in saved.glob("*.safetensors"):
        os.truncate(file, 0)
    assert torch.equal(copied["b"], torch.arange(5))
