"""RsSavePlanner: what DefaultSavePlanner saves, with far less said about it."""

import argparse
import gc
import pickle
import warnings
import weakref
from collections import Counter, OrderedDict
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import dcp_rs
from dcp_rs import RsLoadPlanner, RsSavePlanner, RsWriter
from dcp_rs.errors import CheckpointNotFoundError, PlanError, UnsafePickleError, UnsupportedError
from support import (
    assert_state_equal,
    blank,
    dtypes_state,
    nested_state,
    rank_outcomes,
    run_ranks,
    shapes_state,
    strange_names_state,
)


def restored(template, path, **options):
    dcp_rs.load(template, path, verify=True, **options)
    return template


# --- one rank: the same state comes back as through torch's planner and writer ---------------------


@pytest.mark.parametrize("make", [dtypes_state, shapes_state, strange_names_state, nested_state])
def test_what_is_saved_is_restored(ckpt, make):
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


def test_metadata_says_what_torchs_says(tmp_path):
    state = nested_state()
    ours = dcp_rs.save(state, tmp_path / "ours")
    stock = dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    assert dict(ours.planner_data) == dict(stock.planner_data)
    assert set(ours.state_dict_metadata) == set(stock.state_dict_metadata)
    for fqn, entry in stock.state_dict_metadata.items():
        got = ours.state_dict_metadata[fqn]
        assert type(got) is type(entry)
        if hasattr(entry, "size"):
            assert (got.size, got.chunks) == (entry.size, entry.chunks)
            assert got.properties.dtype == entry.properties.dtype


def test_metadata_pickles_to_a_few_bytes_and_knows_when_it_is_out_of_date(ckpt):
    metadata = dcp_rs.save({f"layer.{i}": torch.ones(3) for i in range(500)}, ckpt)
    data = pickle.dumps(metadata)
    assert len(data) < 2000
    copy = pickle.loads(data)
    assert len(copy.state_dict_metadata) == len(copy.storage_data) == len(copy.planner_data) == 500
    assert copy.state_dict_metadata["layer.7"].size == (3,)
    late = pickle.loads(data)
    dcp_rs.save({"w": torch.ones(1)}, ckpt)
    assert len(metadata.state_dict_metadata) == 500  # this one holds the old index open
    with pytest.raises(CheckpointNotFoundError, match="has been replaced"):
        len(late.state_dict_metadata)


def test_metadata_of_what_others_wrote_pickles_to_the_path_that_was_opened(tmp_path):
    """It once opened the folder of a file: here that is another model, in silence."""
    save_file({"other": torch.zeros(2)}, tmp_path / "model.safetensors")
    save_file({"w": torch.ones(3)}, tmp_path / "part.safetensors")
    torch.save({"x": torch.ones(4)}, tmp_path / "file.pt")
    for rank in range(2):
        dcp.save({"r": torch.full((rank + 1,), 1.0)}, checkpoint_id=tmp_path / f"of{rank}", no_dist=True)
        (tmp_path / f"of{rank}/.metadata").rename(tmp_path / f"of{rank}/__{rank}.metadata")
    for name, rank, size in [
        ("part.safetensors", None, {"w": (3,)}),
        ("file.pt", None, {"x": (4,)}),
        ("of0", 0, {"r": (1,)}),
        ("of1", 1, {"r": (2,)}),
    ]:
        metadata = dcp_rs.RsReader(tmp_path / name).read_metadata(rank=rank)
        assert repr(metadata.state_dict_metadata).endswith(f"{name}>")
        data = pickle.dumps(metadata)
        assert len(data) < 2000
        copy = pickle.loads(data)
        assert {fqn: entry.size for fqn, entry in copy.state_dict_metadata.items()} == size


def test_parameters_tied_weights_and_frozen_ones(ckpt):
    weight = torch.nn.Parameter(torch.randn(4, 3))
    frozen = torch.nn.Parameter(torch.randn(2), requires_grad=False)
    metadata = dcp_rs.save({"a": weight, "b": weight, "c": frozen}, ckpt)
    got = restored({"a": torch.zeros(4, 3), "b": torch.zeros(4, 3), "c": torch.zeros(2)}, ckpt)
    assert_state_equal(got, {"a": weight.detach(), "b": weight.detach(), "c": frozen.detach()})
    flags = {fqn: entry.properties.requires_grad for fqn, entry in metadata.state_dict_metadata.items()}
    assert flags == {"a": True, "b": True, "c": False}


def test_without_flattening(ckpt):
    dcp_rs.save({"w": torch.ones(2), "d": {"x": 1}}, ckpt, planner=RsSavePlanner(flatten_state_dict=False))
    with dcp_rs.open(ckpt) as checkpoint:
        assert checkpoint["d"] == {"x": 1}
        assert sorted(checkpoint.keys()) == ["d", "w"]


def test_globs_choose_what_is_saved(ckpt):
    state = {"model": {"w": torch.ones(1), "b": torch.ones(1)}, "optim": {"m": torch.ones(1), "lr": 1}}
    dcp_rs.save(state, ckpt, planner=RsSavePlanner(include="*.[wm]"))
    assert sorted(dcp_rs.open(ckpt).keys()) == ["model.w", "optim.m"]
    dcp_rs.save(state, ckpt, planner=RsSavePlanner(exclude=["optim.*"]))
    assert sorted(dcp_rs.open(ckpt).keys()) == ["model.b", "model.w"]


def test_values_that_know_their_state(ckpt):
    module = torch.nn.Linear(3, 2)
    dcp_rs.save({"module": module, "step": 4}, ckpt)
    other = torch.nn.Linear(3, 2)
    restored({"module": other, "step": 0}, ckpt)
    assert_state_equal(other.state_dict(), module.state_dict())


# --- casts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_floating_tensors_are_cast(ckpt, dtype):
    state = {
        "f": torch.linspace(-2, 2, 4096).reshape(64, 64),
        "t": torch.linspace(-2, 2, 4096).reshape(64, 64).t(),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "i": torch.arange(5),
        "c": torch.ones(2, dtype=torch.complex64),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0),
    }
    dcp_rs.save(state, ckpt, planner=RsSavePlanner(dtype=dtype))
    with dcp_rs.open(ckpt) as checkpoint:
        for name, tensor in state.items():
            want = tensor.to(dtype) if tensor.is_floating_point() else tensor
            assert_state_equal({name: checkpoint[name]}, {name: want.contiguous()})


def test_large_casts_take_bounded_memory(ckpt):
    state = {f"w{i}": torch.randn(1100, 1000) for i in range(3)} | {"t": torch.randn(900, 1000).t()}
    dcp_rs.save(state, ckpt, planner=RsSavePlanner(dtype=torch.float64), max_inflight_bytes=4 << 20)
    with dcp_rs.open(ckpt) as checkpoint:
        assert all(torch.equal(checkpoint[name], tensor.double()) for name, tensor in state.items())


def test_strided_and_conjugated_tensors_take_bounded_memory(ckpt):
    state = {
        "wide": torch.randn(3, 700_001).t(),
        "deep": torch.randn(2, 3, 5, 70_001).permute(3, 1, 0, 2),
        "conj": torch.randn(600_000, dtype=torch.complex64).conj(),
        "one_row": torch.randn(1_000_000, 2)[:, 0].unsqueeze(0),
    }
    dcp_rs.save(state, ckpt, max_inflight_bytes=2 << 20)
    with dcp_rs.open(ckpt) as checkpoint:
        assert all(torch.equal(checkpoint[name], tensor) for name, tensor in state.items())


def test_casts_reach_other_writers(tmp_path):
    state = {"f": torch.ones(3), "i": torch.arange(2)}
    planner = RsSavePlanner(dtype=torch.bfloat16, exclude="nothing*")
    metadata = dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), planner=planner, no_dist=True)
    assert metadata.state_dict_metadata["f"].properties.dtype == torch.bfloat16
    got = {"f": torch.zeros(3, dtype=torch.bfloat16), "i": torch.zeros(2, dtype=torch.int64)}
    dcp.load(got, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert_state_equal(got, {"f": torch.ones(3, dtype=torch.bfloat16), "i": torch.arange(2)})


def test_a_dtype_that_is_no_float_is_refused():
    with pytest.raises(ValueError, match="floating-point"):
        RsSavePlanner(dtype=torch.int8)


# --- what is refused ---------------------------------------------------------------------------------


def test_a_tensor_without_values_is_refused_by_name(ckpt):
    with pytest.raises(UnsupportedError, match="'m' is on the meta device"):
        dcp_rs.save({"m": torch.empty(2, device="meta")}, ckpt)


@dataclass
class Config:
    width: int = 8


SAVES = [dcp_rs.save, lambda state, path, **more: dcp.save(state, storage_writer=RsWriter(path), **more)]


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
        UserWarning, match=rf"value 'run\.config' \({kind}\) is saved, but will not load under weights_only=True"
    ):
        save({"run": {"config": value}}, ckpt, no_dist=True)
    with pytest.raises(UnsafePickleError):
        dcp_rs.load({"run": {"config": None}}, ckpt, no_dist=True)
    with dcp_rs.open(ckpt, weights_only=False) as checkpoint:
        assert type(checkpoint["run.config"]) is type(value)


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


# --- subclasses --------------------------------------------------------------------------------------


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
        super().set_up_planner({f"x_{k}": v for k, v in state_dict.items()}, storage_meta, is_coordinator)


def test_subclasses_get_items_where_they_ask_for_them(ckpt):
    dcp_rs.save({"w": torch.ones(2)}, ckpt, planner=Doubling())
    assert dcp_rs.open(ckpt)["w"].tolist() == [2, 2]
    dcp_rs.save({"w": torch.ones(2), "x": 1}, ckpt, planner=Counting())
    assert Counting.seen == 2
    dcp_rs.save({"w": torch.ones(2)}, ckpt, planner=Renaming())
    assert list(dcp_rs.open(ckpt).keys()) == ["x_w"]


# --- ranks -------------------------------------------------------------------------------------------


def layouts(seed=0):
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    square = init_device_mesh("cpu", (2, size // 2) if size > 1 else (1, 1))
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "rows": distribute_tensor(whole(7, 3), mesh, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(whole(3, 9), mesh, [Shard(1)], src_data_rank=None),
        "hybrid": distribute_tensor(whole(8, 6), square, [Replicate(), Shard(0)], src_data_rank=None),
        "block": distribute_tensor(whole(8, 6), square, [Shard(0), Shard(1)], src_data_rank=None),
        "empty": distribute_tensor(whole(1, 3), mesh, [Shard(0)], src_data_rank=None),
        "model": {f"w{i}": whole(5 + i, 4) for i in range(9)},
        "step": 3,
        f"own.{dist.get_rank()}": whole(2),
    }


def save_both_ways(path):
    state = layouts()
    metadata = dcp_rs.save(state, path / "ours")
    dcp.save(layouts(), storage_writer=dcp.FileSystemWriter(path / "stock"))
    ours, stock = layouts(seed=1), layouts(seed=2)
    dcp_rs.load(ours, path / "ours", verify=True, planner=RsLoadPlanner())
    dcp.load(stock, storage_reader=dcp.FileSystemReader(path / "stock"))
    assert_state_equal(ours, stock)
    return len(metadata.state_dict_metadata), metadata.storage_meta.checkpoint_id


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_restore_what_torchs_planner_would(tmp_path, size):
    counts = run_ranks(size, save_both_ways, tmp_path)
    assert counts == [(15 + size, tmp_path / "ours")] * size


def save_replicas(path, lowest):
    state = {f"w{i}": torch.full((1000 * (i + 1),), float(i)) for i in range(16)}
    dcp_rs.save(state, path, planner=RsSavePlanner(dedup_save_to_lowest_rank=lowest))


def test_replicas_are_saved_once_and_balanced_by_bytes(tmp_path):
    run_ranks(4, save_replicas, tmp_path / "even", False)
    sizes = [file.stat().st_size for file in (tmp_path / "even").glob("g*")]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) <= 16_000 * 4
    run_ranks(2, save_replicas, tmp_path / "lowest", True)
    small, large = sorted(file.stat().st_size for file in (tmp_path / "lowest").glob("g*"))
    assert small < 8192
    assert large > 500_000


def save_wrongly(path, how):
    rank = dist.get_rank()
    if how == "shape":
        state = {"fine": torch.ones(1), "w": torch.ones(2 + rank)}
    else:
        state = {"w": torch.ones(2) if rank == 0 else 3}
    dcp_rs.save(state, path)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("shape", r'"w": it is a tensor of float32 \[2\] on rank 0, and a tensor of float32 \[3\] on rank 1'),
        ("kind", '"w": it is a tensor of float32'),
    ],
)
def test_every_rank_hears_of_a_plan_that_does_not_fit(ckpt, how, message):
    for outcome in rank_outcomes(2, save_wrongly, ckpt, how):
        assert isinstance(outcome.error, PlanError)
        assert outcome.error.tensor == "w"
        with pytest.raises(PlanError, match=message):
            raise outcome.error
    assert list(ckpt.glob("g*")) == []


# --- cached plans --------------------------------------------------------------------------------------


def save_with_cached_plans(path):
    sent = []
    for step in range(4):
        state = layouts(seed=step) | ({"late": torch.ones(3)} if step == 3 and dist.get_rank() == 1 else {})
        planner = RsSavePlanner(enable_plan_caching=True)
        dcp_rs.save(state, path, planner=planner)
        got = layouts(seed=9)
        dcp_rs.load(got, path)
        assert_state_equal(got, layouts(seed=step))
        dist.barrier()
        sent.append(planner._request_bytes)
    return sent


def test_a_plan_that_did_not_change_is_not_sent_again(ckpt):
    first, second = run_ranks(2, save_with_cached_plans, ckpt)
    assert first[0] > 100
    assert first[1:] == [0, 0, 0]
    assert second[1:3] == [0, 0]
    assert second[3] > 100
    assert "late" in dcp_rs.open(ckpt)


def save_and_compare(path, group, seed, **options):
    """A save of the ranks of a group; what each of them sent of its plan."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    planner = RsSavePlanner(enable_plan_caching=True)
    state = {"all": torch.full((4,), float(seed)), f"of{rank}": torch.full((3,), float(10 * seed + rank))}
    dcp_rs.save(state, path, planner=planner, process_group=group, **options)
    with dcp_rs.open(path) as checkpoint:
        assert checkpoint["all"].tolist() == [seed] * 4
        for other in range(size):
            assert checkpoint[f"of{other}"].tolist() == [10 * seed + other] * 3
    dist.barrier(group)
    return planner._request_bytes


def save_in_many_groups(path):
    """Rank 1 is in both groups, and is the coordinator of the second."""
    rank = dist.get_rank()
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
    sent = {"first": [], "second": []}
    save_alone = {"alone": torch.ones(2)}
    dcp_rs.save(save_alone, path / f"alone{rank}", planner=RsSavePlanner(enable_plan_caching=True), no_dist=True)
    for seed in range(3):
        if rank in (0, 1):
            sent["first"].append(save_and_compare(path / "first", first, seed))
        if rank in (1, 2):
            sent["second"].append(save_and_compare(path / "second", second, seed))
        dcp_rs.save(save_alone, path / f"alone{rank}", planner=RsSavePlanner(enable_plan_caching=True), no_dist=True)
        # torch's own function does not tell through which group.
        state = {"all": torch.ones(4), f"of{rank}": torch.ones(3)}
        for group in (first, second) if rank == 1 else (first,) if rank == 0 else (second,):
            planner = RsSavePlanner(enable_plan_caching=True)
            name = path / ("a" if group is first else "b")
            dcp.save(state, storage_writer=RsWriter(name), planner=planner, process_group=group)
    third = dist.new_group([2, 0])
    if rank in (0, 2):
        sent["third"] = [save_and_compare(path / "third", third, seed) for seed in range(2)]
    # Another group of the same ranks, and one that is made anew, begin with nothing.
    again = dist.new_group([0, 1])
    if rank == 2:
        return sent, True
    sent["again"] = [save_and_compare(path / "again", again, seed) for seed in range(2)]
    gone = weakref.ref(again)
    dist.destroy_process_group(again)
    del again
    gc.collect()
    return sent, gone() is None


def test_plans_are_remembered_for_each_group(tmp_path):
    for sent, gone in run_ranks(3, save_in_many_groups, tmp_path):
        for name, sizes in sent.items():
            assert all(size > 0 for size in sizes[:1]), name
            assert all(size == 0 for size in sizes[1:]), name
        assert gone


def fail(writer, plans):
    raise PlanError("after planning")


def save_after_a_failure(path):
    rank = dist.get_rank()

    def planner():
        return RsSavePlanner(enable_plan_caching=True)

    one, two = {"w": torch.ones(2)}, {"w": torch.ones(2), f"more{rank}": torch.ones(3)}
    dcp_rs.save(one, path, planner=planner())
    with pytest.MonkeyPatch.context() as patch:  # the coordinator plans, and the save fails after that
        patch.setattr(RsWriter, "prepare_global_plan", fail)
        with pytest.raises(PlanError, match="after planning"):
            dcp_rs.save(two, path, planner=planner())
    for state in (one, two, one, one):
        dcp_rs.save(state, path, planner=planner())
        dist.barrier()
        with dcp_rs.open(path) as checkpoint:
            assert sorted(checkpoint) == sorted(["w", "more0", "more1"] if state is two else ["w"])
        dist.barrier()


def test_a_save_that_failed_is_not_remembered(ckpt):
    run_ranks(2, save_after_a_failure, ckpt)


# --- one save with stock planners too -------------------------------------------------------------------


def test_torchs_planner_and_ours_write_the_same_bytes(tmp_path):
    state = nested_state()
    for name, planner in [("ours", RsSavePlanner()), ("stock", DefaultSavePlanner())]:
        dcp.save(state, storage_writer=RsWriter(tmp_path / name), planner=planner, no_dist=True)
    ours, stock = (dcp_rs.open(tmp_path / name) for name in ("ours", "stock"))
    assert list(ours.keys()) == list(stock.keys())
    assert_state_equal(ours.state_dict(), stock.state_dict())


def save_pending_sums(path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dcp_rs.save({"sums": DTensor.from_local(torch.ones(3), mesh, [Partial()])}, path)


def test_pending_reductions_are_refused(ckpt):
    for outcome in rank_outcomes(2, save_pending_sums, ckpt):
        assert isinstance(outcome.error, PlanError), outcome.traceback
        assert "'sums' has pending reductions" in str(outcome.error)
    assert not ckpt.exists() or not list(ckpt.iterdir())
