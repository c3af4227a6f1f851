"""Who waits for whom: the lock of a folder, signals, forks, and what a panic becomes."""

import errno
import fcntl
import logging
import mmap
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

import dcp_rs
import programs
from crash.states import found_number, rank_state
from dcp_rs import _core
from dcp_rs.errors import CheckpointExistsError, DcpRsError, InternalError, PlanError
from support import files_in
from support.both import save_stock
from support.forged import whole_item
from support.places import ROOT, TESTS
from support.slabs import batch_of

RUST = ROOT / "rust" / "py" / "src"


def save(path, number):
    dcp_rs.save(rank_state(number, 0), path, no_dist=True)


@contextmanager
def locked(folder):
    """As if another process was committing."""
    with (folder / _core.LOCK_NAME).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def python(code, *arguments, **options):
    """A process of its own that has the tests' modules."""
    head = "import os, signal, sys, threading, time\nsys.path.insert(0, sys.argv[1])\nimport torch, dcp_rs\nfrom crash.states import rank_state\n"
    return programs.Popen(
        [sys.executable, "-c", head + code, TESTS, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process, seconds=120):
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"it hangs; it said {process.communicate()}")


# --- waiting for the lock

SIGNALLED = """
signal.signal(signal.SIGALRM, lambda *_: os.write(1, b"."))
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
dcp_rs.save(rank_state(2, 0), sys.argv[2], no_dist=True)
signal.setitimer(signal.ITIMER_REAL, 0)
"""


def wait_for_data(folder, process, old):
    """Until other data files are there than the old ones, and then signals are heard."""
    while process.poll() is None and set(folder.glob("g*")) <= old:
        pass
    assert set(folder.glob("g*")) - old, process.stderr.read()
    process.stdout.read(100)


def test_a_commit_waits_for_another_through_signals(ckpt):
    save(ckpt, 1)
    with locked(ckpt):
        # Also a save waits to begin while another commits or removes; let this one be past that.
        process = python(SIGNALLED, ckpt)
        process.stdout.read(100)
        assert process.poll() is None
        old = set(ckpt.glob("g*"))
        assert len(old) == 1
    wait_for_data(ckpt, process, old)
    finish(process)
    assert found_number(ckpt, 1) == 2


COMMIT_LATER = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
from torch.distributed import checkpoint as dcp
class Told(dcp_rs.RsWriter):
    def finish(self, metadata, results):
        os.write(1, b"written")
        sys.stdin.readline()
        if len(sys.argv) > 3:
            signal.signal(signal.SIGALRM, lambda *_: os.write(1, b"."))
            signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        os.write(1, b"go")
        super().finish(metadata, results)
        signal.setitimer(signal.ITIMER_REAL, 0)
dcp.save(rank_state(2, 0), storage_writer=Told(sys.argv[2]), no_dist=True)
"""


@contextmanager
def about_to_commit(folder, *arguments):
    """A process whose save waits for the lock of the folder, which is held."""
    process = python(COMMIT_LATER, folder, *arguments, stdin=subprocess.PIPE)
    assert process.stdout.read(7) == "written", process.stderr.read()
    with locked(folder):
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.read(2) == "go"
        while not has_open(process, folder / _core.LOCK_NAME):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.001)
        yield process


def has_open(process, path):
    """Whether the process has the file open: it does from where it begins to wait for the lock."""
    opened = []
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            opened.append(descriptor.readlink())
    return path.resolve() in opened


def test_a_signal_does_not_make_the_lock_ours(ckpt):
    """A handler that returns interrupts a system call that waits."""
    save(ckpt, 1)
    with about_to_commit(ckpt, "ticking") as process:
        assert process.stdout.read(100) == "." * 100
        assert process.poll() is None
        assert found_number(ckpt, 1) == 1
    finish(process)
    assert process.returncode == 0
    assert found_number(ckpt, 1) == 2


def test_ctrl_c_ends_the_wait_for_the_lock(ckpt):
    save(ckpt, 1)
    with about_to_commit(ckpt) as process:
        process.send_signal(signal.SIGINT)
        # It has data to remove, and cannot either: it says so and ends.
        _, said = finish(process)
        assert "KeyboardInterrupt" in said
        assert "dcp_rs.clean" in said
    assert process.returncode != 0
    assert found_number(ckpt, 1) == 1
    assert len(dcp_rs.clean(ckpt, yes=True).removed) == 1
    assert len(files_in(ckpt)) == 2


# --- forks in the midst of a commit

FORKING = """
def child():
    while True:
        signal.pause()
saving = threading.Event()
def save_on():
    number = 2
    while not done.is_set():
        dcp_rs.save(rank_state(number, 0), sys.argv[2], no_dist=True, fsync=False)
        number += 1
        saving.set()
done = threading.Event()
thread = threading.Thread(target=save_on)
thread.start()
saving.wait()
for _ in range(40):
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(0)
    os.write(1, b"%d\\n" % pid)
    time.sleep(0.003)
if sys.argv[3] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
done.set()
thread.join()
for number in range(1000, 1003):
    dcp_rs.save(rank_state(number, 0), sys.argv[2], no_dist=True)
os.write(1, b"saved\\n")
os._exit(0)
"""


@pytest.mark.parametrize("how", ["goes on", "killed"])
def test_a_forked_child_has_no_part_in_a_commit(ckpt, how):
    """Workers that load data are forked while another thread saves, and live longer than the save; or than the process."""
    save(ckpt, 1)
    process = python(FORKING, ckpt, how)
    children = []
    try:
        for line in process.stdout:
            if line == "saved\n":
                break
            children.append(int(line))
            if len(children) == 40 and how == "killed":
                break
        process.wait(120)
        assert len(children) == 40
        if how == "goes on":
            assert found_number(ckpt, 1) == 1002
        # Neither the lock nor a claim is theirs.
        save(ckpt, 2000)
        assert found_number(ckpt, 1) == 2000
        assert dcp_rs.clean(ckpt, yes=True).kept == []
        assert len(files_in(ckpt)) == 2
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        process.kill()
        process.communicate()


def in_child(function):
    """What a forked process that runs `function` ended with; it is given a minute."""
    pid = os.fork()
    if pid == 0:
        code = 1
        signal.alarm(60)
        try:
            function()
            code = 0
        except BaseException as error:  # noqa: BLE001 - of the child, which ends here
            os.write(2, repr(error).encode())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_does_not_remove_what_its_parent_wrote(ckpt):
    save(ckpt, 1)
    writer = dcp_rs.RsWriter(ckpt)
    planner = dcp_rs.RsSavePlanner()
    planner.set_up_planner(rank_state(2, 0), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, _ = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    writer.write_data(planner.finish_plan(plan), planner).wait()
    before = files_in(ckpt)
    assert len(before) == 3
    assert in_child(writer.__del__) == 0
    assert files_in(ckpt) == before
    assert [kept.verdict for kept in dcp_rs.clean(ckpt).kept] == ["in use"]
    writer.reset()
    assert len(files_in(ckpt)) == 2


def test_a_child_does_not_wait_for_the_threads_of_a_load(ckpt):
    save(ckpt, 1)
    index = _core.Index.open(str(ckpt), None, False)
    batch = batch_of(index)
    reader = _core.SlabReader.create(
        batch, batch.slab_regions(0), 1 << 16, sort=False, io="buffered", threads=1
    )
    assert reader.batch_count > 2
    with mmap.mmap(-1, 1 << 16) as memory:
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        reader.start([(address, 1 << 16)], memory, 1)
        _, slab = reader.next()

        def child():
            with pytest.raises(PlanError, match="begun before a fork"):
                reader.next()
            reader.release(slab)
            assert reader.stats().read == 0
            reader.close()

        assert in_child(child) == 0
        reader.close()


def test_a_child_cannot_write_to_the_save_of_its_parent(ckpt):
    tensor = torch.ones(10)
    item = whole_item("w", tensor)
    options = {"threads": 1, "fsync": False, "io": "buffered", "max_inflight_bytes": 1 << 20}
    made = _core.Save.create(
        str(ckpt), [item], save_id=bytes(16), generation=1, token=1, rank=0, world_size=1, **options
    )

    def child():
        for call in (lambda: made.write([_core.Part(0, 0, tensor.data_ptr(), 40)]), made.finish):
            with pytest.raises(PlanError, match="begun before a fork"):
                call()
        made.abort()

    assert in_child(child) == 0
    made.write([_core.Part(0, 0, tensor.data_ptr(), 40)])
    made.finish()


# --- what runs Python holds no lock


def test_a_plan_is_not_locked_while_tensors_are_looked_at():
    """What looks like a tensor may run Python, which may come back to the plan, on this thread or another."""
    plan = _core.SavePlan()

    class Looking:
        @property
        def __dict__(self):
            assert len(plan) == 0
            thread = threading.Thread(target=len, args=(plan,), daemon=True)
            thread.start()
            thread.join(30)
            assert not thread.is_alive()
            seen.append(self)
            return {"marked": True}

    seen = []
    done = threading.Thread(
        target=plan.add_plain, args=(["a"], None, [Looking()], (Looking,), {}), daemon=True
    )
    done.start()
    done.join(60)
    assert not done.is_alive(), "it waits for itself"
    assert len(seen) == 1


# --- panics


@pytest.mark.parametrize("on_thread", [False, True])
def test_a_panic_is_an_error_that_pickles(on_thread):
    with pytest.raises(
        InternalError, match=r"please report it .*: it broke \(at rust/py/src/panics.rs:\d+"
    ) as raised:
        _core._panic("it broke", on_thread)
    assert isinstance(raised.value, DcpRsError)
    copy = pickle.loads(pickle.dumps(raised.value))
    assert type(copy) is InternalError
    assert str(copy) == str(raised.value)


@pytest.mark.skipif(not RUST.is_dir(), reason="without the sources")
def test_all_that_python_calls_is_guarded():
    for file in RUST.glob("*.rs"):
        text = file.read_text()
        for found in re.finditer(r"((?:#\[.*\]\n)*)#\[py(methods|function)\]", text):
            assert "#[guarded]" in found[1], (
                f"{file.name}: {text[found.start() : found.start() + 200]}"
            )


# --- what is told, and what is left


def test_a_wait_that_lasts_is_logged(ckpt, caplog):
    """A save waited for another process for ten minutes, and said nothing."""
    save(ckpt, 1)
    got = []
    with locked(ckpt), caplog.at_level(logging.WARNING, logger="dcp_rs"):
        waiting = threading.Thread(
            target=lambda: got.append(_core.FolderLock(str(ckpt), notice=0.02))
        )
        waiting.start()
        while not caplog.records:
            assert waiting.is_alive()
            time.sleep(0.01)
    waiting.join(60)
    assert len(got) == 1
    (record,) = caplog.records  # the next is due in a minute
    assert record.levelname == "WARNING"
    assert f"{ckpt / _core.LOCK_NAME}: still waiting: another process" in record.getMessage()


def names_in(folder):
    return {file.name for file in folder.iterdir()}


@pytest.mark.parametrize("kind", ["stock", "hugging face"])
def test_no_lock_is_left_in_a_folder_of_others(tmp_path, kind):
    """It went along in uploads of models."""
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    if kind == "stock":
        save_stock({"w": torch.ones(3)}, theirs)
    else:
        dcp_rs.save({"w": torch.ones(3)}, tmp_path / "own", no_dist=True)
        dcp_rs.convert(tmp_path / "own", theirs, to="safetensors")
    names = names_in(theirs)
    dcp_rs.index(theirs, out=out)
    assert names_in(theirs) == names
    assert names_in(out) == {"index.dcprs"}
    dcp_rs.clean(theirs, yes=True)
    assert names_in(theirs) == names
    dcp_rs.index(theirs)
    with pytest.raises(CheckpointExistsError):
        dcp_rs.index(theirs)
    dcp_rs.index(theirs, overwrite=True)
    assert names_in(theirs) == {*names, "index.dcprs"}


def test_the_lock_of_a_save_stays_while_its_folder_is_cleaned(ckpt):
    save(ckpt, 1)
    dcp_rs.clean(ckpt, yes=True)
    assert (ckpt / _core.LOCK_NAME).exists()


# --- a disk that is full


def test_a_lock_that_cannot_be_made_is_an_error(ckpt):
    save(ckpt, 1)
    lock = ckpt / _core.LOCK_NAME
    lock.unlink()
    lock.symlink_to("elsewhere")
    with pytest.raises(OSError, match="open") as raised:
        save(ckpt, 2)
    assert raised.value.errno == errno.ELOOP
    assert found_number(ckpt, 1) == 1
    assert not (ckpt / "elsewhere").exists()
