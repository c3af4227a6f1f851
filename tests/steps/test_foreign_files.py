"""Files of others in the folder of a step.

One `config.json` or `.DS_Store` in an unfinished step blocked every later start, although the note
of the save lay in the folder, and no call that was advised helped.
"""

import pytest
import torch

import dcp_rs
from dcp_rs import CheckpointManager
from dcp_rs.steps.folder_store import FolderStepStore
from support.numbered import loaded, names_in, numbers


def state_of(step):
    return {"w": torch.full((1000,), float(step)), "at": {"step": step}}


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


FOREIGN = ["config.json", ".DS_Store", "_SUCCESS", "tokenizer", "pytorch_model.bin"]


def leave_unfinished(run, step, foreign):
    store = FolderStepStore(run)
    store.take_over()
    store.begin(step, f"{step:032x}", {}, ["mine.txt"])
    store.put_files(step, {"mine.txt": b"mine"})
    dcp_rs.save(state_of(step), store.folder(step), no_dist=True)
    (store.folder(step) / "index.dcprs").unlink()
    if foreign == "tokenizer":
        (store.folder(step) / foreign).mkdir()
    else:
        (store.folder(step) / foreign).write_text("theirs")


@pytest.mark.parametrize("foreign", FOREIGN)
def test_unfinished_step_is_passed_over_and_replaced(run, foreign):
    with CheckpointManager(run) as manager:
        manager.save(5, state_of(5))
    leave_unfinished(run, 10, foreign)
    with CheckpointManager(run) as manager:
        with pytest.warns(UserWarning, match="its save did not finish"):
            assert loaded(manager) == 5
        manager.save(10, state_of(10))
        assert loaded(manager, verify=True) == 10
        names = {path.name for path in manager.path(10).iterdir()}
    assert foreign in names
    assert "mine.txt" not in names


def test_sweep_leaves_a_step_in_which_others_wrote(run):
    leave_unfinished(run, 10, "config.json")
    with CheckpointManager(run) as manager:
        manager.save(20, state_of(20))
        manager.save(30, state_of(30))
        assert numbers(manager) == [20, 30]
    assert {"config.json", "mine.txt"} < {p.name for p in (run / "step-10").iterdir()}


@pytest.mark.parametrize("foreign", FOREIGN[:4])
def test_file_that_is_there_before_the_save(run, foreign):
    with CheckpointManager(run) as manager:
        manager.path(10).mkdir(parents=True)
        (manager.path(10) / foreign).mkdir()
        manager.save(10, state_of(10))
        assert loaded(manager) == 10
    assert names_in(run) == ["step-10"]
