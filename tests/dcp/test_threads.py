"""What many threads of a process do with one reader, one checkpoint, one save."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
from crash.states import rank_state
from dcp_rs import RsReader, _core
from support.forged import whole_item
from support.numbered import check_loaded, save


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
        list(
            threads.map(
                lambda i: made.write([_core.Part(i, 0, data.data_ptr(), data.nbytes)]), range(4)
            )
        )
    made.finish()


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
