"""New tensors of a load (``dtype=``, ``device=``, templates on meta): they take the place of the old ones when they are full, and not before."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader
from dcp_rs.errors import CorruptDataError, PlanError, UnsafePickleError
from support import assert_state_equal, run_ranks
from support.both import save_rs
from support.failures import without_torchs_collection
from support.forged import save_with_hole

W = torch.arange(24.0).reshape(4, 6) / 7
STATE = {
    "model": {
        "layers": [{"weight": W, "bias": W[0]}, {"weight": -W, "bias": -W[0]}],
        "ids": torch.arange(5),
    },
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(2.5),
    "step": 7,
}


class Committing(RsLoadPlanner):
    """Gets items, and commits in its own way."""

    def commit_tensor(self, read_item, tensor):
        tensor.mul_(1)


class Allocating(RsLoadPlanner):
    """Has the values read to somewhere else, and copies them."""

    def resolve_tensor(self, read_item, **options):
        if isinstance(read_item, str):
            return super().resolve_tensor(read_item, **options)
        return torch.full(read_item.lengths, -1.0, dtype=torch.float64)

    def commit_tensor(self, read_item, tensor):
        place = self.lookup_tensor(read_item.dest_index)
        for dim, (offset, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            place = place.narrow(dim, offset, length)
        place.copy_(tensor)


class Deciding(RsLoadPlanner):
    """Sees the items of all ranks."""

    def create_global_plan(self, global_plan):
        assert all(plan.items for plan in global_plan)
        return super().create_global_plan(global_plan)


class Forwarding:
    """Wraps a planner, and adds nothing. It is of no class of torch's."""

    def __init__(self, **options):
        self.inner = RsLoadPlanner(**options)

    def __getattr__(self, name):
        return getattr(self.inner, name)


WAYS = {
    "ours": RsLoadPlanner,
    "committing": Committing,
    "allocating": Allocating,
    "deciding": Deciding,
    "wrapped": Forwarding,
}
OPTIONS = {
    "dtype": ("cpu", {"dtype": torch.bfloat16, "assign": True}),
    "device": ("meta", {"device": "cpu"}),
    "both": ("meta", {"device": "cpu", "dtype": torch.float64}),
    "meta": ("meta", {}),
}


@pytest.fixture(autouse=True)
def poison():
    """Memory that nobody filled holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def load_by(planner, state, path, **options):
    with without_torchs_collection():
        dcp_rs.load_state_dict(state, RsReader(path, **options), planner=planner)


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request, tmp_path):
    """Loads from where the same state was saved by either."""
    planner = request.param

    def load(state, flatten=True, reader_options=None, **options):
        made = planner(flatten_state_dict=flatten, dtype_policy="cast", **options)
        load_by(made, state, tmp_path, **(reader_options or {}))
        return getattr(made, "inner", made)

    load.save = lambda state: save_rs(state, tmp_path)
    load.planner = planner
    return load


def template(tree, device):
    if isinstance(tree, dict):
        return {key: template(value, device) for key, value in tree.items()}
    if isinstance(tree, list):
        return [template(value, device) for value in tree]
    return torch.zeros_like(tree, device=device) if isinstance(tree, torch.Tensor) else None


def leaves(tree):
    """All that is reachable, by identity."""
    if isinstance(tree, dict | list):
        return [
            leaf
            for value in (tree.values() if isinstance(tree, dict) else tree)
            for leaf in leaves(value)
        ]
    return [tree]


@contextlib.contextmanager
def nothing_replaced(state):
    before = leaves(state)
    yield
    after = leaves(state)
    assert len(before) == len(after)
    assert all(a is b for a, b in zip(before, after, strict=True))
    for leaf in after:
        shards = (
            [shard.tensor for shard in leaf.local_shards()]
            if isinstance(leaf, ShardedTensor)
            else [leaf]
        )
        for tensor in shards:
            assert (
                not isinstance(tensor, torch.Tensor) or tensor.is_meta or not tensor.isnan().any()
            )


def cast(tree, dtype):
    if isinstance(tree, dict):
        return {key: cast(value, dtype) for key, value in tree.items()}
    if isinstance(tree, list):
        return [cast(value, dtype) for value in tree]
    return (
        tree.to(dtype)
        if isinstance(tree, torch.Tensor) and tree.is_floating_point() and dtype
        else tree
    )


@pytest.mark.parametrize(("device", "options"), OPTIONS.values(), ids=OPTIONS)
def test_new_tensors_come_with_what_was_read(way, device, options):
    way.save(STATE)
    state = template(STATE, device)
    way(state, **options)
    assert_state_equal(state, cast(STATE, options.get("dtype")))


@pytest.mark.parametrize(("device", "options"), OPTIONS.values(), ids=OPTIONS)
def test_failed_plan_replaces_nothing(way, device, options):
    way.save(STATE)
    for wrong in (
        {"missing": torch.zeros(2)},
        {"scalar": torch.zeros(3)},
        {"model": template(STATE, device)["model"] | {"ids": "no tensor"}},
    ):
        state = template(STATE, device) | wrong
        with nothing_replaced(state), pytest.raises(PlanError):
            way(state, **options)


def test_a_partial_load_leaves_alone_what_it_does_not_fill(way):
    way.save(STATE)
    for device, options in OPTIONS.values():
        state = template(STATE, device)
        state["missing"] = torch.zeros(2, device=device)
        state["model"]["layers"][0]["bias"] = torch.zeros(5, device=device)  # of another shape
        state["model"]["ids"] = "no tensor"
        before = state["missing"], state["model"]["layers"][0]["bias"]
        report = way(state, allow_partial_load=True, **options).report
        assert (state.pop("missing"), state["model"]["layers"][0].pop("bias")) == before
        want = cast(STATE, options.get("dtype"))
        want["model"]["layers"][0].pop("bias")
        assert_state_equal(state, want | {"model": want["model"] | {"ids": "no tensor"}})
        assert report.missing == ["missing"]
        assert len(report.shape_mismatched) == 2


def test_excluded_entries_stay(way):
    way.save(STATE)
    state = template(STATE, "meta")
    weight = state["model"]["layers"][1]["weight"]
    way(state, exclude="*.1.weight", dtype=torch.float16)
    assert state["model"]["layers"][1].pop("weight") is weight
    assert_state_equal(
        state["model"]["layers"],
        [cast(STATE["model"]["layers"][0], torch.float16), {"bias": -W[0].half()}],
    )


def test_without_flattening(way):
    """It is torch's planner then, and options that torch's has not are refused."""
    way.save({"a": W, "b": -W})
    state = {"a": torch.zeros(4, 6), "b": torch.zeros(4, 6)}
    way(state, flatten=False)
    assert_state_equal(state, {"a": W, "b": -W})
    with (
        nothing_replaced(state),
        pytest.raises(PlanError, match=r"dtype= of RsLoadPlanner need flatten_state_dict=True"),
    ):
        way(state, flatten=False, dtype=torch.float16)


def test_values_without_flattening(tmp_path):
    save_rs({"a": W, "step": 7}, tmp_path)
    for planner in (RsLoadPlanner(flatten_state_dict=False), Committing(flatten_state_dict=False)):
        state = {"a": torch.zeros(4, 6), "step": 0}
        load_by(planner, state, tmp_path)
        assert_state_equal(state, {"a": W, "step": 7})


def damage(path):
    for file in path.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-400:] = bytes(400)
        file.write_bytes(data)


@pytest.mark.parametrize(("device", "options"), OPTIONS.values(), ids=OPTIONS)
def test_a_read_that_fails_is_raised_and_our_own_leaves_the_old_tensors(
    way, tmp_path, device, options
):
    state = {f"t{i}": torch.full((8, 8), float(i + 1)) for i in range(12)}
    way.save({"model": state})
    damage(tmp_path)
    got = {"model": template(state, device)}
    before = dict(got["model"])
    with pytest.raises((CorruptDataError, RuntimeError)):
        way(got, reader_options={"verify": True}, **options)
    if way.planner is RsLoadPlanner:  # elsewhere torch's driver shows them before they are filled
        assert all(tensor is before[name] for name, tensor in got["model"].items())


class Evil:
    def __reduce__(self):
        return print, ("called",)


@pytest.mark.filterwarnings("ignore:.*will not load")
def test_a_value_that_is_refused_leaves_all_as_it_was(tmp_path):
    save_rs({"model": {"w": W}, "step": 3, "evil": Evil()}, tmp_path)
    state = {"model": {"w": torch.zeros(4, 6, device="meta")}, "step": 0, "evil": None}
    with nothing_replaced(state), pytest.raises(UnsafePickleError):
        dcp_rs.load(state, tmp_path)


def test_a_tensor_that_is_held_in_part_is_left_alone(tmp_path):
    save_with_hole_in(tmp_path)
    for planner in (RsLoadPlanner, Committing, Allocating):
        state = {"nested": {"w": torch.full((8, 1), -1.0)}}
        options = {"allow_partial_load": True, "rename": {"w": "nested.w"}}
        made = planner(dtype=torch.float64, assign=True, **options)
        with nothing_replaced(state):
            load_by(made, state, tmp_path)
        assert made.report.incomplete == ["nested.w"]
        state = {"nested": {"w": torch.full((8, 1), -1.0, device="meta")}}
        made = planner(device="cpu", **options)
        with nothing_replaced(state):
            load_by(made, state, tmp_path)
        assert made.report.incomplete == ["nested.w"]
        for whole in ({"dtype": torch.float64, "assign": True}, {"device": "cpu"}, {}):
            state = {"nested": {"w": torch.full((8, 1), -1.0)}}
            with (
                nothing_replaced(state),
                pytest.raises(PlanError, match=r"'w': the checkpoint does not hold \[4, 1\]"),
            ):
                load_by(planner(rename={"w": "nested.w"}, **whole), state, tmp_path)


def partial_on_meta(path):
    mesh = init_device_mesh("cpu", (2,))
    local = torch.empty(4, 1, device="meta")
    state = {"nested": {"w": DTensor.from_local(local, mesh, [Shard(0)])}}
    rename = {"w": "nested.w"}
    report = dcp_rs.load(state, path, device="cpu", rename=rename, allow_partial_load=True)
    assert state["nested"]["w"].is_meta
    assert report.incomplete == ["nested.w"]


def test_ranks_agree_on_what_stays_on_meta(tmp_path):
    """The checkpoint has all rows of the first rank, which got a tensor, and none of the second."""
    save_with_hole_in(tmp_path)
    run_ranks(2, partial_on_meta, tmp_path)


def save_with_hole_in(path):
    path.mkdir(exist_ok=True)
    save_with_hole(path)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 6)
        self.head = nn.Linear(6, 4, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize(("device", "options"), OPTIONS.values(), ids=OPTIONS)
def test_one_tensor_under_two_names_becomes_one(way, device, options):
    way.save({"model": {"embedding.weight": W, "head.weight": W, "other": W}})
    with torch.device(device):
        state = Tied().state_dict()
    assert state["embedding.weight"] is not state["head.weight"]  # but of one memory
    state["other"] = torch.zeros(4, 6, device=device)
    way(nested := {"model": state}, **options)
    state = nested["model"]
    want = cast(W, options.get("dtype"))
    assert_state_equal(dict(state), {"embedding.weight": want, "head.weight": want, "other": want})
    assert state["embedding.weight"] is state["head.weight"]
    assert state["other"].data_ptr() != state["head.weight"].data_ptr()


def test_in_inference_mode(way):
    way.save(STATE)
    with torch.inference_mode():
        for device, options in OPTIONS.values():
            state = template(STATE, device)
            way(state, **options)
            assert_state_equal(state, cast(STATE, options.get("dtype")))


def of_ranks(path):
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(15.0).reshape(5, 3)
    own = whole.chunk(2)[rank]
    flat = torch.arange(3.0)
    tiny = flat[:1] if rank == 0 else flat[:0]  # rank 1 holds nothing of it

    def dtensor(local, like):
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
        )

    def sharded(device, local):
        at = [0, 0] if rank == 0 else [3, 0]
        shard = ShardMetadata(at, list(local.shape), f"rank:{rank}/{device}")
        return init_from_local_shards([LocalShard(local, shard)], 5, 3)

    def state(make, device):
        return {
            "nested": {"d": dtensor(make(own), whole), "tiny": dtensor(make(tiny), flat[:1])},
            "s": sharded(device, make(own)),
            "plain": make(whole),
        }

    dcp_rs.save(state(torch.clone, "cpu"), path, fsync=False)
    for planner in (RsLoadPlanner, Committing, Deciding):
        for device, options in OPTIONS.values():
            got = state(lambda t, device=device: torch.zeros_like(t, device=device), device)
            load_by(planner(dtype_policy="cast", **options), got, path)
            dtype = options.get("dtype", torch.float32)
            nested = got["nested"]
            assert torch.equal(nested["d"].to_local(), own.to(dtype))
            assert nested["d"].placements == (Shard(0),)
            assert nested["d"].shape == (5, 3)
            assert torch.equal(nested["tiny"].to_local(), tiny.to(dtype))
            (shard,) = got["s"].local_shards()
            assert torch.equal(shard.tensor, own.to(dtype))
            assert got["s"].dtype == dtype
            assert str(shard.metadata.placement) == f"rank:{rank}/cpu"
            assert torch.equal(got["plain"], whole.to(dtype))
            # What fails on one rank has replaced nothing on the other.
            got = state(lambda t, device=device: torch.zeros_like(t, device=device), device)
            wrong = {"missing": torch.zeros(1)} if rank == 1 else {}
            with nothing_replaced(got), pytest.raises(PlanError, match="missing"):
                load_by(planner(dtype_policy="cast", **options), got | wrong, path)


def test_shards_of_ranks(tmp_path):
    run_ranks(2, of_ranks, tmp_path)


def test_a_shard_with_attributes_that_make_no_sense_is_refused_by_name(tmp_path):
    pytest.importorskip("torch.distributed.checkpoint.protocol", reason="attributes say nothing")
    shard = W[:1].clone()
    shard.global_shape, shard.global_offsets = torch.Size([4, 6]), (0, 0)
    shard.local_offsets, shard.local_sizes = (0, 0), (1, 6)
    with pytest.raises(PlanError, match="'w'"):
        dcp_rs.save({"w": shard}, tmp_path, no_dist=True)
