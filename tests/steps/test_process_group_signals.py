"""Preemption signals that are sent to a whole process group, as Slurm does.

The handler put the default action back in forked children, so the signal killed the workers of the
DataLoader, and with them the save: 8 of 8.
"""

import os
import signal
import subprocess
import sys

import pytest

import programs
from support.numbered import names_in

JOB = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader
from dcp_rs import CheckpointManager

os.setsid()
run, number = sys.argv[1], signal.Signals(int(sys.argv[2]))
with CheckpointManager(run, preemption=number, fsync=False) as manager:
    data = DataLoader(range(10**9), batch_size=4, num_workers=2)
    for step, batch in enumerate(data, 1):
        if step == 1:
            print("ready", flush=True)
        if manager.should_save(step):
            manager.save(step, {"w": torch.ones(3)})
        if manager.preempted:
            break
print("done", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU])
def test_save_with_workers_of_a_data_loader(tmp_path, number):
    run = tmp_path / "run"
    command = [sys.executable, "-c", JOB, run, str(int(number))]
    with programs.Popen(command, stdout=subprocess.PIPE) as job:
        assert job.stdout.readline() == b"ready\n"
        os.killpg(job.pid, number)
        assert job.stdout.read() == b"done\n"
        assert job.wait(60) == 0
    assert len(names_in(run)) == 1
