"""The manager of a run in a folder and on a store alike. test_manager.py and test_store_manager.py have the rest."""

import os

import pytest
import torch

import dcp_rs
from dcp_rs.engine import save as engine_save
from dcp_rs.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    RunTakenOverError,
    UnsupportedError,
)
from dcp_rs.optim import training_state
from support.numbered import bad_state, killed, loaded, numbers, state_of


def test_run_begins_and_goes_on(root):
    with root.manager(save_every=10, keep_last=2) as manager:
        assert str(manager.root) == root.url
        assert repr(manager) == f"CheckpointManager({root.url!r})"
        assert loaded(manager) is manager.resumed is manager.latest_step() is None
        for step in range(1, 36):
            if manager.should_save(step):
                manager.save(step, state_of(step))
    assert root.names() == ["step-20", "step-30"]
    with root.manager(save_every=10, keep_last=2) as manager:
        assert loaded(manager) == manager.resumed == manager.latest_step() == 30
        assert manager.passed_over == []
        assert not manager.should_save(30)  # it is there
        assert loaded(manager, 20) == 20
        missing = rf"there is no step 10 in {root.url}.*: it has 20, 30"
        with pytest.raises(CheckpointNotFoundError, match=missing):
            manager.load({}, 10)
        manager.delete(20)
        assert numbers(manager) == [30]
        missing = rf"there is no step 20 in {root.url}.*: it has 30"
        with pytest.raises(CheckpointNotFoundError, match=missing):
            manager.delete(20)


@pytest.mark.parametrize("policy", [{"keep_every": 10}, {"keep_best": 1, "metric": "loss"}])
def test_no_step_goes_for_one_that_was_damaged_since(root, policy):
    """Only the newest steps were looked at again, and the others taken for whole."""
    with root.manager(**policy) as manager:
        manager.save(10, state_of(10), metrics={"loss": 1.0})
        manager.save(15, state_of(15), metrics={"loss": 2.0})
        root.cut_data(10)
        manager.save(30, state_of(30), metrics={"loss": 3.0})
        assert numbers(manager) == [15, 30]


def test_step_that_was_damaged_since_stops_no_removal(root):
    """Each removal took it for whole, found it damaged, and removed nothing."""
    with root.manager(keep_last=2) as manager:
        manager.save(1, state_of(1))
        manager.save(2, state_of(2))
        root.remove_data(1)
        for step in (3, 4, 5):
            manager.save(step, state_of(step))
        assert numbers(manager) == [4, 5]


def test_background_saves_follow_each_other(root):
    with root.manager(keep_last=3, metric="loss", fsync=False) as manager:
        state = state_of(0)
        for step in range(1, 8):
            state["w"].fill_(step)
            state["at"]["step"] = step
            future = manager.async_save(step, state, metrics={"loss": abs(step - 2)})
            assert len(numbers(manager)) <= 5
        metadata = future.result(60)
        assert numbers(manager) == [2, 5, 6, 7]  # what goes is gone when the future is done
        assert metadata.state_dict_metadata.keys() == {"w", "at.step"}
        assert manager.best_step() == 2
        assert loaded(manager) == 7
        for step in manager.steps():
            assert step.metrics == {"loss": float(abs(step.number - 2))}
            assert dcp_rs.verify(step.path, storage_options=root.options).leftovers == []
    assert root.open_uploads() == []
    assert not any("saving-" in key for key in root.keys(""))


def test_step_is_replaced_only_with_force(root):
    with root.manager() as manager:
        manager.save(5, state_of(5), metrics={"loss": 1})
        exists = rf"a step 5 in {root.url}.* already: force=True replaces it"
        for save in (manager.save, manager.async_save):
            with pytest.raises(CheckpointExistsError, match=exists):
                save(5, state_of(6))
        assert loaded(manager) == 5
        with pytest.raises(UnsupportedError):
            manager.save(5, bad_state(6), metrics={"loss": 2}, force=True)
        assert loaded(manager) == 5
        assert manager.steps()[0].metrics == {"loss": 1}
        manager.save(5, {"w": torch.ones(3)}, metrics={"loss": 3}, force=True)
        assert manager.steps()[0].metrics == {"loss": 3}
        with dcp_rs.open(manager.path(5), storage_options=root.options) as checkpoint:
            assert checkpoint["w"].tolist() == [1, 1, 1]


def test_training_state_is_saved_and_resumed(root):
    def job(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 2)
        return model, torch.optim.AdamW(model.parameters()), {"step": 0}

    model, optimizer, extra = job(0)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    with root.manager() as manager:
        assert manager.load_training_state(*job(1)) is None
        manager.async_save(7, training_state(model, optimizer, extra | {"step": 7}))
        other, other_optimizer, extra = job(1)
        assert manager.load_training_state(other, other_optimizer, extra) == 7
    assert extra == {"step": 7}
    assert torch.equal(other.weight, model.weight)
    moments = other_optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(moments, optimizer.state_dict()["state"][0]["exp_avg"])


@pytest.fixture
def meanwhile(monkeypatch):
    """Functions that the next saves call after they began, and before they write."""
    happens, real = [], engine_save.write_files

    def write(*arguments, **options):
        if happens:
            happens.pop(0)()
        return real(*arguments, **options)

    monkeypatch.setattr(engine_save, "write_files", write)
    return happens


def test_max_bytes_makes_room_before_a_save(root, meanwhile):
    seen = []
    with root.manager() as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
        one = manager.steps()[0].nbytes
    with root.manager(max_bytes=3 * one + one // 2) as manager:
        meanwhile.append(lambda: seen.append(numbers(manager)))
        manager.save(4, state_of(4))
        assert seen == [[2, 3]]
        assert numbers(manager) == [2, 3, 4]
    with root.manager(max_bytes=1) as manager:
        meanwhile.append(lambda: seen.append(numbers(manager)))
        manager.save(5, state_of(5))
        assert seen == [[2, 3], [4]]  # never the latest, before the new one is there
        assert numbers(manager) == [5]


# --- what is resumed from


def test_broken_steps_are_skipped_and_named(root):
    with root.manager() as manager:
        for step in (2, 3, 4):
            manager.save(step, state_of(step))
        root.cut_data(3)
        index = "step-4/index.dcprs"
        root.write(index, root.read(index)[:10])
        killed(manager, 5)
    with root.manager(keep_last=10) as manager:
        with pytest.warns(UserWarning, match="not resumed from") as said:
            assert loaded(manager) == 2
        kinds = [(skipped.number, skipped.kind) for skipped in manager.passed_over]
        assert kinds == [(5, "unfinished"), (4, "damaged"), (3, "damaged")]
        assert len(said) == 3
        assert manager.latest_step() == 2
        # The run goes on over what was damaged or not finished.
        for step in (3, 4, 5):
            manager.save(step, state_of(step))
        assert numbers(manager) == [2, 3, 4, 5]
        assert loaded(manager) == 5


def test_damage_that_only_reading_finds_is_skipped(root):
    with root.manager() as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
        root.flip_data(3)
        root.flip_data(2)
        with pytest.warns(UserWarning, match="not resumed from step-[23]: corrupt data"):
            assert loaded(manager, verify=True) == 1
        kinds = [(skipped.number, skipped.kind) for skipped in manager.passed_over]
        assert kinds == [(3, "damaged"), (2, "damaged")]
        with pytest.raises(dcp_rs.errors.CorruptDataError):
            loaded(manager, 3, verify=True)
        root.flip_data(1)
        none = r"none can be resumed from: step-3: corrupt.*step-1: corrupt"
        with pytest.raises(CheckpointNotFoundError, match=none):
            loaded(manager, verify=True)


# --- another run


def test_save_of_a_job_that_was_taken_over_is_not_committed(root, meanwhile):
    """A job that was stopped, and woke up, committed its step into the run of the next one."""
    with root.manager() as old, root.manager() as new:
        old.save(1, state_of(1))
        taken = rf"was taken over by process {os.getpid()} on '.*' since 20"
        meanwhile.append(lambda: loaded(new))
        with pytest.raises(RunTakenOverError, match=taken) as raised:
            old.save(2, state_of(-1))
        assert raised.value.path == root.url
        assert new.resumed == 1
        assert numbers(new) == [1]
        assert root.keys("step-2/g") == []
        for save in (old.save, old.async_save):
            with pytest.raises(RunTakenOverError):
                save(2, state_of(-1))
        new.save(2, state_of(2))
        assert loaded(new, take_over=False) == 2


def test_job_that_was_taken_over_removes_nothing(root):
    """It removed what the next one had resumed from."""
    with root.manager(keep_last=1) as old, root.manager() as new:
        old.save(1, state_of(1))
        old.save(2, state_of(2))
        assert loaded(new) == 2
        new.save(3, state_of(3))
        with pytest.raises(RunTakenOverError):
            old.delete(2)
        old._coordinator._prune(3)  # as after a save that committed right before
        (problem,) = old._coordinator.problems
        assert "was taken over" in problem
        assert root.names() == ["step-2", "step-3"]


def test_roll_back_past_a_step_that_another_job_saved_anew(root):
    """The step that was there before counted as older, and the next start resumed from the new."""
    with root.manager() as manager:
        for step in (10, 20, 30):
            manager.save(step, state_of(step))
        with root.manager() as other:
            loaded(other, 20)
            other.save(30, state_of(31), force=True)
        loaded(manager, 20)
        with pytest.warns(UserWarning, match="later steps"):
            manager.save(25, state_of(25))
    assert root.manager().latest_step() == 25


def test_save_that_is_refused_ends_no_other_job(root):
    """A job was started by mistake: its save of step 1 was refused, and the run ended all the same.

    So did a job that only evaluates, and one that loaded nothing.
    """
    with root.manager() as run, root.manager() as second, root.manager() as evaluation:
        run.save(1, state_of(1))
        run.save(2, state_of(2))
        assert loaded(evaluation, take_over=False) == 2
        for other in (second, evaluation):
            with pytest.raises(CheckpointExistsError, match="force=True replaces it"):
                other.save(1, state_of(-1))
        run.save(3, state_of(3))
        second.save(4, state_of(4))
        with pytest.raises(RunTakenOverError):
            run.save(5, state_of(-1))
        with pytest.raises(CheckpointExistsError):
            second.save(3, state_of(-1))
        assert numbers(second) == [1, 2, 3, 4]


def test_load_of_a_step_that_is_not_there_ends_no_other_job(root):
    """The load failed, and the next save of the run that went on failed too."""
    with root.manager() as run, root.manager() as other:
        run.save(1, state_of(1))
        with pytest.raises(CheckpointNotFoundError, match="there is no step 9"):
            loaded(other, 9)
        with pytest.raises(ValueError, match="from 0 on"):
            loaded(other, -1)
        run.save(2, state_of(2))
        assert loaded(other, 1) == 1
        with pytest.raises(RunTakenOverError):
            run.save(3, state_of(-1))


# --- files of the user


@pytest.mark.parametrize("in_background", [False, True])
def test_forced_save_that_fails_leaves_the_files_of_the_step(root, in_background):
    """They were replaced when the save began, and the old step was then whole with new files."""
    with root.manager() as manager:
        manager.save(1, state_of(1), extra_files={"a.txt": b"old"})
        save = manager.async_save if in_background else manager.save
        new = {"force": True, "extra_files": {"a.txt": b"new", "b.txt": b"new"}}
        with pytest.raises(UnsupportedError):
            save(1, bad_state(1), **new).result(60)
        if in_background:
            with pytest.raises(UnsupportedError):
                manager.wait()
        assert loaded(manager) == 1
        assert root.read("step-1/a.txt") == b"old"
        assert root.keys("step-1/b.txt") == []
        save(1, state_of(1), **new)
        manager.wait()
        assert root.read("step-1/a.txt") == root.read("step-1/b.txt") == b"new"
        save(2, state_of(2))
        manager.wait()
        assert root.keys("step-2/b.txt") == []


def test_forced_save_replaces_the_files_of_the_step(root):
    """Those that the new save does not have stayed beside it: files of two steps, mixed."""
    with root.manager() as manager:
        root.write("step-1/model.pt", b"of somebody else")
        with pytest.raises(CheckpointExistsError, match=r"delete\(1\) removes it"):
            manager.save(1, state_of(1), force=True)
        assert root.keys("step-1/") == ["step-1/model.pt"]
        root.remove("step-1/model.pt")  # only what may be a checkpoint is in the way
        manager.save(1, state_of(1), extra_files={"a.txt": b"old", "b.txt": b"old"})
        root.write("step-1/c.txt", b"of somebody else")
        root.write("step-1/deeper/d.txt", b"of somebody else")
        manager.save(1, state_of(1), force=True, extra_files={"a.txt": b"new"})
        assert root.read("step-1/a.txt") == b"new"
        files = {key for key in root.keys("step-1/") if key.endswith(".txt")}
        assert files == {f"step-1/{name}" for name in ("a.txt", "c.txt", "deeper/d.txt")}
        assert loaded(manager) == 1
        manager.delete(1)
        assert root.keys("step-1/") == []
