"""Ctrl-C in the midst of a load or a save."""

import os
import signal
import subprocess
import sys

import pytest
import torch

import dcp_rs
from support.places import TESTS

INTERRUPTED = """
import os, signal, sys, threading, time
import torch, dcp_rs
from support import threads
torch.set_num_threads(1)
path, what = sys.argv[1:]
size = 256 << 20
tensor = torch.zeros(size, dtype=torch.uint8)
def load(): dcp_rs.load({"w": tensor}, path, no_dist=True, verify=True, threads=4, io=io)
def save(): dcp_rs.save({"w": tensor}, path + "-new", no_dist=True)
io = "buffered"
work = load if what == "load" else save
dcp_rs.load({"small": torch.zeros(1)}, path, no_dist=True)
before = threads.names()
hits = 0
for delay in (0.002, 0.01, 0.02, 0.03, 0.05, 0.08):
    io = {"buffered": "mmap", "mmap": "direct", "direct": "buffered"}[io]
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    working = False
    try:
        timer.start()
        began = time.monotonic()
        working = True
        work()
    except BaseException as error:
        if not working:  # it came as its thread was started
            continue
        name = type(error).__name__
        causes = [type(e).__name__ for e, _ in getattr(error, "failures", {}).values()]
        assert name == "KeyboardInterrupt" or causes == ["KeyboardInterrupt"], (name, causes, error)
        hits += 1
        took = time.monotonic() - began
    for _ in range(2):  # a late signal ends the first
        try:
            timer.join()
            time.sleep(0.05)
        except KeyboardInterrupt:
            pass
    end = time.monotonic() + 5
    while threads.names() != before:  # one that was joined is listed for a moment more
        assert time.monotonic() < end, (threads.names(), before)
        time.sleep(0.005)
if what == "load":
    dcp_rs.load({"w": tensor}, path, no_dist=True)  # nothing is locked
    assert int(tensor[::4096].sum()) == size // 4096
else:
    assert not [f for f in os.listdir(path + "-new") if f.endswith(".tmp")] if os.path.exists(path + "-new") else True
    dcp_rs.save({"w": tensor[:10]}, path + "-new", no_dist=True)
print(hits)
"""


@pytest.mark.parametrize("what", ["load", "save"])
def test_ctrl_c_leaves_no_thread_and_no_lock(tmp_path, what):
    path = tmp_path / "ckpt"
    dcp_rs.save(
        {"w": torch.ones(256 << 20, dtype=torch.uint8), "small": torch.ones(1)}, path, no_dist=True, fsync=False
    )
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, path, what],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 3
