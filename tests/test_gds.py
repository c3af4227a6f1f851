"""``io="gds"``, with a made-up driver over host memory."""

import os
from pathlib import Path

import pytest
import torch

import dcp_rs
from dcp_rs import fill, gds
from dcp_rs.errors import UnsupportedError
from dcp_rs.options import ReadOptions
from support import assert_state_equal
from support.fakes import FakeAccelerator
from support.slabs import install, load, saved, state

GDS = ReadOptions(io="gds")


class FakeDriver:
    """In place of ``torch.cuda.gds``."""

    def __init__(self) -> None:
        self.reads = []
        self.accelerator = None
        self.refuse_open = False
        self.refuse_read = False
        driver = self

        class GdsFile:
            def __init__(self, path: str, flags: int) -> None:
                if driver.refuse_open:
                    raise RuntimeError("cuFileHandleRegister failed: not supported")
                assert flags == os.O_RDONLY
                self._path = path

            def load_storage(self, storage: torch.UntypedStorage, offset: int = 0) -> None:
                if driver.refuse_read:
                    raise RuntimeError("cuFileRead failed")
                driver.reads.append((offset, storage.nbytes()))
                with Path(self._path).open("rb") as file:
                    file.seek(offset)
                    data = bytearray(file.read(storage.nbytes()))
                assert len(data) == storage.nbytes()
                torch.empty(0, dtype=torch.uint8).set_(storage).copy_(torch.frombuffer(data, dtype=torch.uint8))

        self.GdsFile = GdsFile


@pytest.fixture
def driver(monkeypatch):
    driver = FakeDriver()
    driver.accelerator = install(monkeypatch, FakeAccelerator())
    monkeypatch.setattr(gds, "_gds", lambda: driver)
    monkeypatch.setattr(gds, "_reaches", lambda _: True)
    monkeypatch.setattr(gds, "_synchronize", lambda _: None)
    return driver


def test_files_are_read_to_the_device(ckpt, driver):
    want = state() | {"large": torch.randn(5000, 1000), "scalar": torch.tensor(1.5), "c": torch.randn(3)}
    index = saved(ckpt, want)
    got = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    load(index, got, GDS)
    driver.accelerator.synchronize()
    assert_state_equal(got, want)
    total = sum(tensor.nbytes for tensor in want.values())
    assert total * 0.99 <= sum(length for _, length in driver.reads) <= total * 1.05
    assert all(offset % 4096 == 0 for offset, _ in driver.reads)
    assert len(driver.reads) < 6


def test_casts_strides_and_slices(ckpt, driver, monkeypatch):
    monkeypatch.setattr(gds, "SCRATCH_BYTES", 1 << 20)
    want = {"a": torch.randn(900, 700), "b": torch.randn(500, 300)}
    index = saved(ckpt, want)
    double, across = torch.zeros(900, 700, dtype=torch.float64), torch.zeros(700, 900).t()
    column = torch.zeros(500, 20)
    fill.fill_regions(
        index,
        [
            fill.Target(0, [0, 0], double, "a", torch.float32),
            fill.Target(0, [0, 0], across, "a", torch.float32),
            fill.Target(1, [0, 40], column, "b", torch.float32),
        ],
        GDS,
    )
    assert driver.reads
    driver.accelerator.synchronize()  # what did not lie in one run came the other way
    assert torch.equal(double, want["a"].double())
    assert torch.equal(across, want["a"])
    assert torch.equal(column, want["b"][:, 40:60])


def test_it_says_why_it_does_not_work(ckpt, driver):
    want = state()
    index = saved(ckpt, want)
    got = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    driver.refuse_read = True
    with pytest.raises(UnsupportedError, match=r"cuFileRead.*io='auto'"):
        load(index, got, GDS)
    driver.refuse_open = True
    with pytest.raises(UnsupportedError, match="cuFileHandleRegister"):
        load(index, got, GDS)


def test_without_a_driver(monkeypatch, ckpt):
    install(monkeypatch, FakeAccelerator())
    monkeypatch.setattr(gds, "_reaches", lambda _: True)
    monkeypatch.delattr(torch.cuda, "gds")
    with pytest.raises(UnsupportedError, match=r"torch\.cuda\.gds"):
        load(saved(ckpt, state()), {"layer.0": torch.zeros(50, 32)}, GDS)


def test_host_memory_is_read_as_ever(ckpt):
    want = state()
    dcp_rs.save(want, ckpt)
    got = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in want.items()}
    dcp_rs.load(got, ckpt, io="gds", planner=dcp_rs.RsLoadPlanner(dtype_policy="cast"))
    assert_state_equal(got, {name: tensor.double() for name, tensor in want.items()})
    with dcp_rs.open(ckpt, io="gds") as source:
        assert_state_equal(dict(source.stream()), want)


def test_it_cannot_verify():
    with pytest.raises(ValueError, match="verify"):
        ReadOptions(io="gds", verify=True)
