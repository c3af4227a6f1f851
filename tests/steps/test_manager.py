"""The checkpoint manager on one rank."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

import dcp_rs
import programs
from dcp_rs import CheckpointManager
from dcp_rs.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DcpRsError,
    PlanError,
    RunTakenOverError,
    SaveInProgressError,
    UnsupportedError,
)
from dcp_rs.steps import folder_store
from dcp_rs.steps.folder_store import FolderStepStore
from dcp_rs.steps.preemption import Preemption
from dcp_rs.steps.retention import Policies, prune
from dcp_rs.transfer.buffers import shared_blocks
from support.numbered import bad_state, killed, loaded, names_in, numbers, state_of
from support.threads import saves_held_up


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def data_file(manager, step):
    return next(manager.path(step).glob("g*.safetensors"))


def flip(manager, step):
    with data_file(manager, step).open("r+b") as file:
        file.seek(-10, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


# --- saves and loads


@pytest.mark.parametrize("step", [-1, 1.0, "3", True, None, np.float32(1), torch.tensor(1.0)])
def test_wrong_step_number_is_refused(run, step):
    with CheckpointManager(run, save_every=1) as manager:
        calls = [
            lambda: manager.save(step, state_of(0)),
            lambda: manager.async_save(step, state_of(0)).result(),
            lambda: manager.should_save(step),
            lambda: manager.path(step),
            lambda: manager.delete(step),
            lambda: manager.annotate(step, {"loss": 1.0}),
        ]
        if step is not None:
            calls += [lambda: manager.load(state_of(0), step)]
        for call in calls:
            with pytest.raises(ValueError, match="must be an integer from 0 on"):
                call()
    assert not run.exists()


def test_integers_of_numpy_and_torch_are_step_numbers(run):
    """They were refused, or ended in an error of json."""
    for one in (np.int64(2), np.uint8(2), torch.tensor(2)):
        with CheckpointManager(run, save_every=np.int64(2), keep_last=np.int32(1)) as manager:
            assert manager.should_save(one) is True
            manager.save(one, state_of(2))
            assert manager.should_save(one) is False
            assert manager.path(one) == run / "step-2"
            manager.annotate(one, {"loss": 1.0})
            assert loaded(manager, one) == 2
            assert type(manager.resumed) is int
            manager.async_save(one, state_of(2), force=True).result()
            manager.delete(one)
            assert numbers(manager) == []


@pytest.mark.parametrize(
    "loss", ["1.0", None, [1], 10**400], ids=["text", "none", "list", "too large"]
)
def test_wrong_metric_is_refused(run, loss):
    with CheckpointManager(run) as manager, pytest.raises(ValueError, match=r"metrics\['loss'\]"):
        manager.save(1, state_of(1), metrics={"loss": loss})
    assert not run.exists()


def test_tensors_are_metrics_and_nan_is_never_best(run):
    with CheckpointManager(run, metric="loss", keep_last=1) as manager:
        assert manager.best_step() is None
        for step, loss in ((1, torch.tensor(2.0)), (2, float("nan")), (3, torch.tensor(3))):
            manager.save(step, state_of(step), metrics={"loss": loss})
        assert manager.best_step() == 1
        assert numbers(manager) == [1, 3]
    with CheckpointManager(run) as manager, pytest.raises(ValueError, match="needs metric="):
        manager.best_step()


@pytest.mark.parametrize(
    "wrong",
    [
        {"save_every": 0},
        {"keep_last": -1},
        {"keep_best": 1},
        {"io": "fast"},
        {"preemption": signal.SIGKILL},
        {"preemption": "SIGTERM"},
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_once(run, wrong):
    with pytest.raises(ValueError, match=r"save_every|keep_last|metric|io|SIGKILL|SIGTERM"):
        CheckpointManager(run, **wrong)


# --- what is resumed from


def test_a_run_that_never_saved_begins_anew_beside_what_a_kill_left(run):
    with CheckpointManager(run) as manager:
        killed(manager, 5)
        with pytest.warns(UserWarning, match="not resumed from step-5: its save did not finish"):
            assert loaded(manager) is None
        assert [(passed.number, passed.kind) for passed in manager.passed_over] == [
            (5, "unfinished")
        ]
        manager.save(5, state_of(5))  # in its place
        assert loaded(manager) == 5
        assert len(list(manager.path(5).glob("g*"))) == 1


def test_a_run_does_not_begin_anew_beside_checkpoints_that_it_cannot_take(run):
    with CheckpointManager(run) as manager:
        manager.path(3).mkdir(parents=True)
        torch.save(state_of(3), manager.path(3) / "model.pt")
        with pytest.raises(UnsupportedError, match=r"step-3: .*holds model.pt"):
            loaded(manager)
        with pytest.raises(CheckpointNotFoundError, match=r"no step 3 .*model.pt.*it has none"):
            loaded(manager, 3)


@pytest.mark.parametrize("older", [[], [5]])
def test_newer_checkpoint_under_another_form_of_the_name_is_a_warning(run, older):
    """With ``step-0010`` alone the job began at 0, and beside step 5 it went on from 5: in silence."""
    with CheckpointManager(run) as manager:
        for step in older:
            manager.save(step, state_of(step))
        dcp_rs.save(state_of(10), run / "step-0010", no_dist=True)
        with pytest.warns(UserWarning, match=r"not looked at: 'step-0010'.*step_name="):
            assert loaded(manager) == (5 if older else None)
        (run / "step-0010").rename(run / "step-10")
        assert loaded(manager) == 10


def test_a_state_dict_that_does_not_fit_is_no_damage(run):
    with CheckpointManager(run) as manager:
        manager.save(1, state_of(1))
        manager.save(2, {"w": torch.ones(3)})
        with pytest.raises(PlanError):
            loaded(manager)


@pytest.mark.parametrize("how", ["root", "nodes"])
def test_error_of_a_load_names_the_step(tmp_path, how):
    """The caller may not know which one the manager chose."""
    options = {"local": tmp_path / "node"} if how == "nodes" else {}
    with CheckpointManager(tmp_path / "run", no_dist=True, **options) as manager:
        manager.save(3, {"w": torch.zeros(2)})
        with pytest.raises(PlanError, match="no 'v'") as caught:
            manager.load({"v": torch.zeros(2)})
    folder = tmp_path / ("run" if how == "root" else "node") / "step-3"
    assert caught.value.path == str(folder)
    assert f"This is step 3: {folder}" in caught.value.__notes__


# --- names and files of the user's


def test_files_of_the_user_are_in_a_step_and_go_with_it(run, tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    with CheckpointManager(run, keep_last=1, fsync=False) as manager:
        manager.save(
            1, state_of(1), extra_files={"tokenizer.json": tokenizer, "config.json": b"[1]"}
        )
        assert (manager.path(1) / "tokenizer.json").read_text() == "{}"
        assert (manager.path(1) / "config.json").read_bytes() == b"[1]"
        manager.async_save(2, state_of(2), extra_files={"config.json": b"[2]"}).result(60)
        assert (manager.path(2) / "config.json").read_bytes() == b"[2]"
        assert names_in(run) == ["step-2"]
        assert loaded(manager) == 2


@pytest.mark.parametrize(
    "name", ["", "a/b", "../x", ".hidden", "index.dcprs", f"saving-{1:032x}.json"]
)
def test_names_of_files_that_cannot_be_are_refused(run, name):
    with CheckpointManager(run) as manager:
        with pytest.raises(ValueError, match="extra_files has"):
            manager.save(1, state_of(1), extra_files={name: b""})
        with pytest.raises(FileNotFoundError):
            manager.save(1, state_of(1), extra_files={"x": run / "nowhere"})
        assert not manager.path(1).exists()


def test_killed_save_with_extra_files_is_replaced(run):
    """They are no checkpoint of others."""
    with CheckpointManager(run, fsync=False) as manager:
        manager.save(1, state_of(1), extra_files={"config.json": b"[1]"})
        (manager.path(1) / "index.dcprs").unlink()
        note = next(manager.path(1).glob("saved-*.json"))
        note.rename(note.with_name(note.name.replace("saved", "saving")))
        (manager.path(1) / f"config.json.{1:016x}.tmp").touch()
        with pytest.warns(UserWarning, match="its save did not finish"):
            assert loaded(manager) is None
        manager.save(1, state_of(1))
        assert loaded(manager) == 1
        assert not (manager.path(1) / "config.json").exists()


def test_steps_have_the_name_that_is_asked_for(run):
    (run / "step-7").mkdir(parents=True)
    with CheckpointManager(run, keep_last=2, step_name="global_{}.ckpt", fsync=False) as manager:
        for step in (8, 9, 10):
            manager.save(step, state_of(step))
        (run / "global_011.ckpt").mkdir()
        assert names_in(run) == ["global_011.ckpt", "global_10.ckpt", "global_9.ckpt", "step-7"]
        assert numbers(manager) == [9, 10]
        assert loaded(manager) == 10
    for wrong in ("step", "a/{}", "{}-{}", ".{}", "x{0}", "{}/x"):
        with pytest.raises(ValueError, match="step_name"):
            CheckpointManager(run, step_name=wrong)


# --- what goes


def test_resumed_and_best_steps_stay(run):
    with CheckpointManager(run) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step), metrics={"loss": step})
    with CheckpointManager(run, keep_last=1, metric="loss") as manager:
        assert loaded(manager, 2) == 2
        for step in (4, 5):
            manager.save(step, state_of(step), metrics={"loss": step})
        assert numbers(manager) == [1, 2, 5]


def test_nothing_goes_before_what_stays_is_verified(run):
    with CheckpointManager(run, keep_last=1, verify_before_prune=True) as manager:
        manager.save(1, state_of(1))
        manager.save(2, state_of(2))
        assert [(step.number, step.verified) for step in manager.steps()] == [(2, True)]


def test_undeletable_step_is_a_warning(run):
    with CheckpointManager(run, keep_last=1) as manager:
        manager.save(1, state_of(1))
        (run / ".removing-step-1").write_text("in the way")
        with pytest.warns(UserWarning, match=r"removing-step-1, which was removed, is still there"):
            manager.save(2, state_of(2))
        assert numbers(manager) == [2]
        (run / ".removing-step-1").unlink()
        manager.save(4, state_of(4))
        assert names_in(run) == ["step-4"]


def save_and_wait(manager, step, state, *, background):
    (manager.async_save if background else manager.save)(step, state)
    manager.wait()


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting needs root"
)
@pytest.mark.parametrize("background", [False, True])
def test_full_disk_is_an_error_and_the_run_goes_on(tmp_path, background):
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], check=False
    ).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        with CheckpointManager(place / "run", keep_last=5) as manager:
            state = {"w": torch.ones(550_000)}
            for step in (1, 2, 3):
                manager.save(step, state)
            with pytest.raises(OSError, match="No space left") as failed:
                save_and_wait(manager, 4, state, background=background)
            assert failed.value.errno == errno.ENOSPC
            assert numbers(manager) == [1, 2, 3]
            manager.delete(1)
            manager.save(4, state)
            assert numbers(manager) == [2, 3, 4]
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


# --- a save in the background that fails


def fail_at(call, manager):
    if call == "save":
        manager.save(9, state_of(9))
    elif call == "async_save":
        manager.async_save(9, state_of(9))
    elif call == "load":
        loaded(manager)
    elif call == "delete":
        manager.delete(1)
    elif call == "should_save":
        while not manager.should_save(9):
            threading.Event().wait(0.01)
    else:
        getattr(manager, call)()


@pytest.mark.parametrize(
    "call", ["save", "async_save", "load", "delete", "should_save", "wait", "close"]
)
def test_a_failure_in_the_background_is_raised_once_by_the_next_call(run, call):
    manager = CheckpointManager(run, keep_last=1)
    manager.save(1, state_of(1))
    future = manager.async_save(2, bad_state(2))
    with pytest.raises(UnsupportedError, match="meta device"):
        fail_at(call, manager)
    assert isinstance(future.exception(), UnsupportedError)
    assert numbers(manager) == [1]  # nothing was removed, nor saved
    if call == "close":
        with pytest.raises(DcpRsError, match="is closed"):
            manager.wait()
    else:
        manager.async_save(2, state_of(2))
    manager.close()
    assert numbers(manager) == ([1] if call == "close" else [2])


def test_the_end_of_a_block_raises_what_failed_in_the_background(run):
    with pytest.raises(UnsupportedError, match="meta device"), CheckpointManager(run) as manager:
        manager.async_save(2, bad_state(2))


def fail_in_a_block(manager, state):
    with manager:
        manager.async_save(2, state)
        raise KeyError("the loop's own")


def test_an_error_in_a_block_is_not_hidden_by_one_in_the_background(run):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError) as raised:
        fail_in_a_block(CheckpointManager(run, preemption=signal.SIGTERM), bad_state(2))
    assert "the save in the background failed" in raised.value.__notes__[0]
    assert signal.getsignal(signal.SIGTERM) == before
    manager = CheckpointManager(run)
    with pytest.raises(KeyError):
        fail_in_a_block(manager, state_of(2))
    assert numbers(manager) == [2]


def failing(monkeypatch, error, times):
    """Looks at the data of step 2 fail so many times."""
    looked, left = FolderStepStore._data_files, [times]

    def fail(store, index, files):
        if "step-2" in str(index.path) and left[0] > 0:
            left[0] -= 1
            raise error
        return looked(store, index, files)

    monkeypatch.setattr(FolderStepStore, "_data_files", fail)
    look = FolderStepStore._look_at_some

    def look_anew(store, *arguments):
        store._known.clear()
        return look(store, *arguments)

    monkeypatch.setattr(FolderStepStore, "_look_at_some", look_anew)
    monkeypatch.setattr(folder_store, "_WAITS", (0.01, 0.01))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT])
def test_a_step_that_cannot_be_looked_at_is_asked_for_again(run, monkeypatch, number):
    """One passing error of a network file system: an older step was resumed, hours were lost, and the run died at the newest."""
    manager = CheckpointManager(run)
    manager.save(1, state_of(1))
    manager.save(2, state_of(2))
    failing(monkeypatch, OSError(number, os.strerror(number)), times=2)
    assert loaded(manager) == 2


def test_a_step_that_can_never_be_looked_at_is_an_error(run, monkeypatch):
    manager = CheckpointManager(run, reuse=True)
    manager.save(1, state_of(1))
    manager.save(2, state_of(2))
    failing(monkeypatch, OSError(errno.EIO, "Input/output error"), times=10**9)
    for call in (
        lambda: loaded(manager),
        lambda: loaded(manager, 2),
        lambda: manager.save(2, state_of(0)),
        manager.latest_step,
    ):
        with pytest.raises(OSError, match="Input/output error") as raised:
            call()
        assert "step-2 may be whole" in raised.value.__notes__[0]
    assert loaded(manager, 1) == 1
    with pytest.warns(UserWarning, match="none is reused or makes room"):
        manager.save(3, state_of(3))
    monkeypatch.undo()
    assert numbers(manager) == [1, 2, 3]


def without_index(manager, step):
    (manager.path(step) / "index.dcprs").unlink()


@pytest.mark.parametrize("take_over", [True, False])
def test_newest_step_that_lost_its_index_is_an_error(run, take_over):
    """It was passed over with a warning, and the run died there at every restart."""
    with CheckpointManager(run) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step), metrics={"loss": step})
        without_index(manager, 2)
    with CheckpointManager(run) as manager:
        with pytest.raises(UnsupportedError, match=r"step-2: .*dcp_rs\.index.*remove it"):
            manager.load(state_of(0), take_over=take_over)
        assert not (manager.path(2) / "index.dcprs").exists()
        assert manager.latest_step() == 1
        dcp_rs.index(manager.path(2))
        assert loaded(manager, take_over=take_over) == 2
        assert manager.steps()[-1].metrics == {"loss": 2}


def test_step_that_lost_its_index_and_data_is_replaced(run):
    with CheckpointManager(run) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
        without_index(manager, 2)
        os.truncate(data_file(manager, 2), 10)
    with CheckpointManager(run) as manager:
        with pytest.warns(UserWarning, match="not resumed from step-2"):
            assert loaded(manager) == 1
        manager.save(2, state_of(2))
        assert loaded(manager) == 2


def test_a_newest_step_of_a_later_version_is_raised(run, monkeypatch):
    """An older one was resumed with a warning, hours were lost, and the run died at the newest at every restart."""
    manager = CheckpointManager(run)
    for step in (1, 2, 3):
        manager.save(step, state_of(step))
    failing(monkeypatch, UnsupportedError("of a later version"), times=10**9)
    assert loaded(manager) == 3  # what is older does not matter
    manager.delete(3)
    with pytest.raises(
        UnsupportedError, match=r"step-2: of a later version.*load\(state, N\).*remove it"
    ):
        loaded(manager)
    with pytest.raises(
        CheckpointExistsError, match=r"step 2 cannot be saved to .*of a later version"
    ):
        manager.save(2, state_of(0))
    # To go back is for the user to say. After that nothing is in the way.
    manager.delete(2)
    assert loaded(manager) == 1
    monkeypatch.undo()
    for step in (2, 3):
        manager.save(step, state_of(step))
    with CheckpointManager(run) as manager:
        assert loaded(manager) == 3


@pytest.mark.parametrize("background", [False, True])
def test_a_step_that_was_found_damaged_is_replaced(run, background):
    """The run resumed from the step before, and died at the damaged one at every restart."""
    with CheckpointManager(run) as manager:
        manager.save(1, state_of(1))
        manager.save(2, state_of(2))
        flip(manager, 2)
    with CheckpointManager(run, reuse=True) as manager:
        with pytest.warns(UserWarning, match="not resumed from step-2"):
            assert loaded(manager, verify=True) == 1
        with pytest.raises(UnsupportedError):
            manager.save(2, bad_state(2))
        assert numbers(manager) == [1, 2]  # there until another one is
        save_and_wait(manager, 2, state_of(2), background=background)
        assert loaded(manager, verify=True) == 2
        with pytest.raises(CheckpointExistsError):
            manager.save(2, state_of(2))


def test_max_bytes_spares_the_newest_good_step_below_a_damaged_one(run):
    """The damaged step was taken for the latest, and the good one removed before the next save."""
    with CheckpointManager(run) as manager:
        manager.save(1, state_of(1))
        manager.save(9, state_of(9))
        one = manager.steps()[0].nbytes
        flip(manager, 9)
    with CheckpointManager(run, max_bytes=3 * one + one // 2) as manager:
        with pytest.warns(UserWarning, match="not resumed from step-9"):
            assert loaded(manager, verify=True) == 1
        manager.save(2, state_of(2))
        assert numbers(manager) == [9, 1, 2]  # this run's steps count as newer
        with pytest.raises(UnsupportedError):
            manager.save(3, bad_state(3))
        assert 2 in numbers(manager)


# --- an earlier run


def test_an_evaluation_beside_a_run_takes_nothing_over(run):
    with CheckpointManager(run) as training, CheckpointManager(run) as evaluation:
        training.save(1, state_of(1))
        assert loaded(evaluation, take_over=False) == 1
        training.save(2, state_of(2))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_root_that_cannot_be_written_to_can_be_loaded_from(run, monkeypatch, number):
    with CheckpointManager(run) as manager:
        manager.save(1, state_of(1))

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(FolderStepStore, "_put", refuse)
    with CheckpointManager(run) as manager:
        assert loaded(manager) == 1
        with pytest.raises(OSError, match=os.strerror(number)):
            manager.save(2, state_of(2))
        monkeypatch.undo()
        manager.save(2, state_of(2))
        assert numbers(manager) == [1, 2]


def test_first_save_takes_over_run(run):
    with CheckpointManager(run) as old, CheckpointManager(run) as new:
        assert loaded(old) is None
        assert not run.exists()
        old.save(1, state_of(1))
        new.save(2, state_of(2))
        with pytest.raises(RunTakenOverError):
            old.save(3, state_of(3))


def test_a_killed_save_stops_nobody_where_locks_tell_nothing(run, monkeypatch):
    """On NFS, Lustre, CephFS and FUSE a save that was killed made every restart fail at that step for 24 hours."""
    told = folder_store.leftovers
    monkeypatch.setattr(
        folder_store,
        "leftovers",
        lambda path: [replace(left, verdict="young") for left in told(path)],
    )
    with CheckpointManager(run) as manager:
        manager.save(1, state_of(1))
        for step in (0, 3, 2):
            killed(manager, step)
        assert manager._store.look_at(3).kind == "unfinished"  # another save began since
        assert manager._store.look_at(2).kind == "unknown"
        manager.save(2, state_of(2))  # beside it
        assert len(list(manager.path(2).glob("g*"))) == 2
    with CheckpointManager(run, keep_last=2) as manager:
        with pytest.warns(UserWarning, match="not resumed from step-3: its save did not finish"):
            assert loaded(manager, verify=True) == 2
        manager.save(3, state_of(3))  # in its place: no save of an earlier run can commit
        assert len(list(manager.path(3).glob("g*"))) == 1
        assert names_in(run) == ["step-2", "step-3"]


def test_a_step_that_another_process_saves_is_refused(run):
    claim = """
import sys, torch, dcp_rs
class Paused(dcp_rs.RsWriter):
    def finish(self, metadata, results):
        print("written", flush=True)
        sys.stdin.read()
        super().finish(metadata, results)
torch.distributed.checkpoint.save({"w": torch.ones(3)}, storage_writer=Paused(sys.argv[1]), no_dist=True)
"""
    with CheckpointManager(run) as manager:
        command = [sys.executable, "-c", claim, manager.path(4)]
        with programs.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout.readline() == b"written\n"
            with pytest.raises(SaveInProgressError, match="a process is saving it"):
                manager.save(4, state_of(4))
            manager._store.begin(4, "0" * 32, {})  # as a manager does
            who = rf"process {os.getpid()} on '.+' since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC is saving it"
            with pytest.raises(SaveInProgressError, match=who):
                manager.save(4, state_of(4))
            other.stdin.close()
        assert numbers(manager) == [4]


def test_a_job_that_wakes_up_is_told_that_the_run_has_gone_on(run):
    """Until it woke up, the new job died at the step of the stopped one. Then that step was committed into the new run."""
    job = """
import sys, torch, dcp_rs
from dcp_rs.errors import RunTakenOverError
with dcp_rs.CheckpointManager(sys.argv[1], keep_last=1) as manager:
    begin, holding = manager._store.begin, manager._store.holding
    def wake_up():  # with all its data written, before its commit
        print("written", flush=True)
        sys.stdin.read()
        return holding()
    def begin_and_wait(*arguments, **options):
        begin(*arguments, **options)
        manager._store.holding = wake_up
    manager._store.begin = begin_and_wait
    try:
        manager.save(2, {"w": torch.ones(3)})
    except RunTakenOverError as error:
        print(error)
"""
    with CheckpointManager(run) as manager:
        manager.save(1, state_of(1))
    with CheckpointManager(run) as manager:
        with programs.Popen(
            [sys.executable, "-c", job, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdout.readline() == b"written\n"
            with pytest.warns(
                UserWarning,
                match=r"not resumed from step-2: process \d+ on '.+' since .* is saving it",
            ):
                assert loaded(manager) == 1
            manager.save(2, state_of(2))
            other.stdin.close()
            assert f"was taken over by process {os.getpid()} on".encode() in other.stdout.read()
        assert numbers(manager) == [1, 2]
        assert loaded(manager, verify=True) == 2
        assert len(list(manager.path(2).glob("g*"))) == 1


# --- preemption


def test_a_signal_is_a_reason_to_save(run):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("before"))
    try:
        with CheckpointManager(run, save_every=100, preemption=signal.SIGTERM) as manager:
            assert not manager.should_save(1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert not manager.preempted  # the ranks have not agreed
            assert manager.should_save(2)
            assert manager.preempted
            manager.save(2, state_of(2))
            assert not manager.should_save(2)
            assert manager.should_save(3)
        assert heard == ["before"]
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == ["before", "before"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_function_is_asked(run):
    answers = iter([False, True])
    with CheckpointManager(run, preemption=lambda: next(answers)) as manager:
        assert not manager.should_save(1)
        assert manager.should_save(2)
        assert manager.should_save(3)  # it is not asked again


def test_a_process_that_is_forked_is_stopped_as_ever(run):
    code = """
import os, signal, sys, dcp_rs
with dcp_rs.CheckpointManager(sys.argv[1], preemption=signal.SIGTERM) as manager:
    for before in (None, "another handler was put over it"):
        child = os.fork()
        if not child:
            if before:
                over = signal.getsignal(signal.SIGTERM)
                signal.signal(signal.SIGTERM, lambda *args: (over(*args), os._exit(9)))
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert not manager.should_save(1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert manager.should_save(1)
"""
    done = programs.run(
        [sys.executable, "-c", code, run], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == [str(-signal.SIGTERM), "9"]


def test_a_handler_that_somebody_put_in_its_place_stays(run):
    before = signal.getsignal(signal.SIGTERM)
    try:
        manager = CheckpointManager(run, preemption=signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        manager.close()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_managers_that_are_closed_in_any_order_give_the_signal_back(run):
    """The first one's handler stayed, and the process ignored SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        managers = [CheckpointManager(run, preemption=signal.SIGTERM) for _ in range(3)]
        for manager in managers:
            manager.close()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_comes_as_its_handler_is_replaced_is_noticed(monkeypatch):
    """It ended the process."""
    heard = []
    install = signal.signal
    before = install(signal.SIGUSR1, lambda *_: heard.append("before"))

    def install_late(*arguments):
        replaced = install(*arguments)
        signal.raise_signal(signal.SIGUSR1)
        return replaced

    try:
        monkeypatch.setattr(signal, "signal", install_late)
        source = Preemption(signal.SIGUSR1)
        monkeypatch.undo()
        assert source.noticed()
        assert heard == ["before"]
        source.close()
    finally:
        install(signal.SIGUSR1, before)


def test_a_close_that_cannot_restore_a_handler_releases_the_rest(run):
    before = signal.getsignal(signal.SIGTERM)
    try:
        manager = CheckpointManager(run, preemption=signal.SIGTERM)
        manager.async_save(1, state_of(1)).result(60)
        with ThreadPoolExecutor() as threads, pytest.raises(ValueError, match="main thread"):
            threads.submit(manager.close).result(60)
        assert shared_blocks._idle == []
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_needs_the_main_thread(run):
    errors = []

    def make():
        try:
            CheckpointManager(run, preemption=signal.SIGTERM)
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


def test_a_manager_that_only_looks_changes_nothing(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with CheckpointManager(run, keep_last=1) as manager:
            assert manager.latest_step() is None
            assert repr(manager) == f"CheckpointManager({str(run)!r})"
        manager.close()
    assert not run.exists()


def test_a_prune_from_outside_leaves_a_save_alone_that_has_no_data_yet(run):
    """After a rollback the steps that are saved are below the latest."""
    with CheckpointManager(run) as manager:
        for step in (20, 30):
            manager.save(step, state_of(step))
        assert loaded(manager, 20) == 20
        with saves_held_up():
            manager.async_save(21, state_of(21), metrics={"loss": 1.0}, extra_files={"a.txt": b"a"})
            done = prune(FolderStepStore(run), Policies(keep_last=5))
        manager.wait()
        assert done.removed == done.swept == []
        assert (manager.path(21) / "a.txt").read_bytes() == b"a"
        assert {step.number: dict(step.metrics) for step in manager.steps()} == {
            20: {},
            21: {"loss": 1.0},
            30: {},
        }


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_that_failed_is_over(run, in_background):
    with CheckpointManager(run) as manager:
        save = manager.async_save if in_background else manager.save
        with pytest.raises(UnsupportedError):
            save(1, bad_state(1)).result(60)
        if in_background:
            with pytest.raises(UnsupportedError):
                manager.wait()
        manager.save(1, state_of(1))
        assert numbers(manager) == [1]


def test_a_step_is_settled_where_files_of_the_user_cannot_be_put_into_it(run):
    """Its note said that the save goes on. Had it lost its index later, a sweep removed it."""
    with CheckpointManager(run) as manager:
        manager.save(1, state_of(1))
        (manager.path(1) / "a.txt").mkdir()
        with pytest.warns(UserWarning, match=r"extra_files are not all in place.*a\.txt"):
            manager.save(1, state_of(2), force=True, extra_files={"a.txt": b"new"})
        assert len(list(manager.path(1).glob("saved-*"))) == 1
        assert list(manager.path(1).glob("saving-*")) == []


def test_a_note_that_was_tampered_with_gets_nothing_else_removed(run):
    with CheckpointManager(run) as manager:
        manager.save(1, state_of(1), extra_files={"a.txt": b"old"})
        manager.save(2, state_of(2))
        note = next(manager.path(1).glob("saved-*.json"))
        note.write_text(note.read_text().replace("a.txt", "../step-2/index.dcprs"))
        manager.save(1, state_of(1), force=True)
        assert numbers(manager) == [1, 2]


@pytest.mark.parametrize("kind", ["stock", "no index"])
def test_step_that_may_be_whole_is_not_replaced(run, kind):
    """It was removed before a forced save began, and lost where that save failed."""
    with CheckpointManager(run) as manager:
        if kind == "stock":
            path = manager.path(3)
            torch.distributed.checkpoint.save(state_of(3), checkpoint_id=path, no_dist=True)
        else:
            manager.save(3, state_of(3))
            without_index(manager, 3)
        for force in (False, True):
            with pytest.raises(
                CheckpointExistsError, match=r"(dcp_rs\.index.*;|of torch:) delete\(3\) removes"
            ):
                manager.save(3, state_of(4), force=force)
        dcp_rs.index(manager.path(3))
        assert loaded(manager) == 3
        without_index(manager, 3)
        manager.delete(3)
        manager.save(3, state_of(3))
        assert loaded(manager, verify=True) == 3
