"""``dcp-rs steps`` and ``prune``, and ``ls`` and ``inspect``, of a run on a store."""

import json
import sys

import pytest
import torch

import programs
from dcp_rs import CheckpointManager


@pytest.fixture
def does(server):
    """Runs a command, and returns what it says; the options of the store are given."""
    given = [
        f"--storage-option={key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in server.options(max_retries=1).items()
    ]

    def run(*arguments, status=0):
        line = [sys.executable, "-m", "dcp_rs", *map(str, arguments), *given]
        done = programs.run(line, capture_output=True, check=False, text=True)
        assert done.returncode == status, done
        return done.stdout or done.stderr

    return run


@pytest.fixture
def run(server):
    """The URL of a run with steps 100, 200 and 300, of which 100 is the best, and what is left of 400."""
    with CheckpointManager(
        server.url("run"), storage_options=server.options(), no_dist=True
    ) as manager:
        for step in (100, 200, 300, 400):
            manager.save(step, {"w": torch.full((1000,), float(step))}, metrics={"loss": step / 50})
    del server.objects["run/step-400/index.dcprs"]
    return server.url("run")


@pytest.mark.slow
def test_the_steps_of_a_run(does, run):
    out = does("steps", run).splitlines()
    assert out[0].split() == ["step", "age", "size", "new", "reused", "verified", "metrics"]
    assert [line.split()[0] for line in out[1:4]] == ["100", "200", "300"]
    assert out[1].endswith("loss=2")
    assert out[4].startswith("passed over  step-400: its save did not finish, or goes on")
    assert out[5].startswith("3 steps, ")
    for command in ("ls", "inspect"):
        assert [row.split()[0] for row in does(command, f"{run}/").splitlines()] == [
            row.split()[0] for row in out
        ]
    assert does("ls", f"{run}/step-100").splitlines()[-1] != out[-1]  # a checkpoint is one


@pytest.mark.slow
def test_the_steps_of_a_run_for_programs(does, run, server):
    found = json.loads(does("steps", run, "--json"))
    assert found["path"] == run
    assert found["latest"] == 300
    assert [step["path"] for step in found["steps"]] == [
        f"{run}/step-{number}" for number in (100, 200, 300)
    ]
    assert found["bytes"] == sum(step["bytes"] for step in found["steps"])
    assert [(passed["step"], passed["kind"]) for passed in found["passed_over"]] == [
        (400, "unknown")
    ]


@pytest.mark.slow
def test_prune_removes_only_on_request(does, run, server):
    before = server.keys()
    out = does("prune", run, "--keep-last", 1, "--keep-best", 1, "--metric", "loss")
    assert "1 step, " in out
    assert server.keys() == before
    does("prune", run, "--keep-last", 1, "--keep-best", 1, "--metric", "loss", "--verify", "--yes")
    gone = set(before) - set(server.keys())
    assert {key.split("/")[1] for key in gone} == {"step-200"}
    assert not server.keys("run/step-200")
    assert does("prune", run, "--keep-last", 2, "--yes").endswith("nothing to remove\n")
    server.undeletable.update(server.keys("run/step-100/index"))
    out = does("prune", run, "--keep-last", 1, "--yes", status=1)
    assert "step 100 could not be removed" in out


@pytest.mark.slow
def test_where_there_is_no_run(does, server, run):
    assert "has no folder step-N" in does("steps", server.url("nowhere"), status=2)
    assert "has no folder step-N" in does("prune", f"{run}/step-100", "--yes", status=2)
