"""``Checkpoint.stream``: everything in the order of the files, read ahead."""

import threading
import weakref

import pytest
import torch

import dcp_rs
from dcp_rs import fill, staging
from dcp_rs import stream as streaming
from dcp_rs.errors import CorruptDataError, DcpRsError
from support import assert_state_equal
from support.fakes import FakeAccelerator
from support.indexes import commit_ranks
from support.slabs import damage, entries_of, install, no_slab_threads

CPU = torch.device("cpu")


@pytest.fixture
def want(ckpt):
    torch.manual_seed(1)
    state = {f"w{i:02}": torch.randn(100 + i, 300) for i in range(40)}
    state |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(2), "step": 7, "zz": torch.empty(3, 0)}
    dcp_rs.save(state, ckpt)
    return state


@pytest.mark.parametrize("options", [{}, {"max_inflight_bytes": 300_000}, {"verify": True}, {"io": "direct"}])
@pytest.mark.parametrize("through_slabs", [False, True])
def test_a_stream_gives_everything(ckpt, want, monkeypatch, options, through_slabs):
    fake = install(monkeypatch, FakeAccelerator()) if through_slabs else None
    with dcp_rs.open(ckpt, **options) as source:
        got = dict(source.stream())
        if fake:
            fake.synchronize()
        order = [source._index.name(i) for i in source._index.file_order()]
    assert list(got) == order
    assert_state_equal(got, want)


def test_a_tensor_is_safe_on_the_callers_stream_when_it_is_handed_over(ckpt, want, monkeypatch):
    fake = install(monkeypatch, FakeAccelerator(delay=0.002))
    with dcp_rs.open(ckpt, max_inflight_bytes=1 << 20) as source:
        for name, tensor in source.stream():
            if name != "step":
                fake.synchronize()
                assert torch.equal(tensor, want[name]), name


def test_copies_into_memory_that_is_used_again_come_after_its_last_use(ckpt, want, monkeypatch):
    """The allocator hands out memory that the caller's stream is not done with."""
    fake = install(monkeypatch, FakeAccelerator())
    empty = torch.empty

    def used_before(*sizes, **options):
        tensor = empty(*sizes, **options)

        def last_use() -> None:
            threading.Event().wait(0.003)
            tensor.fill_(0xA5)

        fake.caller.submit(last_use)
        return tensor

    monkeypatch.setattr(torch, "empty", used_before)
    monkeypatch.setattr(
        staging, "_new_slab", lambda nbytes, **_: staging._aligned(empty(nbytes + 4096, dtype=torch.uint8), nbytes)
    )
    with dcp_rs.open(ckpt, max_inflight_bytes=1 << 20) as source:
        got = dict(source.stream())
    fake.synchronize()
    assert_state_equal(got, want)


@pytest.mark.usefixtures("want")
def test_reading_ahead_is_bounded(ckpt, monkeypatch):
    made = []
    fill_regions = fill.fill_regions
    monkeypatch.setattr(
        streaming,
        "fill_regions",
        lambda index, targets, options: (
            made.append(sum(t.tensor.nbytes for t in targets)),
            fill_regions(index, targets, options),
        ),
    )
    limit = 1 << 20
    used = 0
    with dcp_rs.open(ckpt, max_inflight_bytes=limit) as source:
        for _, tensor in source.stream():
            used += tensor.nbytes if isinstance(tensor, torch.Tensor) else 0
            assert sum(made) - used <= limit
    assert max(made) <= limit // 2


@pytest.mark.usefixtures("want")
def test_a_stream_holds_nothing_that_it_has_handed_over(ckpt):
    with dcp_rs.open(ckpt) as source:
        for name, tensor in source.stream():
            if name == "w03":
                seen = weakref.ref(tensor)
                del tensor
                assert seen() is None
                break


@pytest.mark.usefixtures("want")
@pytest.mark.parametrize("through_slabs", [False, True])
def test_a_stream_can_be_left_early(ckpt, monkeypatch, through_slabs):
    if through_slabs:
        install(monkeypatch, FakeAccelerator(delay=0.001))
    with dcp_rs.open(ckpt, max_inflight_bytes=1 << 20) as source:
        running = source.stream()
        next(running)
        next(running)
        running.close()
    assert no_slab_threads()
    assert not any(thread.name.startswith("dcp-rs-stream") for thread in threading.enumerate())


@pytest.mark.usefixtures("want")
@pytest.mark.parametrize("through_slabs", [False, True])
def test_damage_is_raised_where_it_is(ckpt, monkeypatch, through_slabs):
    if through_slabs:
        install(monkeypatch, FakeAccelerator())
    with dcp_rs.open(ckpt, verify=True, max_inflight_bytes=300_000) as source:
        damage(ckpt, source._index)
        with pytest.raises(CorruptDataError):
            for _ in source.stream():
                pass
    assert no_slab_threads()


@pytest.mark.usefixtures("want")
def test_a_closed_checkpoint_streams_nothing(ckpt):
    source = dcp_rs.open(ckpt)
    source.close()
    with pytest.raises(DcpRsError, match="closed"):
        source.stream()


def test_a_checkpoint_of_shards_streams_whole_tensors(ckpt, monkeypatch):
    """Chunks of one tensor in several files, as ranks write them."""
    from dcp_rs import _core

    whole = {"a": torch.randn(90, 40), "b": torch.randn(60, 7)}
    ckpt.mkdir()
    indexes = []
    for rank in range(3):
        rows = {name: t.chunk(3)[rank].contiguous() for name, t in whole.items()}
        entries = entries_of(rows)
        for entry in entries:
            entry.shape = tuple(whole[entry.fqn].shape)
            entry.offsets = (rank * entry.sizes[0], 0)
        save = _core.Save.create(
            str(ckpt),
            [entry.item() for entry in entries],
            generation=1,
            token=rank,
            rank=rank,
            world_size=3,
            **dcp_rs.WriteOptions(fsync=False).engine(),
        )
        save.write([(i, 0, e.data.data_ptr(), e.data.nbytes) for i, e in enumerate(entries)])
        indexes.append(save.finish())
    commit_ranks(ckpt, indexes)
    for fake in (None, FakeAccelerator()):
        if fake:
            install(monkeypatch, fake)
        with dcp_rs.open(ckpt) as source:
            got = dict(source.stream())
        if fake:
            fake.synchronize()
        assert_state_equal(got, whole)


def test_the_state_dict_of_a_device_is_one_load(ckpt, want, monkeypatch):
    fake = install(monkeypatch, FakeAccelerator())
    loads = []
    monkeypatch.setattr(staging, "lane_for", lambda device: loads.append(device) or fake.lane(device))
    with dcp_rs.open(ckpt) as source:
        source._device = torch.device("xpu")  # anything but the CPU
        monkeypatch.setattr(
            "dcp_rs.checkpoint.stream",
            lambda index, _, options, value: _original(index, CPU, options, value),
        )
        monkeypatch.setattr(type(source), "__getitem__", lambda _, name: want[name])
        got = source.state_dict()
    fake.synchronize()
    assert_state_equal(got, want)
    assert len(loads) == 1


_original = streaming.stream
