"""``progress=``: it hears the end, and an error in it is the caller's."""

import pytest
import torch

import dcp_rs
from support.both import save_rs, save_stock

#: Long enough to be asked about in between.
STATE = {"w": torch.arange(24 << 20, dtype=torch.int32), "step": 3}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("progress")
    save_rs(STATE, folder / "ours")
    save_stock(STATE, folder / "stock")
    return folder


def check(seen: list[int], total: int) -> None:
    assert seen == sorted(seen)
    assert seen[-1] == total


def test_verification_tells_of_its_end(world):
    for _ in range(3):
        seen: list[int] = []
        report = dcp_rs.verify(world / "ours", progress=seen.append)
        check(seen, report.bytes_verified)
    assert report.bytes_verified > STATE["w"].nbytes


def test_an_index_tells_of_its_end(world, tmp_path):
    seen: list[int] = []
    dcp_rs.index(world / "stock", out=tmp_path / "adopted", digests=True, progress=seen.append)
    check(seen, dcp_rs.verify(tmp_path / "adopted", allow_external=True).bytes_verified)
    (world / "ours" / "index.dcprs").rename(tmp_path / "lost")
    seen.clear()
    dcp_rs.index(world / "ours", progress=seen.append)
    check(seen, dcp_rs.verify(world / "ours").bytes_verified)
    # Nothing to do is nothing to tell.
    seen.clear()
    dcp_rs.index(world / "stock", out=tmp_path / "again", progress=seen.append)
    assert not seen


def test_what_it_raises_ends_the_work(world):
    def stop(done: int) -> None:
        raise ValueError(done)

    with pytest.raises(ValueError, match=r"\d+"):
        dcp_rs.verify(world / "ours", progress=stop)
