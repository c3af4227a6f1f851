"""Saves that may fail, and what comes after a save."""

import errno
import os
import warnings

import pytest
import torch

from dcp_rs import CheckpointManager, api
from dcp_rs.errors import CheckpointExistsError, CheckpointNotFoundError
from support.numbered import loaded, names_in, numbers


def state_of(step):
    return {"w": torch.full((1000,), float(step)), "at": {"step": step}}


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def failing(monkeypatch):
    """Let saves fail, until the returned function is called."""

    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for name in ("save", "async_save"):
        monkeypatch.setattr(api, name, fail)
    return monkeypatch.undo


def test_failed_saves_are_warnings_until_there_are_too_many(run, failing):
    with CheckpointManager(run, on_error="warn", max_failures=3) as manager:
        for step in (1, 2):
            with pytest.warns(UserWarning, match=f"step {step} was not saved: .*Input/output"):
                assert manager.save(step, state_of(step)) is None
        with pytest.raises(OSError, match="Input/output error") as raised:
            manager.save(3, state_of(3))
        assert "3 saves in a row failed" in raised.value.__notes__[-1]
        failing()
        manager.save(4, state_of(4))
        assert loaded(manager) == 4


@pytest.mark.parametrize("is_local", [False, True])
def test_failed_background_saves_are_warnings(run, failing, is_local):
    """With a folder on the node, the warning named no step."""
    local = run.with_name("node") if is_local else None
    manager = CheckpointManager(run, local=local, on_error="warn", max_failures=3)
    for step in (1, 2, 3):
        manager.async_save(step, state_of(step))
        if step < 3:
            with pytest.warns(UserWarning, match=f"step {step} was not saved"):
                manager.wait()
    with pytest.raises(OSError, match="Input/output error"):
        manager.close()


def test_success_begins_to_count_anew(run, failing, monkeypatch):
    with CheckpointManager(run, on_error="warn", max_failures=2) as manager:
        with pytest.warns(UserWarning, match="was not saved"):
            manager.save(1, state_of(1))
        failing()
        manager.save(2, state_of(2))
        monkeypatch.setattr(api, "save", lambda *_, **__: (run / "nothing").stat())
        with pytest.warns(UserWarning, match="was not saved"):
            manager.save(3, state_of(3))


def test_failed_save_is_tried_again(run, failing):
    with CheckpointManager(run, save_every=100, on_error="warn", retry_after=5) as manager:
        with pytest.warns(UserWarning, match="was not saved"):
            manager.save(100, state_of(100))
        assert [step for step in range(101, 108) if manager.should_save(step)] == [105, 106, 107]
        failing()
        manager.save(105, state_of(105))
        assert [step for step in range(105, 206) if manager.should_save(step)] == [200]


def test_mistakes_are_never_warnings(run):
    with CheckpointManager(run, on_error="warn") as manager:
        manager.save(1, state_of(1))
        with pytest.raises(CheckpointExistsError):
            manager.save(1, state_of(1))
        with pytest.raises(ValueError, match="a number"):
            manager.save(2, state_of(2), metrics={"loss": "low"})
    for wrong in ({"on_error": "ignore"}, {"max_failures": 0}, {"retry_after": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CheckpointManager(run, **wrong)


@pytest.mark.parametrize("save", ["save", "async_save"])
def test_on_saved_is_called_after_the_commit(run, save):
    seen = []
    with CheckpointManager(
        run, on_saved=lambda path: seen.append((path, (path / "index.dcprs").is_file()))
    ) as manager:
        for step in (1, 2):
            getattr(manager, save)(step, state_of(step))
        manager.wait()
        assert seen == [(manager.path(1), True), (manager.path(2), True)]


def test_failure_of_on_saved_is_a_warning(run):
    def fail(_):
        raise KeyError("mine")

    with CheckpointManager(run, on_saved=fail) as manager:
        with pytest.warns(UserWarning, match="step 1 is saved, but on_saved failed: KeyError"):
            manager.save(1, state_of(1))
        assert numbers(manager) == [1]


def test_failure_of_keep_is_a_warning(run):
    """The save raised it, though the step was saved, and on_saved was not called."""
    seen = []
    options = {"keep_last": 1, "keep": lambda _, metrics: metrics["loss"] < 1}
    with CheckpointManager(run, on_saved=seen.append, **options) as manager:
        with pytest.warns(UserWarning, match=r"still there: KeyError"):
            manager.save(1, state_of(1))
        manager.save(2, state_of(2), metrics={"loss": 2.0})
        assert numbers(manager) == [1, 2]
        assert seen == [manager.path(1), manager.path(2)]


def test_latest_leads_to_the_newest_step(run):
    with CheckpointManager(run, latest=True, keep_last=1) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
            assert (run / "latest").resolve() == manager.path(step).resolve()
        assert numbers(manager) == [2]
    assert names_in(run) == ["latest", "step-2"]


def test_latest_leads_to_the_newest_step_after_another_is_saved_or_removed(run):
    """It led to a step that was saved again, and nowhere once the newest was removed."""
    with CheckpointManager(run, latest=True) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
        manager.save(1, state_of(1), force=True)
        assert (run / "latest").resolve() == manager.path(3).resolve()
        manager.delete(3)
        assert (run / "latest").resolve() == manager.path(2).resolve()


def test_kept_steps_are_exempt(run):
    with CheckpointManager(run, keep_last=1, keep=lambda step, _: step % 10 == 0) as manager:
        for step in (5, 10, 15, 20, 25):
            manager.save(step, state_of(step))
        assert numbers(manager) == [10, 20, 25]
    with CheckpointManager(run, keep=lambda _, metrics: "loss" in metrics) as manager:
        manager.save(30, state_of(30), metrics={"loss": 1.0})
        manager.save(35, state_of(35))
        assert numbers(manager) == [10, 20, 25, 30, 35]  # no policy removes any


def test_annotated_metrics_decide_what_is_best(run):
    options = {"metric": "accuracy", "mode": "max", "keep_best": 1, "keep_last": 1}
    with CheckpointManager(run, **options) as manager:
        manager.save(1, state_of(1), metrics={"loss": 3.0})
        CheckpointManager(run).annotate(1, {"accuracy": 0.5})  # by another process
        manager.annotate(1, {"f1": 0.25})
        assert manager.steps()[0].metrics == {"loss": 3.0, "accuracy": 0.5, "f1": 0.25}
        for step, accuracy in ((2, 0.7), (3, 0.6), (4, 0.1)):
            manager.save(step, state_of(step))
            manager.annotate(step, {"accuracy": accuracy})
        manager.save(5, state_of(5))
        assert numbers(manager) == [2, 5]
        assert manager.best_step() == 2
        with pytest.raises(CheckpointNotFoundError, match="no step 4"):
            manager.annotate(4, {"accuracy": 1.0})


def test_replaced_step_loses_its_annotations(run):
    with CheckpointManager(run) as manager:
        manager.save(1, state_of(1))
        manager.annotate(1, {"accuracy": 0.5})
        manager.save(1, state_of(1), force=True)
        assert manager.steps()[0].metrics == {}
        assert not list(manager.path(1).glob("annotated-*"))


def test_names_of_other_tools(run):
    with CheckpointManager(run, step_name="iter_{:07d}") as manager:
        manager.save(7, state_of(7))
        assert names_in(run) == ["iter_0000007"]
        assert loaded(manager) == 7
    with pytest.warns(
        UserWarning, match="may be or hold checkpoints.* not looked at: 'iter_0000007'"
    ):
        assert loaded(CheckpointManager(run)) is None
    with pytest.warns(UserWarning, match=f"not looked at: '{run.name}'"):
        assert loaded(CheckpointManager(run.parent, step_name="iter_{:07d}")) is None
    for wrong in ("iter_{:x}", "iter_{:.2f}", "{}{}", "iter", "a/{}"):
        with pytest.raises(ValueError, match="step_name"):
            CheckpointManager(run, step_name=wrong)


@pytest.mark.parametrize("name", ["epoch=3-step=100.ckpt", "step=100.ckpt", "epoch_12.pth"])
def test_files_of_other_tools_are_named(run, name):
    """Lightning's were passed over silently, and training began at 0."""
    run.mkdir()
    (run / name).touch()
    with pytest.warns(UserWarning, match=f"not looked at: '{name}'"):
        assert loaded(CheckpointManager(run)) is None


def test_preemption_is_asked_for_at_every_nth_step(run):
    asked = []
    manager = CheckpointManager(
        run, preemption=lambda: asked.append(1) is not None, preemption_every=10
    )
    for step in range(1, 31):
        manager.should_save(step)
    assert len(asked) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.close()
