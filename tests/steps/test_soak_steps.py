"""Short runs of the soak of the checkpoint manager: saved, pruned, killed at any moment, resumed."""

import shutil
import sys

import pytest

import programs
from crash import nfs
from support.places import TESTS

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

SOAK = TESTS / "soak_steps.py"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "steps"), [(1, 60), pytest.param(4, 40, marks=pytest.mark.slow)])
def test_runs_that_are_killed_resume_from_the_newest_whole_step(ranks, steps):
    # In a process of its own, which has no threads: it forks.
    command = [sys.executable, str(SOAK), str(steps), "--ranks", str(ranks), "--seed", "7"]
    done = programs.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Tally(ranks={ranks}" in done.stdout
    assert f"steps={steps}," in done.stdout
    assert "kills=0" not in done.stdout


def check_killed_on_nfs(kills):
    """On NFS a save that was killed made every restart fail at that step for 24 hours."""
    tallies = nfs.run(kills)
    assert [tally["locks"] for tally in tallies] == [True, False]
    for tally in tallies:
        assert tally["kills"] == kills // 2
        assert tally["slowest_start"] < 20  # nothing is waited for


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_nfs_every_restart_goes_on_at_once():
    check_killed_on_nfs(50)  # `make crash` kills 500
