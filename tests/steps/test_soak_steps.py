"""Short runs of the soak of the checkpoint manager: saved, pruned, killed at any moment, resumed."""

import sys

import pytest

from support import programs
from support.places import TESTS

SOAK = TESTS / "soak_steps.py"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "steps"), [(1, 100), (4, 40)])
def test_runs_that_are_killed_resume_from_the_newest_whole_step(ranks, steps):
    # In a process of its own, which has no threads: it forks.
    command = [sys.executable, str(SOAK), str(steps), "--ranks", str(ranks), "--seed", "7"]
    done = programs.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Tally(ranks={ranks}" in done.stdout
    assert f"steps={steps}," in done.stdout
    assert "kills=0" not in done.stdout
