"""A mount that renames a deleted open file: NFS, sshfs, bindfs, every libfuse file system.

A process that deleted a folder with its own lock in it failed: the lock's file came back under
another name, and the folder was not empty. 15 of 30 jobs that restarted after a kill died of it.
"""

import os

import pytest
import torch

import dcp_rs
from dcp_rs import CheckpointManager
from dcp_rs.steps.folder_store import FolderStepStore
from support.numbered import loaded, names_in, numbers


def state_of(step):
    return {"w": torch.full((1000,), float(step)), "at": {"step": step}}


def leave_unfinished(run, step):
    """Leave what a kill leaves in the middle of a save."""
    store = FolderStepStore(run)
    store.take_over()
    store.begin(step, f"{step:032x}", {})
    dcp_rs.save(state_of(step), store.folder(step), no_dist=True)
    (store.folder(step) / "index.dcprs").unlink()
    data = next(store.folder(step).glob("g*.safetensors"))
    os.truncate(data, 100)


def test_killed_save_is_replaced(renaming):
    run = renaming / "run"
    with CheckpointManager(run) as manager:
        manager.save(5, state_of(5))
    leave_unfinished(run, 10)
    with CheckpointManager(run) as manager:
        with pytest.warns(UserWarning, match="did not finish"):
            assert loaded(manager) == 5
        manager.save(10, state_of(10))
    assert names_in(run) == ["step-10", "step-5"]


def test_killed_save_is_swept(renaming):
    run = renaming / "run"
    leave_unfinished(run, 10)
    with CheckpointManager(run) as manager:
        manager.save(20, state_of(20))
    assert names_in(run) == ["step-20"]


def test_step_with_an_open_file_is_removed_later(renaming):
    """A file that another process has open keeps its folder, and no save fails for that."""
    run = renaming / "run"
    with CheckpointManager(run, keep_last=1) as manager:
        manager.save(1, state_of(1))
        with next(manager.path(1).glob("g*.safetensors")).open("rb"):
            with pytest.warns(UserWarning, match="is still there"):
                manager.save(2, state_of(2))
            assert numbers(manager) == [2]
            manager.save(3, state_of(3))
        manager.save(4, state_of(4))
    assert names_in(run) == ["step-4"]


def test_step_with_an_open_file_is_deleted_and_saved_again(renaming):
    run = renaming / "run"
    with CheckpointManager(run) as manager:
        manager.save(1, state_of(1))
        with next(manager.path(1).glob("g*.safetensors")).open("rb"):
            with pytest.warns(UserWarning, match="is still there"):
                manager.delete(1)
            manager.save(1, state_of(1))
            assert loaded(manager) == 1


@pytest.mark.parametrize("to", ["safetensors", "dcp", "dcp-rs"])
def test_conversion_leaves_nothing_beside_its_output(renaming, to):
    dcp_rs.save(state_of(1), renaming / "ckpt", no_dist=True)
    for overwrite in (False, True):
        dcp_rs.convert(
            renaming / "ckpt", renaming / "out", to=to, include=["w"], overwrite=overwrite
        )
        assert sorted(os.listdir(renaming)) == ["ckpt", "out"]
