"""A mount that fails or refuses calls."""

import errno
import os
import re

import pytest
import torch

import dcp_rs
from dcp_rs import CheckpointManager
from dcp_rs.checkpoint import open as opened
from filesystems.mounts import mounted
from support.numbered import loaded, numbers


def state_of(step):
    return {"w": torch.full((1000,), float(step)), "at": {"step": step}}


@pytest.mark.parametrize("name", ["ENOTCONN", "ESTALE", "EIO"])
def test_outage_is_told_as_what_it_is(faulty, name):
    """It was told as `CheckpointExistsError`, which loops take for "saved already"."""
    path = faulty.path / "deep" / "ckpt"
    dcp_rs.save(state_of(1), path, no_dist=True)
    manager = CheckpointManager(faulty.path / "run")
    faulty.set(fail={"errno": name, "at": 1})
    for call in (
        lambda: dcp_rs.save(state_of(2), path, no_dist=True),
        lambda: dcp_rs.load(state_of(0), path, no_dist=True),
        lambda: manager.save(1, state_of(1)),
    ):
        with pytest.raises(OSError, match=re.escape(os.strerror(getattr(errno, name)))) as raised:
            call()
        assert raised.value.errno == getattr(errno, name)
    faulty.set()
    state = state_of(0)
    dcp_rs.load(state, path, no_dist=True)
    assert state["at"] == {"step": 1}


def test_file_system_that_cannot_set_a_length(tmp_path):
    with (
        mounted(tmp_path / "a", tmp_path / "b", refuse={"truncate": "EOPNOTSUPP"}) as mount,
        CheckpointManager(mount.path / "run", keep_last=1) as manager,
    ):
        for step in (1, 2):
            manager.save(step, state_of(step))
        assert loaded(manager, verify=True) == 2
        assert numbers(manager) == [2]


@pytest.mark.parametrize("refuse", [{}, {"truncate": "EOPNOTSUPP"}])
def test_file_system_that_takes_writes_in_order_only(tmp_path, refuse):
    """A save failed with `OSError`, since the header comes last."""
    with mounted(tmp_path / "a", tmp_path / "b", sequential=True, refuse=refuse) as mount:
        state = {f"w{size}": torch.arange(size) for size in (1, 1000, 3_000_000)}
        found = {name: torch.zeros_like(value) for name, value in state.items()}
        dcp_rs.save(state, mount.path / "ckpt", no_dist=True)
        assert dcp_rs.verify(mount.path / "ckpt").ok
        dcp_rs.load(found, mount.path / "ckpt", no_dist=True)
        assert all(torch.equal(found[name], value) for name, value in state.items())
        dcp_rs.convert(mount.path / "ckpt", mount.path / "model.safetensors")
        with dcp_rs.open(mount.path / "model.safetensors") as converted:
            assert torch.equal(converted["w1000"], torch.arange(1000))
        with CheckpointManager(mount.path / "run", keep_last=1) as manager:
            for step in (1, 2):
                manager.save(step, state_of(step))
            assert loaded(manager, verify=True) == 2
            assert numbers(manager) == [2]


def test_file_system_that_maps_nothing(tmp_path):
    with mounted(tmp_path / "a", tmp_path / "b", direct_io=True) as mount:
        dcp_rs.save({"w": torch.arange(100_000)}, mount.path / "ckpt", no_dist=True)
        for io in ("auto", "buffered", "mmap", "direct"):
            state = {"w": torch.zeros(100_000, dtype=torch.int64)}
            dcp_rs.load(state, mount.path / "ckpt", no_dist=True, io=io)
            assert torch.equal(state["w"], torch.arange(100_000))
            with dcp_rs.open(mount.path / "ckpt", io=io) as ckpt:
                assert torch.equal(ckpt["w"], torch.arange(100_000))


class _Refusing:
    """An index whose files cannot be mapped."""

    def __init__(self, number):
        self._number = number

    def map_file(self, _):
        raise OSError(self._number, os.strerror(self._number))


def test_file_that_cannot_be_mapped_is_read(tmp_path, monkeypatch):
    dcp_rs.save({"w": torch.arange(10)}, tmp_path / "ckpt", no_dist=True)
    for number in (errno.ENODEV, errno.EOPNOTSUPP):
        assert opened._map_file(_Refusing(number), 0) is None
    with pytest.raises(OSError, match="Input/output"):
        opened._map_file(_Refusing(errno.EIO), 0)
    monkeypatch.setattr(opened, "_map_file", lambda *_: None)
    with dcp_rs.open(tmp_path / "ckpt") as ckpt:
        assert torch.equal(ckpt["w"], torch.arange(10))
