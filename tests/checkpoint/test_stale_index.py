"""Data files that changed, or went away, under the index beside them: the error says which, what differs, and what to do."""

import os

import pytest
import torch

import dcp_rs
from dcp_rs.errors import CorruptDataError
from support.both import save_rs, save_stock
from support.failures import failure, loaded, read_whole

STATE = {"a": torch.arange(6.0), "b": torch.ones(3), "step": 1}
ANEW = (
    "index.dcprs describes the files as they were before: if the files are right, replace it with "
    "dcp_rs.index(path, overwrite=True), or remove it"
)


def template():
    return {"a": torch.zeros(6), "b": torch.zeros(3), "step": 0}


def load(path):
    return loaded(path, template())


@pytest.fixture
def indexed(tmp_path):
    """A stock checkpoint with an index, and its data file."""
    save_stock(STATE, tmp_path / "stock")
    dcp_rs.index(tmp_path / "stock")
    return tmp_path / "stock", tmp_path / "stock" / "__0_0.distcp"


def longer(path, file):
    size = file.stat().st_size
    index = (path / "index.dcprs").read_bytes()
    (path / "index.dcprs").unlink()
    save_stock(STATE | {"more": torch.ones(99)}, path)
    (path / "index.dcprs").write_bytes(index)
    return f"the file is {file.stat().st_size} bytes long, expected {size}"


def touched(path, file):
    os.utime(file, (1, 1))
    return "the file was modified after it was indexed"


def gone(path, file):
    file.unlink()
    return "the file is missing"


@pytest.mark.parametrize("use", [load, read_whole])
@pytest.mark.parametrize("change", [longer, touched, gone])
def test_stale_index_over_data_of_others(indexed, dcp_rs_cli, change, use):
    path, file = indexed
    what = change(path, file)
    error = failure(CorruptDataError, use, path)
    assert error.path == str(file)
    assert what in str(error)
    assert str(error).count(ANEW) == 1
    (problem,) = dcp_rs.verify(path).problems
    assert str(problem).count(ANEW) == 1
    status, out, _ = dcp_rs_cli("verify", path)
    assert (status, out.count("replace it with dcp-rs index --overwrite, or remove it")) == (1, 1)
    if change is not gone:
        dcp_rs.index(path, overwrite=True)
        assert load(path)["a"].tolist() == STATE["a"].tolist()
        (path / "index.dcprs").unlink()
        assert load(path)["step"] == 1


@pytest.mark.parametrize("use", [load, read_whole])
def test_stale_index_over_native_data(tmp_path, use):
    """No index mends that; what is lost is only in part of the files."""
    path = tmp_path / "ckpt"
    save_rs(STATE, path)
    (file,) = path.glob("g*.safetensors")
    size = file.stat().st_size
    for what in (f"the file is 9 bytes long, expected {size}", "the file is missing"):
        os.truncate(file, 9) if "9 bytes" in what else file.unlink()
        error = failure(CorruptDataError, use, path)
        assert error.path == str(file)
        assert str(error).endswith(f"{what}; dcp_rs.verify(path) lists what is lost")
        (problem,) = dcp_rs.verify(path).problems
        assert "dcp_rs." not in str(problem)


def test_data_without_an_index(tmp_path):
    """What was read when it was opened is not true any more."""
    save_stock(STATE, tmp_path / "stock")
    with dcp_rs.open(tmp_path / "stock") as checkpoint:
        os.utime(tmp_path / "stock" / "__0_0.distcp", (1, 1))
        with pytest.raises(
            CorruptDataError, match=r"the file was modified after .*; open the checkpoint again$"
        ):
            checkpoint["a"]
