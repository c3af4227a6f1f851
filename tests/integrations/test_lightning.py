"""Lightning's plug-in without Lightning: classes of the same names stand in for its own. `make test-frameworks` runs it with the real ones."""

import importlib
import sys
import types
from contextlib import suppress
from importlib.machinery import ModuleSpec

import pytest
import torch

import dcp_rs
from dcp_rs.errors import CheckpointExistsError
from support.formats import judge, leftovers


@pytest.fixture
def checkpoint_io(monkeypatch):
    names = {"": (), ".fabric": (), ".fabric.plugins": ("CheckpointIO",), ".pytorch": ()}
    names[".pytorch.strategies"] = ("FSDPStrategy", "ModelParallelStrategy")
    for name, classes in names.items():
        module = types.ModuleType(f"lightning{name}")
        module.__path__, module.__spec__ = [], ModuleSpec(module.__name__, None)
        for inner in classes:
            setattr(module, inner, type(inner, (), {}))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "dcp_rs.integrations.lightning", raising=False)
    module = importlib.import_module("dcp_rs.integrations.lightning")
    yield module.DcpRsCheckpointIO
    sys.modules.pop("dcp_rs.integrations.lightning", None)


@pytest.fixture
def old(tmp_path):
    """A checkpoint of Lightning's own: a file."""
    torch.save({"state_dict": {"w": torch.ones(3)}}, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


NEW = {"state_dict": {"w": torch.zeros(3)}}


def test_a_file_gives_way_to_a_folder(checkpoint_io, old):
    checkpoint_io().save_checkpoint(NEW, old)
    judge("dcp-rs", old, NEW)
    assert not leftovers(old.parent)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["folder", "file", "nothing"])
def test_a_link_gives_way_and_what_it_leads_to_stays(checkpoint_io, tmp_path, kind, asynchronous):
    """The best checkpoint was replaced by the last one, without a word, where ``last.ckpt`` was a link to it."""
    io, best, last = (
        checkpoint_io(asynchronous=asynchronous),
        tmp_path / "best.ckpt",
        tmp_path / "last.ckpt",
    )
    before = {"state_dict": {"w": torch.ones(3)}}
    if kind == "folder":
        dcp_rs.save(before, best, no_dist=True)
    elif kind == "file":
        torch.save(before, best)
    last.symlink_to(best.name)
    io.save_checkpoint(NEW, last)
    io.wait()
    judge("dcp-rs", last, NEW)
    assert not last.is_symlink()
    if kind == "nothing":
        assert not best.exists()
    else:
        assert torch.equal(io.load_checkpoint(best)["state_dict"]["w"], torch.ones(3))
    assert not leftovers(tmp_path)


def test_a_signal_at_any_call_that_changes_a_name_leaves_one_of_the_two(checkpoint_io, tmp_path):
    """It is raised as soon as such a call is over."""
    changed = []

    def interrupting(_frame, event, function):
        if event == "c_return" and function.__name__ in (
            "unlink",
            "rename",
            "replace",
            "put_in_place",
        ):
            changed.append(function.__name__)
            if len(changed) == at:
                raise KeyboardInterrupt

    for at in range(1, 20):
        changed.clear()
        path = tmp_path / str(at) / "last.ckpt"
        path.parent.mkdir()
        torch.save({"state_dict": {"w": torch.ones(3)}}, path)
        sys.setprofile(interrupting)
        with suppress(KeyboardInterrupt):
            checkpoint_io().save_checkpoint(NEW, path)
        sys.setprofile(None)
        with dcp_rs.open(path) as found:
            assert found["state_dict.w"][0] == (0 if path.is_dir() else 1), changed
        if len(changed) < at:
            break
    assert path.is_dir()
    assert 1 < at < 19


def test_a_file_that_was_written_meanwhile_stays(checkpoint_io, old):
    written = []

    def write(*_):
        if not written:
            written.append(
                torch.save({"state_dict": {"w": torch.full((3,), 7.0)}, "epoch": 2}, old)
            )

    with pytest.raises(CheckpointExistsError, match="was created meanwhile"):
        checkpoint_io(progress=write).save_checkpoint(NEW, old)
    assert torch.load(old)["epoch"] == 2
    assert not leftovers(old.parent)
