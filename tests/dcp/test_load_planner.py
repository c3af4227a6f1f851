"""``RsLoadPlanner``: every option, and what stock DCP loads wrong without a word."""

import dataclasses
import gc
import os
import pickle
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader
from dcp_rs.engine.reports import Mismatch
from dcp_rs.errors import PlanError
from support import RankDiedError, assert_state_equal, rank_outcomes, run_ranks
from support.forged import save_with_hole

pytestmark = pytest.mark.filterwarnings("error", "ignore:torch.distributed is disabled")

W = torch.arange(24.0).reshape(4, 6) / 7
STATE = {
    "layers": {"0": {"weight": W, "bias": W[0]}, "1": {"weight": -W, "bias": -W[0]}},
    "ids": torch.arange(5),
    "mask": torch.tensor([True, False, True]),
    "z": torch.complex(W[0], W[1]),
    "step": 7,
    "note": "text",
}


def fresh(state=STATE, device="cpu"):
    if isinstance(state, dict):
        return {key: fresh(value, device) for key, value in state.items()}
    return torch.zeros_like(state, device=device) if isinstance(state, torch.Tensor) else None


@pytest.fixture
def saved(ckpt):
    dcp_rs.save(STATE, ckpt, fsync=False)
    return ckpt


# --- dtype and device


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_dtype_is_what_floating_point_tensors_become(saved, load, dtype):
    report = load(state := fresh(), saved, dtype=dtype, assign=True)
    want = {
        name: {k: v.to(dtype) for k, v in layer.items()} for name, layer in STATE["layers"].items()
    }
    assert_state_equal(state, STATE | {"layers": want})
    assert report.dtype_mismatched == []  # it was a wish


def test_a_low_precision_checkpoint_loads_into_a_float32_model(tmp_path, load):
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        path = tmp_path / str(dtype)
        dcp_rs.save({"w": W.to(dtype)}, path, fsync=False)
        report = load(state := {"w": torch.zeros(4, 6)}, path, dtype_policy="cast")
        assert torch.equal(state["w"], W.to(dtype).float())
        assert report.dtype_mismatched == [Mismatch("w", torch.float32, dtype)]
        state = {"w": torch.zeros(4, 6, dtype=dtype)}
        load(state, path, dtype=torch.float32, assign=True)
        assert torch.equal(state["w"], W.to(dtype).float())


def test_a_difference_in_dtype_is_said(saved, load):
    def template():
        return {
            "layers": {
                "0": {
                    "weight": torch.zeros(4, 6, dtype=torch.float16),
                    "bias": torch.zeros(6).double(),
                }
            }
        }

    with pytest.warns(UserWarning, match=r"'layers.0.\w+' and 1 more are cast on loading"):
        load(template(), saved)
    report = load(state := template(), saved, dtype_policy="cast")
    assert torch.equal(state["layers"]["0"]["weight"], W.half())
    assert {m.name for m in report.dtype_mismatched} == {"layers.0.weight", "layers.0.bias"}
    with pytest.raises(PlanError, match=r"layers.0.* is torch.float.*dtype_policy='error'"):
        load(template(), saved, dtype_policy="error")
    # dtype= says it is meant for that dtype, and for no other.
    load(template(), saved, dtype=torch.float64, assign=True, dtype_policy="error")
    state = {"ids": torch.zeros(5, dtype=torch.int32)}
    differs = r"'ids' is torch.int32 in the state dict, and torch.int64 in the checkpoint"
    with pytest.raises(PlanError, match=differs):
        load(state, saved, dtype=torch.float64, dtype_policy="error")


def test_a_cast_that_cannot_be_is_an_error_whatever_the_policy(saved, load):
    for policy in ("warn", "cast", "error"):
        with pytest.raises(
            PlanError,
            match=r"'z' is stored as torch.complex64, which cannot be cast to torch.float32",
        ):
            load({"z": torch.zeros(6)}, saved, dtype_policy=policy)


def test_unknown_policies_are_refused():
    with pytest.raises(ValueError, match=r"dtype_policy='ask'"):
        RsLoadPlanner(dtype_policy="ask")


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 4, bias=False) for _ in range(2)])
        self.register_buffer("ids", torch.zeros(5, dtype=torch.int64))


@pytest.mark.parametrize(
    "options", [{}, {"device": "cpu"}, {"device": "cpu", "dtype": torch.bfloat16}]
)
def test_models_on_meta_come_into_being(saved, load, options):
    with torch.device("meta"):
        module = Module()
    state = module.state_dict()
    with pytest.warns(UserWarning, match="the load fills no tensor"):
        load(state, saved, **options)
    module.load_state_dict(state, assign=True)
    dtype = options.get("dtype", torch.float32)
    assert torch.equal(module.layers[1].weight, -W.to(dtype))
    assert torch.equal(module.ids, STATE["ids"])


def test_excluded_tensors_stay_on_meta(saved, load):
    with torch.device("meta"):
        state = Module().state_dict()
    with pytest.warns(UserWarning, match="the load fills no tensor"):
        load(state, saved, exclude="layers.1.*")
    assert state["layers.1.weight"].is_meta
    assert torch.equal(state["layers.0.weight"], W)


def test_a_policy_may_change_between_loads(saved):
    planner = RsLoadPlanner(dtype_policy="error")
    state = {"layers": {"0": {"weight": torch.zeros(4, 6).double()}}}
    with pytest.raises(PlanError, match="dtype_policy='error'"):
        dcp_rs.load_state_dict(state, RsReader(saved), planner=planner)
    planner.dtype_policy = "cast"
    dcp_rs.load_state_dict(state, RsReader(saved), planner=planner)
    assert torch.equal(state["layers"]["0"]["weight"], W.double())


# --- names


@pytest.mark.parametrize(
    "rename",
    [
        {"layers.0.weight": "model.a", "layers.1.weight": "model.b", "step": "count"},
        lambda name: {
            "layers.0.weight": "model.a",
            "layers.1.weight": "model.b",
            "step": "count",
        }.get(name, name),
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64]
)  # through the fast path and through staging
def test_rename(saved, load, rename, dtype):
    state = {
        "model": {"a": torch.zeros(4, 6), "b": torch.zeros(4, 6)},
        "count": 0,
        "ids": torch.zeros(5).long(),
    }
    load(state, saved, rename=rename, dtype=dtype, assign=True)
    assert_state_equal(
        state, {"model": {"a": W.to(dtype), "b": -W.to(dtype)}, "count": 7, "ids": STATE["ids"]}
    )


@pytest.mark.parametrize(
    ("include", "exclude", "loaded"),
    [
        (
            "layers.*",
            None,
            {"layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"},
        ),
        (["layers.0.*", "ids"], None, {"layers.0.weight", "layers.0.bias", "ids"}),
        ("layers.*", "*.bias", {"layers.0.weight", "layers.1.weight"}),
        (None, ["layers.*", "z", "note", "step"], {"ids", "mask"}),
    ],
)
def test_include_and_exclude(saved, load, include, exclude, loaded):
    report = load(state := fresh(), saved, include=include, exclude=exclude)
    want, blank = dict(flat(STATE)), dict(flat(fresh()))
    for name, value in flat(state):
        assert_state_equal(value, want[name] if name in loaded else blank[name])
    assert set(report.excluded) == set(want) - loaded


def flat(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


# --- what does not fit


def test_missing_entry_is_named(saved, load):
    state = fresh() | {"new": torch.zeros(2), "other": 1}
    with pytest.raises(PlanError, match=r"the checkpoint has no 'new' \(nor 'other'\)"):
        load(state, saved)
    state = fresh() | {"layers": {"0": {"weight": torch.zeros(6, 4)}}}
    with pytest.raises(
        PlanError, match=r"'layers.0.weight' has shape \(6, 4\) in the state dict, and \(4, 6\)"
    ):
        load(state, saved)
    with pytest.raises(
        PlanError, match=r"'ids' is a tensor in the checkpoint, and of type int in the state dict"
    ):
        load({"ids": 3}, saved)


@pytest.mark.parametrize("count", [2, 10, 13])
def test_all_that_does_not_fit_is_named(tmp_path, load, count):
    """Only the first was: a model of other sizes was mended one run at a time."""
    dcp_rs.save(
        {f"w{i:02}": torch.ones(4, 4) for i in range(count)} | {"right": torch.ones(2)},
        tmp_path,
        no_dist=True,
    )
    state = {f"w{i:02}": torch.zeros(4, i + 5) for i in range(count)} | {"right": torch.zeros(2)}
    state["w01"] = "a word"
    for options in ({}, {"dtype": torch.float16}):
        with pytest.raises(PlanError) as raised:
            load(state, tmp_path, **options)
        said = str(raised.value).split("; ")
        assert raised.value.tensor == "w00"
        assert (
            said[0]
            == "tensor 'w00' has shape (4, 5) in the state dict, and (4, 4) in the checkpoint"
        )
        assert said[1] == "'w01' is a tensor in the checkpoint, and of type str in the state dict"
        assert len(said) == min(count, 10) + (count > 10)
        assert all(f"'w{i:02}' has shape (4, {i + 5})" in said[i] for i in range(2, min(count, 10)))
        assert (said[-1] == "and 3 more") == (count > 10)
        assert state["right"].tolist() == [0, 0]


def test_a_partial_load_reports_what_it_left_alone(saved, load):
    state = {
        "layers": {"0": {"weight": torch.zeros(4, 6), "bias": torch.full((5,), -1.0)}},
        "ids": "not a tensor",
        "new": torch.full((2,), -1.0),
        "missing_value": 3,
        "step": 0,
    }
    report = load(state, saved, allow_partial_load=True)
    want = {"layers": {"0": {"weight": W, "bias": torch.full((5,), -1.0)}}, "ids": "not a tensor"}
    assert_state_equal(state, want | {"new": torch.full((2,), -1.0), "missing_value": 3, "step": 7})
    assert set(report.missing) == {"new", "missing_value"}
    assert set(report.unexpected) == {"layers.1.weight", "layers.1.bias", "mask", "z", "note"}
    assert set(report.shape_mismatched) == {
        Mismatch("layers.0.bias", (5,), (6,)),
        Mismatch("ids", "str", (5,)),
    }
    assert report.incomplete == []


# --- tensors by name


def test_tensors_by_name(saved):
    planner = RsLoadPlanner(checkpoint=saved)
    first = planner.resolve_tensor("layers.0.weight")
    second = planner.resolve_tensor("layers.0.weight", dtype=torch.float64)
    third = planner.resolve_tensor("ids", device="cpu", dtype=torch.int16)
    assert torch.equal(first, W)
    assert second.dtype == torch.float64
    assert third.tolist() == list(range(5))
    first.zero_()  # the caller's own
    assert torch.equal(planner.resolve_tensor("layers.0.weight"), W)
    assert (
        RsLoadPlanner(checkpoint=saved, dtype=torch.bfloat16).resolve_tensor("layers.1.bias").dtype
        == torch.bfloat16
    )
    with pytest.raises(KeyError, match=r"nothing"):
        planner.resolve_tensor("nothing")
    with pytest.raises(TypeError, match=r"'note' is not a tensor"):
        planner.resolve_tensor("note")
    with pytest.raises(PlanError, match=r"no checkpoint"):
        RsLoadPlanner().resolve_tensor("ids")
    # It gave the real part of complex numbers, and an error of torch's own for what that cannot
    # convert.
    for dtype in (torch.float32, getattr(torch, "float4_e2m1fn_x2", torch.float32)):
        with pytest.raises(
            PlanError,
            match=r"'z' is stored as torch.complex64, which cannot be cast to torch.float",
        ):
            planner.resolve_tensor("z", dtype=dtype)
    # After a load, of what was loaded, under its name there.
    planner = RsLoadPlanner(rename={"layers": "model"}, allow_partial_load=True)
    dcp_rs.load_state_dict({"step": 0, "new": 0}, RsReader(saved), planner=planner)
    assert torch.equal(planner.resolve_tensor("model.1.weight"), -W)
    assert planner.report.missing == ["new"]
    dcp_rs.load_state_dict(
        {"step": 0}, RsReader(saved), planner=planner
    )  # the report is of the last load
    assert planner.report.missing == []


def test_a_tensor_by_name_is_no_view_of_its_file(saved):
    """The file may be overwritten in place, and removed, before the tensor is used."""
    got = RsLoadPlanner(checkpoint=saved).resolve_tensor("layers.0.weight")
    for file in saved.glob("g*"):
        with file.open("r+b") as opened:
            opened.write(bytes(file.stat().st_size))
    assert torch.equal(got, W)


class Watching(RsLoadPlanner):
    """Sees every item of its rank, and fills in its own way."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def resolve_tensor(self, read_item, **options):
        if not isinstance(read_item, str):
            self.seen.append(read_item.storage_index.fqn)
        return super().resolve_tensor(read_item, **options)

    def commit_tensor(self, read_item, tensor):
        tensor.mul_(2)
        super().commit_tensor(read_item, tensor)


def test_subclasses_see_items(tmp_path):
    dcp_rs.save({"model": {"w": W, "b": W[0]}, "step": 3}, tmp_path, no_dist=True)
    planner = Watching(rename={"model.w": "model.x"}, exclude="model.skip")
    got = {
        "model": {"x": torch.zeros(4, 6), "b": torch.zeros(6), "skip": torch.zeros(1)},
        "step": 0,
    }
    dcp.load(got, storage_reader=RsReader(tmp_path), planner=planner, no_dist=True)
    assert_state_equal(
        got, {"model": {"x": W * 2, "b": W[0] * 2, "skip": torch.zeros(1)}, "step": 3}
    )
    assert sorted(planner.seen) == ["model.b", "model.w"]


def test_with_a_reader_of_others_it_is_torchs_planner(tmp_path):
    state = {"model": {"w": W, "b": W[0]}, "step": 3}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    got = {"model": {"w": torch.zeros(4, 6), "b": torch.zeros(6)}, "step": 0}
    dcp.load(
        got, storage_reader=dcp.FileSystemReader(tmp_path), planner=RsLoadPlanner(), no_dist=True
    )
    assert_state_equal(got, state)
    planner = RsLoadPlanner(rename={"model.w": "model.x"}, include="*")
    with pytest.raises(
        CheckpointException, match=r"rename= and include= of RsLoadPlanner need an RsReader"
    ):
        dcp.load(got, storage_reader=dcp.FileSystemReader(tmp_path), planner=planner, no_dist=True)


# --- ranks


def told_to_the_coordinator(path):
    with mock.patch.object(dist, "gather_object", wraps=dist.gather_object) as gather:
        for count in (5, 500):
            dcp_rs.load({f"w{i}": torch.zeros(2) for i in range(count)}, path)
    return [len(pickle.dumps(call.args[0])) for call in gather.call_args_list]


def test_message_of_a_plan_is_of_constant_size(ckpt):
    dcp_rs.save({f"w{i}": torch.zeros(2) for i in range(500)}, ckpt, fsync=False)
    for small, large in run_ranks(2, told_to_the_coordinator, ckpt):
        assert abs(small - large) < 400
        assert large < 2000


def load_with_hole(path):
    mesh = init_device_mesh("cpu", (2,))

    def target():
        return {
            "w": distribute_tensor(torch.full((8, 1), -1.0), mesh, [Shard(0)], src_data_rank=None)
        }

    # Only rank 1 lacks something; both ranks hear of it.
    with pytest.raises(
        PlanError, match=r"'w': the checkpoint does not hold \[4, 1\] elements at \[4, 0\]"
    ) as caught:
        dcp_rs.load(target(), path)
    assert any("rank 1" in note for note in caught.value.__notes__)
    state = target()
    planner = RsLoadPlanner(allow_partial_load=True)
    dcp_rs.load_state_dict(state, RsReader(path), planner=planner)
    got = state["w"].to_local().flatten().tolist()
    assert got == [-1] * 4
    assert planner.report.incomplete == ["w"]
    whole = {"w": torch.full((8, 1), -1.0)}
    with pytest.raises(PlanError, match=r"'w'"):
        dcp_rs.load(whole, path)
    dcp_rs.load(whole, path, allow_partial_load=True)
    assert whole["w"].flatten().tolist() == [-1] * 8


def test_holes_are_found_before_anything_is_read(ckpt):
    ckpt.mkdir()
    save_with_hole(ckpt)
    run_ranks(2, load_with_hole, ckpt)


def keys_that_differ(path):
    """Each rank asks for other names, as with pipelines; one asks for what is not there."""
    rank = dist.get_rank()
    mine = {f"stage{rank}": torch.full((3,), float(rank)), "shared": torch.ones(2)}
    dcp_rs.save(mine, path, fsync=False)
    other = (rank + 1) % dist.get_world_size()
    for planner in (RsLoadPlanner(), Watching()):
        got = {f"stage{other}": torch.zeros(3)} | ({"shared": torch.zeros(2)} if rank else {})
        dcp_rs.load_state_dict(got, RsReader(path), planner=planner)
        times = 2 if isinstance(planner, Watching) else 1
        assert got[f"stage{other}"].tolist() == [other * times] * 3
    problems = [
        ({"stage9": torch.zeros(3)}, "the checkpoint has no 'stage9'"),
        ({"stage1": torch.zeros(4)}, "'stage1' has shape"),
        (
            {"stage1": torch.zeros(3, dtype=torch.int32)},
            "'stage1' is torch.int32 .*dtype_policy='error'",
        ),
    ]
    for bad, message in problems:
        state = bad if rank == 1 else {"shared": torch.zeros(2)}
        with pytest.raises(PlanError, match=message) as caught:
            dcp_rs.load(state, path, dtype_policy="error")
        assert any("raised on rank 1" in note for note in caught.value.__notes__)
        # Through dcp.load it is DCP's collection of errors, with the rank.
        state = dict(bad) if rank == 1 else {"shared": torch.zeros(2)}
        with pytest.raises(CheckpointException) as collected:
            dcp.load(
                state, storage_reader=RsReader(path), planner=RsLoadPlanner(dtype_policy="error")
            )
        assert list(collected.value.failures) == [1]


def test_ranks_may_ask_for_different_keys(ckpt):
    run_ranks(2, keys_that_differ, ckpt)


class Dying(RsLoadPlanner):
    """Rank 1 is gone while it plans."""

    def create_local_plan(self):
        if dist.get_rank() == 1:
            os._exit(3)
        return super().create_local_plan()


class DyingReader(RsReader):
    """Rank 1 is gone when the others read."""

    def read_data(self, plan, planner):
        if dist.get_rank() == 1:
            os._exit(3)
        return super().read_data(plan, planner)


def load_and_die(path, where, replicas):
    began = time.monotonic()
    planner, reader = (Dying(), RsReader) if where == "plan" else (RsLoadPlanner(), DyingReader)
    try:
        dcp_rs.load_state_dict(fresh(), reader(path, replicas=replicas), planner=planner)
    except Exception as error:  # noqa: BLE001 - whatever the process group raises
        return time.monotonic() - began, repr(error)
    return None


@pytest.mark.parametrize(
    ("where", "replicas"),
    [
        ("read", "each"),
        *(pytest.param(*at, marks=pytest.mark.slow) for at in (("plan", "each"), ("read", "all"))),
    ],
)
def test_a_rank_that_dies_ends_the_load_of_all(saved, where, replicas):
    outcomes = rank_outcomes(3, load_and_die, saved, where, replicas, timeout=40, fresh=True)
    assert isinstance(outcomes[1].error, RankDiedError)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank]
        assert outcomes[rank].value is not None
        seconds, _ = outcomes[rank].value
        assert seconds < 40


def test_a_load_leaves_nothing_to_the_garbage_collector(tmp_path):
    dcp_rs.save({"w": torch.ones(4), "step": 1}, tmp_path / "ckpt", no_dist=True, fsync=False)
    planner = RsLoadPlanner()
    gone = weakref.ref(planner)
    gc.disable()
    try:
        dcp_rs.load_state_dict(
            {"w": torch.zeros(4), "step": 0},
            RsReader(tmp_path / "ckpt"),
            planner=planner,
            no_dist=True,
        )
        del planner
        assert gone() is None  # nor what it held: the state dict, the mapped index
    finally:
        gc.enable()


def test_tensors_by_name_are_of_the_last_load(tmp_path):
    for number in (1, 2):
        state = {"w": torch.full((3, 2), float(number))}
        dcp_rs.save(state, tmp_path / str(number), no_dist=True, fsync=False)
    planner, state = RsLoadPlanner(), {"w": torch.zeros(3, 2)}
    dcp.load(state, storage_reader=RsReader(tmp_path / "1"), planner=planner, no_dist=True)
    assert planner.resolve_tensor("w").eq(1).all()
    dcp_rs.load_state_dict(state, RsReader(tmp_path / "2"), planner=planner, no_dist=True)
    assert state["w"].eq(2).all()
    assert planner.resolve_tensor("w").eq(2).all()
    turned = {"w": torch.zeros(2, 3)}
    dcp_rs.load_state_dict(
        turned,
        RsReader(tmp_path / "1", views=dcp_rs.Transpose("w", (1, 0))),
        planner=planner,
        no_dist=True,
    )
    assert planner.resolve_tensor("w").shape == (2, 3)


def test_globs_of_an_iterator_count_for_every_load(tmp_path):
    dcp_rs.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path, no_dist=True, fsync=False)
    planner = RsLoadPlanner(include=(glob for glob in ["a"]))
    for _ in range(2):
        state = {"a": torch.zeros(2), "b": torch.zeros(2)}
        dcp.load(state, storage_reader=RsReader(tmp_path), planner=planner, no_dist=True)
        assert (state["a"].tolist(), state["b"].tolist()) == ([1, 1], [0, 0])


def test_a_name_is_read_from_the_checkpoint_of_the_last_load_or_from_none(saved, tmp_path):
    """After a load by torch's reader, it came from the load before that."""
    planner = RsLoadPlanner()
    got = {"layers.0.weight": torch.zeros_like(W)}
    dcp_rs.load_state_dict(got, RsReader(saved), planner=planner, no_dist=True)
    assert torch.equal(planner.resolve_tensor("layers.0.weight"), W)
    dcp.save(got, checkpoint_id=tmp_path / "stock", no_dist=True)
    reader = dcp.FileSystemReader(tmp_path / "stock")
    dcp.load(got, storage_reader=reader, planner=planner, no_dist=True)
    with pytest.raises(PlanError, match="no checkpoint"):
        planner.resolve_tensor("layers.0.weight")


def test_options_of_a_planner_can_be_set_later(saved):
    planner = RsLoadPlanner()
    planner.dtype, planner.assign = torch.bfloat16, True
    got = {"layers.0.weight": torch.zeros_like(W)}
    dcp_rs.load_state_dict(got, RsReader(saved), planner=planner, no_dist=True)
    assert got["layers.0.weight"].dtype == torch.bfloat16


class LeavesOut(dcp.DefaultLoadPlanner):
    """Plans an entry that the checkpoint lacks, and leaves it out at the end."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        (item,) = plan.items
        absent = dataclasses.replace(item, storage_index=MetadataIndex("absent"))
        return dataclasses.replace(plan, items=[item, absent])

    def finish_plan(self, plan):
        return super().finish_plan(dataclasses.replace(plan, items=plan.items[:1]))


@pytest.mark.parametrize("local_ranks", ["1", "2"])
def test_a_planner_may_leave_out_what_it_planned(saved, monkeypatch, local_ranks):
    """With other ranks on the machine, they are told what this rank reads."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks)
    got = {"layers.0.weight": torch.zeros_like(W)}
    dcp.load(got, storage_reader=RsReader(saved), planner=LeavesOut(), no_dist=True)
    assert torch.equal(got["layers.0.weight"], W)
