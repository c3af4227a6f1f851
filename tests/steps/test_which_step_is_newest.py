"""A run in a folder that has steps of others: an older run, a roll back, torch, another program.

A new run in an old folder lost its steps as soon as the next was saved, and a restart resumed the
old run. A run of stock checkpoints began again at step 0 without a word.
"""

import errno
import os
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_rs import CheckpointManager
from dcp_rs.errors import CheckpointExistsError, CheckpointNotFoundError, UnsupportedError
from dcp_rs.steps import folder_store
from dcp_rs.steps.folder_store import FolderStepStore
from dcp_rs.steps.retention import keep_within
from dcp_rs.steps.step_store import Step
from support.numbered import bad_state, loaded, names_in, numbers


def state_of(step):
    return {"w": torch.full((1000,), float(step)), "at": {"step": step}}


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def fill(run, *steps):
    with CheckpointManager(run) as manager:
        for step in steps:
            manager.save(step, state_of(step))


def test_new_run_in_an_old_folder(run):
    fill(run, 1000, 1010)
    with CheckpointManager(run, keep_last=1) as manager:
        with pytest.warns(UserWarning, match=r"later steps, .* \(1000, 1010\)"):
            manager.save(10, state_of(10))
        manager.save(20, state_of(20))
        assert names_in(run) == ["step-20"]
        assert manager.latest_step() == 20


def test_fresh_process_goes_on_with_the_new_run(run):
    fill(run, 1000, 1010)
    with CheckpointManager(run) as manager, pytest.warns(UserWarning, match="count as newer"):
        manager.save(10, state_of(10))
    with CheckpointManager(run, keep_last=2) as manager:
        assert manager.latest_step() == 10
        assert [step.number for step in manager.steps()] == [1000, 1010, 10]
        assert loaded(manager) == 10
        manager.save(1000, state_of(1000))  # in place of that of the older run
        assert numbers(manager) == [10, 1000]
    assert loaded(CheckpointManager(run)) == 1000


def test_roll_back(run):
    fill(run, 10, 20, 30, 40)
    with CheckpointManager(run) as manager:
        assert loaded(manager, 20) == 20
        with pytest.warns(UserWarning, match=r"\(30, 40\): from now on step 30"):
            manager.save(30, {"w": torch.zeros(1000), "at": {"step": 30}})
        assert manager.latest_step() == 30
    state = state_of(0)
    assert CheckpointManager(run).load(state) == 30
    assert state["w"].eq(0).all()
    with CheckpointManager(run, keep_last=1) as manager:
        manager.load(state)
        manager.save(35, state_of(35))
        assert names_in(run) == ["step-30", "step-35"]  # it resumed from 30


@pytest.mark.filterwarnings("ignore:.*count as newer")
def test_roll_back_past_steps_of_torch(run):
    """They cannot be in a list of saves, so each restart resumed from them again."""
    for step in (10, 20, 30):
        dcp.save(state_of(step), checkpoint_id=run / f"step-{step}", no_dist=True)
    with CheckpointManager(run) as manager:
        assert loaded(manager, 20) == 20
        manager.save(21, state_of(21))
        assert manager.latest_step() == 21
    with CheckpointManager(run, keep_last=1) as manager:
        assert loaded(manager) == 21
        manager.save(22, state_of(22))
        assert numbers(manager) == [30, 10, 20, 21, 22]  # those of torch stay


@pytest.mark.filterwarnings("ignore:.*count as newer")
def test_roll_back_past_a_step_that_cannot_be_read_for_a_while(run, monkeypatch):
    """Its first save did not see the step, no later one looked, and a restart resumed from it."""
    fill(run, 10, 20, 30, 40)
    list_files = folder_store._files_in

    def fail_at_30(folder):
        if folder.name == "step-30":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return list_files(folder)

    with CheckpointManager(run) as manager:
        assert loaded(manager, 20) == 20
        monkeypatch.setattr(folder_store, "_WAITS", ())
        monkeypatch.setattr(folder_store, "_files_in", fail_at_30)
        manager.save(21, state_of(21))
        monkeypatch.undo()
        manager.save(22, state_of(22))
    assert loaded(CheckpointManager(run)) == 22


@pytest.mark.filterwarnings("ignore:.*count as newer")
@pytest.mark.parametrize("then", ["fail", "delete", "replace"])
def test_roll_back_is_for_good_from_its_first_save_on(run, then):
    """The steps after it counted as newest again once its first step was gone or saved again."""
    fill(run, 10, 20, 30, 40)
    with CheckpointManager(run) as manager:
        assert loaded(manager, 20) == 20
        if then == "fail":
            with pytest.raises(UnsupportedError, match="meta"):
                manager.save(21, bad_state(21))
        else:
            manager.save(21, state_of(21))
    with CheckpointManager(run, keep_last=2) as manager:
        assert loaded(manager) == (20 if then == "fail" else 21)
        if then == "delete":
            manager.delete(21)
        elif then == "replace":
            manager.save(21, state_of(21), force=True)
        assert manager.latest_step() == (21 if then == "replace" else 20)
        manager.save(22, state_of(22))
        manager.save(23, state_of(23))
        stays = {"fail": [20], "delete": [], "replace": [21]}[then]
        assert numbers(manager) == [*stays, 22, 23]


def test_evaluation_by_the_job_itself_is_no_roll_back(run):
    """It made all steps of earlier processes count as old, and the policies removed them first."""
    fill(run, 10, 20, 30)
    with CheckpointManager(run, save_every=10, keep_last=3) as manager:
        assert loaded(manager) == 30
        manager.save(40, state_of(40))
        with warnings.catch_warnings(action="error"):
            assert loaded(manager, 20, take_over=False) == manager.resumed == 20
        assert not manager.should_save(40)  # it was just saved
        manager.save(50, state_of(50))
        assert numbers(manager) == [30, 40, 50]


def test_evaluation_of_an_old_step_is_no_roll_back(run):
    fill(run, 10, 20)
    with CheckpointManager(run) as manager:
        assert loaded(manager, 10, take_over=False) == 10
    assert CheckpointManager(run).latest_step() == 20
    with CheckpointManager(run) as manager:
        assert loaded(manager) == 20
        with pytest.raises(CheckpointExistsError):
            manager.save(20, state_of(20))


def test_steps_of_torch_load_and_stay(run):
    for step in (100, 200):
        dcp.save(state_of(step), checkpoint_id=run / f"step-{step}", no_dist=True)
    with CheckpointManager(run, keep_last=1, reuse=True) as manager:
        assert manager.latest_step() == 200
        assert loaded(manager) == 200
        assert loaded(manager, 100, take_over=False) == 100
        assert loaded(manager) == 200
        for step in (300, 400):
            manager.save(step, state_of(step))
        with pytest.raises(CheckpointExistsError, match="a checkpoint of torch"):
            manager.save(100, state_of(100), force=True)
        assert numbers(manager) == [100, 200, 400]
        assert loaded(manager) == 400


def test_unfinished_step_of_torch_is_passed_over(run):
    dcp.save(state_of(100), checkpoint_id=run / "step-100", no_dist=True)
    dcp.save(state_of(200), checkpoint_id=run / "step-200", no_dist=True)
    (run / "step-200" / ".metadata").unlink()
    with CheckpointManager(run) as manager, pytest.warns(UserWarning, match="not resumed from"):
        assert loaded(manager) == 100


def test_root_that_is_a_checkpoint(run):
    fill(run, 10)
    dcp.save(state_of(1), checkpoint_id=run / "stock", no_dist=True)
    for root in (run / "step-10", run / "stock"):
        with pytest.raises(CheckpointNotFoundError, match="is a checkpoint itself"):
            loaded(CheckpointManager(root))


def test_root_that_is_a_dangling_link(tmp_path):
    (tmp_path / "run").symlink_to("nowhere")
    with pytest.raises(CheckpointNotFoundError, match="is a dangling link"):
        loaded(CheckpointManager(tmp_path / "run"))


def step_at(number, saved):
    return Step(number=number, path=None, save_id=f"{number:032x}", saved=saved, nbytes=0)


def test_step_of_a_wrong_clock_does_not_stay_for_ever():
    now, hour, year = 1_000_000.0, 3600.0, 365 * 86400.0
    steps = [step_at(1, now + year), step_at(2, now)]
    assert keep_within(steps, hour, now) == {1, 2}
    steps.append(step_at(3, now + 2 * hour))
    assert keep_within(steps, hour, now + 2 * hour) == {3}
    steps.append(step_at(4, 0.0))  # and one of a clock that was reset: all others are as old
    assert keep_within(steps, hour, now + 2 * hour) == {1, 2, 3, 4}


def test_stuck_file_is_told_once(run, monkeypatch, recwarn):
    from dcp_rs.steps import folder_store

    with CheckpointManager(run, keep_last=1) as manager:
        manager.save(1, state_of(1))

        def rmtree(path, *, ignore_errors=False):
            if not ignore_errors:
                raise OSError(16, "Device or resource busy", str(path))

        monkeypatch.setattr(folder_store.shutil, "rmtree", rmtree)
        manager.save(2, state_of(2))
        told = [w for w in recwarn if "is still there" in str(w.message)]
        assert len(told) == 1
        manager.wait()
        assert len([w for w in recwarn if "step-1." in str(w.message)]) == 1


@pytest.mark.parametrize("policies", [{}, {"keep_last": 3}, {"keep_every": 1}])
def test_save_looks_at_few_steps(run, monkeypatch, policies):
    """Each save looked at every step."""
    fill(run, *range(1, 31))
    with CheckpointManager(run, **policies) as manager:
        loaded(manager)
        manager.save(31, state_of(31))
        listed = []
        names, look = FolderStepStore.names, FolderStepStore._list
        monkeypatch.setattr(
            FolderStepStore, "names", lambda root: listed.append("root") or names(root)
        )
        monkeypatch.setattr(
            FolderStepStore,
            "_list",
            lambda root, folders: listed.extend(p.name for p in folders) or look(root, folders),
        )
        manager.save(32, state_of(32))
    assert listed.count("root") == 1
    assert len(listed) <= 10


def test_fsync_of_notes_is_that_of_the_save(run, monkeypatch):
    synced = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, synced.append)
    with CheckpointManager(run, keep_last=1, fsync=False) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
        assert numbers(manager) == [2]
    assert synced == []
