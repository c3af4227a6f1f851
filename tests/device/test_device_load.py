"""Loads onto the simulated device: what arrives, in what order, within what memory, and what an error leaves."""

import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import dcp_rs
from dcp_rs import _core
from dcp_rs.errors import CorruptDataError, PlanError, UnsupportedError
from dcp_rs.options import ReadOptions
from dcp_rs.transfer import buffers, copy_stream, load, upload
from dcp_rs.transfer.target import Target
from support import ALL_DTYPES, assert_state_equal, random_tensor, same_bits, threads
from support.simulated import host, on
from support.slabs import SMALL, batch_of, damage, fill, saved, state, whole

# --- what arrives


def test_loaded_tensors_are_safe_on_the_callers_stream(ckpt, sim, device):
    want = state() | {"large": torch.randn(700, 1000), "scalar": torch.tensor(3.0)}
    index = saved(ckpt, want)
    got = on(device, want)
    sim.delay = 3000
    fill(index, got)
    sim.delay = 0  # of what is asked for from now on
    assert_state_equal(host(got), want)


def test_small_tensors_go_down_together(ckpt, sim, device):
    want = {f"w{i}": torch.randn(8, 8) for i in range(2000)}
    index = saved(ckpt, want)
    got = on(device, want)
    before = sim.copies
    fill(index, got, ReadOptions())
    assert sim.copies - before <= 4  # 512 KB: one slab, one scatter
    assert_state_equal(host(got), want)


def test_a_strided_destination_leaves_the_others_together(ckpt, sim, device):
    """One column shard among small tensors, and each was copied by itself: torch has a kernel for lists of equal strides only."""
    want = {f"w{i}": torch.randn(8, 8) for i in range(2000)}
    index = saved(ckpt, want)
    got = on(device, want)
    got["w7"] = torch.zeros(8, 20, device=device)[:, 3:11]
    sim.synchronize()
    before = sim.copies
    fill(index, got, ReadOptions())
    assert sim.copies - before <= 4
    assert_state_equal({name: tensor.contiguous() for name, tensor in host(got).items()}, want)


def test_large_tensors_need_no_scratch_memory(ckpt, sim, device):
    want = {"w": torch.randn(4096, 1024)}
    index = saved(ckpt, want)
    got = on(device, want)
    copies, allocated = sim.copies, sim.allocated
    fill(index, got, ReadOptions())
    assert sim.allocated == allocated
    assert sim.copies - copies <= 4
    assert_state_equal(host(got), want)


def test_every_dtype(ckpt, sim, device):
    want = {str(dtype): random_tensor((37, 5), dtype) for dtype in ALL_DTYPES}
    index = saved(ckpt, want)
    got = on(device, want)
    sim.delay = 500
    fill(index, got)
    assert_state_equal(host(got), want)


CASTS = [
    (torch.uint16, torch.float32),
    (torch.uint32, torch.int64),
    (torch.uint64, torch.float64),
    (torch.complex32, torch.complex64),
    (torch.float8_e8m0fnu, torch.float32),
    (torch.float8_e4m3fn, torch.bfloat16),
    (torch.float32, torch.float8_e5m2),
    (torch.float32, torch.uint16),
    (torch.bfloat16, torch.float32),
    (torch.int64, torch.int32),
    (torch.float64, torch.float16),
    (torch.bool, torch.float32),
]


def test_casts_that_no_kernel_does_for_a_group_are_done_one_by_one(ckpt, sim, device):
    """G1: ``_foreach_copy_`` takes the ordinary dtypes alone, and a cast of others raised."""
    stored = {f"{a}>{b}.{i}": torch.arange(4 + i).to(a) for a, b in CASTS for i in range(3)}
    wanted = {
        name: torch.zeros(t.shape, dtype=CASTS[at // 3][1])
        for at, (name, t) in enumerate(stored.items())
    }
    index = saved(ckpt, stored)
    got = on(device, wanted)
    grouped = sim.grouped
    fill(index, got)
    for name, tensor in stored.items():
        assert same_bits(got[name].cpu(), tensor.to(got[name].dtype)), name
    assert sim.grouped - grouped >= 4  # those that it takes still go together


def test_destinations_of_all_kinds(ckpt, sim, device):
    want = torch.randn(60, 40)
    index = saved(ckpt, {"w": want, "c": torch.randn(9, dtype=torch.complex64)})
    number = index.find("w")
    strided = torch.zeros(40, 60, device=device).t()
    wide = torch.zeros(60, 100, device=device)
    narrow = wide[:, 30:70]
    column = torch.zeros(60, 7, device=device)
    parameter = torch.nn.Parameter(torch.zeros(60, 40, dtype=torch.float64, device=device))
    negative = torch.zeros(9, dtype=torch.complex64, device=device).conj().imag
    on_host = torch.zeros(60, 40)
    sim.delay = 500
    targets = [
        Target(number, [0, 0], strided, "w", torch.float32),
        Target(number, [0, 0], narrow, "w", torch.float32),
        Target(number, [0, 11], column, "w", torch.float32),
        Target(number, [0, 0], parameter.detach(), "w", torch.float32),
        Target(number, [0, 0], on_host, "w", torch.float32),
        Target(number, [3, 5], negative.view(1, 9), "w", torch.float32),
    ]
    assert negative.is_neg()
    load.fill(index, targets, SMALL)
    assert torch.equal(strided.cpu(), want)
    assert torch.equal(narrow.cpu(), want)
    assert wide[:, :30].cpu().abs().sum() == 0
    assert torch.equal(column.cpu(), want[:, 11:18])
    assert torch.equal(parameter.cpu(), want.double())
    assert torch.equal(negative.cpu(), want[3, 5:14])
    assert torch.equal(on_host, want)


def test_several_devices_take_turns(ckpt, sim, device, other_device):
    want = state()
    index = saved(ckpt, want)
    got = {
        name: t.to(other_device if i % 2 else device)
        for i, (name, t) in enumerate(on(device, want).items())
    }
    sim.delay = 1000
    fill(index, got)
    sim.delay = 0
    assert_state_equal(host(got), want)
    assert {t.device.index for t in got.values()} == {0, 1}


def test_another_device_may_be_the_current_one(ckpt, sim, device):
    want = state()
    index = saved(ckpt, want)
    got = on(device, want)
    sim.delay = 2000
    with torch.accelerator.device_index(1):
        fill(index, got)
        sim.delay = 0
        assert torch.accelerator.current_device_index() == 1
    assert_state_equal(host(got), want)


@pytest.mark.parametrize("io", ["mmap", "direct", "buffered"])
@pytest.mark.parametrize("verify", [False, True, "auto"])
def test_every_way_to_read(ckpt, sim, device, io, verify):
    want = state() | {"large": torch.randn(1500, 1000), "tall": torch.randn(70_001, 3)}
    index = saved(ckpt, want)
    got = on(device, want)
    sim.delay = 300
    fill(index, got, ReadOptions(io=io, verify=verify, max_inflight_bytes=4 << 20))
    assert_state_equal(host(got), want)


@pytest.mark.parametrize("planner", [None, dcp.DefaultLoadPlanner, dcp_rs.RsLoadPlanner])
def test_dcp_load(ckpt, sim, device, planner):
    want = state() | {"nested": {"b": torch.arange(7)}, "step": 4}
    dcp_rs.save(want, ckpt)
    got = on(device, want | {"nested": on(device, want["nested"]), "step": 0})
    sim.delay = 500
    dcp.load(got, storage_reader=dcp_rs.RsReader(ckpt), planner=planner and planner(), no_dist=True)
    got["nested"] = host(got["nested"])
    assert_state_equal(host(got), want)


def test_a_load_to_other_dtypes(ckpt, sim, device):
    want = state()
    dcp_rs.save(want, ckpt)
    got = {
        name: torch.zeros(t.shape, dtype=torch.bfloat16, device=device) for name, t in want.items()
    }
    sim.delay = 500
    dcp_rs.load(got, ckpt, dtype_policy="cast")
    assert_state_equal(host(got), {name: t.bfloat16() for name, t in want.items()})


@pytest.mark.parametrize("without", [None, "streams"])
def test_destinations_of_inference_mode(ckpt, sim, device, without):
    """Outside of the mode, a load raised half way through: `copy_` refuses such a tensor there."""
    want = state() | {"large": torch.randn(700, 1000)}
    index = saved(ckpt, want)
    with torch.inference_mode():
        got = on(device, want)
    if without:
        setattr(sim, without, 0)
    fill(index, got)
    assert_state_equal(host(got), want)


# --- the order of things


def test_a_slab_is_filled_again_only_when_its_copies_are_done(ckpt, sim, device):
    want = {f"w{i}": torch.randn(64 << 10) for i in range(16)}  # 256 KiB each, in slabs of 64 KiB
    index = saved(ckpt, want)
    got = on(device, want)
    sim.delay = 10_000
    fill(index, got, ReadOptions(max_inflight_bytes=256 << 10, threads=2))
    sim.delay = 0
    assert_state_equal(
        host(got), want
    )  # a slab that was filled too early would have changed under a copy


def test_the_next_load_has_the_slabs_when_the_last_copies_are_done(ckpt, sim, device):
    want = [{f"w{i}": torch.randn(30_000) for i in range(4)} for _ in range(4)]
    indexes = [saved(ckpt / str(i), state_dict) for i, state_dict in enumerate(want)]
    got = [on(device, state_dict) for state_dict in want]
    sim.delay = 10_000
    for index, state_dict in zip(indexes, got, strict=True):
        fill(index, state_dict)
    sim.delay = 0
    for state_dict, there in zip(want, got, strict=True):
        assert_state_equal(host(there), state_dict)


def test_slabs_are_filled_while_copies_run(ckpt, sim, device):
    want = {f"w{i}": torch.randn(64 << 10) for i in range(8)}
    index = saved(ckpt, want)
    targets = [whole(index, name, torch.empty(64 << 10, device=device)) for name in index.names()]
    batch = _core.Batch(index)
    for number, target in enumerate(targets):
        batch.add_device_target(number, target, 1, there=True)
    sim.delay = 20_000
    stream = copy_stream.copy_stream_for(device)
    options = ReadOptions(max_inflight_bytes=1 << 20)
    running = upload.SlabLoad(
        batch, batch.slab_regions(0), sort=True, accelerator=True, options=options
    )
    unfinished = 0
    with running:
        for _, copies, slab in running:
            unfinished += any(not event.query() for event, _ in running._pending)
            running.sent(stream.upload(slab, upload.make_transfer(slab, stream, targets, copies)))
    assert unfinished > 5  # slabs were ready before the copies of the ones before were over


@pytest.mark.parametrize("size", [10, 1 << 19])  # through scratch memory, and straight
def test_copies_begin_after_the_callers_work(ckpt, sim, device, size):
    index = saved(ckpt, {"w": torch.ones(size)})
    got = torch.zeros(size, device=device)
    with sim.held_up(torch.accelerator.current_stream(device), 0.05):
        got.fill_(7)
        fill(index, {"w": got}, ReadOptions())
    assert torch.equal(got.cpu(), torch.ones(size))


def test_the_callers_stream_may_be_any(ckpt, sim, device):
    want = state()
    index = saved(ckpt, want)
    mine = torch.Stream(device=device)
    with mine:
        got = on(device, want)
        sim.delay = 2000
        fill(index, got)
        copies = {name: tensor.clone() for name, tensor in got.items()}
    mine.synchronize()
    sim.delay = 0
    assert_state_equal(host(copies), want)


def test_scratch_memory_may_be_in_use_by_the_callers_stream(ckpt, sim, device):
    """The allocator hands out what the caller has let go of, before the work on it is done."""
    want = state()
    index = saved(ckpt, want)
    got = on(device, want)
    scratch = buffers.slab_bytes(SMALL.inflight_bytes(accelerator=True))
    old = [torch.empty(scratch, dtype=torch.uint8, device=device) for _ in range(2)]
    other = torch.Stream(device=device)
    with sim.held_up(other):
        for memory in old:
            memory.record_stream(other)
        del memory
        old.clear()
    # So it becomes free, with work of the caller's stream still to come, when the load asks for
    # memory
    other.synchronize()
    sim.delay = 20_000
    fill(index, got)
    sim.delay = 0
    assert_state_equal(host(got), want)


# --- memory


def test_pinned_memory_is_bounded(ckpt, sim, device):
    want = {"w": torch.randn(1 << 20)}
    index = saved(ckpt, want)
    got = on(device, want)
    for limit in (256 << 10, 1 << 20, 3 << 20, 256 << 20):
        dcp_rs.release_pinned_memory()
        assert sim.pinned_bytes == 0
        fill(index, got, ReadOptions(max_inflight_bytes=limit))
        assert 0 < sim.pinned_bytes <= limit
        assert_state_equal(host(got), want)


def test_device_memory_is_bounded(ckpt, sim, device):
    want = state(200, 300)
    index = saved(ckpt, want)
    got = on(device, want)
    torch.accelerator.memory.reset_peak_memory_stats(device)
    before = torch.accelerator.memory.memory_allocated(device)
    fill(index, got, ReadOptions())
    assert torch.accelerator.memory.max_memory_allocated(device) - before <= 2 * buffers.SLAB_BYTES
    assert_state_equal(host(got), want)


def test_a_device_without_pinned_memory(ckpt, sim, device):
    want = state() | {"large": torch.randn(700, 1000)}
    index = saved(ckpt, want)
    got = on(device, want)
    sim.pinned = 0
    sim.delay = 1000
    fill(index, got)
    sim.delay = 0
    assert sim.pinned_bytes == 0
    assert_state_equal(host(got), want)


def test_a_device_without_streams(ckpt, sim, device):
    want = state() | {"large": torch.randn(700, 1000)}
    index = saved(ckpt, want)
    got = on(device, want)
    sim.streams = 0
    sim.delay = 100
    fill(index, got)
    assert_state_equal(host(got), want)


# --- when things go wrong


@pytest.mark.parametrize(
    "read", [{"verify": True, "max_inflight_bytes": 512 << 10}, {"verify": "auto", "io": "direct"}]
)
def test_damage_in_the_middle_stops_the_load(ckpt, sim, device, read):
    want = state(60)
    index = saved(ckpt, want)
    damage(ckpt, index)
    got = on(device, want)
    sim.delay = 2000
    with pytest.raises(CorruptDataError, match="digest"):
        fill(index, got, ReadOptions(**read))
    sim.delay = 0
    after = host(got)
    sim.synchronize()
    assert_state_equal(host(got), after)  # nothing arrives any more
    assert threads.none_of("dcp-rs-slab")


def test_a_device_that_fails_stops_the_load(ckpt, sim, device):
    want = {f"w{i}": torch.randn(64 << 10) for i in range(20)}
    index = saved(ckpt, want)
    got = on(device, want)
    sim.delay = 2000
    sim.fail_after = sim.copies + 3
    with pytest.raises(RuntimeError, match="out of order"):
        fill(index, got, ReadOptions(max_inflight_bytes=256 << 10))
    sim.fail_after, sim.delay = -1, 0
    begun = host(got)  # comes after what was begun
    sim.synchronize()
    assert_state_equal(host(got), begun)
    assert threads.none_of("dcp-rs-slab")


def test_copies_that_are_lost_are_heard_of(ckpt, sim, device):
    want = {f"w{i}": torch.randn(64 << 10) for i in range(20)}
    index = saved(ckpt, want)
    got = on(device, want)
    sim.fail_late = 1
    with pytest.raises(RuntimeError, match="a copy was lost"):
        fill(index, got, ReadOptions(max_inflight_bytes=256 << 10))
    sim.reset()
    assert threads.none_of("dcp-rs-slab")
    fill(index, got, ReadOptions(max_inflight_bytes=256 << 10))
    assert_state_equal(host(got), want)


def test_a_consumer_that_raises_stops_the_load(ckpt, sim, device):
    index = saved(ckpt, {f"w{i}": torch.randn(64 << 10) for i in range(20)})
    batch = batch_of(index)
    options = ReadOptions(max_inflight_bytes=256 << 10)
    running = upload.SlabLoad(
        batch, batch.slab_regions(0), sort=True, accelerator=True, options=options
    )

    def consume() -> None:
        with running:
            for number, _ in enumerate(running):
                if number == 3:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert threads.none_of("dcp-rs-slab")


def test_a_missing_file_is_found_before_anything_is_copied(ckpt, sim, device):
    want = state()
    index = saved(ckpt, want)
    for path in index.file_paths():
        path.unlink()
    got = on(device, {"layer.0": torch.zeros(50, 32)})
    before = sim.copies
    with pytest.raises(CorruptDataError, match="missing"):
        fill(index, got)
    assert sim.copies == before


def test_unfillable_tensor_is_refused(ckpt, sim, device):
    index = saved(ckpt, {"w": torch.randn(4, 4)})
    for tensor, error, word in (
        (torch.empty(4, 4, device="meta"), PlanError, "meta"),
        (torch.zeros(4, 4).to_sparse(), UnsupportedError, "layout"),
        (torch.zeros(4, 1, device=device).expand(4, 4), PlanError, "memory of its own"),
    ):
        before = sim.copies
        with pytest.raises(error, match=word):
            fill(index, {"w": tensor})
        assert sim.copies == before


def test_loads_of_several_threads(ckpt, sim, device, other_device):
    want = state()
    dcp_rs.save(want, ckpt)
    sim.delay = 1000
    got, failed = [on(device if i % 2 else other_device, want) for i in range(3)], []

    def run(mine):
        try:
            with torch.Stream(device=mine["layer.0"].device):
                dcp_rs.load(mine, ckpt)
                copies = {name: tensor.clone() for name, tensor in mine.items()}
                assert_state_equal(host(copies), want)
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=run, args=[mine]) for mine in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# --- packing

SHAPES = st.lists(st.integers(0, 40), max_size=3)
DTYPES = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.uint8, torch.complex128, torch.float8_e4m3fn]
)


@given(
    shapes=st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=12),
    cut=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=3, max_size=3),
    verify=st.booleans(),
    transpose=st.booleans(),
)
def test_any_regions_into_any_memory(tmp_path_factory, sim, device, shapes, cut, verify, transpose):
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
        memory = torch.zeros(sizes[::-1] if transpose else sizes, dtype=tensor.dtype, device=device)
        memory = memory.permute(tuple(reversed(range(memory.dim())))) if transpose else memory
        parts.append((memory, part))
        targets.append(Target(index.find(name), offsets, memory, name, tensor.dtype))
    sim.delay = 100
    load.fill(index, targets, ReadOptions(max_inflight_bytes=128 << 10, verify=verify))
    sim.delay = 0
    for memory, part in parts:
        assert same_bits(memory.cpu(), part)
