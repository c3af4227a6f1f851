"""Two clients of one folder. One remembers for a while what a name led to, as network clients do.

The job that had been replaced read the note of the run under a name that its client remembered, and
went on committing: 3 of 3 on GlusterFS.
"""

import errno
import threading
import time
from contextlib import contextmanager

import pytest
import torch

import dcp_rs
from dcp_rs import CheckpointManager, _core
from dcp_rs.errors import CorruptDataError, RunTakenOverError
from filesystems.mounts import bindfs, mounted
from support.numbered import loaded, numbers


def state_of(step):
    return {"w": torch.full((1000,), float(step)), "at": {"step": step}}


@pytest.fixture
def clients(tmp_path):
    """A folder, and the same folder by a client that remembers names for ten minutes."""
    here = tmp_path / "here"
    with mounted(here, tmp_path / "there", stale_names=600) as there:
        yield here, there


@pytest.fixture(params=["names", "attributes"])
def paths(request, tmp_path):
    here = tmp_path / "here"
    if request.param == "names":
        with mounted(here, tmp_path / "there", stale_names=600) as there:
            yield here, there.path
    else:
        options = ["--enable-lock-forwarding", "-o", "attr_timeout=600,entry_timeout=600"]
        with (
            bindfs(here, tmp_path / "a", *options) as one,
            bindfs(here, tmp_path / "b", *options) as two,
        ):
            yield one, two


def test_replaced_job_commits_nothing(paths):
    here, there = paths
    old = CheckpointManager(there / "run")
    assert loaded(old) is None
    old.save(1, state_of(1))
    new = CheckpointManager(here / "run")
    assert loaded(new) == 1
    with pytest.raises(RunTakenOverError, match="was taken over by process"):
        old.save(2, state_of(2))
    new.save(2, state_of(2))
    assert loaded(new) == 2
    old.close()
    new.close()


def test_step_that_a_replaced_job_committed_is_replaced(tmp_path):
    """Without locks between the machines, the old job's commit cannot be stopped."""
    run = tmp_path / "run"
    old, new = CheckpointManager(run), CheckpointManager(run)
    old.save(0, state_of(0))
    loaded(new)
    old._store.take_over = old._store.check_run = lambda *_: None
    old._store._lock = _NoLock
    time.sleep(0.01)
    old.save(1, {"w": torch.zeros(1000), "at": {"step": 0}})
    new.save(1, state_of(1))
    assert loaded(new) == 1


class _NoLock:
    def read(self):
        return b""


def test_failed_save_of_a_replaced_job_says_why(tmp_path, monkeypatch):
    """The new job had swept what the old one was writing: the old one got FileNotFoundError."""
    run = tmp_path / "run"
    with CheckpointManager(run) as old, CheckpointManager(run) as new:
        loaded(old)

        def save(*_, **__):
            loaded(new)
            raise FileNotFoundError(errno.ENOENT, "No such file", str(run))

        monkeypatch.setattr("dcp_rs.steps.manager.api.save", save)
        with pytest.raises(RunTakenOverError):
            old.save(1, state_of(1))


def test_lock_holds_a_note(tmp_path):
    lock = _core.FolderLock(str(tmp_path))
    assert lock.read() == b""
    lock.write(b"one", True)
    assert lock.read() == b"one"
    del lock
    assert _core.FolderLock(str(tmp_path)).read() == b"one"


def test_checkpoint_that_another_machine_replaced_is_read_anew(clients):
    here, there = clients
    dcp_rs.save(state_of(1), here / "ckpt", no_dist=True)
    state = state_of(0)
    dcp_rs.load(state, there.path / "ckpt", no_dist=True)
    assert state["at"] == {"step": 1}
    dcp_rs.save(state_of(2), here / "ckpt", no_dist=True)
    # The client still leads to the old index, whose data files are gone.
    threading.Timer(1.0, lambda: there.set(stale_names=0)).start()
    dcp_rs.load(state, there.path / "ckpt", no_dist=True)
    assert state["at"] == {"step": 2}


def test_missing_file_of_another_rank_is_explained(tmp_path):
    """Two machines with a local disk each."""
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state_of(1))

        @contextmanager
        def lose_data():
            for data in manager.path(2).glob("g*.safetensors"):
                data.unlink()
            yield

        manager._store.holding = lose_data
        with pytest.raises(CorruptDataError, match=r"rank 0 wrote it.*do all machines share it"):
            manager.save(2, state_of(2))
        assert numbers(manager) == [1]
