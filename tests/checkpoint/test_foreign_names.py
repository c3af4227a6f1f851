"""Files of others that were blamed for something else: git-lfs pointers, plain names, odd numbers."""

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import dcp_rs
from dcp_rs.errors import CorruptDataError, CorruptIndexError

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 12345\n"
)
#: What downloads leave in place of a file, and the words for it.
STAND_INS = {
    "a pointer": (POINTER, "git lfs pull"),
    "a web page": (b"\n<!DOCTYPE html>\n<html><body>Not found</body></html>", "web page"),
    "html": (b"<HTML><body>Please log in</body></HTML>", "web page"),
}


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.pt", "pytorch_model.bin", "model.safetensors.index.json"]
)
@pytest.mark.parametrize("kind", STAND_INS)
def test_file_in_place_of_the_real_one_is_named(kind, name, tmp_path):
    """It was a "header of 2336927755350992246 bytes"."""
    content, words = STAND_INS[kind]
    (tmp_path / name).write_bytes(content)
    for path in [tmp_path / name] + [tmp_path] * (not name.endswith(".pt")):
        with pytest.raises((CorruptDataError, CorruptIndexError), match=words):
            dcp_rs.open(path)


@pytest.mark.parametrize("kind", STAND_INS)
def test_file_in_place_of_metadata_is_named(kind, tmp_path):
    content, words = STAND_INS[kind]
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CorruptIndexError, match=words):
        dcp_rs.open(tmp_path)


@pytest.mark.parametrize("name", ["./m.safetensors", ".//m.safetensors", "m.safetensors/."])
def test_file_in_a_weight_map_may_begin_with_a_dot(name, tmp_path):
    """It "leads out of the folder"."""
    save_file({"w": torch.arange(3.0)}, tmp_path / "m.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    assert torch.equal(dcp_rs.open(tmp_path)["w"], torch.arange(3.0))


@pytest.mark.parametrize("name", ["../m.safetensors", "./../m.safetensors", "/m.safetensors", "."])
def test_file_in_a_weight_map_may_not_leave_the_folder(name, tmp_path):
    save_file({"w": torch.arange(3.0)}, tmp_path / "m.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(CorruptIndexError, match="leads out"):
        dcp_rs.open(tmp_path)


def series(folder, *numbers, of=3):
    for number in numbers:
        save_file(
            {f"w{number}": torch.ones(1)}, folder / f"model-{number:05}-of-{of:05}.safetensors"
        )


def test_series_may_count_from_0(tmp_path):
    series(tmp_path, 0, 1, 2)
    assert set(dcp_rs.open(tmp_path)) == {"w0", "w1", "w2"}


@pytest.mark.parametrize(
    ("numbers", "named", "why"),
    [
        ((1, 2, 3, 4), "model-00004-of-00003", "not one of the 3 files"),
        ((0, 1, 2, 3), "model-00000-of-00003", "not one of the 3 files"),
        ((1, 3), "model-00002-of-00003", "missing: 2 of 3"),
        ((1, 3, 4), "model-00002-of-00003", "missing: 2 of 3"),
        ((0, 2), "model-00001-of-00003", "missing: 2 of 3"),
    ],
)
def test_series_is_counted(numbers, named, why, tmp_path):
    """A file that is there was "missing: 4 of 3 files are there"."""
    series(tmp_path, *numbers)
    with pytest.raises(CorruptDataError, match=why) as raised:
        dcp_rs.open(tmp_path)
    assert named in str(raised.value)


def huge(path, size=1 << 40):
    """Make a file of a terabyte that takes no room."""
    with path.open("ab") as file:
        file.truncate(size)


def test_huge_files_of_metadata_are_refused_unread(tmp_path):
    """Each was read whole, until the memory was full."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    huge(tmp_path / "dcp" / ".metadata")
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "hf" / "model.safetensors")
    huge(tmp_path / "hf" / "model.safetensors.index.json")
    for path in (tmp_path / "dcp", tmp_path / "hf" / "model.safetensors.index.json"):
        with pytest.raises(CorruptIndexError, match="1099511627776 bytes, more than"):
            dcp_rs.open(path)
    (tmp_path / "hf" / "model.safetensors.index.json").unlink()
    huge(tmp_path / "hf" / "config.json")
    assert torch.equal(dcp_rs.open(tmp_path / "hf")["w"], torch.ones(2))
    with pytest.raises(CorruptIndexError, match="1099511627776 bytes, more than"):
        dcp_rs.open(tmp_path / "hf", dequantize=True)
    dcp_rs.save({"w": torch.ones(2)}, tmp_path / "own", no_dist=True)
    huge(tmp_path / "own" / "index.dcprs")
    with pytest.raises(CorruptIndexError, match="1099511627776 bytes long, its header says"):
        dcp_rs.open(tmp_path / "own")
    shutil.rmtree(tmp_path)
