"""A few of each of the `matrices`."""

import signal
from collections import Counter

import pytest

from filesystems import matrices
from filesystems.mounts import why_missing


@pytest.mark.slow  # each kill is the start of a process
@pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
def test_kills_on_a_mount_that_renames(tmp_path):
    assert matrices.kills(tmp_path, 12)["kills"] == 12


def test_take_overs_on_two_clients(tmp_path):
    assert matrices.take_overs(tmp_path, 6) == Counter(told=6)


@pytest.mark.slow  # as above
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signals_to_a_job_with_workers(tmp_path, number):
    assert matrices.preemptions(tmp_path, 5, number) == Counter(saved=5)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_failing_calls(faulty):
    assert matrices.failing_calls(faulty, 8).total() == 8
