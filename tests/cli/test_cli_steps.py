"""``dcp-rs steps`` and ``prune``, and ``ls`` and ``inspect`` of the folder of a run."""

import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import save_file

from dcp_rs import CheckpointManager
from dcp_rs.cli import main


@pytest.fixture
def run(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        for step, loss in ((100, 2.0), (200, 1.0), (300, 3.0)):
            manager.save(step, {"w": torch.ones(1000)}, metrics={"loss": loss, "lr": 0.1})
        manager.save(400, {"w": torch.ones(1000)})
        (manager.path(400) / "index.dcprs").unlink()
        manager._store.begin(150, "0" * 32, {})  # killed at once, long ago
        os.utime(manager.path(150) / f"saving-{0:032x}.json", (0, 0))
    return tmp_path / "run"


@pytest.fixture
def dcp_rs_does(capfd, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def does(*arguments, status=0):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)])
        said = capfd.readouterr()
        assert ended.value.code == status, said
        return said.out

    return does


def folders(run):
    return sorted(int(path.name.removeprefix("step-")) for path in run.glob("step-*"))


@pytest.mark.parametrize("command", ["steps", "ls", "inspect"])
def test_the_steps_of_a_run(dcp_rs_does, run, command):
    out = dcp_rs_does(command, run).splitlines()
    assert out[0].split() == ["step", "age", "size", "new", "reused", "verified", "metrics"]
    assert [line.split()[0] for line in out[1:4]] == ["100", "200", "300"]
    assert out[1].endswith("loss=2 lr=0.1")
    assert out[4] == "passed over  step-150: its save did not finish"
    assert out[5].startswith(
        "passed over  step-400: it is complete, but its index.dcprs is gone: dcp-rs index"
    )
    assert out[6].startswith("3 steps, ")


def test_the_steps_of_a_run_for_programs(dcp_rs_does, run):
    found = json.loads(dcp_rs_does("steps", run, "--json"))
    assert found["latest"] == 300
    assert [(step["step"], step["metrics"]) for step in found["steps"]] == [
        (100, {"loss": 2.0, "lr": 0.1}),
        (200, {"loss": 1.0, "lr": 0.1}),
        (300, {"loss": 3.0, "lr": 0.1}),
    ]
    assert [(step["step"], step["kind"]) for step in found["passed_over"]] == [
        (150, "unfinished"),
        (400, "no index"),
    ]
    assert found["bytes"] == sum(step["bytes"] for step in found["steps"])


def test_a_checkpoint_is_no_run(dcp_rs_does, run, tmp_path):
    assert "float32  [1000]" in dcp_rs_does("ls", run / "step-100")
    dcp_rs_does("steps", run / "step-100", status=2)
    dcp_rs_does("steps", tmp_path / "nowhere", status=2)
    dcp_rs_does("prune", tmp_path / "nowhere", status=2)
    dcp_rs_does("ls", tmp_path, status=2)


def test_a_file_with_the_name_of_a_step_makes_no_run(dcp_rs_does, tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "step-5").write_text("a file")
    assert "float32  [2]" in dcp_rs_does("ls", tmp_path)


def test_pruning_first_says_what_would_go(dcp_rs_does, run):
    out = dcp_rs_does("prune", run, "--keep-last", 1, "--keep-best", 1, "--metric", "loss")
    assert "to remove  step-100" in out
    assert "to remove  step-150  its save did not finish" in out
    assert "kept       step-200" in out
    assert "2 steps, " in out
    assert folders(run) == [100, 150, 200, 300, 400]
    out = dcp_rs_does("prune", run, "--keep-last", 1, "--keep-best", 1, "--metric", "loss", "--yes")
    assert "removed    step-100" in out
    assert folders(run) == [200, 300, 400]
    assert dcp_rs_does("prune", run, "--keep-last", 2, "--yes").endswith("nothing to remove\n")


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ((), [100, 200, 300]),
        (("--keep-every", 200), [200, 300]),
        pytest.param(("--keep-within", "1h"), [100, 200, 300], marks=pytest.mark.slow),
        pytest.param(("--max-bytes", "20kB"), [200, 300], marks=pytest.mark.slow),
        (("--max-bytes", "1"), [300]),  # never the latest
        (("--keep-best", 1, "--metric", "loss", "--mode", "max"), [300]),
        (("--keep-best", 1, "--metric", "loss", "--verify"), [200, 300]),
    ],
)
def test_pruning_by_every_policy(dcp_rs_does, run, options, left):
    found = json.loads(dcp_rs_does("prune", run, *options, "--yes", "--json"))
    assert [step["step"] for step in found["kept"]] == left
    assert [step["step"] for step in found["unfinished"]] == [150]
    assert folders(run) == [*left, 400]


def test_step_that_is_not_removed_is_a_finding(dcp_rs_does, run):
    for step in (200, 300):
        data = next((run / f"step-{step}").glob("g*"))
        with data.open("r+b") as file:
            file.seek(-10, os.SEEK_END)
            file.write(b"x")
    out = dcp_rs_does("prune", run, "--keep-last", 2, "--verify", "--yes", status=1)
    assert "problem    step 300 is damaged" in out
    assert "nothing was removed" in out
    assert folders(run) == [100, 200, 300, 400]


@pytest.mark.parametrize(
    "wrong",
    [
        ("--keep-within", "soon"),
        ("--keep-within", "6M"),  # months, to some
        ("--max-bytes", "5XB"),
        ("--keep-last", "0"),
        ("--keep-best", "1"),
        ("--mode", "best"),
    ],
)
def test_senseless_arguments_are_explained(dcp_rs_does, run, wrong):
    dcp_rs_does("prune", run, *wrong, status=2)


def test_shared_bytes_are_shown_and_counted_once(dcp_rs_does, tmp_path):
    root = tmp_path / "run"
    with CheckpointManager(root, reuse=True) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"frozen": torch.ones(100_000), "step": torch.tensor(step)})
    assert [line.split().count("400") for line in dcp_rs_does("steps", root).splitlines()[1:4]] == [
        0,
        1,
        1,
    ]
    found = json.loads(dcp_rs_does("steps", root, "--json"))
    assert [step["reused"] for step in found["steps"]] == [0, 400_000, 400_000]
    assert [step["written"] < 10_000 for step in found["steps"]] == [False, True, True]
    assert found["bytes"] < 430_000 < sum(step["bytes"] for step in found["steps"])
    # What another step holds, too, is not made free.
    assert json.loads(dcp_rs_does("prune", root, "--keep-last", "1", "--json"))["bytes"] < 20_000


def test_steps_of_another_name(dcp_rs_does, tmp_path):
    with CheckpointManager(
        tmp_path / "run", step_name="global_{}", no_dist=True, fsync=False
    ) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.ones(3)})
    name = ("--step-name", "global_{}")
    assert [
        step["step"]
        for step in json.loads(dcp_rs_does("steps", manager.root, *name, "--json"))["steps"]
    ] == [1, 2]
    dcp_rs_does("prune", manager.root, *name, "--keep-last", 1, "--yes")
    assert not manager.path(1).exists()
    assert manager.path(2).exists()
    dcp_rs_does("steps", manager.root, status=2)
    dcp_rs_does("steps", manager.root, "--step-name", "a/{}", status=2)


def test_folders_that_a_removal_left_are_shown_and_removed(dcp_rs_does, run):
    """Without --yes nothing told of them."""
    left = run / ".removing-step-100.0123456789abcdef"
    (run / "step-100").rename(left)
    out = dcp_rs_does("prune", run)
    assert f"to remove  {left.name}  it was removed, and is still there" in out
    assert out.splitlines()[-1].startswith("2 steps, ")  # and step-150
    assert json.loads(dcp_rs_does("prune", run, "--json"))["aside"] == [str(left)]
    assert f"removed    {left.name}" in dcp_rs_does("prune", run, "--yes")
    assert not left.exists()
    assert dcp_rs_does("prune", run, "--yes").endswith("nothing to remove\n")


def test_cleaning_a_run_says_what_removes_its_leftovers(dcp_rs_does, run):
    """It found nothing to remove, whatever there was."""
    (run / "step-100").rename(run / ".removing-step-100.0123456789abcdef")
    lines = dcp_rs_does("clean", run).splitlines()
    assert lines[0] == (
        "left         .removing-step-100.0123456789abcdef: it was removed, and is still there"
    )
    assert lines[1] == "passed over  step-150: its save did not finish"
    assert lines[2].startswith("passed over  step-400: it is complete, but its index.dcprs is gone")
    assert lines[3] == (
        f"{run} is a run, and clean looks at one of its steps; "
        f"dcp-rs prune {run} --yes removes 2 leftovers of the run"
    )
    dcp_rs_does("prune", run, "--yes")
    shutil.rmtree(run / "step-400")
    out = dcp_rs_does("clean", run)
    assert out == f"{run} is a run, and clean looks at one of its steps\n"
    assert dcp_rs_does("clean", run / "step-200") == "nothing to remove\n"
