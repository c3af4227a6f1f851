"""Jobs of two machines, by torchrun.

A machine is a network namespace with an address of its own, and a mount namespace in which one path
leads to a disk of its own. The machines share a folder.
"""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each job starts four processes and their launchers

RANKS = 2  # of each machine
_JOB = r"""
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_rs

root, local, last = sys.argv[1], sys.argv[2] or None, int(sys.argv[3])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


def say(what):
    # torchrun's Python is unbuffered: print would write the end of the line by itself.
    sys.stdout.write(f"rank {dist.get_rank()} {what}\n")


def state_of(step):
    rows = torch.arange(4000.0).reshape(1000, 4) + step
    return {"rows": distribute_tensor(rows, mesh, [Shard(0)], src_data_rank=None), "step": step}


more = {} if local is None else {"local": local, "copies": 1, "upload_every": 1000}
with dcp_rs.CheckpointManager(root, keep_last=3, **more) as manager:
    state = state_of(-1)
    found = manager.load(state)
    want = state_of(-1 if found is None else found)
    assert torch.equal(state["rows"].to_local(), want["rows"].to_local())
    assert state["step"] == want["step"]
    say(f"found {found}")
    for step in range((found or 0) + 1, last + 1):
        manager.save(step, state_of(step))
        say(f"saved {step}")
dist.destroy_process_group()
"""


def why_missing():
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "unshare", "mount"):
        if shutil.which(program) is None:
            return f"the program {program} is not installed"
    made = subprocess.run(
        ["ip", "netns", "add", name := f"dcp-rs-{uuid.uuid4().hex[:8]}"], check=False
    )
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return "network namespaces cannot be made" if made.returncode else None


class Machine:
    """A machine, with what a job on it needs."""

    def __init__(self, folder: Path, name: str, link: str, number: int) -> None:
        self.name, self._link, self._number = name, link, number
        self.disk = folder / f"disk{number}"
        self._job = folder / "job.py"
        self._local = folder / "local"
        self.disk.mkdir()
        self._local.mkdir(exist_ok=True)

    def start(self, machines: int, root: Path, *, local: bool, last: int) -> subprocess.Popen[str]:
        """Start its part of a job that saves up to a step. Its rank in the job is its number."""
        ranks = ["--nnodes", machines, "--node-rank", self._number, "--nproc-per-node", RANKS]
        where = ["--master-addr", "10.177.0.1", "--master-port", 29_500]
        run = [self._job, root, self._local / "run" if local else "", last]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *ranks, *where, *run]
        script = 'mount --bind "$0" "$1" && shift && exec "$@"'
        inside = ["unshare", "--mount", "sh", "-c", script, self.disk, self._local]
        command = ["ip", "netns", "exec", self.name, *inside, *torchrun]
        return subprocess.Popen(
            list(map(str, command)),
            env=os.environ | {"GLOO_SOCKET_IFNAME": self._link, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def kill(self) -> None:
        """Kill all processes on it."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.name], check=True, capture_output=True, text=True
        )
        for process in map(int, listed.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@pytest.fixture
def machines(tmp_path):
    """Two machines, with a network between them."""
    if why := why_missing():
        pytest.skip(why)
    tmp_path.joinpath("job.py").write_text(textwrap.dedent(_JOB))
    suffix = uuid.uuid4().hex[:6]
    names, links = [f"dcp-rs-{suffix}-{i}" for i in (0, 1)], [f"v{suffix}{i}" for i in (0, 1)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for number, (name, link) in enumerate(zip(names, links, strict=True)):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"10.177.0.{number + 1}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [
            Machine(tmp_path, name, link, n)
            for n, (name, link) in enumerate(zip(names, links, strict=True))
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def run(machines, root, *, local, last):
    """Run a job on machines to its end. Return what its ranks printed, sorted."""
    parts = [each.start(len(machines), root, local=local, last=last) for each in machines]
    said = [part.communicate(timeout=120) for part in parts]
    for part, (_, errors) in zip(parts, said, strict=True):
        assert part.returncode == 0, errors
    lines = [line for out, _ in said for line in out.splitlines()]
    return sorted(line for line in lines if line.startswith("rank "))


def found(step, ranks):
    return [f"rank {rank} found {step}" for rank in range(ranks)]


def test_job_goes_on_with_another_number_of_machines(machines, tmp_path):
    root = tmp_path / "shared"
    assert run(machines, root, local=False, last=2)[::3] == found(None, 4)
    assert run(machines[:1], root, local=False, last=3)[::2] == found(2, 2)
    assert run(machines, root, local=False, last=3) == found(3, 4)


def test_machine_that_is_replaced_gets_its_files_from_the_other(machines, tmp_path):
    root = tmp_path / "shared"
    run(machines, root, local=True, last=3)
    assert [path.name for path in root.glob("step-*")] == ["step-1"]
    for machine in machines:
        assert sorted(os.listdir(machine.disk / "run"))[-2:] == ["step-2", "step-3"]
    shutil.rmtree(machines[1].disk / "run")
    assert run(machines, root, local=True, last=3) == found(3, 4)
    assert (machines[1].disk / "run" / "step-3").is_dir()


def test_loss_of_a_machine_is_told_and_costs_one_step_at_most(machines, tmp_path):
    root = tmp_path / "shared"
    parts = [each.start(2, root, local=True, last=10**6) for each in machines]
    try:
        last = 0
        while last < 3:
            words = parts[0].stdout.readline().split()
            if words[2:3] == ["saved"]:
                last = max(last, int(words[3]))
            assert parts[0].poll() is None, parts[0].communicate()[1]
        machines[1].kill()
        out, errors = parts[0].communicate(timeout=120)
        assert parts[0].returncode != 0
        assert "RankLostError" in errors
        saved = max([last, *(int(line.split()[3]) for line in out.splitlines() if "saved" in line)])
    finally:
        for machine, part in zip(machines, parts, strict=True):
            machine.kill()
            part.communicate()
    shutil.rmtree(machines[1].disk / "run")
    (resumed,) = {int(line.split()[-1]) for line in run(machines, root, local=True, last=0)}
    assert resumed in (saved, saved + 1)
