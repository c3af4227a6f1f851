"""Slabs of host memory: how the engine fills them, and how they are kept between loads."""

import os
import threading

import pytest
import torch

from dcp_rs import _core
from dcp_rs.errors import PlanError
from dcp_rs.options import ReadOptions
from dcp_rs.transfer import buffers, upload
from support import threads
from support.files import drop_from_page_cache
from support.slabs import batch_of, saved, state

# --- the engine


def test_uncached_data_is_read_past_the_page_cache(ckpt):
    want = state() | {"large": torch.randn(1500, 1000)}
    index = saved(ckpt, want)
    drop_from_page_cache(ckpt)
    batch = batch_of(index)
    running = upload.SlabLoad(
        batch, batch.slab_regions(0), sort=True, accelerator=False, options=ReadOptions(io="direct")
    )
    with running:
        for _ in running:
            pass
    stats = running.stats()
    total = sum(tensor.nbytes for tensor in want.values())
    assert stats.wanted >= total
    if stats.direct:  # not every file system has direct I/O
        assert stats.direct == stats.read <= total * 1.05 + 4096 * len(want)


def reader(index, slab_bytes=1 << 16, threads=2, **options):
    batch = batch_of(index)
    options = {"sort": True, "io": "auto", "verify": False} | options
    return _core.SlabReader.create(
        batch, batch.slab_regions(0), slab_bytes, threads=threads, **options
    )


def test_batches_come_in_order_and_slabs_wait_for_their_release(ckpt):
    index = saved(ckpt, {f"w{i}": torch.randn(16 << 10) for i in range(10)})
    source = reader(index)
    taken = buffers.new_slabs(3, 1 << 16, pinned=False)
    source.start([(slab.data_ptr(), slab.nbytes) for slab in taken], taken, 3)
    held, order = [], []
    for _ in range(3):
        batch, slab = source.next()
        order.append(batch)
        held.append(slab)
    assert sorted(held) == [0, 1, 2]
    copies = [slab.clone() for slab in taken]
    threading.Event().wait(0.05)
    assert all(torch.equal(a, b) for a, b in zip(copies, taken, strict=True))  # none was touched
    while True:
        for slab in held:
            source.release(slab)
        found = source.next()
        if found is None:
            break
        order.append(found[0])
        held = [found[1]]
    assert order == list(range(source.batch_count))
    source.close()


def test_a_closed_load_gives_nothing(ckpt):
    index = saved(ckpt, {f"w{i}": torch.randn(16 << 10) for i in range(10)})
    source = reader(index)
    with pytest.raises(PlanError, match="not begun"):
        source.next()
    taken = buffers.new_slabs(2, 1 << 16, pinned=False)
    source.start([(slab.data_ptr(), slab.nbytes) for slab in taken], taken, 2)
    with pytest.raises(PlanError, match="has begun"):
        source.start([(slab.data_ptr(), slab.nbytes) for slab in taken], taken, 2)
    source.close()
    with pytest.raises(KeyboardInterrupt):
        source.next()
    source.close()
    assert threads.none_of("dcp-rs-slab")


def test_a_load_that_is_dropped_stops(ckpt):
    index = saved(ckpt, {f"w{i}": torch.randn(16 << 10) for i in range(10)})
    source = reader(index)
    taken = buffers.new_slabs(2, 1 << 16, pinned=False)
    source.start([(slab.data_ptr(), slab.nbytes) for slab in taken], taken, 2)
    del source
    assert threads.none_of("dcp-rs-slab")


def test_misplaced_slabs_are_refused(ckpt):
    index = saved(ckpt, {"w": torch.randn(10)})
    source = reader(index)
    memory = torch.empty(3 << 16, dtype=torch.uint8)
    with pytest.raises(PlanError, match="multiples"):
        source.start([(memory.data_ptr() // 4096 * 4096 + 8, 1 << 16)], memory, 1)
    with pytest.raises(PlanError, match="65535 bytes, where 65536 are needed"):
        source.start([(memory.data_ptr() // 4096 * 4096, (1 << 16) - 1)], memory, 1)
    with pytest.raises(PlanError, match="multiples"):
        source.start([], memory, 1)
    with pytest.raises(PlanError, match="slabs of"):
        reader(index, slab_bytes=1000)


def test_a_fork_leaves_the_threads_to_its_parent(ckpt):
    index = saved(ckpt, {f"w{i}": torch.randn(16 << 10) for i in range(10)})
    source = reader(index)
    taken = buffers.new_slabs(2, 1 << 16, pinned=False)
    source.start([(slab.data_ptr(), slab.nbytes) for slab in taken], taken, 2)
    child = os.fork()
    if child == 0:
        source.close()  # would wait for ever for threads that are not there
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    while (found := source.next()) is not None:
        source.release(found[1])
    source.close()


# --- their sizes


def test_slab_sizes():
    assert buffers.slab_bytes(256 << 20) == 8 << 20
    assert buffers.slab_bytes(1 << 30) == 8 << 20
    assert buffers.slab_bytes(5 << 20) == 512 << 10
    assert buffers.slab_bytes(1) == 64 << 10
    assert buffers.slab_bytes(1, least=1 << 20) == 1 << 20
