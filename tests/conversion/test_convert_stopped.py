"""A conversion that is stopped, by Ctrl-C or a full disk, leaves nothing."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dcp_rs
import programs
from support.formats import make

SLOW = """
import signal, sys, warnings
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has background jobs ignore it
warnings.simplefilter("ignore")
import dcp_rs

def progress(done, total):
    print(done, flush=True)
    import time; time.sleep(0.2)

dcp_rs.convert(sys.argv[1], sys.argv[2], to=sys.argv[3], progress=progress, max_inflight_bytes=1 << 20)
"""


@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "torch", "safetensors"])
def test_ctrl_c_leaves_nothing(to: str, tmp_path: Path) -> None:
    make("dcp-rs", {f"w.{i}": torch.ones(4 << 20) for i in range(5)}, tmp_path / "src")
    command = [sys.executable, "-c", SLOW, str(tmp_path / "src"), str(tmp_path / "dst"), to]
    with programs.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline()  # something is written
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert {entry.name for entry in tmp_path.iterdir()} == {"src"}


@pytest.fixture
def tiny_disk(tmp_path: Path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True, check=False).returncode
    ):
        pytest.skip("no right to mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "torch", "safetensors"])
def test_a_full_disk_leaves_nothing(to: str, tiny_disk: Path, tmp_path: Path) -> None:
    make("dcp", {"w": torch.ones(1000, 500), "v": torch.ones(1000, 500)}, tmp_path / "src")
    with pytest.raises(OSError, match="No space left"):
        dcp_rs.convert(tmp_path / "src", tiny_disk / "dst", to=to)
    assert list(tiny_disk.iterdir()) == []
