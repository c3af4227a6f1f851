"""Files that are open: no more than a process may have, and none once a call has returned."""

import os
import resource
from pathlib import Path

import torch

import dcp_rs
from dcp_rs import _core
from support.forged import whole_item


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
        made = _core.Save.create(
            str(tmp_path), [item], token=rank, rank=rank, max_inflight_bytes=1 << 20, **one
        )
        made.write([_core.Part(0, 0, data.data_ptr(), 40)])
        indexes.append(made.finish())
    how = {
        "save_id": bytes(range(16)),
        "generation": 1,
        "planner_data": {},
        "items": None,
        "names": [],
    }
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


def test_no_call_leaves_a_file_open_or_mapped(tmp_path):
    state = {"w": torch.arange(1000.0), "step": 3}

    def use():
        dcp_rs.save(state, tmp_path / "ckpt", no_dist=True)
        dcp_rs.load(dict(state), tmp_path / "ckpt", no_dist=True)
        dcp_rs.verify(tmp_path / "ckpt")
        with dcp_rs.open(tmp_path / "ckpt") as checkpoint:
            checkpoint["w"].sum()
        return checkpoint  # closed

    def held():
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count(
            str(tmp_path)
        )

    use()
    before = held()
    kept = [use() for _ in range(3)]
    assert len(kept) == 3
    assert held() == before
