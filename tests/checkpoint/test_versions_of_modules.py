"""Versions of modules stay with state dicts, as in files of torch.save.

They were lost by open, convert and load_training_state, and modules took new state for old.
"""

import functools
import operator
from collections import OrderedDict

import pytest
import torch
from torch import nn

import dcp_rs
from dcp_rs.optim import load_training_state, save_training_state


class Versioned(nn.Linear):
    """Since version 2 the weight is half of what it was. State of no version is refused."""

    _version = 2

    def __init__(self):
        super().__init__(2, 2)

    def _load_from_state_dict(self, state, prefix, local, *rest):
        version = local.get("version")
        if version is None:
            raise ValueError("a version is missing")
        if version < self._version:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2
        super()._load_from_state_dict(state, prefix, local, *rest)


class Old(Versioned):
    _version = 1


def model_of(kind=Versioned):
    return nn.Sequential(OrderedDict(first=nn.Linear(2, 2), second=kind()))


def assert_loads(state_dict, saved):
    """The state dict loads as the saved model's own, which may be older."""
    wanted, model = model_of(), model_of()
    wanted.load_state_dict(saved.state_dict())
    model.load_state_dict(state_dict)
    assert torch.equal(model.second.weight, wanted.second.weight)


kinds = pytest.mark.parametrize("kind", [Versioned, Old])


@kinds
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_an_open_file_has_them(tmp_path, kind, zipped):
    saved = model_of(kind)
    path = tmp_path / "x.pth"
    state = {"model": saved.state_dict(), "step": 3}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    opened = dcp_rs.open(path).state_dict()
    assert opened["model"]._metadata == torch.load(path)["model"]._metadata
    assert_loads(opened["model"], saved)
    torch.save(saved.state_dict(), path, _use_new_zipfile_serialization=zipped)
    assert_loads(dcp_rs.open(path).state_dict(copy=True), saved)


@kinds
def test_conversions_keep_them(tmp_path, kind):
    saved = model_of(kind)
    path, native, back = tmp_path / "x.pth", tmp_path / "native", tmp_path / "back.pth"
    for state, at in (
        (saved.state_dict(), ()),
        ({"a": [{"m": saved.state_dict()}]}, ("a", 0, "m")),
    ):
        torch.save(state, path)
        dcp_rs.convert(path, native, to="dcp-rs", overwrite=True)
        dcp_rs.convert(native, back, to="torch", overwrite=True)
        for whole in (dcp_rs.open(native).state_dict(), torch.load(back)):
            found = functools.reduce(operator.getitem, at, whole)
            assert found._metadata == saved.state_dict()._metadata
            assert_loads(found, saved)
    dcp_rs.index(path)
    assert_loads(dcp_rs.open(path).state_dict()["a"][0]["m"], saved)


@kinds
@pytest.mark.parametrize(
    ("state", "options"),
    [
        (lambda model: model.state_dict(prefix="module."), {"rename": {"module": ""}}),
        (lambda model: nn.DataParallel(model).state_dict(), {"rename": {"module": ""}}),
        (lambda model: {"a": model.state_dict(), "b": 1}, {"include": "a.*", "rename": {"a": ""}}),
        (
            lambda model: {"a": nn.DataParallel(model).state_dict(), "b": 1},
            {"include": "a.*", "rename": {"a.module": ""}},
        ),
    ],
)
def test_new_names_keep_them(tmp_path, kind, state, options):
    saved = model_of(kind)
    torch.save(state(saved), tmp_path / "x.pth")
    for to in ("y.pth", "native"):
        dcp_rs.convert(tmp_path / "x.pth", tmp_path / to, **options)
        assert_loads(dcp_rs.open(tmp_path / to).state_dict(), saved)
    assert_loads(torch.load(tmp_path / "y.pth"), saved)


@kinds
def test_saves_keep_them(tmp_path, kind):
    saved = model_of(kind)
    state = {"model": saved.state_dict(), "step": 3}
    dcp_rs.save(state, tmp_path / "one", no_dist=True)
    dcp_rs.async_save(state, tmp_path / "two", no_dist=True).result()
    save_training_state(tmp_path / "three", saved, extra={"step": 3}, no_dist=True)
    for name in ("one", "two", "three"):
        assert_loads(dcp_rs.open(tmp_path / name).state_dict()["model"], saved)
        dcp_rs.convert(tmp_path / name, tmp_path / f"{name}.pth", to="torch")
        assert_loads(torch.load(tmp_path / f"{name}.pth")["model"], saved)
    metadata = dcp_rs.RsReader(tmp_path / "one").read_metadata()
    assert set(metadata.planner_data) == set(metadata.state_dict_metadata)


@kinds
def test_training_state_of_a_file_loads_by_them(tmp_path, kind):
    saved, path = model_of(kind), tmp_path / "x.pt"
    for state in (saved.state_dict(), nn.DataParallel(saved).state_dict()):
        torch.save({"model": state}, path)
        wanted, model = model_of(), model_of()
        wanted.load_state_dict(saved.state_dict())
        load_training_state(path, model, no_dist=True)
        assert torch.equal(model.second.weight, wanted.second.weight)
        loaded = model_of()
        load_training_state(
            path, nn.ModuleDict({"part": loaded}), rename={"model": "model.part"}, no_dist=True
        )
        assert torch.equal(loaded.second.weight, wanted.second.weight)
    torch.save({"model": dict(saved.state_dict())}, path)
    with pytest.raises(ValueError, match="version is missing"):  # as torch's load_state_dict
        load_training_state(path, model, no_dist=True)


@pytest.mark.parametrize(
    "odd", [[1], {"": 1}, {1: {}}, {"": {"version": [1], 2: 3}}, {"": {"version": None, "x": "y"}}]
)
def test_odd_notes_are_no_obstacle(tmp_path, odd):
    state = model_of().state_dict()
    state._metadata = odd
    torch.save(state, tmp_path / "x.pth")
    opened = dcp_rs.open(tmp_path / "x.pth").state_dict()
    assert list(opened) == list(state)
    dcp_rs.save(state, tmp_path / "native", no_dist=True)
    assert list(dcp_rs.open(tmp_path / "native").state_dict()) == list(state)
