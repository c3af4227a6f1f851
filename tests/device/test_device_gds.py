"""``io="gds"`` to the simulated device, whose driver reads files straight to its memory, past all streams."""

import pytest
import torch

import dcp_rs
from dcp_rs.errors import UnsupportedError
from dcp_rs.options import ReadOptions
from dcp_rs.transfer import gds, load
from dcp_rs.transfer.target import Target
from support import assert_state_equal
from support.simulated import host, on
from support.slabs import fill, saved, state

GDS = ReadOptions(io="gds")


@pytest.fixture
def driver(device, monkeypatch):
    """Set by tests: refuse to open, refuse to read, bring fewer bytes."""
    file = torch.get_device_module(device).gds.GdsFile
    monkeypatch.setattr(file, "reads", [])
    for name in ("refuse_open", "refuse_read", "short"):
        monkeypatch.setattr(file, name, getattr(file, name))
    return file


def test_files_are_read_to_the_device(ckpt, sim, device, driver):
    want = state() | {"large": torch.randn(5000, 1000), "scalar": torch.tensor(1.5), "c": torch.randn(3)}
    index = saved(ckpt, want)
    got = on(device, want)
    sim.delay = 2000
    fill(index, got, GDS)
    sim.delay = 0
    assert_state_equal(host(got), want)
    total = sum(tensor.nbytes for tensor in want.values())
    assert total * 0.99 <= sum(length for _, length in driver.reads) <= total * 1.05
    assert all(offset % 4096 == 0 for offset, _ in driver.reads)
    assert max(length for _, length in driver.reads) <= gds.READ_BYTES  # what others wait for
    assert len(driver.reads) < 8


def test_the_scratch_memory_is_read_to_again_when_copies_are_done(ckpt, sim, device, driver, monkeypatch):
    monkeypatch.setattr(gds, "SCRATCH_BYTES", 1 << 20)
    want = {f"w{i}": torch.randn(100_000) for i in range(20)}
    index = saved(ckpt, want)
    got = on(device, want)
    sim.delay = 5000
    fill(index, got, GDS)
    sim.delay = 0
    assert_state_equal(host(got), want)
    assert len(driver.reads) >= 8


def test_casts_strides_and_slices(ckpt, sim, device, driver, monkeypatch):
    monkeypatch.setattr(gds, "SCRATCH_BYTES", 1 << 20)
    want = {"a": torch.randn(900, 700), "b": torch.randn(500, 300)}
    index = saved(ckpt, want)
    double = torch.empty(900, 700, dtype=torch.float64, device=device)
    across, column = torch.empty(700, 900, device=device).t(), torch.empty(500, 20, device=device)
    sim.delay = 1000
    load.fill(
        index,
        [
            Target(0, [0, 0], double, "a", torch.float32),
            Target(0, [0, 0], across, "a", torch.float32),
            Target(1, [0, 40], column, "b", torch.float32),
        ],
        GDS,
    )
    assert driver.reads
    assert torch.equal(double.cpu(), want["a"].double())
    assert torch.equal(across.cpu(), want["a"])
    assert torch.equal(column.cpu(), want["b"][:, 40:60])


def test_a_stream_whose_consumer_changes_its_own(ckpt, sim, device, driver):
    """W9: tensors that were read together were ordered for the stream that took the first."""
    want = {f"w{i:02}": torch.randn(3000, 10) for i in range(40)}
    dcp_rs.save(want, ckpt)
    streams = [torch.Stream(device=device) for _ in range(3)]
    copies = {}
    sim.delay = 1000
    with dcp_rs.open(ckpt, device=device, io="gds", max_inflight_bytes=1 << 20) as source:
        running = source.stream()
        for turn in range(len(want)):
            with streams[turn % 3]:
                name, tensor = next(running)
                copies[name] = tensor.clone()
                del tensor
    sim.delay = 0
    sim.synchronize()
    assert_state_equal(host(copies), want)
    assert driver.reads


def test_it_says_why_it_does_not_work(ckpt, device, driver):
    want = state()
    index = saved(ckpt, want)
    got = on(device, want)
    driver.refuse_read = True
    with pytest.raises(UnsupportedError, match=r"cuFileRead.*io='auto'"):
        fill(index, got, GDS)
    driver.refuse_open = True
    with pytest.raises(UnsupportedError, match="cuFileHandleRegister"):
        fill(index, got, GDS)


@pytest.mark.parametrize("missing", [1, 100, 4096])
def test_a_short_read_is_seen(ckpt, device, driver, missing):
    """G8: what had been in memory before passed for what the file holds."""
    want = {"w": torch.randn(100_000), "zeros": torch.zeros(1000)}
    index = saved(ckpt, want)
    got = on(device, want)
    driver.short = missing
    with pytest.raises(UnsupportedError, match=r"fewer bytes.*io='auto'"):
        fill(index, got, GDS)


def test_data_that_looks_like_the_mark_of_a_short_read(ckpt, device, driver):
    want = {
        f"{mark}.{at}.{length}": torch.full((length,), mark, dtype=torch.uint8)
        for at in range(3)
        for mark in gds._MARKS
        for length in (1, 4096, 100_000)
    }
    index = saved(ckpt, want)
    got = on(device, want)
    fill(index, got, GDS)
    assert_state_equal(host(got), want)
    assert driver.reads


def test_without_a_driver(ckpt, sim, device, monkeypatch):
    want = state()
    index = saved(ckpt, want)
    got = on(device, want)
    monkeypatch.delattr(torch.get_device_module(device).gds, "GdsFile")
    with pytest.raises(UnsupportedError, match=r"torch\.sim\.gds"):
        fill(index, got, GDS)
    monkeypatch.delattr(torch.get_device_module(device), "gds")
    sim.delay = 500
    fill(index, got, GDS)  # as ever
    assert_state_equal(host(got), want)
