"""Pinned slabs between loads."""

import os

import pytest
import torch

import dcp_rs
from dcp_rs.options import ReadOptions
from dcp_rs.transfer import buffers
from support import assert_state_equal
from support.simulated import host, on
from support.slabs import fill, saved, state

MIB = 1 << 20


@pytest.fixture
def cache(sim, device):  # pinned memory is the device's
    return buffers.SlabPool()


def places(taken):
    return {slab.data_ptr() for slab in taken}


def test_pinned_slabs_are_used_again(cache):
    first = cache.take(3, 4096, pinned=True)
    assert all(slab.is_pinned() and slab.data_ptr() % 4096 == 0 for slab in first)
    cache.give(first)
    again = cache.take(4, 4096, pinned=True)
    assert places(first) < places(again)
    cache.give(again)
    other = cache.take(1, 8192, pinned=True)
    assert not places(other) & places(again)
    cache.give(other)
    assert places(cache.take(4, 4096, pinned=True)) == places(again)  # there was room for both
    assert places(cache.take(1, 8192, pinned=True)) == places(other)


def test_what_is_kept_is_bounded(cache, monkeypatch):
    monkeypatch.setattr(buffers, "MAX_KEPT_BYTES", 10_000)
    cache.give(cache.take(4, 4096, pinned=True))
    assert cache.clear() == 8192
    assert cache.clear() == 0
    cache.give(cache.take(2, 4096, pinned=True))
    cache.give(cache.take(1, 8192, pinned=True))
    assert cache.clear() == 8192  # the one that was used last


def test_a_fork_has_no_slabs_of_its_parent(cache):
    taken = cache.take(2, 4096, pinned=True)
    cache.give(taken)
    child = os.fork()
    if child == 0:
        left = {id(buffer) for buffer in buffers._left_alone}
        os._exit(0 if cache._idle == [] and {id(slab) for slab in taken} <= left else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.clear() == 8192


def test_slabs_of_a_load_in_inference_mode_serve_a_save_out_of_it(ckpt, tmp_path, sim, device):
    """They were tensors of inference, which nothing may write to out of that mode: every later save from the device raised."""
    want = state()
    dcp_rs.save(want, ckpt)
    with torch.inference_mode():
        got = on(device, want)
        dcp_rs.load(got, ckpt)
    again = {name: tensor.clone() for name, tensor in got.items()}
    dcp_rs.save(again, tmp_path / "again")
    assert_state_equal(dcp_rs.open(tmp_path / "again").state_dict(), want)


def test_loads_of_other_sizes_leave_torchs_pinned_memory_alone(ckpt, sim, device):
    """G5: another slab size emptied torch's whole cache of pinned memory, which waits for the device."""
    want = state()
    index = saved(ckpt, want)
    got = on(device, want)
    mine = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
    place = mine.data_ptr()
    del mine
    busy = torch.Stream(device=device)
    with sim.held_up(busy):  # a load that waited for the whole device would not end
        held = sim.pinned_bytes
        for limit in (1 << 20, 256 << 10, 2 << 20, 256 << 10):
            fill(index, got, ReadOptions(max_inflight_bytes=limit))
            assert sim.pinned_bytes >= held
    assert_state_equal(host(got), want)
    assert torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True).data_ptr() == place


def test_pinned_memory_is_given_back(ckpt, sim, device):
    want = state()
    index = saved(ckpt, want)
    got = on(device, want)
    for limit in (1 << 20, 256 << 10):
        fill(index, got, ReadOptions(max_inflight_bytes=limit))
    assert sim.pinned_bytes > 0
    assert dcp_rs.release_pinned_memory() > 0
    assert sim.pinned_bytes == 0
    assert dcp_rs.release_pinned_memory() == 0
    fill(index, got, ReadOptions())
    assert_state_equal(host(got), want)


def test_events_are_used_again(ckpt, sim, device, monkeypatch):
    """G7: one was made for each slab."""
    made = []
    event = torch.Event
    monkeypatch.setattr(torch, "Event", lambda **options: made.append(options) or event(**options))
    want = {f"w{i}": torch.randn(64 << 10) for i in range(100)}
    index = saved(ckpt, want)
    got = on(device, want)
    fill(index, got, ReadOptions(max_inflight_bytes=1 << 20))
    assert_state_equal(host(got), want)
    assert len(made) <= buffers.SPARE_SLABS + 1
