"""Disks that fail on demand: every call of a save, one after the other, leaves a checkpoint that is whole."""

import errno

import pytest
import torch

import dcp_rs
from dcp_rs.testing.disk import FailingDisk, SmallDisk


def save(path, value, **options):
    dcp_rs.save({"w": torch.full((64, 64), float(value))}, path, no_dist=True, **options)


def held(path):
    with dcp_rs.open(path, verify=True) as checkpoint:
        return float(checkpoint["w"][0, 0])


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_every_call_fails_once(tmp_path, io):
    path = tmp_path / "ckpt"
    save(path, 0)
    failed = []
    for at in range(100):
        before = held(path)
        disk = FailingDisk(tmp_path, at=at, error=errno.ENOSPC)
        raised = None
        try:
            with disk:
                save(path, at + 1, io=io)
        except OSError as error:
            raised = error.errno
        if disk.failed is None:
            assert disk.calls <= at
            assert raised is None
            break
        failed.append(disk.failed)
        assert raised in (None, errno.ENOSPC)
        assert held(path) in ((before, at + 1) if raised else (at + 1,))
    else:
        pytest.fail("no save came to its end")
    assert {"create", "write", "sync", "rename", "sync folder"} <= set(failed)
    # After a loss of power there is the old index or the new one: its bytes are durable before its
    # name is.
    commit = failed.index("rename")
    assert failed[commit - 2 : commit + 2] == ["write", "sync", "rename", "sync folder"]


def test_other_folders_do_not_fail(tmp_path):
    with FailingDisk(tmp_path / "watched") as disk:
        save(tmp_path / "other", 1)
    assert (disk.calls, disk.failed) == (0, None)
    assert held(tmp_path / "other") == 1


def test_relative_paths_are_meant_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="Input/output"), FailingDisk("ckpt") as disk:
        save("ckpt", 1)
    assert disk.failed == "create folder"
    save("ckpt", 2)  # left: nothing fails any more
    assert held("ckpt") == 2


def test_a_small_disk_is_full(tmp_path):
    path = tmp_path / "ckpt"
    save(path, 1)
    with SmallDisk(4096), pytest.raises(OSError) as caught:  # noqa: PT011 - its number is looked at
        save(path, 2)
    assert caught.value.errno == errno.EFBIG
    assert held(path) == 1
    save(path, 3)
    assert held(path) == 3


def test_one_disk_at_a_time(tmp_path):
    """The one around was forgotten: its test went through whatever the program did."""
    outer = FailingDisk(tmp_path, at=100)
    with outer:
        with pytest.raises(RuntimeError, match="one at a time"), FailingDisk(tmp_path):
            pass
        save(tmp_path / "ckpt", 1)
    assert outer.calls > 3
    with pytest.raises(OSError, match="Input/output error"), FailingDisk(tmp_path):
        save(tmp_path / "ckpt", 2)
    with pytest.raises(ValueError, match="counted from 0"):
        FailingDisk(tmp_path, at=-1)
