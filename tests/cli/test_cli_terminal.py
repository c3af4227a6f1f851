"""What the command line shows on a terminal, as against what a pipe gets of it."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_rs.cli import output
from support.both import save_rs
from support.commands import COMMAND, in_a_process
from support.terminal import shown_on_a_terminal


@pytest.mark.slow
def test_no_escapes_when_piped(world: Path) -> None:
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS")
    }
    for arguments in (
        ["--help"],
        ["convert", "--help"],
        ["ls", world / "ckpt"],
        ["inspect", world / "ckpt"],
        ["inspect", world / "ckpt", "model.embedding.weight"],
        ["verify", world / "ckpt"],
        ["ls", "nowhere"],
    ):
        done = in_a_process(*arguments, env=environment)
        assert "\x1b" not in done.stdout + done.stderr, arguments
        assert "\r" not in done.stdout + done.stderr, arguments


def test_a_terminal_gets_colours_and_names_no_commands(world: Path, tmp_path: Path) -> None:
    save_rs({"evil\x1b[31mred\x07": torch.ones(3), "line\nbreak": torch.ones(3)}, tmp_path / "ckpt")
    for path, name in (
        (world / "ckpt", "model.embedding.weight"),
        (tmp_path / "ckpt", "evil\x1b[31mred\x07"),
    ):
        shown = on_a_terminal("ls", path)
        assert "\x1b[" in shown
        assert "\x1b[31mred" not in shown
        assert "\x07" not in shown
        assert r"evil\x1b[31mred\x07" in shown or path != tmp_path / "ckpt"
        assert "\x1b[31mred" not in on_a_terminal("inspect", path, name)


def on_a_terminal(*arguments: Any) -> str:
    return shown_on_a_terminal([*COMMAND, *map(str, arguments)], TERM="xterm-256color", NO_COLOR="")


def test_80_columns(world: Path, dcp_rs_cli) -> None:
    for arguments in (
        ["inspect", world / "ckpt"],
        ["ls", world / "ckpt"],
        ["inspect", world / "ckpt", "buffers.0"],
    ):
        _, out, _ = dcp_rs_cli(*arguments)
        long = [
            line
            for line in out.splitlines()
            if len(line) > 80 and ".safetensors" not in line and str(world) not in line
        ]
        assert not long


def status_into_true(*arguments: Any) -> tuple[int, str]:
    """The status of a command whose reader has had enough at once, and its errors."""
    line = " ".join(map(str, [*COMMAND, *arguments]))
    script = f"{line} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr


def test_head_changes_no_status(world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "ckpt", tmp_path / "damaged")
    next((tmp_path / "damaged").glob("*.safetensors")).unlink()
    for command, status in (
        (["ls", world / "ckpt"], 0),
        (["ls", world / "ckpt", "--json"], 0),
        (["--help"], 0),
        (["verify", tmp_path / "damaged"], 1),
    ):
        assert status_into_true(*command) == (status, ""), command


def by_shell(*words: Any) -> tuple[int, str]:
    """The status of a command with redirections, and its errors."""
    line = " ".join(map(str, [*COMMAND, *words]))
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.slow
def test_streams_that_are_closed_change_no_status(world: Path) -> None:
    """Without standard output there was an AttributeError; without standard error a failure had the status of a finding."""
    assert by_shell("ls", world / "ckpt", ">&-") == (0, "")
    assert by_shell("verify", world / "ckpt", "<&-", ">&-", "2>&-") == (0, "")
    assert by_shell("diff", world / "ckpt", world / "hf", ">&-") == (1, "")
    assert by_shell("diff", world / "nowhere", world / "ckpt", "2>&-") == (2, "")
    assert by_shell("ls", world / "nowhere", "--json", ">&-", "2>&-") == (2, "")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="nothing tells what is open")
def test_descriptors_that_are_closed_are_no_data_files(world: Path, tmp_path: Path) -> None:
    """The next files that were opened had the numbers of the standard streams."""
    script = "import os; from dcp_rs.cli.output import prepare_streams; prepare_streams(); os.open('/', os.O_RDONLY); "
    script += (
        "print(*(os.readlink(f'/proc/self/fd/{fd}') for fd in range(4)), file=open('seen', 'w'))"
    )
    python = COMMAND[0]
    line = f'{python} -c "$SCRIPT" <&- >&- 2>&-'
    environment = os.environ | {"SCRIPT": script}
    subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, timeout=60, check=True)
    seen = (tmp_path / "seen").read_text().split()
    assert seen[:3] == [os.devnull] * 3


@pytest.mark.slow
def test_errors_that_nobody_reads_change_no_status(world: Path, tmp_path: Path) -> None:
    """That they could not be written had the status of a finding, and a warning ended the command."""
    shutil.copytree(world / "ckpt", tmp_path / "two")
    (tmp_path / "two" / ".metadata").touch()  # of which a warning says that it is there, too
    there = [">/dev/full"] if Path("/dev/full").exists() else []
    for words, status in ((["diff", "nowhere", world / "ckpt"], 2), (["ls", tmp_path / "two"], 0)):
        assert by_shell(*words, "2>&1 | true; exit ${PIPESTATUS[0]}") == (status, "")
        assert by_shell(*words, "2>&1 >&- | true; exit ${PIPESTATUS[0]}") == (status, "")
        for full in there:
            assert by_shell(*words, f"2{full}") == (status, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [["ls"], ["ls", "--json"], ["--help"]], ids=" ".join)
def test_a_full_disk_is_an_error_of_one_line(world: Path, arguments: list[str]) -> None:
    """The status was 120, and a traceback came after the line."""
    words = [*arguments, world / "ckpt"] if arguments[0] == "ls" else arguments
    assert by_shell(*words, ">/dev/full") == (2, "dcp-rs: No space left on device\n")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9994, "9.99 kB"),
        (9995, "10.0 kB"),
        (99949, "99.9 kB"),
        (999499, "999 kB"),
        (999500, "1.00 MB"),
        (2280000000, "2.28 GB"),
        (10**16, "10000 TB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert output.size(nbytes) == text
