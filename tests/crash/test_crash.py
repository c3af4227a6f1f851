"""Saves that are killed or fail at every step: the folder holds the old checkpoint or the new one, whole.

`make crash` does the same hundreds of times (tests/crash).
"""

import contextlib
import errno
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_rs
from crash import faults, power
from crash.folder import Folder
from crash.process import kills
from crash.states import found_number, rank_state, stray_files
from dcp_rs._core import LOCK_NAME
from dcp_rs.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    SaveInProgressError,
)
from support import files_in, run_ranks
from support.places import TESTS

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


def save(path, number):
    dcp_rs.save(rank_state(number, 0), path, no_dist=True)


@pytest.mark.timeout(900)
def test_a_killed_save_leaves_the_old_checkpoint_or_the_new(tmp_path):
    one, four = kills("--kills", "20", "--kills-of-four", "8", "--folder", tmp_path)
    assert (one["kills"], four["kills"], four["one_rank_only"]) == (20, 8, 4)
    assert one["kept_old"] > 0
    assert one["by_way"] == dict.fromkeys(Folder.ways, 4)
    assert one["children"] > 0
    assert four["by_way"] == {way: 2 for way in Folder.ways if way != "forks"}


@needs_compiler
def test_each_call_of_a_save_fails_once():
    (tally,) = faults.run("1", "1", "saves")
    assert {"open", "pwrite", "fsync", "rename", "unlink"} <= tally["calls"].keys()
    assert tally["kept_old"] + tally["became_new"] + tally["harmless"] == tally["faults"]


@needs_compiler
@pytest.mark.slow
def test_a_call_that_fails_at_any_step_of_saves_and_conversions():
    tallies = faults.run("1", "1")
    assert len(tallies) == 2 * (1 + 4)  # saves, and conversions to each format
    for tally in tallies:
        calls = tally["calls"]
        writes = calls.get("write", 0) + calls.get("pwrite", 0)
        assert min(calls["open"], calls["fsync"] - 1, writes - 2, calls["rename"]) > 0, tally
        if "dcp-rs" in tally["what"] or "save" in tally["what"]:
            assert min(calls["fallocate"], calls["flock"]) > 0, tally
        assert tally["kept_old"] + tally["became_new"] + tally["harmless"] == tally["faults"]


@needs_compiler
@pytest.mark.slow
def test_a_call_that_fails_on_one_of_four_ranks():
    for tally in faults.run("1", "4"):
        assert tally["faults"] >= 10


# --- disks that are full


def save_expecting(path, number, error):
    """Saves; returns whether it failed, with `error`."""
    try:
        save(path, number)
    except OSError as failure:
        assert failure.errno == error  # noqa: PT017
        return True
    return False


def check_after_failure(path, old):
    assert found_number(path, 1) == old
    assert stray_files(path) == []


def test_a_limit_on_the_size_of_files(ckpt):
    save(ckpt, 1)
    whole = max(file.stat().st_size for file in ckpt.iterdir())
    index = (ckpt / "index.dcprs").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for limit in (0, 1, index - 1, index, 4096, whole // 2, whole - 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            failed = save_expecting(ckpt, 3, errno.EFBIG)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert failed, limit
            check_after_failure(ckpt, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    save(ckpt, 2)
    assert found_number(ckpt, 1) == 2


@pytest.fixture
def mounted(tmp_path):
    """Mounts file systems of 16 MiB; unmounts them."""
    places = []

    def mount(kind):
        place = tmp_path / kind
        place.mkdir()
        if kind == "tmpfs":
            command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", place]
        else:
            image = tmp_path / "image"
            with image.open("wb") as file:
                file.truncate(16 << 20)
            if shutil.which("mkfs.ext4") is None:
                pytest.skip("no mkfs.ext4")
            subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", image], check=True)
            command = ["mount", "-o", "loop", image, place]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount {kind}: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", place], check=True)


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk(mounted, kind):
    place = mounted(kind)
    ckpt = place / "ckpt"
    save(ckpt, 1)
    filler = place / "filler"
    failures = 0
    page = 4096
    # From nothing left, to enough for the data, to enough for the index too.
    data = max(file.stat().st_size for file in ckpt.iterdir())
    for spare in (
        0,
        page,
        16 * page,
        data // 2,
        data - page,
        data,
        data + page,
        data + 2 * page,
        data + 64 * page,
    ):
        fill(filler, spare)
        failed = save_expecting(ckpt, 3, errno.ENOSPC)
        filler.unlink()
        if failed:
            check_after_failure(ckpt, 1)
            failures += 1
        else:
            assert found_number(ckpt, 1) == 3
            save(ckpt, 1)
    assert failures >= 4
    save(ckpt, 2)
    assert found_number(ckpt, 1) == 2


def fill(filler, spare):
    """Writes until the disk is full, but for `spare` bytes."""
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017
        file.truncate(max(0, file.tell() - spare))
        os.fsync(file.fileno())


def save_on_full(path, number, limit):
    rank = int(os.environ["RANK"])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == limit[0]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit[1], hard))
    try:
        dcp_rs.save(rank_state(number, rank), path)
    except OSError as failure:
        notes = [
            note for note in failure.__notes__ if not note.startswith("there:")
        ]  # the traceback of another rank
        return type(failure).__name__, failure.errno, notes
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return None


@pytest.mark.parametrize("victim", [0, 3])
def test_a_disk_that_is_full_for_one_rank_fails_all(ckpt, victim):
    assert run_ranks(4, save_on_full, ckpt, 1, (-1, 0)) == [None] * 4
    for limit in (0, 100_000):
        said = run_ranks(4, save_on_full, ckpt, 2, (victim, limit))
        assert said == [("OSError", errno.EFBIG, [f"raised on rank {victim}"])] * 4
        assert found_number(ckpt, 4) == 1
        assert stray_files(ckpt) == []  # what the others wrote is gone too


# --- order on the disk

SAVE_TWICE = """
import sys
sys.path.insert(0, sys.argv[1])
import dcp_rs
from crash.states import rank_state
for number in (1, 2):
    dcp_rs.save(rank_state(number, 0), sys.argv[2], no_dist=True)
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")
def test_the_order_of_system_calls(ckpt, tmp_path):
    """Data is durable before the index names it, the index before its rename, the rename before old data goes."""
    trace = tmp_path / "trace"
    calls = "pwrite64,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat"
    command = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-y",
        "-qq",
        "-e",
        f"trace={calls}",
        "-e",
        "signal=none",
        "-o",
        trace,
    ]
    done = subprocess.run(
        [*command, sys.executable, "-c", SAVE_TWICE, TESTS, ckpt],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and "ptrace" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.returncode == 0, done.stderr
    events = []
    for line in trace.read_text().splitlines():
        if (call := re.search(r"^\d+ +(\w+)\((.*)", line)) and str(ckpt) in call[2]:
            paths = re.findall(re.escape(str(ckpt)) + r"[^>\"]*", call[2])
            events.append((call[1], Path(paths[-1])))
    commits = [i for i, (call, path) in enumerate(events) if call.startswith("rename")]
    assert [events[i][1].name for i in commits] == ["index.dcprs"] * 2
    begin = 0
    for save_number, commit in enumerate(commits):
        before = events[begin:commit]
        written = {path for call, path in before if call == "pwrite64"}
        assert any(path.suffix == ".safetensors" for path in written)
        assert any(path.suffix == ".tmp" for path in written)
        for path in written:
            last_write = max(i for i, event in enumerate(before) if event == ("pwrite64", path))
            assert any(
                call in ("fsync", "fdatasync") and at == path
                for call, at in before[last_write + 1 :]
            ), f"{path.name} is not synced before the commit"
        temporary = next(i for i, (_, path) in enumerate(before) if path.suffix == ".tmp")
        assert ("fsync", ckpt) in before[:temporary], (
            "names of data files are durable before the index is written"
        )
        after = events[
            commit + 1 : commits[save_number + 1] if save_number + 1 < len(commits) else None
        ]
        assert after[0] == ("fsync", ckpt), "the rename is durable before anything else happens"
        begin = commit + 1
    removed = [i for i, (call, _) in enumerate(events) if call.startswith("unlink")]
    assert len(removed) == 1, "the data file of the first save"
    assert removed[0] > commits[1] + 1


# --- two writers, and what lies about


def contend(path):
    """Ranks 0 and 1 save, each for itself; rank 2 looks on."""
    rank = int(os.environ["RANK"])
    seen = set()
    for i in range(10):
        if rank < 2:
            dcp_rs.save(rank_state(100 * (rank + 1) + i, 0), path, no_dist=True)
        else:
            with contextlib.suppress(CheckpointReplacedError):
                seen.add(found_number(path, 1))
    return seen


def test_two_writers_leave_one_save(ckpt):
    save(ckpt, 1)
    seen = run_ranks(3, contend, ckpt)[2]
    assert found_number(ckpt, 1) in (109, 209)
    assert dcp_rs.verify(ckpt).ok
    assert seen <= {1, *range(100, 110), *range(200, 210)}
    assert seen


def test_leftovers_are_no_checkpoint(ckpt):
    ckpt.mkdir()
    save(ckpt.parent / "other", 5)
    for file in (ckpt.parent / "other").iterdir():
        shutil.copy(file, ckpt)
    index = ckpt / "index.dcprs"
    index.rename(ckpt / "index.dcprs.0123456789abcdef.tmp")
    with pytest.raises(CheckpointNotFoundError, match="did not finish"):
        dcp_rs.open(ckpt)
    with pytest.raises(CheckpointNotFoundError):
        dcp_rs.load({"common": torch.zeros(1)}, ckpt)
    (ckpt / "index.dcprs.ffffffffffffffff.tmp").write_bytes(b"half of an ind")
    next(ckpt.glob("g*.safetensors")).write_bytes(b"cut short")
    save(ckpt, 6)
    assert found_number(ckpt, 1) == 6
    assert len(stray_files(ckpt)) == 3  # not trusted, and not touched: they may be another writer's


def test_a_save_that_fails_removes_what_every_rank_wrote(ckpt):
    run_ranks(2, save_and_refuse, ckpt)
    assert files_in(ckpt) == []


def save_and_refuse(path):
    rank = int(os.environ["RANK"])
    value = torch.ones(3) if rank == 0 else torch.empty(3, device="meta")
    with pytest.raises((dcp_rs.errors.DcpRsError, CheckpointException)):
        dcp_rs.save({f"x{rank}": value}, path)


def test_a_writer_of_torch_protocol_discards_when_the_commit_fails(ckpt, monkeypatch):
    save(ckpt, 1)
    monkeypatch.setattr(
        "dcp_rs.engine.destination._core.commit_indexes",
        lambda *_, **__: (_ for _ in ()).throw(OSError(28, "disk full")),
    )
    with pytest.raises(CheckpointException):
        dcp.save(rank_state(2, 0), storage_writer=dcp_rs.RsWriter(ckpt), no_dist=True)
    check_after_failure(ckpt, 1)


def test_committed_save_is_not_discarded(ckpt):
    """The sync after the rename fails: the caller gets the error, and the new checkpoint is in place."""
    writer = dcp_rs.RsWriter(ckpt)
    dcp.save(rank_state(3, 0), storage_writer=writer, no_dist=True)
    writer.reset()
    assert found_number(ckpt, 1) == 3


def test_a_writer_that_moved_on_discards_where_it_wrote(tmp_path, monkeypatch):
    """A writer of torch's protocol that is given another path: what it wrote for a save that failed is at the first one."""
    first, second = tmp_path / "first", tmp_path / "second"
    save(first, 1)
    monkeypatch.chdir(tmp_path)
    writer = write_only(dcp_rs.RsWriter("first"))
    assert len(stray_files(first)) == 1
    writer.path = second
    monkeypatch.chdir("/")
    writer.reset()
    check_after_failure(first, 1)
    assert not second.exists()


def test_a_save_whose_writer_is_reset_meanwhile_fails_and_leaves_nothing(tmp_path):
    """The writer of a save in the background is given another path before the commit."""
    writer = dcp_rs.RsWriter(tmp_path / "first")
    begun, go_on = threading.Event(), threading.Event()
    finish = writer.finish

    def wait_and_finish(metadata, results):
        begun.set()
        assert go_on.wait(60)
        finish(metadata, results)

    writer.finish = wait_and_finish
    how = {"storage_writer": writer, "no_dist": True}
    with ThreadPoolExecutor(1) as pool:
        saved = pool.submit(dcp.save, rank_state(1, 0), **how)
        assert begun.wait(60)
        writer.reset(tmp_path / "second")
        go_on.set()
        with pytest.raises(CheckpointException) as error:
            saved.result(60)
    (failure,) = error.value.failures.values()
    assert isinstance(failure[0], SaveInProgressError)
    assert [name for name in os.listdir(tmp_path / "first") if name != LOCK_NAME] == []
    assert not (tmp_path / "second").exists()


def write_only(writer):
    """A save up to its commit, which another rank keeps from happening."""
    planner = dcp_rs.RsSavePlanner()
    planner.set_up_planner(rank_state(2, 0), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, _ = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    writer.write_data(planner.finish_plan(plan), planner).wait()
    return writer


# --- a loss of power


def check_over_another(tally):
    """The old checkpoint and the new one are both seen, and each sync that is left out is noticed."""
    assert min(tally["old"], tally["new"], tally["cleaned"], tally["saved_over"]) > 0
    assert tally["refused"] == ["data", "index", "folder"]


@needs_compiler
@pytest.mark.slow
def test_a_loss_of_power_leaves_the_old_checkpoint_or_the_new():
    tallies = power.run("16")
    assert len(tallies) == 8 + 4  # saves and the like, and conversions to each format
    for tally in tallies:
        assert tally["states"] == tally["old"] + tally["new"] >= tally["moments"]
    for tally in tallies:
        if "reuses" in tally["what"]:
            assert min(tally["old"], tally["new"]) > 0
            assert tally["refused"] == ["data", "index", "folder"]
    over = [tally for tally in tallies if "over another, " in tally["what"]]
    assert len(over) == 2
    for tally in over:
        check_over_another(tally)
