"""A save that takes over from an earlier one what did not change: what is loaded is what stock torch saved and loaded, whichever of the two is removed."""

import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_rs
from dcp_rs import RsReader, RsSavePlanner, RsWriter, _core
from dcp_rs.checkpoint.clean import leftovers
from dcp_rs.errors import CorruptDataError
from support import assert_state_equal, blank, run_ranks
from support.both import HAS_RANK_LOCAL, load_rs, through_stock
from support.files import flip
from support.second_reader import SecondReader
from support.states import random_tensor

LARGE = (600, 1000)  # of float32: several blocks


def state(changed=0):
    """What a step of fine-tuning has: most of it stays."""
    return {
        "frozen": random_tensor(LARGE, torch.float32, 1),
        "transposed": random_tensor((30, 50), torch.bfloat16, 2).t(),
        "adapter": random_tensor((8, 8), torch.float32, 100 + changed),
        "value": {"of": ("a run", 1)},
        "step": changed,
        "empty": torch.empty(0, 3),
    }


def save(values, path, parent=None, **options):
    """How many bytes were written, and how many reused."""
    writer = RsWriter(path, parent=parent, **options)
    dcp.save(dict(values), storage_writer=writer, planner=RsSavePlanner(), no_dist=True)
    return writer.report.bytes_written, writer.report.bytes_reused


def assert_holds(path, values, judge):
    """That the checkpoint is whole, and loads what stock torch saved and loaded."""
    want = through_stock(values, judge)
    assert_state_equal(load_rs(blank(values), path, verify=True), want)
    assert dcp_rs.verify(path).ok
    SecondReader.open(path)


@pytest.mark.parametrize("gone", ["parent", "child"])
def test_either_is_whole_without_the_other(tmp_path, gone):
    one, two = tmp_path / "1", tmp_path / "2"
    save(state(1), one)
    written, reused = save(state(2), two, parent=one)
    assert reused == 600 * 1000 * 4 + 30 * 50 * 2 + len(_bytes_of_value())
    assert written < 2000
    assert_holds(one, state(1), tmp_path / "stock-1")
    assert_holds(two, state(2), tmp_path / "stock-2")
    shutil.rmtree(one if gone == "parent" else two)
    left, number = (two, 2) if gone == "parent" else (one, 1)
    assert_holds(left, state(number), tmp_path / "stock-3")


def _bytes_of_value():
    import io

    data = io.BytesIO()
    torch.save(("a run", 1), data)
    return data.getvalue()


def test_links_share_the_disk_and_make_no_chains(tmp_path):
    for number in range(1, 5):
        save(
            state(number),
            tmp_path / str(number),
            parent=tmp_path / str(number - 1) if number > 1 else None,
        )
        if number > 2:
            shutil.rmtree(tmp_path / str(number - 2))
    files = [file.stat() for path in ("3", "4") for file in (tmp_path / path).glob("g*")]
    large = {file.st_ino for file in files if file.st_size > 2_000_000}
    assert len(large) == 1
    assert {file.st_nlink for file in files if file.st_ino in large} == {2}
    assert_holds(tmp_path / "4", state(4), tmp_path / "stock")


names = st.sampled_from("abcdef")
shapes = st.sampled_from([(), (3,), (40, 50), (0, 2), (70_000,)])
entries = st.one_of(
    st.tuples(
        shapes, st.sampled_from([torch.float32, torch.int8, torch.complex64]), st.integers(0, 2)
    ),
    st.integers(0, 3),
)


def made(drawn):
    return {
        name: random_tensor(entry[0], entry[1], entry[2]) if isinstance(entry, tuple) else entry
        for name, entry in drawn.items()
    }


@settings(max_examples=12)
@given(
    st.lists(st.dictionaries(names, entries, min_size=1), min_size=2, max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from([None, "[abc]"]),
)
def test_any_history_of_saves_with_parents(tmp_path_factory, drawn, rng, reuse):
    """Save some, save others with the one before as the parent, load all; remove any, load the rest; lose an index, make it again."""
    root = tmp_path_factory.mktemp("history")
    # What is said not to change does not.
    held = made(dict.fromkeys("abc", ((300,), torch.float32, 1)))
    history = (
        [{**made(entry), **held} for entry in drawn] if reuse else [made(entry) for entry in drawn]
    )
    for number, values in enumerate(history):
        parent = root / str(rng.randrange(number)) if number else None
        save(values, root / str(number), parent=parent, reuse=reuse)
    left = list(range(len(history)))
    for _ in range(len(history)):
        for number in left:
            assert_state_equal(
                load_rs(blank(history[number]), root / str(number), verify=True), history[number]
            )
            assert dcp_rs.verify(root / str(number)).ok
            SecondReader.open(root / str(number))
        one = rng.choice(left)
        (root / str(one) / "index.dcprs").unlink()
        dcp_rs.index(root / str(one))
        assert_state_equal(load_rs(blank(history[one]), root / str(one), verify=True), history[one])
        left.remove(rng.choice(left))
        for number in set(range(len(history))) - set(left):
            shutil.rmtree(root / str(number), ignore_errors=True)


# --- ranks


def sharded(changed):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    return {
        "rows": distribute_tensor(
            random_tensor((64, 500), seed=1), mesh, [Shard(0)], src_data_rank=None
        ),
        "columns": distribute_tensor(
            random_tensor((6, 8), seed=changed), mesh, [Shard(1)], src_data_rank=None
        ),
        "common": random_tensor((5000,), seed=2),
        f"of.{rank}": random_tensor((300,), seed=10 + rank),
        "step": changed,
    }


def save_sharded(folder, number, parent):
    writer = RsWriter(f"{folder}/{number}", parent=None if parent is None else f"{folder}/{parent}")
    dcp.save(sharded(number), storage_writer=writer, planner=RsSavePlanner())
    dcp.save(sharded(number), checkpoint_id=f"{folder}/stock-{number}")
    return writer.report.bytes_written, writer.report.bytes_reused


def compare_sharded(folder, number):
    got, want = blank_sharded(), blank_sharded()
    dcp.load(got, storage_reader=RsReader(f"{folder}/{number}", verify=True))
    dcp.load(want, checkpoint_id=f"{folder}/stock-{number}")
    plain = [
        {k: v.to_local() if hasattr(v, "to_local") else v for k, v in each.items()}
        for each in (got, want)
    ]
    assert_state_equal(*plain)


def blank_sharded():
    values = sharded(77)
    with torch.no_grad():
        for value in values.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    return values


def test_ranks_reuse_their_own_parts(tmp_path):
    run_ranks(2, save_sharded, str(tmp_path), 1, None)
    sizes = run_ranks(2, save_sharded, str(tmp_path), 2, 1)
    assert all(reused > 60_000 for _, reused in sizes)
    assert all(written < 3000 for written, _ in sizes)
    shutil.rmtree(tmp_path / "1")
    assert dcp_rs.verify(tmp_path / "2").ok
    run_ranks(2, compare_sharded, str(tmp_path), 2)
    SecondReader.open(tmp_path / "2")


def test_other_ranks_reuse_what_they_cut_alike(tmp_path):
    run_ranks(2, save_sharded, str(tmp_path), 1, None)
    run_ranks(4, save_sharded, str(tmp_path), 2, 1)
    run_ranks(2, save_sharded, str(tmp_path), 3, 2)
    shutil.rmtree(tmp_path / "1")
    run_ranks(4, compare_sharded, str(tmp_path), 2)
    run_ranks(2, compare_sharded, str(tmp_path), 3)
    for number in (2, 3):
        SecondReader.open(tmp_path / str(number))
        (tmp_path / str(number) / "index.dcprs").unlink()
        dcp_rs.index(tmp_path / str(number))
    run_ranks(4, compare_sharded, str(tmp_path), 2)
    run_ranks(2, compare_sharded, str(tmp_path), 3)


def save_where_one_rank_sees_no_parent(folder):
    path = f"{folder}/{'1' if dist.get_rank() == 0 else 'nowhere'}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp_rs.save(sharded(2), f"{folder}/2", parent=path)
    dcp.save(sharded(2), checkpoint_id=f"{folder}/stock-2")
    return [str(warning.message) for warning in caught if "could be reused" in str(warning.message)]


def test_a_parent_that_only_one_rank_sees(tmp_path):
    run_ranks(2, save_sharded, str(tmp_path), 1, None)
    said = run_ranks(2, save_where_one_rank_sees_no_parent, str(tmp_path))
    assert not said[0]
    assert "nowhere" in said[1][0]
    run_ranks(2, compare_sharded, str(tmp_path), 2)


@pytest.mark.skipif(not HAS_RANK_LOCAL, reason="this torch has no rank-local saves")
def test_a_rank_local_save_reuses_that_rank_s_own(tmp_path):
    run_ranks(2, save_rank_local, str(tmp_path))


def save_rank_local(folder):
    rank = dist.get_rank()
    values = {"w": random_tensor((5000,), seed=rank)}
    for number, parent in ((1, None), (2, f"{folder}/1")):
        writer = RsWriter(f"{folder}/{number}", parent=parent)
        dcp.save(dict(values), storage_writer=writer, use_collectives=False)
    assert writer.report.bytes_reused == 20_000
    index = _core.Index.open(f"{folder}/2", rank, False)
    assert [linked for _, linked in index.use_of_files()] == [False, True]


# --- what the caller says


def test_frozen_tensors_are_compared_by_their_first_block(tmp_path):
    save(state(1), tmp_path / "1", reuse="froz*")
    changed = state(2) | {"frozen": state()["frozen"].clone()}
    changed["frozen"][-1] += 1
    # The caller's word counts: that it is wrong beyond the first block is not noticed.
    save(changed, tmp_path / "2", parent=tmp_path / "1", reuse="froz*")
    assert_state_equal(load_rs(blank(state(1)), tmp_path / "2"), state(2))
    # Where the parent's save was not told so, it does not.
    save(changed, tmp_path / "3", parent=tmp_path / "1")
    save(
        changed | {"frozen": state()["frozen"]},
        tmp_path / "4",
        parent=tmp_path / "3",
        reuse=["froz*", "x"],
    )
    assert_state_equal(load_rs(blank(state(1)), tmp_path / "3"), changed)
    assert_state_equal(load_rs(blank(state(1)), tmp_path / "4"), state(2))
    # Where it is wrong from the first block on, as after a step of training, it is.
    trained = state(2) | {"frozen": random_tensor(LARGE, seed=9)}
    save(trained, tmp_path / "5", parent=tmp_path / "1", reuse="froz*")
    assert_state_equal(load_rs(blank(state(1)), tmp_path / "5"), trained)


def test_reuse_is_globs():
    with pytest.raises(TypeError, match="globs over names"):
        RsWriter("x", reuse=3)
    with pytest.raises(TypeError, match="globs over names"):
        RsWriter("x", reuse=torch.nn.Linear(1, 1))


# --- planners and ways to save


@pytest.mark.parametrize("planner", [DefaultSavePlanner, RsSavePlanner])
def test_any_planner(tmp_path, planner):
    for number, parent in ((1, None), (2, tmp_path / "1")):
        writer = RsWriter(tmp_path / str(number), parent=parent)
        dcp.save(state(number), storage_writer=writer, planner=planner(), no_dist=True)
    assert writer.report.bytes_reused > 2_400_000
    assert_state_equal(load_rs(blank(state(2)), tmp_path / "2", verify=True), state(2))


def test_cast_tensors_are_compared_as_stored(tmp_path):
    for number, parent in ((1, None), (2, tmp_path / "1")):
        writer = RsWriter(tmp_path / str(number), parent=parent)
        values = {"w": torch.arange(700_000.0), "n": torch.tensor(float(number))}
        dcp.save(
            values, storage_writer=writer, planner=RsSavePlanner(dtype=torch.bfloat16), no_dist=True
        )
    assert writer.report.bytes_reused == 1_400_000
    with dcp_rs.open(tmp_path / "2", verify=True) as checkpoint:
        assert torch.equal(checkpoint["w"], torch.arange(700_000.0).bfloat16())


def test_a_save_over_its_own_parent(tmp_path):
    save(state(1), tmp_path)
    written, reused = save(state(2), tmp_path, parent=tmp_path)
    assert reused > 2_400_000 > written
    assert_state_equal(load_rs(blank(state(2)), tmp_path, verify=True), state(2))
    assert {file.name[:9] for file in tmp_path.glob("g*")} == {"g00000002"}


# --- parents that cannot be used


def break_nothing(path):
    shutil.rmtree(path)


def break_index(path):
    (path / "index.dcprs").write_bytes(b"\x89DCPRS\r\n" + bytes(400))


def break_file(path):
    next(path.glob("g*")).unlink()


def break_length(path):
    os.truncate(next(path.glob("g*")), 5000)


def break_kind(path):
    shutil.rmtree(path)
    dcp.save({"frozen": state()["frozen"]}, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize("harm", [break_nothing, break_index, break_file, break_length, break_kind])
def test_a_parent_that_cannot_be_used_is_named_and_all_is_written(tmp_path, harm):
    one, two = tmp_path / "one", tmp_path / "two"
    save(state(1), one)
    harm(one)
    with pytest.warns(
        UserWarning, match=r"what could be reused of .*one is written to .*two: .*"
    ) as said:
        written, reused = save(state(2), two, parent=one)
    (reason,) = (str(each.message) for each in said if "could be reused" in str(each.message))
    assert str(one) in reason.split(": ", 1)[1] or harm is break_kind
    assert reused == 0
    assert written > 2_400_000
    assert_holds(two, state(2), tmp_path / "stock")


def flip_frozen(path):
    with dcp_rs.open(path) as checkpoint:
        (chunk,) = checkpoint.chunks("frozen")
    flip(path / chunk.file, chunk.offset + 1_500_000)


def test_a_byte_that_flips_in_what_is_reused_is_found(tmp_path):
    one, two, three = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    save(state(1), one)
    save(state(2), two, parent=one)
    flip_frozen(one)
    for path in (one, two):
        (problem,) = dcp_rs.verify(path).problems
        assert problem.tensor == "frozen"
    with pytest.raises(CorruptDataError, match="frozen"):
        dcp_rs.load(blank(state(2)), two, verify=True, no_dist=True)
    # A save reads nothing of it, unless it is told to.
    save(state(3), three, parent=two)
    assert not dcp_rs.verify(three).ok
    with pytest.warns(UserWarning, match='tensor "frozen" at byte'):
        written, _ = save(state(3), tmp_path / "4", parent=two, verify_reuse=True)
    assert written > 2_400_000
    assert_holds(tmp_path / "4", state(3), tmp_path / "stock")


def test_where_links_cannot_be_made_all_is_written(tmp_path):
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system")
    folder = other / f"dcp-rs-{os.getpid()}"
    try:
        save(state(1), folder)
        with pytest.warns(UserWarning, match="link"):
            written, reused = save(state(2), tmp_path / "2", parent=folder)
        assert (written > 2_400_000, reused) == (True, 0)
        assert_holds(tmp_path / "2", state(2), tmp_path / "stock")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- what else knows of it


def test_conversions_copies_of_the_index_and_cleaning_know_of_links(tmp_path):
    one, two = tmp_path / "1", tmp_path / "2"
    save(state(1), one)
    save(state(2), two, parent=one)
    for to in ("dcp-rs", "dcp"):
        dcp_rs.convert(two, tmp_path / to, to=to)
        assert_state_equal(load_rs(blank(state(2)), tmp_path / to), state(2))
    # A killed save's links are cleaned, and the parent keeps its file.
    (two / "index.dcprs").rename(tmp_path / "index")
    link = max(two.glob("g*"), key=lambda file: file.stat().st_size)
    kept = {Path(left.path).name: left.verdict for left in leftovers(two)}
    assert set(kept.values()) == {"whole"}
    assert link.name in kept
    (tmp_path / "index").rename(two / "index.dcprs")
    save({"other": torch.ones(1)}, two)
    assert not link.exists()
    assert_holds(one, state(1), tmp_path / "stock")
