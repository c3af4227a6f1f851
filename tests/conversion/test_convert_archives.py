"""The checksums of the zip archives that a conversion writes."""

import io
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs.errors import CorruptDataError
from support import random_tensor
from support.formats import make


def test_archives_have_their_checksums(tmp_path: Path) -> None:
    """Conversion has torch leave them out, for speed; they are added after."""
    state = {
        "large": random_tensor((1500, 1000), seed=1),
        "empty": torch.empty(0),
        "scalar": torch.tensor(2),
        "step": 7,
    }
    make("dcp-rs", state, tmp_path / "src")
    dcp_rs.convert(tmp_path / "src", tmp_path / "x.pt", to="torch")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None
        assert len([entry for entry in archive.infolist() if entry.CRC]) >= 5
    dcp_rs.convert(tmp_path / "src", tmp_path / "dcp", to="dcp", shards=2)
    places = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().storage_data.values()
    assert len(places) == 4
    for place in places:
        data = (tmp_path / "dcp" / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
            assert archive.getinfo("archive/data.pkl").CRC != 0
    # The next save of this process has its own.
    torch.save(state, tmp_path / "own.pt")
    with zipfile.ZipFile(tmp_path / "own.pt") as archive:
        assert archive.testzip() is None


def test_what_is_no_archive_gets_no_checksums(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(100)}, path)
    good = path.read_bytes()
    descriptor = good.index(b"PK\x07\x08")
    for bad in (good[:-1], good[:descriptor] + b"????" + good[descriptor + 4 :], b"PK\x03\x04", b""):
        path.write_bytes(bad)
        with pytest.raises(CorruptDataError, match=r"x\.pt"):
            dcp_rs._core.seal_archives(str(path), [(0, len(bad))], 1)
        assert path.read_bytes() == bad
    path.write_bytes(good)
    with pytest.raises(CorruptDataError):
        dcp_rs._core.seal_archives(str(path), [(0, len(good) + 1)], 1)
