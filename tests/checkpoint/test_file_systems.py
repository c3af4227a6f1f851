"""What a file lies on: overlays, and indexes that are overwritten in place."""

import shutil
import subprocess
import sys

import pytest
import torch

import dcp_rs

STATE = {f"w{i}": torch.arange(1 << 18) + i for i in range(8)}

#: Loads a checkpoint through an overlay that it mounts for itself; prints what went past the page cache.
THROUGH_AN_OVERLAY = """
import os, subprocess, sys
from pathlib import Path
import torch, dcp_rs

folder = Path(sys.argv[1])
for name in ("upper", "work", "seen"):
    (folder / name).mkdir()
options = f"lowerdir={folder / 'lower'},upperdir={folder / 'upper'},workdir={folder / 'work'}"
if subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, folder / "seen"], capture_output=True).returncode:
    sys.exit(77)
got = {f"w{i}": torch.zeros(1 << 18, dtype=torch.float64) for i in range(8)}


def load_warm():
    for file in (folder / "lower" / "ckpt").iterdir():
        file.read_bytes()
    return dcp_rs.load(got, folder / "seen" / "ckpt").bytes_direct  # of what is cast it is counted


# More than once, as some machines take memory back within moments.
print(min(load_warm() for _ in range(3)))
assert all(torch.equal(got[f"w{i}"], torch.arange(1 << 18, dtype=torch.float64) + i) for i in range(8))
"""


def bytes_past_the_cache(folder):
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("there is no unshare")
    command = [unshare, "--mount", sys.executable, "-c", THROUGH_AN_OVERLAY, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("an overlay cannot be mounted here")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_warm_file_on_an_overlay_is_read_from_memory(tmp_path):
    dcp_rs.save(STATE, tmp_path / "lower" / "ckpt")
    assert bytes_past_the_cache(tmp_path) == 0


#: Opens a checkpoint, has its index cut short in place, and goes on to read from it.
CUT_SHORT = """
import os, sys
import torch, dcp_rs

path = sys.argv[1]
with dcp_rs.open(path) as checkpoint:
    os.truncate(os.path.join(path, "index.dcprs"), 0)
    print(len(checkpoint), int(checkpoint["w3"][5]))
"""


def test_an_index_that_is_cut_short_in_place_does_not_end_the_process(tmp_path):
    dcp_rs.save(STATE, tmp_path / "ckpt")
    command = [sys.executable, "-c", CUT_SHORT, tmp_path / "ckpt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["8", "8"]), done.stderr
