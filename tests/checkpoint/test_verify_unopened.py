"""A checkpoint that does not open, for damage, is one that `verify` finds damaged: a report, as of one that opens, and no error."""

import json
import os
import shutil

import pytest
import torch

import dcp_rs
from dcp_rs.errors import (
    CheckpointNotFoundError,
    CorruptDataError,
    CorruptIndexError,
    UnsafePickleError,
)
from support.both import save_rs, save_stock

STATE = {"large": torch.arange(1 << 12), "small": torch.ones(3)}


def cut(path, size):
    os.truncate(path, size)
    return path


def safetensors(folder):
    dcp_rs.save_file(STATE, folder / "model.safetensors")
    return (
        cut(folder / "model.safetensors", 20_000),
        folder / "model.safetensors",
        "follow the header",
    )


def torch_file(folder):
    torch.save(STATE, folder / "model.pt")
    return cut(folder / "model.pt", 20_000), folder / "model.pt", "it was cut short"


def stock(folder):
    save_stock(STATE, folder / "stock")
    cut(folder / "stock" / "__0_0.distcp", 20_000)
    return folder / "stock", folder / "stock" / "__0_0.distcp", "lead out of a file of 20000 bytes"


def stock_without_data(folder):
    save_stock(STATE, folder / "stock")
    (folder / "stock" / "__0_0.distcp").unlink()
    return folder / "stock", folder / "stock" / "__0_0.distcp", "it is missing"


def native_index(folder):
    save_rs(STATE, folder / "ckpt")
    return folder / "ckpt", cut(folder / "ckpt" / "index.dcprs", 300), "the file is 300 bytes long"


@pytest.fixture(params=[safetensors, torch_file, stock, stock_without_data, native_index])
def unopened(request, tmp_path):
    """A checkpoint, the file of it that is damaged, and what is said of that."""
    return request.param(tmp_path)


def test_the_report_says_which_file_and_what_of_it(unopened):
    path, file, what = unopened
    with pytest.raises((CorruptDataError, CorruptIndexError)) as raised:
        dcp_rs.open(path)
    report = dcp_rs.verify(path)
    assert not report
    (problem,) = report.problems
    assert (problem.file, problem.tensor) == (str(file), raised.value.tensor or "")
    assert (problem.offset, problem.got) == (raised.value.offset or 0, str(raised.value))
    assert what in str(problem)
    assert (report.entries, report.lost, report.bytes_verified) == (None, [], 0)


def test_the_command_ends_as_with_any_damage(dcp_rs_cli, unopened):
    path, file, what = unopened
    status, out, err = dcp_rs_cli("verify", path)
    assert (status, err) == (1, "")
    damaged, lost, verdict = out.splitlines()
    assert damaged.startswith("damaged  ")
    assert str(file) in damaged
    assert what in damaged
    assert lost.startswith("lost     all of it")
    assert ("dcp-rs index --overwrite" in lost) == (file.name == "index.dcprs")
    assert verdict.startswith("1 problem")
    status, out, err = dcp_rs_cli("verify", path, "--json")
    assert (status, err) == (1, "")
    said = json.loads(out)
    assert (said["ok"], said["entries"], said["problems"][0]["file"]) == (False, None, str(file))


def test_one_that_opens_says_how_much_it_has(dcp_rs_cli, tmp_path):
    save_rs(STATE, tmp_path / "ckpt")
    assert dcp_rs.verify(tmp_path / "ckpt").entries == 2
    assert json.loads(dcp_rs_cli("verify", tmp_path / "ckpt", "--json")[1])["entries"] == 2


def test_verify_raises_errors_other_than_damage(dcp_rs_cli, tmp_path):
    save_stock(STATE, tmp_path / "stock")
    (tmp_path / "empty").mkdir()
    for nothing in ("empty", "nowhere", "stock/__0_0.distcp"):
        with pytest.raises(CheckpointNotFoundError):
            dcp_rs.verify(tmp_path / nothing)
        assert dcp_rs_cli("verify", tmp_path / nothing)[0] == 2
    unsafe = shutil.copytree(tmp_path / "stock", tmp_path / "unsafe")
    (unsafe / ".metadata").write_bytes(b"\x80\x02cposix\nsystem\nU\x04true\x85R.")
    with pytest.raises(UnsafePickleError):
        dcp_rs.verify(unsafe)
    assert dcp_rs_cli("verify", unsafe)[0] == 2
