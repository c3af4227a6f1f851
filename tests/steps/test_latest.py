"""``latest``: what a loop of one's own resumes from, of this package, of torch, and of both."""

import pytest
import torch

import dcp_rs
from dcp_rs.errors import CheckpointNotFoundError, DcpRsError, UnsupportedError
from support.both import save_rs, save_stock
from support.forged import INDEX


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def save(run, name, how=save_rs):
    how({"w": torch.ones(1000)}, run / name)
    return run / name


def data_file(folder):
    return next(folder.glob("g*.safetensors"))


def test_new_run_has_none(run):
    assert dcp_rs.latest(run) is None
    run.mkdir()
    assert dcp_rs.latest(run) is None
    (run / "notes.txt").write_text("not a step")
    (run / "logs").mkdir()
    assert dcp_rs.latest(run) is None


def test_newest_by_number(run):
    for number in (9, 10, 8):
        save(run, f"step-{number}")
    assert dcp_rs.latest(run) == run / "step-10"
    assert dcp_rs.latest(f"file://{run}") == run / "step-10"


def test_steps_of_a_manager(run):
    with dcp_rs.CheckpointManager(run) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.ones(3)})
    assert dcp_rs.latest(run) == manager.path(2)


def test_steps_of_torch_count(run):
    """A run that moved to this package has steps of both."""
    save(run, "step-5", save_stock)
    assert dcp_rs.latest(run) == run / "step-5"
    save(run, "step-6")
    assert dcp_rs.latest(run) == run / "step-6"
    save(run, "step-7", save_stock)
    assert dcp_rs.latest(run) == run / "step-7"


@pytest.mark.parametrize("how", [save_rs, save_stock])
def test_names_with_leading_zeros_are_others(run, how):
    save(run, "step-0010", how)
    with pytest.raises(CheckpointNotFoundError, match="'step-0010'"):
        dcp_rs.latest(run)
    assert dcp_rs.latest(run, step_name="step-{:04d}") == run / "step-0010"
    save(run, "step-5", how)
    with pytest.warns(UserWarning, match="not looked at: 'step-0010'"):
        assert dcp_rs.latest(run) == run / "step-5"


def test_names_of_other_forms(run):
    save(run, "global_2")
    save(run, "step-1")
    assert dcp_rs.latest(run, step_name="global_{}") == run / "global_2"
    assert dcp_rs.latest(run) == run / "step-1"


@pytest.mark.parametrize("how", [save_rs, save_stock])
def test_checkpoints_of_another_name_only_raise(run, how):
    """With None, the run would begin at step 1."""
    save(run, "epoch_3", how)
    with pytest.raises(CheckpointNotFoundError, match=r"'epoch_3'.*step_name=") as raised:
        dcp_rs.latest(run)
    assert raised.value.path == str(run)


@pytest.mark.parametrize("how", [save_rs, save_stock])
def test_checkpoint_itself_is_no_run(run, how):
    save(run, ".", how)
    with pytest.raises(CheckpointNotFoundError, match=r"is a checkpoint itself.*dcp_rs\.load"):
        dcp_rs.latest(run)


@pytest.mark.parametrize("how", [save_rs, save_stock])
def test_unfinished_step_is_skipped(run, how):
    save(run, "step-1", how)
    folder = save(run, "step-2", how)
    if how is save_rs:
        (folder / INDEX).unlink()
        data = data_file(folder)
        data.write_bytes(data.read_bytes()[:100])
    else:
        (folder / ".metadata").unlink()
    assert dcp_rs.latest(run) == run / "step-1"


def test_step_that_lost_its_index_raises(run):
    save(run, "step-1")
    (save(run, "step-2") / INDEX).unlink()
    with pytest.raises(UnsupportedError, match=r"step-2.*dcp_rs\.index"):
        dcp_rs.latest(run)


def test_damaged_step_is_skipped_with_a_warning(run):
    save(run, "step-1")
    data_file(save(run, "step-2")).unlink()
    with pytest.warns(UserWarning, match=r"step-2: its data file g.* is gone"):
        assert dcp_rs.latest(run) == run / "step-1"
    data_file(run / "step-1").unlink()
    with pytest.raises(CheckpointNotFoundError, match="none of its steps is whole"):
        dcp_rs.latest(run)


def test_later_version_is_the_latest_and_its_load_raises(run):
    save(run, "step-1")
    index = save(run, "step-2") / INDEX
    data = bytearray(index.read_bytes())
    data[8] = 99
    index.write_bytes(data)
    path = dcp_rs.latest(run)
    assert path == run / "step-2"
    with pytest.raises(DcpRsError):
        dcp_rs.load({"w": torch.zeros(1000)}, path, no_dist=True)


def test_wrong_step_name_raises(run):
    with pytest.raises(ValueError, match="step_name"):
        dcp_rs.latest(run, step_name="step")
