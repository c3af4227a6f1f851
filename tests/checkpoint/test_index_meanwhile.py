"""An index is made for the data that was looked at: a save that was committed meanwhile is not lost to it."""

import shutil

import pytest
import torch

import dcp_rs
from dcp_rs import _core
from dcp_rs.errors import CheckpointExistsError, CheckpointReplacedError
from support.both import save_rs, save_stock


def once(work):
    todo = [work]

    def hook(*_):
        if todo:
            todo.pop()()

    return hook


def state(value):
    return {"w": torch.full((300_000,), value)}


def holds(path):
    with dcp_rs.open(path) as checkpoint:
        return checkpoint["w"].unique().tolist()


def test_a_save_that_came_while_a_lost_index_was_made_anew(ckpt):
    save_rs(state(1.0), ckpt)
    (ckpt / "index.dcprs").unlink()
    with pytest.raises(CheckpointExistsError, match="was created meanwhile"):
        dcp_rs.index(ckpt, progress=once(lambda: save_rs(state(2.0), ckpt)))
    assert holds(ckpt) == [2.0]
    assert dcp_rs.verify(ckpt)
    # The first one's data, which has no index any more.
    assert len(dcp_rs.clean(ckpt).found) == 1


def test_a_save_that_replaced_the_checkpoint_while_it_was_indexed(ckpt):
    save_rs(state(1.0), ckpt)
    with pytest.raises(CheckpointReplacedError):
        dcp_rs.index(ckpt, overwrite=True, progress=once(lambda: save_rs(state(2.0), ckpt)))
    assert holds(ckpt) == [2.0]
    assert dcp_rs.verify(ckpt)
    dcp_rs.index(ckpt, overwrite=True)
    assert holds(ckpt) == [2.0]


@pytest.mark.parametrize("overwrite", [False, True])
def test_first_of_two_indexes_stays(ckpt, overwrite):
    save_stock(state(1.0), ckpt)
    if overwrite:
        dcp_rs.index(ckpt)
    other = once(lambda: dcp_rs.index(ckpt, overwrite=overwrite))
    with pytest.raises((CheckpointExistsError, CheckpointReplacedError)):
        dcp_rs.index(ckpt, digests=True, overwrite=overwrite, progress=other)
    assert dcp_rs.verify(ckpt).bytes_without_digest
    assert holds(ckpt) == [1.0]


def test_an_index_elsewhere(ckpt, tmp_path):
    save_stock(state(1.0), ckpt)
    out = tmp_path / "out"
    with pytest.raises(CheckpointExistsError):
        dcp_rs.index(ckpt, out=out, digests=True, progress=once(lambda: save_rs(state(2.0), out)))
    assert holds(out) == [2.0]


def test_data_that_went_meanwhile(ckpt, tmp_path, monkeypatch):
    """Of a save that was under way, and failed: an index of it would be of nothing."""
    save_rs(state(1.0), ckpt)
    (ckpt / "index.dcprs").unlink()
    shutil.copytree(ckpt, tmp_path / "copy")
    (data,) = ckpt.glob("g*.safetensors")
    recover = _core.recover
    monkeypatch.setattr(
        _core, "recover", lambda *args, **how: (recover(*args, **how), data.unlink())[0]
    )
    with pytest.raises(CheckpointReplacedError):
        dcp_rs.index(ckpt)
    monkeypatch.undo()
    assert not (ckpt / "index.dcprs").exists()
    dcp_rs.index(tmp_path / "copy")
    assert holds(tmp_path / "copy") == [1.0]
