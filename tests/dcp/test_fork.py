"""Forks of a process that reads or saves."""

import os
import signal
import threading
import time

import pytest
import torch

from dcp_rs import _core
from support.forged import whole_item
from support.numbered import save


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
        list(range(index.chunk_count)),
        io="buffered",
        threads=3,
        verify=True,
        max_inflight_bytes=1 << 20,
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


@pytest.mark.slow
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
        _core.Save.create(
            str(ckpt),
            [item],
            save_id=bytes(16),
            generation=1,
            token=1,
            rank=0,
            world_size=1,
            **options,
        )
    ]
    made[0].write([_core.Part(0, 0, tensor.data_ptr(), 40)])
    assert in_child(made.clear) == 0
    assert len(list(ckpt.glob("g*"))) == 1
    made[0].finish()
