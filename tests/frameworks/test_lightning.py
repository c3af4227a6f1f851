"""Training with Lightning, stopped and resumed, is the training that was not. `make test-frameworks` runs it."""

import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed: make test-frameworks")

from lightning.pytorch.plugins.io import TorchCheckpointIO

import dcp_rs
from dcp_rs.errors import CheckpointNotFoundError, UnsafePickleError
from dcp_rs.integrations.lightning import DcpRsCheckpointIO
from frameworks.launch import launch

pytestmark = pytest.mark.timeout(1200)  # each run is a start of Python on every rank

RUN = Path(__file__).with_name("lightning_run.py")
EPOCHS, STOP = 4, 2


def same(mine, theirs, where="end"):
    assert type(mine) is type(theirs), where
    if isinstance(theirs, torch.Tensor):
        assert mine.dtype == theirs.dtype, where
        assert torch.equal(mine, theirs), where
    elif isinstance(theirs, dict):
        assert list(mine) == list(theirs), where
        for key in theirs:
            same(mine[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, list | tuple):
        assert len(mine) == len(theirs), where
        for at, value in enumerate(theirs):
            same(mine[at], value, f"{where}.{at}")
    else:
        assert mine == theirs, where


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The end of runs with Lightning's own checkpoints, and no stop."""
    ends = {}

    def end_of(how, ranks):
        if how not in ends:
            folder = tmp_path_factory.mktemp(how)
            launch(RUN, how, folder, EPOCHS, ranks=ranks)
            ends[how] = torch.load(folder / "end.pt")
        return ends[how]

    return end_of


@pytest.mark.parametrize(
    ("how", "stock", "ranks"),
    [
        ("io", "plain", 1),
        ("background", "plain", 1),
        ("wrapped", "plain", 1),
        ("ddp-io", "ddp-plain", 2),
        ("parallel", "parallel-stock", 2),
    ],
)
def test_resumed_training_is_the_training_that_was_not_stopped(
    tmp_path, unbroken, how, stock, ranks
):
    launch(RUN, how, tmp_path, STOP, ranks=ranks)
    kept = tmp_path / "kept"
    assert sorted(os.listdir(kept)) == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert (kept / "last.ckpt" / "index.dcprs").is_file()
    launch(RUN, how, tmp_path, EPOCHS, kept / "last.ckpt", ranks=ranks)
    resumed, whole = torch.load(tmp_path / "end.pt"), unbroken(stock, ranks)
    same(resumed["model"], whole["model"])
    same(resumed["optimizer"], whole["optimizer"])
    assert resumed["losses"] == whole["losses"][len(whole["losses"]) // 2 :]
    assert sorted(entry.name for entry in kept.glob("epoch*")) == ["epoch=2.ckpt", "epoch=3.ckpt"]


def test_a_run_of_lightnings_own_goes_on(tmp_path, unbroken):
    launch(RUN, "plain", tmp_path, STOP)
    assert (tmp_path / "kept" / "last.ckpt").is_file()
    launch(RUN, "io", tmp_path, EPOCHS, tmp_path / "kept" / "last.ckpt")
    same(torch.load(tmp_path / "end.pt")["model"], unbroken("plain", 1)["model"])
    assert (tmp_path / "kept" / "last.ckpt").is_dir()


def test_sharded_runs_of_lightnings_own_go_on(tmp_path, unbroken):
    launch(RUN, "parallel-stock", tmp_path, STOP, ranks=2)
    last = tmp_path / "kept" / "last.ckpt"
    assert (last / ".metadata").is_file()
    launch(RUN, "parallel", tmp_path, EPOCHS, last, ranks=2)
    same(torch.load(tmp_path / "end.pt")["model"], unbroken("parallel-stock", 2)["model"])


def checkpoint():
    return {
        "epoch": 3,
        "state_dict": {"w": torch.randn(3, 4), "half": torch.ones(2).bfloat16()},
        "optimizer_states": [
            {
                "state": {0: {"step": torch.tensor(2.0)}},
                "param_groups": [{"lr": 0.1, "params": [0]}],
            }
        ],
        "lr_schedulers": [],
        "loops": {"fit": {"state_dict": {}, 7: {"ready": {}}}},
        "hyper_parameters": {"names": ["a", {}], "pair": (1, None), "empty": {}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best": None}},
    }


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_comes_back_as_it_was(tmp_path, asynchronous):
    io, wanted = DcpRsCheckpointIO(asynchronous=asynchronous), checkpoint()
    io.save_checkpoint(wanted, tmp_path / "a.ckpt")
    loaded = io.load_checkpoint(tmp_path / "a.ckpt")
    same(loaded, wanted)
    loaded["state_dict"]["w"].zero_()
    same(io.load_checkpoint(str(tmp_path / "a.ckpt"), map_location="cpu"), wanted)
    io.save_checkpoint(wanted | {"epoch": 4}, tmp_path / "a.ckpt")
    assert io.load_checkpoint(tmp_path / "a.ckpt")["epoch"] == 4
    io.save_checkpoint(wanted, tmp_path / "b.ckpt")
    io.remove_checkpoint(tmp_path / "b.ckpt")
    io.remove_checkpoint(tmp_path / "none.ckpt")
    io.teardown()
    assert os.listdir(tmp_path) == ["a.ckpt"]
    dcp_rs.convert(tmp_path / "a.ckpt", tmp_path / "file.ckpt", to="torch")
    same(TorchCheckpointIO().load_checkpoint(tmp_path / "file.ckpt"), wanted | {"epoch": 4})


def test_a_background_save_has_what_was_there_when_it_began(tmp_path):
    io, state = (
        DcpRsCheckpointIO(asynchronous=True),
        {"w": torch.zeros(1 << 20), "steps": {"done": 1}},
    )
    io.save_checkpoint(state, tmp_path / "a.ckpt")
    state["w"].fill_(1)
    state["steps"]["done"] = 2
    same(io.load_checkpoint(tmp_path / "a.ckpt"), {"w": torch.zeros(1 << 20), "steps": {"done": 1}})


def test_a_background_save_that_fails_is_heard_of(tmp_path):
    (tmp_path / "file").write_text("")
    io = DcpRsCheckpointIO(asynchronous=True)

    def save_and_end():
        io.save_checkpoint({"w": torch.zeros(2)}, tmp_path / "file" / "a.ckpt")
        io.teardown()

    with pytest.raises(OSError, match="file"):
        save_and_end()
    io.teardown()


def test_a_file_of_lightnings_own_gives_way_when_the_save_is_complete(tmp_path):
    path = tmp_path / "last.ckpt"
    TorchCheckpointIO().save_checkpoint(checkpoint(), path)
    old = torch.load(path)
    io = DcpRsCheckpointIO(strict_values=True)
    same(io.load_checkpoint(path), old)
    with pytest.raises(UnsafePickleError, match="hparams"):
        io.save_checkpoint({"hparams": Namespace(width=3)}, path)
    same(torch.load(path), old)
    io.save_checkpoint({"epoch": 1}, path)
    same(io.load_checkpoint(path), {"epoch": 1})
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_values_of_ones_own_classes_load_as_in_torch(tmp_path):
    io = DcpRsCheckpointIO()
    with pytest.warns(UserWarning, match="hparams"):
        io.save_checkpoint({"hparams": Namespace(width=3)}, tmp_path / "a.ckpt")
    with pytest.raises(UnsafePickleError):
        io.load_checkpoint(tmp_path / "a.ckpt")
    assert io.load_checkpoint(tmp_path / "a.ckpt", weights_only=False) == {
        "hparams": Namespace(width=3)
    }
    with pytest.raises(CheckpointNotFoundError):
        io.load_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({}, tmp_path / "b.ckpt", storage_options={"a": 1})
