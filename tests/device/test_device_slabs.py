"""Pinned slabs between loads."""

import torch

import dcp_rs
from dcp_rs.options import ReadOptions
from support import assert_state_equal
from support.simulated import host, on
from support.slabs import fill, saved, state

MIB = 1 << 20


def test_pinned_memory_is_used_again(ckpt, sim, device):
    want = state()
    index = saved(ckpt, want)
    got = on(device, want)
    fill(index, got)
    held = sim.pinned_bytes
    assert held > 0
    fill(index, got)
    assert sim.pinned_bytes == held


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
    sim.synchronize()  # a load does not wait for its last copies, which use some of it
    dcp_rs.release_pinned_memory()
    assert sim.pinned_bytes == 0
    fill(index, got, ReadOptions())
    assert_state_equal(host(got), want)
