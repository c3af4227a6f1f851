"""Readers and writers at the same time: threads, processes, forks, signals."""

import contextlib
import itertools
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_rs
from crash.states import found_number, rank_state
from dcp_rs import RsReader, _core
from dcp_rs.errors import CheckpointReplacedError
from support import run_ranks
from support.indexes import whole_item
from support.places import TESTS


def save(path, number):
    dcp_rs.save(rank_state(number, 0), path, no_dist=True, fsync=False)


def template():
    state = rank_state(0, 0)
    return {key: torch.zeros_like(v) if isinstance(v, torch.Tensor) else dict.fromkeys(v) for key, v in state.items()}


def check_loaded(got):
    """Returns which save it is, all of it."""
    number = int(got["common"][0])
    for key, value in rank_state(number, 0).items():
        assert torch.equal(got[key], value) if isinstance(value, torch.Tensor) else got[key] == value, key
    return number


# --- a checkpoint that is replaced while it is read --------------------------------------------------


def test_a_reader_whose_files_are_gone_says_so(ckpt):
    save(ckpt, 2)
    checkpoint = dcp_rs.open(ckpt)
    reader = RsReader(ckpt)
    metadata = reader.read_metadata()
    save(ckpt, 4)
    with pytest.raises(CheckpointReplacedError, match="replaced by another save") as raised:
        checkpoint["common"]
    assert raised.value.path == str(ckpt / "index.dcprs")
    assert type(pickle.loads(pickle.dumps(raised.value))) is CheckpointReplacedError
    with pytest.raises(CheckpointReplacedError):
        checkpoint.get_slice("common")[:3]
    with pytest.raises(CheckpointReplacedError):
        metadata.state_dict_metadata.index.verify(threads=1)
    assert found_number(ckpt, 1) == 4  # opened again


class Replacing(dcp_rs.RsLoadPlanner):
    """Lets another save be committed at some step of a load, ``times`` times."""

    def __init__(self, path, step, times):
        super().__init__()
        self.path, self.step, self.times, self.number = path, step, times, 4

    def maybe(self, step):
        if step == self.step and self.times:
            self.times -= 1
            save(self.path, self.number)
            self.number += 2

    def create_local_plan(self):
        self.maybe("before the plan")
        plan = super().create_local_plan()
        self.maybe("after the plan")
        return plan

    def set_up_planner(self, *args, **kwargs):
        super().set_up_planner(*args, **kwargs)
        self.maybe("before the plan")


@pytest.mark.parametrize("step", ["before the plan", "after the plan"])
def test_a_load_that_is_overtaken_begins_again(ckpt, step):
    save(ckpt, 2)
    planner = Replacing(ckpt, step, 3)
    got = template()
    dcp_rs.load_state_dict(got, RsReader(ckpt), no_dist=True, planner=planner)
    assert check_loaded(got) == planner.number - 2
    assert planner.times == 0
    got = template()
    dcp_rs.load(got, ckpt, no_dist=True, planner=Replacing(ckpt, step, 1))
    check_loaded(got)


def test_a_load_that_is_always_overtaken_gives_up(ckpt):
    save(ckpt, 2)
    with pytest.raises(CheckpointReplacedError):
        dcp_rs.load(template(), ckpt, no_dist=True, planner=Replacing(ckpt, "after the plan", 1000))


def test_the_protocol_of_torch_reports_it(ckpt):
    save(ckpt, 2)
    with pytest.raises(CheckpointException) as raised:
        dcp.load(template(), storage_reader=RsReader(ckpt), no_dist=True, planner=Replacing(ckpt, "after the plan", 1))
    assert type(raised.value.failures[0][0]) is CheckpointReplacedError


class OpenedBefore(RsReader):
    """On rank 1, opens what there was before another save was committed."""

    def read_metadata(self, *args, **kwargs):
        metadata = super().read_metadata(*args, **kwargs)
        if dist.get_rank() == 0 and not getattr(self, "late", False):
            self.late = True
            dist.barrier()  # rank 1 has opened the old one
            save(self.path, 4)
            metadata = super().read_metadata(*args, **kwargs)
        elif not getattr(self, "late", False):
            self.late = True
            dist.barrier()
        return metadata


def load_across(path):
    got = template()
    # The files of the old one stay: nothing but the ids says that there are two.
    kept = [os.open(file, os.O_RDONLY) for file in path.glob("g*")] if dist.get_rank() == 0 else []
    dist.barrier()
    reader = OpenedBefore(path)
    dcp_rs.load_state_dict(got, reader)
    for fd in kept:
        os.close(fd)
    return check_loaded(got)


def test_ranks_that_opened_two_saves_are_noticed(ckpt):
    save(ckpt, 2)
    assert run_ranks(2, load_across, ckpt) == [4, 4]


def test_plans_of_two_saves_are_refused(tmp_path):
    plans = []
    for name in ("a", "b"):
        save(tmp_path / name, 2)
        reader = RsReader(tmp_path / name)
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(dcp.LoadPlan([])))
    joined = reader.prepare_global_plan(plans[:1] * 3)
    assert [plan.storage_data.save_id for plan in joined] == [plans[0].storage_data.save_id] * 3
    assert [plan.storage_data.ranks for plan in joined] == [3, 3, 3]
    with pytest.raises(CheckpointReplacedError):
        reader.prepare_global_plan(plans)


def test_rank_local_saves_replaced_by_a_whole_one(ckpt):
    save(ckpt, 2)
    (ckpt / "index.dcprs").rename(ckpt / "__0.index.dcprs")
    index = _core.Index.open(str(ckpt), 0, False)
    save(ckpt, 4)
    with pytest.raises(CheckpointReplacedError):
        index.check_files([0])


def read_or_write(path, seconds):
    """Rank 0 saves; the others load, in two threads each. Returns how many loads each saw of how many saves."""
    end = time.monotonic() + seconds
    if dist.get_rank() == 0:
        number = 2
        while time.monotonic() < end:
            save(path, number := number + 1)
        return number
    seen = []

    def load_on():
        while time.monotonic() < end:
            got = template()
            # Every save has another shape than the one before it, of which a template has one.
            with contextlib.suppress(dcp_rs.errors.PlanError, CheckpointReplacedError):
                dcp_rs.load(got, path, no_dist=True)
                seen.append(check_loaded(got))
            with contextlib.suppress(CheckpointReplacedError):
                seen.append(found_number(path, 1))

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(load_on) for _ in range(2)]:
            future.result()
    assert seen
    return len(set(seen))


def test_processes_and_threads_read_while_another_overwrites(ckpt):
    save(ckpt, 2)
    saves, *readers = run_ranks(4, read_or_write, ckpt, 3)
    assert saves > 3
    assert all(readers)


# --- one reader, many threads ------------------------------------------------------------------------


def test_one_checkpoint_from_many_threads(ckpt):
    save(ckpt, 3)
    checkpoint = dcp_rs.open(ckpt)
    want = rank_state(3, 0)

    def look(i):
        name = ["common", "of.0.large", "of.0.odd_length"][i % 3]
        assert torch.equal(checkpoint[name], want[name])
        assert torch.equal(checkpoint.get_slice(name)[5:500], want[name][5:500])
        assert checkpoint["of.0.value.number"] == 3

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(look, range(200)))


def test_one_reader_from_many_threads(tmp_path):
    """Each thread's loads are its own; the path is shared."""
    save(tmp_path / "ckpt", 3)
    reader = RsReader(tmp_path / "ckpt")

    def load(_):
        got = rank_state(3, 0)
        for value in got.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        dcp.load(got, storage_reader=reader, no_dist=True)
        return check_loaded(got)

    with ThreadPoolExecutor(6) as threads:
        assert set(threads.map(load, range(60))) == {3}


def test_the_types_of_the_extension_are_frozen(ckpt):
    save(ckpt, 3)
    index = _core.Index.open(str(ckpt), None, False)
    for instance in (index, index.map_file(0)):
        with pytest.raises(AttributeError):
            instance.anything = 1


def test_two_threads_of_one_save_do_not_wait_for_ever(ckpt):
    """The second waits for the first's lock without the GIL, which the first needs now and then."""
    data = torch.ones(32 << 20, dtype=torch.uint8)
    items = [whole_item(f"t{i}", data) for i in range(4)]
    options = {"threads": 1, "fsync": True, "io": "auto", "max_inflight_bytes": 1 << 20}
    made = _core.Save.create(
        str(ckpt), items, save_id=bytes(16), generation=1, token=1, rank=0, world_size=1, **options
    )
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda i: made.write([_core.Part(i, 0, data.data_ptr(), data.nbytes)]), range(4)))
    made.finish()


# --- fork ---------------------------------------------------------------------------------------------


def in_child(function):
    """The exit code of a forked process that runs `function`."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 60
    while not (done := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail("the forked process hangs")
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(done[1])


def read_with_threads(index):
    """All chunks. Nothing of torch: its own threads (OpenMP's) do not survive a fork."""
    assert index.verify(threads=3)[0] == []
    return index.read_bytes(
        list(range(index.chunk_count)), io="buffered", threads=3, verify=True, max_inflight_bytes=1 << 20
    )


def test_a_fork_after_an_open(ckpt):
    save(ckpt, 3)
    index = _core.Index.open(str(ckpt), None, False)
    mapping = memoryview(index.map_file(0))
    want, before = read_with_threads(index), bytes(mapping)

    def child():
        assert read_with_threads(index) == want
        assert bytes(mapping) == before
        mapping[:] = bytes(len(mapping))  # private: the parent's stays
        assert read_with_threads(_core.Index.open(str(ckpt), None, False)) == want

    for _ in range(5):
        assert in_child(child) == 0
    assert bytes(mapping) == before


def test_forks_during_loads_of_other_threads(ckpt):
    save(ckpt, 3)
    index = _core.Index.open(str(ckpt), None, False)
    want = read_with_threads(index)
    stop = threading.Event()

    def load_on():
        while not stop.is_set():
            assert read_with_threads(index) == want

    def child():
        assert read_with_threads(index) == want
        assert read_with_threads(_core.Index.open(str(ckpt), None, False)) == want

    threads = [threading.Thread(target=load_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(30):
            time.sleep(0.003)
            assert in_child(child) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_forked_child_leaves_the_save_of_its_parent_alone(ckpt):
    """A child that lets go of its copy of a save that is going on must not remove the files."""
    tensor = torch.ones(10)
    item = whole_item("w", tensor)
    options = {"threads": 1, "fsync": False, "io": "buffered", "max_inflight_bytes": 1 << 20}
    made = [
        _core.Save.create(str(ckpt), [item], save_id=bytes(16), generation=1, token=1, rank=0, world_size=1, **options)
    ]
    made[0].write([_core.Part(0, 0, tensor.data_ptr(), 40)])
    assert in_child(made.clear) == 0
    assert len(list(ckpt.glob("g*"))) == 1
    made[0].finish()


# --- Ctrl-C ---------------------------------------------------------------------------------------------

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


def test_other_threads_run_during_a_load(tmp_path):
    """The GIL is free: a thread that only counts keeps counting."""
    path = tmp_path / "ckpt"
    dcp_rs.save({"w": torch.ones(256 << 20, dtype=torch.uint8)}, path, no_dist=True, fsync=False)
    target = torch.zeros(256 << 20, dtype=torch.uint8)
    ticks = []
    stop = threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    index = _core.Index.open(str(path), None, False)
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        time.sleep(0.02)
        began = time.monotonic()
        for _ in range(3):
            index.read_chunks(
                [_core.Fill(index.first_chunk(0), (0,), (target.nbytes,), target.data_ptr(), (1,))],
                io="buffered",
                threads=1,
                verify=True,
                max_inflight_bytes=1 << 20,
            )
        ended = time.monotonic()
    finally:
        stop.set()
        thread.join()
    during = [t for t in ticks if began < t < ended]
    assert ended - began > 0.02
    # A held GIL would let it count at the ends only.
    assert len(during) > 5
    assert max(b - a for a, b in itertools.pairwise(during)) < (ended - began) * 0.8


# --- limits of the process ----------------------------------------------------------------------------


def test_more_files_than_a_process_may_open(tmp_path):
    """A checkpoint of many ranks has more data files than the usual limit of open files."""
    one = {
        "save_id": bytes(range(16)),
        "generation": 1,
        "world_size": 300,
        "threads": 1,
        "fsync": False,
        "io": "buffered",
    }
    indexes = []
    data = torch.arange(10.0)
    for rank in range(300):
        item = whole_item(f"w{rank:03}", data)
        made = _core.Save.create(str(tmp_path), [item], token=rank, rank=rank, max_inflight_bytes=1 << 20, **one)
        made.write([_core.Part(0, 0, data.data_ptr(), 40)])
        indexes.append(made.finish())
    how = {"save_id": bytes(range(16)), "generation": 1, "planner_data": {}, "items": None, "names": []}
    _core.commit_indexes(str(tmp_path), None, indexes, fsync=False, **how)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 100, hard))
    try:
        got = {f"w{rank:03}": torch.zeros(10) for rank in range(300)}
        dcp_rs.load(got, tmp_path, no_dist=True, threads=4)
        assert all(torch.equal(value, data) for value in got.values())
        dcp_rs.load(got, tmp_path, no_dist=True, threads=4, io="direct", verify=True)
        report = dcp_rs.verify(tmp_path, threads=4)
        assert report.ok
        assert report.bytes_verified == 300 * 40
        with dcp_rs.open(tmp_path) as checkpoint:
            assert len([checkpoint[name] for name in checkpoint]) == 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
