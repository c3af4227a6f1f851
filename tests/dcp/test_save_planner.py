"""Saves of one rank, and RsSavePlanner: what DefaultSavePlanner saves."""

import argparse
import warnings
from collections import Counter, OrderedDict
from dataclasses import dataclass

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

import dcp_rs
from dcp_rs import RsSavePlanner, RsWriter
from dcp_rs.errors import PlanError, UnsafePickleError, UnsupportedError
from support import (
    assert_state_equal,
    blank,
    dtypes_state,
    nested_state,
    shapes_state,
    strange_names_state,
)


def restored(template, path, **options):
    dcp_rs.load(template, path, verify=True, **options)
    return template


@pytest.mark.parametrize("make", [dtypes_state, shapes_state, strange_names_state, nested_state])
def test_save_is_restored(ckpt, make):
    state = make()
    metadata = dcp_rs.save(state, ckpt)
    got = restored(blank(state), ckpt)
    want = {name: plain(value) for name, value in state.items()}
    assert_state_equal({name: plain(value) for name, value in got.items()}, want)
    with dcp_rs.open(ckpt) as checkpoint:
        assert set(metadata.state_dict_metadata) == set(checkpoint.keys())


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().resolve_neg().contiguous()
    return value


def test_parameters_tied_weights_and_frozen_ones(ckpt):
    weight = torch.nn.Parameter(torch.randn(4, 3))
    frozen = torch.nn.Parameter(torch.randn(2), requires_grad=False)
    metadata = dcp_rs.save({"a": weight, "b": weight, "c": frozen}, ckpt)
    got = restored({"a": torch.zeros(4, 3), "b": torch.zeros(4, 3), "c": torch.zeros(2)}, ckpt)
    assert_state_equal(got, {"a": weight.detach(), "b": weight.detach(), "c": frozen.detach()})
    flags = {
        fqn: entry.properties.requires_grad for fqn, entry in metadata.state_dict_metadata.items()
    }
    assert flags == {"a": True, "b": True, "c": False}


def test_without_flattening(ckpt):
    dcp.save(
        {"w": torch.ones(2), "d": {"x": 1}},
        storage_writer=RsWriter(ckpt),
        planner=RsSavePlanner(flatten_state_dict=False),
    )
    with dcp_rs.open(ckpt) as checkpoint:
        assert checkpoint["d"] == {"x": 1}
        assert sorted(checkpoint.keys()) == ["d", "w"]


def test_globs_choose_what_is_saved(ckpt):
    state = {
        "model": {"w": torch.ones(1), "b": torch.ones(1)},
        "optim": {"m": torch.ones(1), "lr": 1},
    }
    dcp_rs.save(state, ckpt, include="*.[wm]")
    assert sorted(dcp_rs.open(ckpt).keys()) == ["model.w", "optim.m"]
    dcp_rs.save(state, ckpt, exclude=["optim.*"])
    assert sorted(dcp_rs.open(ckpt).keys()) == ["model.b", "model.w"]


@pytest.mark.parametrize("by", ["dcp_rs", "torch"])
def test_globs_of_a_generator_choose_the_same_in_each_save(ckpt, by):
    """The second save found the generator at its end, and excluded nothing."""
    planner = RsSavePlanner(include=iter(["*"]), exclude=(glob for glob in ["big.*"]))
    for _ in range(2):
        state = {"w": torch.ones(1), "big": {"w": torch.ones(9)}}
        if by == "torch":
            dcp.save(state, storage_writer=RsWriter(ckpt), planner=planner, no_dist=True)
        else:
            dcp.save(state, storage_writer=RsWriter(ckpt), planner=planner)
        assert list(dcp_rs.open(ckpt).keys()) == ["w"]


def test_values_that_know_their_state(ckpt):
    module = torch.nn.Linear(3, 2)
    dcp_rs.save({"module": module, "step": 4}, ckpt)
    other = torch.nn.Linear(3, 2)
    restored({"module": other, "step": 0}, ckpt)
    assert_state_equal(other.state_dict(), module.state_dict())


@pytest.mark.parametrize("name", ["uint1", "uint4", "uint7", "int1", "int4", "int7"])
def test_a_dtype_that_torch_does_not_save_is_refused_by_name(ckpt, name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip("this torch has no such dtype")
    state = {"x": torch.empty(4, dtype=dtype), "w": torch.ones(1)}
    for save in (dcp_rs.save, lambda *args: dcp_rs.async_save(*args).result()):
        with pytest.raises(UnsupportedError, match=rf"'x' .*its dtype is torch\.{name}") as raised:
            save(state, ckpt)
        assert raised.value.tensor == "x"
        assert not list(ckpt.glob("g*"))


def test_a_tensor_without_values_is_refused_by_name(ckpt):
    with pytest.raises(UnsupportedError, match="'m' is on the meta device"):
        dcp_rs.save({"m": torch.empty(2, device="meta")}, ckpt)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_lazy_module_is_refused_by_name_before_its_first_forward_pass(ckpt, dtype):
    """The errors of torch named no tensor, and their types were many."""
    state = {"m": torch.nn.LazyBatchNorm1d()}
    with pytest.raises(UnsupportedError, match=r"'m\.weight' has no shape yet"):
        dcp_rs.save(state, ckpt, dtype=dtype, no_dist=True)
    for staging in (False, True):
        future = dcp_rs.async_save(state, ckpt, dtype=dtype, no_dist=True, async_staging=staging)
        with pytest.raises(UnsupportedError, match=r"'m\.weight' has no shape yet"):
            future.result(60)


@dataclass
class Config:
    width: int = 8


SAVES = [
    dcp_rs.save,
    lambda state, path, **more: dcp.save(state, storage_writer=RsWriter(path), **more),
]


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (argparse.Namespace(lr=0.1), r"argparse\.Namespace"),
        (Config(), r"test_save_planner\.Config"),
        ((1, {"deep": [argparse.Namespace()]}), "tuple"),
    ],
)
def test_a_value_that_will_not_load_is_warned_of(ckpt, save, value, kind):
    with pytest.warns(
        UserWarning,
        match=rf"value 'run\.config' \({kind}\) is saved, but will not load under weights_only=True",
    ):
        save({"run": {"config": value}}, ckpt, no_dist=True)
    with pytest.raises(UnsafePickleError):
        dcp_rs.load({"run": {"config": None}}, ckpt, no_dist=True)
    with dcp_rs.open(ckpt, weights_only=False) as checkpoint:
        assert type(checkpoint["run.config"]) is type(value)


@pytest.mark.parametrize("save", SAVES)
def test_a_plain_value_that_needs_too_much_memory_is_warned_of(ckpt, save):
    """Its types load, but a load bounds its memory."""
    state = {"v": (torch.ones(1).expand(5_000_000),)}
    with pytest.warns(UserWarning, match=r"'v' .* will not load .* makes more than"):
        save(state, ckpt, no_dist=True)
    with pytest.raises(UnsafePickleError):
        dcp_rs.load({"v": None}, ckpt, no_dist=True)
    with pytest.raises(UnsafePickleError, match="strict_values=True"):
        dcp_rs.save(state, ckpt, no_dist=True, strict_values=True)


@pytest.mark.parametrize("save", SAVES)
def test_numbers_of_numpy_are_warned_of(ckpt, save):
    numpy = pytest.importorskip("numpy")
    for value in (numpy.float64(0.5), numpy.ones(3), {"lr": (numpy.float64(0.5),)}):
        with pytest.warns(UserWarning, match="numpy"):
            save({"value": (value,)}, ckpt, no_dist=True)


@pytest.mark.parametrize("save", SAVES)
def test_plain_values_are_not_warned_of(ckpt, save):
    values = {
        "none": None,
        "numbers": [True, 1, 0.5, 1j],
        "text": ("a", b"b", {"c"}),
        "torch": (
            torch.float16,
            torch.device("cpu"),
            torch.Size([2]),
            torch.ones(2),
            torch.nn.Parameter(torch.ones(1)),
        ),
        "ordered": (OrderedDict(a={1: [2]}),),
        "allowed": (Counter("aab"),),  # on torch's own list
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="torch.distributed")
        save(values, ckpt, no_dist=True)
    got = dict.fromkeys(values)
    dcp_rs.load(got, ckpt, no_dist=True)
    assert got["numbers"] == values["numbers"]


def test_names_that_collide_are_refused(ckpt):
    with pytest.raises(PlanError, match=r"a\.b"):
        dcp_rs.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, ckpt)


class Doubling(RsSavePlanner):
    def transform_object(self, write_item, object):  # noqa: A002 - torch's name
        made = super().transform_object(write_item, object)
        return made * 2 if isinstance(made, torch.Tensor) else made


class Counting(RsSavePlanner):
    seen = 0

    def create_global_plan(self, all_plans: list[SavePlan]):
        type(self).seen = sum(len(plan.items) for plan in all_plans)
        return super().create_global_plan(all_plans)


class Renaming(RsSavePlanner):
    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        super().set_up_planner(
            {f"x_{k}": v for k, v in state_dict.items()}, storage_meta, is_coordinator
        )


def test_subclasses_get_items_where_they_ask_for_them(ckpt):
    dcp.save({"w": torch.ones(2)}, storage_writer=RsWriter(ckpt), planner=Doubling())
    assert dcp_rs.open(ckpt)["w"].tolist() == [2, 2]
    dcp.save({"w": torch.ones(2), "x": 1}, storage_writer=RsWriter(ckpt), planner=Counting())
    assert Counting.seen == 2
    dcp.save({"w": torch.ones(2)}, storage_writer=RsWriter(ckpt), planner=Renaming())
    assert list(dcp_rs.open(ckpt).keys()) == ["x_w"]


class Reordered(DefaultSavePlanner):
    seen = None

    def set_up_planner(self, is_coordinator, *, storage_meta, state_dict):
        assert storage_meta.save_id
        self.seen = is_coordinator
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def test_a_planner_with_other_parameters_is_set_up_as_by_torch(ckpt):
    """Arguments went by position: it got the wrong ones."""
    planner = Reordered()
    dcp.save({"w": torch.ones(2)}, storage_writer=RsWriter(ckpt), planner=planner)
    assert planner.seen is True
    assert list(dcp_rs.open(ckpt).keys()) == ["w"]


def test_torchs_planner_and_ours_write_the_same_bytes(tmp_path):
    state = nested_state()
    for name, planner in [("ours", RsSavePlanner()), ("stock", DefaultSavePlanner())]:
        dcp.save(state, storage_writer=RsWriter(tmp_path / name), planner=planner, no_dist=True)
    ours, stock = (dcp_rs.open(tmp_path / name) for name in ("ours", "stock"))
    assert list(ours.keys()) == list(stock.keys())
    assert_state_equal(ours.state_dict(), stock.state_dict())
