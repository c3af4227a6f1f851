"""What a file lies on: overlays, networks where opening takes its time, and indexes that are overwritten in place."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import dcp_rs
import programs

STATE = {f"w{i}": torch.arange(1 << 18) + i for i in range(8)}

#: Loads a checkpoint through an overlay that it mounts for itself; prints what went past the page
#: cache.
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


@pytest.mark.slow
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
    done = programs.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["8", "8"]), done.stderr


SLOW_OPEN = Path(__file__).parents[2] / "benches" / "workers" / "slow_open.c"

#: Loads a folder of many files, each of which is opened late, and few of which this process may
#: have open.
LATE = """
import resource, sys
import torch, dcp_rs

path, files, elements = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
got = {f"w{i}": torch.zeros(elements) for i in range(files)}
dcp_rs.load(got, path)
assert all(torch.equal(got[f"w{i}"], torch.arange(float(elements)) + i) for i in range(files))
"""


@pytest.mark.parametrize("elements", [1 << 14, 1 << 9], ids=["mapped", "read"])
@pytest.mark.parametrize("late", ["2000", "0"])
@pytest.mark.slow
def test_many_files_that_open_late(tmp_path, late, elements):
    """More than are kept open where none is late; of these, fewer than there are."""
    files = 150
    named = {f"w{i}": f"{i:05}.safetensors" for i in range(files)}
    for i, (name, file) in enumerate(named.items()):
        save_file({name: torch.arange(float(elements)) + i}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": named})
    )
    library = tmp_path / "slow_open.so"
    try:
        subprocess.run(
            ["cc", "-O1", "-shared", "-fPIC", "-o", library, SLOW_OPEN, "-ldl"], check=True
        )
    except FileNotFoundError:
        pytest.skip("there is no C compiler")
    command = [sys.executable, "-c", LATE, tmp_path, str(files), str(elements)]
    env = {**os.environ, "LD_PRELOAD": str(library), "DCP_RS_BENCH_OPEN_US": late}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
