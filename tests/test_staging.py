"""Loads and saves through slabs, as for an accelerator, on one that is made up: its copies come late."""

import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcp_rs
from dcp_rs import _core, fill, payload, staging, upload
from dcp_rs.errors import CorruptDataError, PlanError, UnsupportedError
from dcp_rs.options import ReadOptions, WriteOptions
from support import ALL_DTYPES, assert_state_equal, random_tensor, same_bits
from support.fakes import FakeAccelerator
from support.slabs import SMALL, damage, entries_of, install, load, no_slab_threads, saved, state


@pytest.fixture
def fake(monkeypatch):
    return install(monkeypatch, FakeAccelerator())


# --- what arrives ----------------------------------------------------------------------------------


def test_what_a_load_gives_is_safe_on_the_callers_stream(ckpt, monkeypatch):
    fake = install(monkeypatch, FakeAccelerator(delay=0.003))
    want = state() | {"large": torch.randn(700, 1000), "scalar": torch.tensor(3.0)}
    index = saved(ckpt, want)
    got = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    load(index, got)
    fake.synchronize()  # nothing else has waited for the streams
    assert_state_equal(got, want)


def test_small_tensors_go_down_together(ckpt, fake):
    want = {f"w{i}": torch.randn(8, 8) for i in range(2000)}
    index = saved(ckpt, want)
    got = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    load(index, got, ReadOptions())
    fake.synchronize()
    assert_state_equal(got, want)
    assert fake.copies <= 4  # 512 KB: one slab, one scatter


def test_large_tensors_need_no_scratch_memory(ckpt, fake):
    want = {"w": torch.randn(4096, 1024)}
    index = saved(ckpt, want)
    got = {"w": torch.zeros(4096, 1024)}
    load(index, got, ReadOptions())
    fake.synchronize()
    assert_state_equal(got, want)
    assert fake.scratch_bytes == 0
    assert fake.copies <= 4


def test_every_dtype_and_cast(ckpt, fake):
    want = {str(dtype): random_tensor((37, 5), dtype) for dtype in ALL_DTYPES}
    index = saved(ckpt, want)
    got = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    load(index, got)
    fake.synchronize()
    for name, tensor in want.items():
        assert same_bits(got[name], tensor), name
    cast = {"torch.float32": torch.zeros(37, 5, dtype=torch.bfloat16)}
    load(index, cast)
    fake.synchronize()
    assert same_bits(cast["torch.float32"], want["torch.float32"].bfloat16())


def test_destinations_of_all_kinds(ckpt, fake):
    want = torch.randn(60, 40)
    index = saved(ckpt, {"w": want, "c": torch.randn(9, dtype=torch.complex64)})
    number = index.find("w")
    strided = torch.zeros(40, 60).t()
    wide = torch.zeros(60, 100)
    narrow = wide[:, 30:70]
    column = torch.zeros(60, 7)
    parameter = torch.nn.Parameter(torch.zeros(60, 40, dtype=torch.float64))
    negative = torch.zeros(9, dtype=torch.complex64).conj().imag
    targets = [
        fill.Target(number, [0, 0], strided, "w", torch.float32),
        fill.Target(number, [0, 0], narrow, "w", torch.float32),
        fill.Target(number, [0, 11], column, "w", torch.float32),
        fill.Target(number, [0, 0], parameter.detach(), "w", torch.float32),
        fill.Target(number, [3, 5], negative, "w", torch.float32),
    ]
    assert negative.is_neg()
    targets[-1] = fill.Target(number, [3], negative, "w", torch.float32)
    with pytest.raises(PlanError):  # of one dimension, in a tensor of two
        fill.fill_regions(index, targets, SMALL)
    targets[-1] = fill.Target(number, [3, 5], negative.view(1, 9), "w", torch.float32)
    fill.fill_regions(index, targets, SMALL)
    fake.synchronize()
    assert torch.equal(strided, want)
    assert torch.equal(narrow, want)
    assert wide[:, :30].abs().sum() == 0
    assert torch.equal(column, want[:, 11:18])
    assert torch.equal(parameter, want.double())
    assert torch.equal(negative, want[3, 5:14])


def test_several_devices_take_turns(ckpt, monkeypatch):
    fakes = {"cpu": FakeAccelerator(0.001), "other": FakeAccelerator(0.002)}
    install(monkeypatch, fakes["cpu"])
    want = state()
    index = saved(ckpt, want)
    got = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    goals = [upload.make_goal(t, t.dtype) for t in got.values()]
    wants = [
        (index.first_chunk(index.find(name)), [0, 0], tuple(t.shape), True, i % 2)
        for i, (name, t) in enumerate(got.items())
    ]
    lanes = iter([fake.lane(torch.device("cpu")) for fake in fakes.values()])
    monkeypatch.setattr(staging, "lane_for", lambda _: next(lanes))
    upload.upload(index, wants, goals, [torch.device("cpu")] * 2, SMALL)
    for fake in fakes.values():
        assert fake.copies > 0
        fake.synchronize()
    assert_state_equal(got, want)


@pytest.mark.parametrize("io", ["mmap", "direct", "buffered"])
@pytest.mark.parametrize("verify", [False, True])
def test_every_way_to_read(ckpt, fake, io, verify):
    want = state() | {"large": torch.randn(1500, 1000), "tall": torch.randn(70_001, 3)}
    index = saved(ckpt, want)
    got = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    load(index, got, ReadOptions(io=io, verify=verify, max_inflight_bytes=4 << 20))
    fake.synchronize()
    assert_state_equal(got, want)


def test_direct_reads_land_in_the_slab(ckpt):
    want = state() | {"large": torch.randn(1500, 1000)}
    index = saved(ckpt, want)
    for name, _, _, _ in index.files():
        path = ckpt / name
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    wants = [(index.first_chunk(i), [0, 0], index.tensor(i)[3], True, 0) for i in range(len(want))]
    slabs = upload.SlabLoad(index, wants, sort=True, accelerator=False, options=ReadOptions(io="direct"))
    images = [image for b in range(slabs._reader.batch_count) for image in slabs._reader.images(b)]
    assert sum(last - first for *_, first, last in images) == sum(
        len(slabs._reader.batch(b)[1]) for b in range(slabs._reader.batch_count)
    )
    with slabs:
        for _ in slabs:
            pass
    wanted, read, direct = slabs.stats()
    total = sum(tensor.nbytes for tensor in want.values())
    assert wanted >= total
    if direct:  # not every file system has direct I/O
        assert direct == read <= total * 1.05 + 4096 * len(images)


# --- the order of things ---------------------------------------------------------------------------


def test_a_slab_is_filled_again_only_when_its_copies_are_done(ckpt, monkeypatch):
    fake = install(monkeypatch, FakeAccelerator(delay=0.02))
    want = {f"w{i}": torch.randn(64 << 10) for i in range(16)}  # 256 KiB each, in slabs of 64 KiB
    index = saved(ckpt, want)
    got = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    load(index, got, ReadOptions(max_inflight_bytes=256 << 10, threads=2))
    fake.synchronize()
    assert_state_equal(got, want)  # a slab that was filled too early would have changed under a copy


def test_slabs_are_filled_while_copies_run(ckpt, monkeypatch):
    fake = install(monkeypatch, FakeAccelerator(delay=0.02))
    want = {f"w{i}": torch.randn(64 << 10) for i in range(8)}
    index = saved(ckpt, want)
    wants = [(index.first_chunk(i), [0], index.tensor(i)[3], True, 0) for i in range(8)]
    lane = fake.lane(torch.device("cpu"))
    load = upload.SlabLoad(
        index,
        wants,
        sort=True,
        accelerator=True,
        options=ReadOptions(max_inflight_bytes=1 << 20),
    )
    goals = [upload.make_goal(torch.empty(64 << 10), torch.float32) for _ in range(8)]
    unfinished = 0
    with load:
        for _, pieces, slab in load:
            unfinished += any(not lane.done(token) for _, token, _ in load._pending)
            load.sent(lane, lane.upload(slab, upload.make_transfer(slab, lane, goals, pieces)))
    assert unfinished > 5  # slabs were ready before the copies of the ones before were over


@pytest.mark.parametrize("size", [10, 1 << 19])  # through scratch memory, and straight
def test_copies_begin_after_the_callers_work(ckpt, fake, size):
    index = saved(ckpt, {"w": torch.ones(size)})
    late = threading.Event()
    got = torch.zeros(size)

    def write_over() -> None:
        late.wait(5)
        got.fill_(7)

    fake.caller.submit(write_over)
    threading.Timer(0.05, late.set).start()
    load(index, {"w": got}, ReadOptions())
    fake.synchronize()
    assert torch.equal(got, torch.ones(size))


def test_scratch_memory_may_be_in_use_by_the_callers_stream(ckpt, fake, monkeypatch):
    """The allocator hands out what the caller has let go of, before the work on it is done."""
    want = state()
    index = saved(ckpt, want)
    got = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    empty = torch.empty

    def used_before(*sizes, **options):
        memory = empty(*sizes, **options)

        def last_use() -> None:
            threading.Event().wait(0.02)
            memory.fill_(0xA5)

        fake.caller.submit(last_use)
        return memory

    monkeypatch.setattr(
        staging,
        "_new_slab",
        lambda nbytes, **_: staging._aligned(empty(nbytes + 4096, dtype=torch.uint8), nbytes),
    )
    monkeypatch.setattr(torch, "empty", used_before)
    load(index, got, ReadOptions())
    fake.synchronize()
    assert_state_equal(got, want)


def test_streams_take_turns(ckpt, fake):
    want = {f"w{i}": torch.randn(64 << 10) for i in range(8)}
    load(saved(ckpt, want), {name: torch.zeros_like(t) for name, t in want.items()})
    assert {name for what, name, *_ in fake.log if what == "copy"} == {"side1", "side2"}


def test_pinned_memory_is_bounded(ckpt, fake, monkeypatch):
    taken = []
    take = staging.slabs.take

    def counted(count, nbytes, *, pinned):
        taken.append(count * nbytes)
        return take(count, nbytes, pinned=pinned)

    monkeypatch.setattr(staging.slabs, "take", counted)
    want = {"w": torch.randn(1 << 20)}
    index = saved(ckpt, want)
    for limit in (256 << 10, 1 << 20, 3 << 20, 256 << 20):
        got = {"w": torch.zeros(1 << 20)}
        load(index, got, ReadOptions(max_inflight_bytes=limit))
        fake.synchronize()
        assert_state_equal(got, want)
        assert taken[-1] <= limit
    assert fake.scratch_bytes <= 4 * 16 << 20


# --- when things go wrong --------------------------------------------------------------------------


def test_damage_in_the_middle_stops_the_load(ckpt, monkeypatch):
    fake = install(monkeypatch, FakeAccelerator(delay=0.002))
    want = state(60)
    index = saved(ckpt, want)
    damage(ckpt, index)
    got = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    with pytest.raises(CorruptDataError, match="digest"):
        load(index, got, ReadOptions(verify=True, max_inflight_bytes=512 << 10))
    fake.synchronize()
    before = {name: tensor.clone() for name, tensor in got.items()}
    assert_state_equal(got, before)  # nothing arrives any more
    assert no_slab_threads()


def test_a_device_that_fails_stops_the_load(ckpt, monkeypatch):
    fake = install(monkeypatch, FakeAccelerator(delay=0.002, fail_after=3))
    want = {f"w{i}": torch.randn(64 << 10) for i in range(20)}
    index = saved(ckpt, want)
    got = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    with pytest.raises(RuntimeError, match="out of order"):
        load(index, got, ReadOptions(max_inflight_bytes=256 << 10))
    assert ("wait", "caller", "side1") in fake.log  # what was begun comes before the caller's next work
    fake.synchronize()
    assert no_slab_threads()


@pytest.mark.usefixtures("fake")
def test_a_consumer_that_raises_stops_the_load(ckpt):
    index = saved(ckpt, {f"w{i}": torch.randn(64 << 10) for i in range(20)})
    wants = [(index.first_chunk(i), [0], index.tensor(i)[3], True, 0) for i in range(20)]
    load = upload.SlabLoad(
        index,
        wants,
        sort=True,
        accelerator=True,
        options=ReadOptions(max_inflight_bytes=256 << 10),
    )

    def consume() -> None:
        with load:
            for number, _ in enumerate(load):
                if number == 3:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert no_slab_threads()


def test_a_missing_file_is_found_before_anything_is_copied(ckpt, fake):
    index = saved(ckpt, state())
    for name, *_ in index.files():
        (ckpt / name).unlink()
    with pytest.raises(CorruptDataError, match="missing"):
        load(index, {"layer.0": torch.zeros(50, 32)})
    assert fake.copies == 0


def test_what_cannot_be_filled_is_refused(ckpt, fake):
    index = saved(ckpt, {"w": torch.randn(4, 4)})
    with pytest.raises(PlanError, match="meta"):
        load(index, {"w": torch.empty(4, 4, device="meta")})
    with pytest.raises(UnsupportedError, match="layout"):
        load(index, {"w": torch.zeros(4, 4).to_sparse()})
    assert fake.copies == 0


# --- the engine's side of it -----------------------------------------------------------------------


def reader(index, slab_bytes=1 << 16, threads=2, **options):
    wants = [
        (index.first_chunk(i), [0] * len(index.tensor(i)[3]), index.tensor(i)[3], True, 0)
        for i in range(index.tensor_count)
    ]
    options = {"sort": True, "io": "auto", "verify": False} | options
    return _core.SlabReader.create(index, wants, slab_bytes, threads=threads, **options)


def test_batches_come_in_order_and_slabs_wait_for_their_release(ckpt):
    index = saved(ckpt, {f"w{i}": torch.randn(16 << 10) for i in range(10)})
    source = reader(index)
    slabs = staging._SlabCache().take(3, 1 << 16, pinned=False)
    source.start([slab.data_ptr() for slab in slabs], slabs, 3)
    held, order = [], []
    for _ in range(3):
        batch, slab = source.next()
        order.append(batch)
        held.append(slab)
    assert sorted(held) == [0, 1, 2]
    copies = [slab.clone() for slab in slabs]
    threading.Event().wait(0.05)
    assert all(torch.equal(a, b) for a, b in zip(copies, slabs, strict=True))  # none was touched
    while True:
        for slab in held:
            source.release(slab)
        found = source.next()
        if found is None:
            break
        order.append(found[0])
        held = [found[1]]
    assert order == list(range(source.batch_count))
    source.close()


def test_a_closed_load_gives_nothing(ckpt):
    index = saved(ckpt, {f"w{i}": torch.randn(16 << 10) for i in range(10)})
    source = reader(index)
    with pytest.raises(PlanError, match="not begun"):
        source.next()
    slabs = staging._SlabCache().take(2, 1 << 16, pinned=False)
    source.start([slab.data_ptr() for slab in slabs], slabs, 2)
    with pytest.raises(PlanError, match="has begun"):
        source.start([slab.data_ptr() for slab in slabs], slabs, 2)
    source.close()
    with pytest.raises(KeyboardInterrupt):
        source.next()
    source.close()
    assert no_slab_threads()


def test_a_load_that_is_dropped_stops(ckpt):
    index = saved(ckpt, {f"w{i}": torch.randn(16 << 10) for i in range(10)})
    source = reader(index)
    slabs = staging._SlabCache().take(2, 1 << 16, pinned=False)
    source.start([slab.data_ptr() for slab in slabs], slabs, 2)
    del source
    assert no_slab_threads()


def test_misplaced_slabs_are_refused(ckpt):
    index = saved(ckpt, {"w": torch.randn(10)})
    source = reader(index)
    memory = torch.empty(3 << 16, dtype=torch.uint8)
    with pytest.raises(PlanError, match="multiples"):
        source.start([memory.data_ptr() // 4096 * 4096 + 8], memory, 1)
    with pytest.raises(PlanError, match="multiples"):
        source.start([], memory, 1)
    with pytest.raises(PlanError, match="slabs of"):
        reader(index, slab_bytes=1000)


def test_a_fork_leaves_the_threads_to_its_parent(ckpt):
    index = saved(ckpt, {f"w{i}": torch.randn(16 << 10) for i in range(10)})
    source = reader(index)
    slabs = staging._SlabCache().take(2, 1 << 16, pinned=False)
    source.start([slab.data_ptr() for slab in slabs], slabs, 2)
    child = os.fork()
    if child == 0:
        source.close()  # would wait for ever for threads that are not there
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    while (found := source.next()) is not None:
        source.release(found[1])
    source.close()


# --- packing ---------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(0, 40), max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.complex128])


@given(
    shapes=st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=12),
    cut=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=3, max_size=3),
    verify=st.booleans(),
    transpose=st.booleans(),
)
def test_any_regions_into_any_memory(tmp_path_factory, shapes, cut, verify, transpose):
    path = tmp_path_factory.mktemp("any") / "ckpt"
    want = {f"t{i}": random_tensor(tuple(shape), dtype) for i, (shape, dtype) in enumerate(shapes)}
    index = saved(path, want)
    targets, parts = [], []
    for name, tensor in want.items():
        offsets, sizes = [], []
        for (offset, extent), size in zip(cut, tensor.shape, strict=False):
            begin = min(offset, size)
            offsets.append(begin)
            sizes.append(min(extent, size - begin))
        part = tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        memory = torch.zeros(sizes[::-1] if transpose else sizes, dtype=tensor.dtype)
        memory = memory.permute(tuple(reversed(range(memory.dim())))) if transpose else memory
        parts.append((memory, part))
        targets.append(fill.Target(index.find(name), offsets, memory, name, tensor.dtype))
    fake = FakeAccelerator()
    with pytest.MonkeyPatch.context() as patch:
        install(patch, fake)
        fill.fill_regions(index, targets, ReadOptions(max_inflight_bytes=128 << 10, verify=verify))
    fake.synchronize()
    for memory, part in parts:
        assert same_bits(memory, part)


# --- slabs between loads ---------------------------------------------------------------------------


class Pinned(torch.Tensor):
    """Stands for pinned memory where there is none."""

    def is_pinned(self):
        return True


@pytest.fixture
def cache(monkeypatch):
    made = []

    def new_slab(nbytes, *, pinned):
        made.append(nbytes)
        memory = torch.empty(nbytes, dtype=torch.uint8)
        return memory.as_subclass(Pinned) if pinned else memory

    monkeypatch.setattr(staging, "_new_slab", new_slab)
    cache = staging._SlabCache()
    cache.made = made
    return cache


def test_pinned_slabs_are_used_again(cache):
    first = cache.take(3, 4096, pinned=True)
    cache.give(first)
    again = cache.take(4, 4096, pinned=True)
    assert [id(slab) for slab in again[:3]] == [id(slab) for slab in first]
    assert cache.made == [4096] * 4
    cache.give(again)
    cache.take(1, 8192, pinned=True)
    assert cache._kept == []  # of another size: let go, or both would count
    cache.give(cache.take(2, 4096, pinned=False))
    assert cache._kept == []  # memory that is not pinned costs nothing to make


def test_what_is_kept_is_bounded_and_can_be_released(cache, monkeypatch):
    monkeypatch.setattr(staging, "MAX_KEPT_BYTES", 10_000)
    cache.give(cache.take(4, 4096, pinned=True))
    assert len(cache._kept) == 2
    assert cache.clear() == 8192
    assert cache.clear() == 0
    assert isinstance(staging.release_pinned_memory(), int)


def test_a_fork_has_no_slabs_of_its_parent(cache):
    cache.give(cache.take(2, 4096, pinned=True))
    child = os.fork()
    if child == 0:
        os._exit(0 if cache._kept == [] and len(cache._left_alone) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(cache._kept) == 2


def test_slab_sizes():
    assert staging.slab_bytes(256 << 20) == 8 << 20
    assert staging.slab_bytes(1 << 30) == 8 << 20
    assert staging.slab_bytes(5 << 20) == 512 << 10
    assert staging.slab_bytes(1) == 64 << 10
    assert staging.slab_bytes(1, least=1 << 20) == 1 << 20


# --- down as well as up ----------------------------------------------------------------------------


def save_from_device(path, state_dict, options):
    path.mkdir()
    entries = entries_of(state_dict)
    save = _core.Save.create(
        str(path),
        [entry.item() for entry in entries],
        generation=1,
        token=1,
        rank=0,
        world_size=1,
        **options.engine(),
    )
    try:
        payload._write_from_device(save, torch.device("cpu"), [(i, e.data) for i, e in enumerate(entries)], options)
        index = save.finish()
    except BaseException:
        save.abort()
        raise
    (path / "index.dcprs").write_bytes(index)


def test_device_tensors_are_saved_through_slabs(ckpt, monkeypatch):
    fake = install(monkeypatch, FakeAccelerator(delay=0.002))
    want = state(200, 3) | {
        "large": torch.randn(2000, 1000),
        "transposed": torch.randn(700, 900).t(),
        "strided": torch.randn(40, 40)[::2, ::3],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
    }
    save_from_device(ckpt, want, WriteOptions(fsync=False, max_inflight_bytes=4 << 20))
    assert fake.copies < 60
    with dcp_rs.open(ckpt) as got:
        assert_state_equal(dict(got), {name: want[name] for name in got})
        assert set(got) == set(want)


def test_a_device_that_fails_leaves_no_files(ckpt, monkeypatch):
    install(monkeypatch, FakeAccelerator(delay=0.001, fail_after=3))
    want = {f"w{i}": torch.randn(1 << 20) for i in range(6)}
    with pytest.raises(RuntimeError, match="out of order"):
        save_from_device(ckpt, want, WriteOptions(fsync=False, max_inflight_bytes=4 << 20))
    assert list(ckpt.iterdir()) == []
