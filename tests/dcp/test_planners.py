"""Planners of the user's own, and destinations of every form.

What `resolve_tensor` returns is filled, and what `commit_tensor` gets holds the values.
"""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import dcp_rs
from dcp_rs import RsReader, RsWriter
from dcp_rs.dcp import reader
from dcp_rs.errors import PlanError
from support import ALL_DTYPES, assert_state_equal, blank, nested_state, random_tensor
from support.both import load_rs, load_stock, save_rs, save_stock

NUMBERS = torch.arange(48, dtype=torch.float32).reshape(6, 8)


@pytest.fixture
def saved(tmp_path):
    """The same state, saved by both."""
    state = {"w": NUMBERS, "b": torch.arange(4, dtype=torch.bfloat16), "step": 7}
    save_rs(state, tmp_path / "ours")
    save_stock(state, tmp_path / "stock")
    return tmp_path


def load(path, template, planner):
    dcp.load(template, storage_reader=RsReader(path), planner=planner, no_dist=True)
    return template


# --- planners


class AllocatingPlanner(DefaultLoadPlanner):
    """New tensors, of whatever dtype, that are copied over with a cast when they are full."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.dtype = dtype
        self.given = {}
        self.committed = []

    def resolve_tensor(self, read_item):
        self.given[read_item.dest_index.fqn] = torch.full(read_item.lengths, -1, dtype=self.dtype)
        return self.given[read_item.dest_index.fqn]

    def commit_tensor(self, read_item, tensor):
        name = read_item.dest_index.fqn
        assert tensor is self.given[name]
        self.committed.append(name)
        self.lookup_tensor(read_item.dest_index).copy_(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
def test_a_planner_may_allocate_and_copy_on_commit(saved, dtype):
    planner = AllocatingPlanner(dtype)
    got = load(saved / "ours", {"w": torch.zeros(6, 8), "b": nn.Parameter(torch.zeros(4))}, planner)
    assert sorted(planner.committed) == ["b", "w"]
    assert torch.equal(got["w"], NUMBERS)
    assert torch.equal(got["b"], torch.arange(4.0))
    assert got["b"].requires_grad


def test_batches_of_destinations_are_bounded(tmp_path, monkeypatch):
    """A planner that allocates for every item holds a batch of them, not the checkpoint."""
    monkeypatch.setattr(reader, "BATCH_BYTES", 4096)
    want = {f"w{i}": random_tensor((256,), seed=i) for i in range(20)}
    save_rs(want, tmp_path)
    open_items, most = 0, 0

    class Counting(AllocatingPlanner):
        def resolve_tensor(self, read_item):
            nonlocal open_items, most
            open_items += 1
            most = max(most, open_items)
            return super().resolve_tensor(read_item)

        def commit_tensor(self, read_item, tensor):
            nonlocal open_items
            open_items -= 1
            super().commit_tensor(read_item, tensor)

    got = load(tmp_path, blank(want), Counting(torch.float32))
    assert_state_equal(got, want)
    assert open_items == 0
    assert most <= 5


class Failing(DefaultLoadPlanner):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def resolve_tensor(self, read_item):
        if self.where == "resolve":
            raise ValueError("no tensor for you")
        if self.where == "shape":
            return torch.zeros(3, 3)
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item, tensor):
        if self.where == "commit":
            raise ValueError("cannot commit")
        super().commit_tensor(read_item, tensor)


@pytest.mark.parametrize(
    ("where", "kind", "message"),
    [
        ("resolve", ValueError, "no tensor for you"),
        ("commit", ValueError, "cannot commit"),
        ("shape", PlanError, r"'w'.*\(3, 3\).*\(6, 8\)"),
    ],
)
def test_error_of_a_planner_arrives(saved, where, kind, message):
    with pytest.raises(CheckpointException, match=message) as raised:
        load(saved / "ours", {"w": torch.zeros(6, 8)}, Failing(where))
    assert type(raised.value.failures[0][0]) is kind


def test_missing_keys_are_allowed_where_the_planner_allows_them(saved):
    template = {"w": torch.zeros(6, 8), "new": torch.full((2,), 5.0)}
    got = load(saved / "ours", template, DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(got["w"], NUMBERS)
    assert torch.equal(got["new"], torch.full((2,), 5.0))


class CastingSavePlanner(DefaultSavePlanner):
    """Saves in another dtype than the plan says, as planners that quantize on the way do."""

    def resolve_data(self, write_item):
        data = super().resolve_data(write_item)
        return data.to(torch.float16) if isinstance(data, torch.Tensor) else data


def test_a_save_planner_may_change_the_dtype(ckpt):
    dcp.save(
        {"w": NUMBERS, "step": 1},
        storage_writer=RsWriter(ckpt),
        planner=CastingSavePlanner(),
        no_dist=True,
    )
    with dcp_rs.open(ckpt) as checkpoint:
        assert_state_equal(checkpoint["w"], NUMBERS.half())
    got = load_rs({"w": torch.zeros(6, 8)}, ckpt)
    assert torch.equal(got["w"], NUMBERS)


# --- destinations


def filled_like_stock(saved, make):
    """Both readers fill what `make` returns: (its name, the tensor to look at afterwards)."""
    ours, stock = make(), make()
    load_rs({"w": ours[0]}, saved / "ours")
    load_stock({"w": stock[0]}, saved / "stock")
    assert_state_equal(ours[0], stock[0])
    assert_state_equal(ours[1], stock[1])
    return ours


def columns():
    base = torch.full((6, 20), -1.0)
    return base[:, 5:13], base


def every_other_column():
    base = torch.full((6, 16), -1.0)
    return base[:, ::2], base


def transposed():
    base = torch.full((8, 6), -1.0)
    return base.t(), base


def inner_of_three():
    base = torch.full((6, 3, 8), -1.0)
    return base[:, 1], base


def offset():
    base = torch.full((49,), -1.0)
    return base[1:].view(6, 8), base


@pytest.mark.parametrize(
    "make",
    [columns, every_other_column, transposed, inner_of_three, offset],
    ids=lambda f: f.__name__,
)
def test_strided_destinations(saved, make):
    view, base = filled_like_stock(saved, make)
    assert torch.equal(view, NUMBERS)
    # Around the view nothing has changed.
    assert (base == -1).sum() == base.numel() - 48


def test_channels_last_destinations(tmp_path):
    want = random_tensor((2, 3, 4, 5))
    save_rs({"w": want}, tmp_path)
    template = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    load_rs({"w": template}, tmp_path)
    assert template.is_contiguous(memory_format=torch.channels_last)
    assert_state_equal(template, want)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int32, torch.uint8, torch.bool, torch.complex64]
)
def test_another_dtype_is_cast_as_stock_does(saved, dtype):
    filled_like_stock(saved, lambda: (torch.zeros(6, 8, dtype=dtype),) * 2)

    def strided():
        base = torch.zeros(8, 12, dtype=dtype)
        return base[:, 3:9].t(), base

    filled_like_stock(saved, strided)


def test_a_cast_goes_through_slabs_of_bounded_size(tmp_path):
    want = torch.arange(3 * 50_000, dtype=torch.float32).reshape(3, 50_000)
    save_rs({"w": want}, tmp_path)
    got = load_rs({"w": torch.zeros(3, 50_000).double()}, tmp_path, max_inflight_bytes=1)["w"]
    assert torch.equal(got, want.double())


def test_destinations_that_require_grad(saved):
    parameter = nn.Parameter(torch.zeros(6, 8))
    view = nn.Parameter(torch.zeros(8, 6)).t()  # not a leaf, and strided
    double = torch.zeros(6, 8, dtype=torch.float64, requires_grad=True)
    for template in (parameter, view, double):
        load_rs({"w": template}, saved / "ours")
        assert torch.equal(template.detach().float(), NUMBERS)
        assert template.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_expanded_destination_is_refused(saved, dtype):
    template = torch.zeros(1, 8, dtype=dtype).expand(6, 8)
    with pytest.raises(CheckpointException):
        load_stock({"w": template}, saved / "stock")
    with pytest.raises(
        CheckpointException, match="several elements in one place of memory"
    ) as raised:
        load_rs({"w": template}, saved / "ours")
    error = pickle.loads(pickle.dumps(raised.value.failures[0][0]))
    assert type(error) is PlanError
    assert error.tensor == "w"
    assert torch.equal(template, torch.zeros(6, 8))


def test_a_subclass_with_memory_of_its_own_is_filled(saved):
    class Marked(torch.Tensor):
        pass

    template = torch.zeros(6, 8).as_subclass(Marked)
    got = load_rs({"w": template}, saved / "ours")["w"]
    assert type(got) is Marked
    assert torch.equal(got.as_subclass(torch.Tensor), NUMBERS)
    save_rs({"w": got}, saved / "again")
    assert_state_equal(load_rs({"w": torch.zeros(6, 8)}, saved / "again")["w"], NUMBERS)


@given(
    dtype=st.sampled_from(ALL_DTYPES),
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
    data=st.data(),
)
def test_any_strided_destination(tmp_path_factory, dtype, shape, data):
    """A view into a larger tensor: a rectangle of it with steps, and its dimensions in any order."""
    steps = [data.draw(st.integers(1, 3)) for _ in shape]
    starts = [data.draw(st.integers(0, 2)) for _ in shape]
    order = data.draw(st.permutations(range(len(shape))))
    outer = [
        start + size * step + 1 for start, size, step in zip(starts, shape, steps, strict=True)
    ]
    want = random_tensor(shape, dtype, seed=3)
    base = random_tensor(tuple(outer[d] for d in order), dtype, seed=4)
    before = (
        base.view(torch.uint8).clone().view(dtype)
    )  # older torch cannot copy its youngest dtypes

    def view(tensor):
        tensor = tensor.permute([order.index(d) for d in range(len(shape))])
        spans = zip(starts, shape, steps, strict=True)
        return tensor[tuple(slice(start, start + size * step, step) for start, size, step in spans)]

    path = tmp_path_factory.mktemp("ckpt")
    save_rs({"w": want}, path, fsync=False)
    load_rs({"w": view(base)}, path)
    assert_state_equal(view(base), want)
    if _copies(dtype):  # around the view nothing has changed
        view(before).copy_(want)
        assert_state_equal(base, before)


def _copies(dtype):
    """Older torch cannot copy its youngest dtypes."""
    try:
        torch.empty(2, 4, dtype=dtype)[:, ::2].copy_(torch.empty(2, 2, dtype=dtype))
    except NotImplementedError:
        return False
    return True


# --- both sides of a nested state


def test_a_planner_for_every_load_and_save(tmp_path):
    """The default planners, given explicitly and used again."""
    save_planner, load_planner = DefaultSavePlanner(), DefaultLoadPlanner()
    for seed in range(2):
        want = nested_state(seed)
        writer = RsWriter(tmp_path)
        dcp.save(dict(want), storage_writer=writer, planner=save_planner, no_dist=True)
        assert_state_equal(load(tmp_path, blank(want), load_planner), want)
