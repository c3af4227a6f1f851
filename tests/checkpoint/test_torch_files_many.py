"""Several files of torch.save that are one checkpoint."""

import json

import pytest
import torch

import dcp_rs
from dcp_rs.errors import CheckpointNotFoundError, CorruptDataError, PlanError
from support import assert_state_equal
from support.states import blank


def sharded(folder):
    """A model in two files, as transformers saved them."""
    folder.mkdir()
    first, second = (
        {"a": torch.ones(3), "b": torch.zeros(2)},
        {"c": torch.arange(4.0), "d": torch.ones(1)},
    )
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    for name, state in zip(names, (first, second), strict=True):
        torch.save(state, folder / name)
    weight_map = dict.fromkeys(first, names[0]) | dict.fromkeys(second, names[1])
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    torch.save({"args": 1}, folder / "training_args.bin")
    return index, first | second


@pytest.mark.parametrize("way", ["folder", "index", "without an index"])
def test_files_with_an_index_are_one_checkpoint(tmp_path, way):
    index, want = sharded(tmp_path / "hf")
    if way == "without an index":
        index.unlink()
    path = index if way == "index" else index.parent
    with dcp_rs.open(path) as opened:
        assert opened.source == "torch"
        assert_state_equal({name: opened[name] for name in opened}, want)
    got = blank(want)
    dcp_rs.load(got, path)
    assert_state_equal(got, want)
    assert dcp_rs.verify(path)
    dcp_rs.convert(path, tmp_path / "out")
    assert_state_equal(dcp_rs.open(tmp_path / "out").state_dict(), want)


def test_files_that_do_not_make_one_checkpoint(tmp_path):
    index, _ = sharded(tmp_path / "hf")
    torch.save({"c": torch.arange(4.0)}, tmp_path / "hf" / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(
        CorruptDataError, match="names the tensor for this file, which does not hold it"
    ) as raised:
        dcp_rs.open(index)
    assert raised.value.tensor == "d"
    index.unlink()
    torch.save({"a": torch.ones(3)}, tmp_path / "hf" / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(PlanError, match="two entries flatten to this name"):
        dcp_rs.open(tmp_path / "hf")
    (tmp_path / "hf" / "pytorch_model-00001-of-00002.bin").unlink()
    with pytest.raises(CorruptDataError, match="it is missing: 1 of 2"):
        dcp_rs.open(tmp_path / "hf")
    (tmp_path / "pth").mkdir()
    torch.save({}, tmp_path / "pth" / "checkpoint.pth")
    with pytest.raises(CheckpointNotFoundError, match="open one of them"):
        dcp_rs.open(tmp_path / "pth")
