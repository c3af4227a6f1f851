"""A merge that is killed, or stopped by Ctrl-C, leaves nothing at its destination; and its memory is bounded."""

import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

import dcp_rs
import programs
from support.formats import make
from support.places import TESTS

STOPPED = """
import os, signal, sys, warnings
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has background jobs ignore it
warnings.simplefilter("ignore")
import dcp_rs

number, call, out, to, overwrite, *inputs = sys.argv[1:]
calls = 0

def progress(done, total):
    global calls
    calls += 1
    if calls == int(call):
        os.kill(os.getpid(), int(number))

dcp_rs.merge(
    inputs, out, to=to, progress=progress, max_inflight_bytes=1 << 20, fsync=False, overwrite=overwrite == "yes"
)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Two checkpoints of 20 MB, which are merged in several slabs."""
    folder = tmp_path_factory.mktemp("inputs")
    paths = []
    for number in range(2):
        state = {
            f"w.{i}": torch.full((1 << 20,), float(i + number), dtype=torch.bfloat16)
            for i in range(10)
        }
        paths.append(make("dcp-rs", state, folder / str(number)))
    yield paths
    shutil.rmtree(folder)


def stop(
    inputs: list[Path],
    out: Path,
    *,
    by: int = signal.SIGKILL,
    call: int = 1,
    to: str,
    overwrite: bool = False,
):
    arguments = [
        str(int(by)),
        str(call),
        str(out),
        to,
        "yes" if overwrite else "no",
        *map(str, inputs),
    ]
    return programs.run(
        [sys.executable, "-c", STOPPED, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("to", ["dcp-rs", "safetensors"])
def test_a_killed_merge_leaves_nothing_at_its_destination(
    to: str, inputs: list[Path], tmp_path: Path
) -> None:
    done = stop(inputs, tmp_path / "out", to=to)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "out").exists()
    dcp_rs.merge(inputs, tmp_path / "out", to=to)
    with dcp_rs.open(tmp_path / "out") as ckpt:
        assert float(ckpt["w.3"][0]) == 3.5


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "torch", "safetensors"])
def test_killed_at_any_call_the_destination_is_what_it_was(
    to: str, overwrite: bool, inputs: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for call in range(1, 20):
        if overwrite and not out.exists():
            dcp_rs.convert(inputs[0], out, to=to)
        done = stop(inputs, out, call=call, to=to, overwrite=overwrite)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert out.exists() == overwrite
        if overwrite:
            with dcp_rs.open(out) as ckpt:
                assert float(ckpt["w.3"][0]) == 3.0
    else:
        pytest.fail("it was never completed")
    assert call > 2
    with dcp_rs.open(out) as ckpt:
        assert float(ckpt["w.3"][0]) == 3.5


def test_ctrl_c_leaves_nothing_at_all(inputs: list[Path], tmp_path: Path) -> None:
    done = stop(inputs, tmp_path / "out", by=signal.SIGINT, to="dcp-rs")
    assert "KeyboardInterrupt" in done.stderr
    assert list(tmp_path.iterdir()) == []


GROWTH = """
import sys, warnings
warnings.simplefilter("ignore")
tests, out, *inputs = sys.argv[1:]
sys.path.insert(0, tests)
import dcp_rs
from support.memory import Growth

dcp_rs.merge(inputs, out, include="small")  # what is loaded once is not the merge's
with Growth() as grown:
    dcp_rs.merge(inputs, out, fsync=False, overwrite=True)
print(grown.nbytes)
"""


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    paths = []
    for number in range(3):
        state = {
            f"w.{i}": torch.full((16 << 20,), float(i), dtype=torch.bfloat16) for i in range(8)
        }
        paths.append(make("dcp-rs", state | {"small": torch.ones(4)}, tmp_path / str(number)))
    command = [sys.executable, "-c", GROWTH, *map(str, (TESTS, tmp_path / "out", *paths))]
    done = programs.run(command, check=True, capture_output=True, text=True, timeout=250)
    assert int(done.stdout) < 120e6
