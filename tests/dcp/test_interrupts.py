"""Ctrl-C in the midst of a load or a save."""

import os
import signal
import sys

import pytest
import torch

import dcp_rs
import programs
from support.places import TESTS

INTERRUPTED = """
import os, random, signal, sys, threading, time
import torch, dcp_rs
import programs
from support import threads
torch.set_num_threads(1)
random.seed(0)
path, what = sys.argv[1:]
size = 256 << 20
tensor = torch.zeros(size, dtype=torch.uint8)
def load(io): dcp_rs.load({"w": tensor}, path, no_dist=True, verify=True, threads=4, io=io)
def save(io): dcp_rs.save({"w": tensor}, path + "-new", no_dist=True, overwrite=True)
work = load if what == "load" else save

def interrupted(io, delay):
    'Whether a Ctrl-C after a delay came in the midst of it.'
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    working = ended = False
    try:
        timer.start()
        working = True
        work(io)
        ended = True
        timer.join()
    except BaseException as error:  # also as the timer's thread was started, and after the work
        name = type(error).__name__
        causes = [type(e).__name__ for e, _ in getattr(error, "failures", {}).values()]
        assert name == "KeyboardInterrupt" or causes == ["KeyboardInterrupt"], (name, causes, error)
        timer.join()
        return working and not ended
    time.sleep(0.05)  # it is sent: here it comes
    return False

dcp_rs.load({"small": torch.zeros(1)}, path, no_dist=True)
before = threads.names()
for io in ("mmap", "direct", "buffered"):
    work(io)
    began = time.monotonic()
    work(io)
    whole = time.monotonic() - began
    end = time.monotonic() + 60
    hits = 0
    while hits < 2:
        try:
            hits += interrupted(io, whole * random.uniform(0, 0.9))
        except KeyboardInterrupt:
            pass
        assert time.monotonic() < end, f"{io}: {hits} of 2 came in the midst of it, of {whole} s"
        settled = time.monotonic() + 5
        while threads.names() != before:  # one that was joined is listed for a moment more
            assert time.monotonic() < settled, (threads.names(), before)
            time.sleep(0.005)
if what == "load":
    dcp_rs.load({"w": tensor}, path, no_dist=True)  # nothing is locked
    assert int(tensor[::4096].sum()) == size // 4096
else:
    assert not [f for f in os.listdir(path + "-new") if f.endswith(".tmp")]
    dcp_rs.save({"w": tensor[:10]}, path + "-new", no_dist=True)
"""


@pytest.mark.parametrize("what", [pytest.param("load", marks=pytest.mark.slow), "save"])
def test_ctrl_c_leaves_no_thread_and_no_lock(tmp_path, what):
    path = tmp_path / "ckpt"
    dcp_rs.save(
        {"w": torch.ones(256 << 20, dtype=torch.uint8), "small": torch.ones(1)},
        path,
        no_dist=True,
        fsync=False,
    )
    done = programs.run(
        [sys.executable, "-c", INTERRUPTED, path, what],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.returncode == 0, done.stderr[-3000:]
