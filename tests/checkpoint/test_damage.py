"""Damage says which file is what, and which tensors are lost; warnings are of the caller's line."""

import json
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_rs
from dcp_rs.cli import main
from dcp_rs.errors import CorruptDataError, CorruptIndexError
from support.both import save_rs, save_stock
from support.files import drop_from_page_cache, flip

STATE = {"large": torch.arange(1 << 19), "small": torch.ones(3), "step": 4}


def test_a_damaged_block_loses_its_tensor(ckpt, capfd, monkeypatch):
    save_rs(STATE, ckpt)
    (file,) = ckpt.glob("*.safetensors")
    place = dcp_rs.open(ckpt).chunks("large")[0]
    flip(file, place.offset + (3 << 20) + 5)
    report = dcp_rs.verify(ckpt)
    assert not report
    assert report.lost == ["large"]
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(ckpt)])
    assert ended.value.code == 1
    assert "lost     1 of 3 entries: large\n" in capfd.readouterr().out
    with pytest.raises(SystemExit):
        main(["verify", str(ckpt), "--json"])
    assert json.loads(capfd.readouterr().out)["lost"] == ["large"]


def test_by_default_what_does_not_come_from_the_page_cache_is_verified(ckpt):
    save_rs(STATE, ckpt)
    into = {"large": torch.zeros(1 << 19, dtype=torch.int64), "small": torch.zeros(3), "step": 0}
    mapped = dcp_rs.load(into, ckpt, io="mmap", no_dist=True)
    assert mapped.bytes_mapped >= 4 << 20
    assert mapped.bytes_verified == 0
    whole = dcp_rs.load(into, ckpt, io="mmap", verify=True, no_dist=True)
    assert whole.bytes_verified == (4 << 20) + 12
    (file,) = ckpt.glob("*.safetensors")
    drop_from_page_cache(ckpt)
    read = dcp_rs.load(into, ckpt, io="direct", no_dist=True)
    if not read.bytes_direct:
        pytest.skip("the file system has no direct I/O")
    assert read.bytes_verified == (4 << 20) + 12
    place = dcp_rs.open(ckpt).chunks("large")[0]
    flip(file, place.offset + (1 << 20) + 5)
    assert dcp_rs.load(into, ckpt, io="mmap", no_dist=True).bytes_verified == 0
    with pytest.raises(CorruptDataError, match="large"):
        dcp_rs.load(into, ckpt, io="direct", no_dist=True)
    with pytest.raises(CheckpointException) as failed:
        dcp.load(into, storage_reader=dcp_rs.RsReader(ckpt, io="direct"), no_dist=True)
    assert isinstance(failed.value.failures[0][0], CorruptDataError)
    dcp_rs.load(into, ckpt, io="direct", verify=False, no_dist=True)
    with pytest.raises(ValueError, match="verify='never'"):
        dcp_rs.load(into, ckpt, verify="never", no_dist=True)


def test_default_verification_costs_no_reads(ckpt):
    """Of rows that go to memory with gaps, blocks would be read twice."""
    shape = (6000, 896)
    dcp_rs.save({"w": torch.randn(shape)}, ckpt, no_dist=True)
    wide = torch.zeros(shape[0], 2 * shape[1])[:, : shape[1]]
    nbytes = 4 * wide.numel()
    drop_from_page_cache(ckpt)
    report = dcp_rs.load({"w": wide}, ckpt, io="direct", no_dist=True)
    if not report.bytes_direct:
        pytest.skip("the file system has no direct I/O")
    assert report.bytes_read < 1.1 * nbytes
    assert report.bytes_verified == 0
    drop_from_page_cache(ckpt)
    report = dcp_rs.load({"w": torch.empty(shape)}, ckpt, io="direct", no_dist=True)
    assert report.bytes_verified == nbytes
    assert report.bytes_read < 1.1 * nbytes


def test_a_file_that_is_gone_loses_all_that_is_in_it(ckpt):
    save_rs(STATE, ckpt)
    (file,) = ckpt.glob("*.safetensors")
    file.unlink()
    assert dcp_rs.verify(ckpt).lost == ["large", "small", "step"]


def test_a_damaged_header_loses_nothing(ckpt):
    """What is read is found by the index."""
    save_rs(STATE, ckpt)
    (file,) = ckpt.glob("*.safetensors")
    flip(file, 40)
    report = dcp_rs.verify(ckpt)
    assert not report
    assert report.lost == []
    assert torch.equal(dcp_rs.open(ckpt)["small"], STATE["small"])


def test_corruption_has_an_error_of_its_own(ckpt, tmp_path):
    save_rs(STATE, ckpt)
    dcp_rs.convert(ckpt, tmp_path / "hf", to="safetensors", skip_unsupported=True)
    flip(tmp_path / "hf" / "model.safetensors", 9)
    with pytest.raises(
        CorruptIndexError, match=r"corrupt header of the data file .*model\.safetensors"
    ):
        dcp_rs.open(tmp_path / "hf")
    flip(ckpt / "index.dcprs", 100)
    with pytest.raises(CorruptIndexError, match=r"corrupt index .*index\.dcprs"):
        dcp_rs.open(ckpt)


def test_warnings_are_of_the_callers_line(ckpt, tmp_path):
    save_stock(STATE, ckpt)
    (tmp_path / "both").mkdir()
    save_rs(STATE, tmp_path / "both")
    (tmp_path / "both" / ".metadata").write_bytes(b"")
    for make, said in (
        (lambda: dcp_rs.open(ckpt, verify=True), "checks nothing"),
        (lambda: dcp_rs.open(tmp_path / "both"), "holds two checkpoints"),
        (
            lambda: dcp_rs.load({"small": torch.zeros(3).double()}, ckpt, no_dist=True),
            "tensor 'small' is cast on loading",
        ),
        (
            lambda: dcp_rs.save({"odd": ckpt}, tmp_path / "odd", no_dist=True),
            "will not load under weights_only=True",
        ),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make()
        (warning,) = [warning for warning in caught if said in str(warning.message)]
        assert warning.filename == __file__, said
