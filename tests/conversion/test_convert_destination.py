"""Where a conversion may write."""

from pathlib import Path

import pytest
import torch

import dcp_rs
from dcp_rs.errors import CheckpointExistsError
from support.formats import judge, leftovers, make


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    make("dcp-rs", {"w": torch.ones(3)}, tmp_path / "src")
    make("dcp", {"old": torch.ones(3)}, tmp_path / "dst")
    with pytest.raises(CheckpointExistsError, match="exists"):
        dcp_rs.convert(tmp_path / "src", tmp_path / "dst")
    judge("dcp", tmp_path / "dst", {"old": torch.ones(3)})
    (tmp_path / "dst" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointExistsError, match=r"notes\.txt"):
        dcp_rs.convert(tmp_path / "src", tmp_path / "dst", overwrite=True)
    (tmp_path / "dst" / "notes.txt").unlink()
    dcp_rs.convert(tmp_path / "src", tmp_path / "dst", overwrite=True)
    judge("dcp-rs", tmp_path / "dst", {"w": torch.ones(3)})
    (tmp_path / "empty").mkdir()
    dcp_rs.convert(tmp_path / "src", tmp_path / "empty", to="dcp")
    (tmp_path / "file.pt").write_text("old")
    dcp_rs.convert(tmp_path / "src", tmp_path / "file.pt", to="torch", overwrite=True)
    judge("torch", tmp_path / "file.pt", {"w": torch.ones(3)})
    assert not leftovers(tmp_path)


def test_the_source_is_never_the_destination(tmp_path: Path) -> None:
    make("dcp-rs", {"w": torch.ones(3)}, tmp_path / "outer" / "src")
    src = tmp_path / "outer" / "src"
    (tmp_path / "link").symlink_to(src)
    data = next(src.glob("*.safetensors"))
    for dst, to in [(src, "dcp"), (tmp_path / "outer", "dcp"), (tmp_path / "link", "dcp"), (data, "safetensors")]:
        with pytest.raises(ValueError, match="is the source"):
            dcp_rs.convert(src, dst, to=to, overwrite=True)
    judge("dcp-rs", src, {"w": torch.ones(3)})
