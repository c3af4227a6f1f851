"""Limits on address space and on threads: saves and loads go on with fewer threads, at last with the caller's own.

With 40 MB of address space to spare they failed for want of memory, where torch's succeeded;
without a thread to spare they panicked.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import pytest

import programs

LITTLE_MEMORY = """
import resource, sys
import torch
import dcp_rs
path = sys.argv[1]
state, into = {"w": torch.arange(8 << 20)}, {"w": torch.zeros(8 << 20, dtype=torch.int64)}
dcp_rs.save({"w": torch.ones(3)}, path + "/first")  # all that is imported late
dcp_rs.load({"w": torch.zeros(3)}, path + "/first")
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (taken + (40 << 20), hard))
for fsync in (True, False):
    dcp_rs.save(state, path + "/ckpt", overwrite=True, fsync=fsync)
    for io in ("auto", "direct", "buffered"):
        into["w"].zero_()
        dcp_rs.load(into, path + "/ckpt", io=io, verify=True)
        assert torch.equal(into["w"], state["w"]), io
print("right")
"""

NO_THREADS = """
import os, resource, sys, threading
import torch
import dcp_rs
torch.set_num_threads(1)
path = sys.argv[1]
state, into = {"w": torch.arange(3 << 20), "value": (1, 2)}, {"w": torch.zeros(3 << 20, dtype=torch.int64), "value": None}
dcp_rs.save({"w": torch.ones(3)}, path + "/first")
dcp_rs.load({"w": torch.zeros(3)}, path + "/first")
hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
if os.geteuid() == 0:  # whom it does not bind
    os.setuid(65534)
try:
    threading.Thread(target=print).start()
except RuntimeError:
    pass
else:
    print("threads can be started")
    sys.exit()
dcp_rs.save(state, path + "/ckpt")
dcp_rs.save(state, path + "/later", parent=path + "/ckpt")
dcp_rs.load(into, path + "/later", verify=True)
assert torch.equal(into["w"], state["w"]) and into["value"] == (1, 2)
assert dcp_rs.verify(path + "/later").ok
print("right")
"""


@pytest.fixture
def folder():
    """A folder that every user may write to."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.parametrize(
    "code",
    [LITTLE_MEMORY, pytest.param(NO_THREADS, marks=pytest.mark.slow)],
    ids=["memory", "threads"],
)
def test_fewer_threads_do_the_work(folder, code):
    command = [sys.executable, "-c", code, str(folder)]
    done = programs.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    if "threads can be started" in done.stdout:
        pytest.skip("this system sets no limit on threads")
    assert done.stdout.split() == ["right"]
