"""A planner may make every item that it resolves in the same memory: stock's writer has written one before it asks for the next.

All items were resolved before the first was written: of four tensors, each cast into the planner's
one buffer, the checkpoint held the last four times, and its digests were right.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.utils._python_dispatch import TorchDispatchMode

import dcp_rs
from dcp_rs import RsSavePlanner, RsWriter
from support import assert_state_equal, run_ranks
from support.both import load_rs, load_stock, save_rs
from support.hooks import WAYS, in_a_subclass
from support.layouts import sharded_state
from support.states import blank

BASES = [DefaultSavePlanner, RsSavePlanner]


def state():
    tied = torch.full((3, 3), 8.0)
    return {
        **{f"w{i}": torch.full((4, 5), float(i)) for i in range(4)},
        "double": torch.full((6,), 5.0, dtype=torch.float64),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "of": {"tied": tied, "to": tied},
        "empty": torch.empty(0),
        "step": 7,
    }


def in_one_buffer(through):
    """A body of ``transform_object``: what it makes of a tensor lies in a buffer that it makes all in, ``through`` says how."""
    buffer = torch.empty(1 << 10)

    def transform(before, planner, item, value):
        made = before(item, value)
        return through(buffer, made) if isinstance(made, torch.Tensor) else made

    return transform


def cast(buffer, tensor):
    return buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)


def transposed(buffer, tensor):
    return (
        buffer[: tensor.numel()]
        .view(tensor.shape[::-1])
        .permute(*reversed(range(tensor.dim())))
        .copy_(tensor)
    )


def by_the_handle(buffer, tensor):
    """The same tensor each time, changed in place."""
    return buffer.resize_(tensor.shape).copy_(tensor)


def from_numpy(buffer, tensor):
    """In memory that is not torch's."""
    return torch.from_numpy(buffer.numpy()[: tensor.numel()].reshape(tensor.shape)).copy_(tensor)


@pytest.mark.parametrize(
    ("way", "through"),
    [
        *((way, cast) for way in WAYS),
        *((in_a_subclass, other) for other in (transposed, by_the_handle, from_numpy)),
    ],
)
@pytest.mark.parametrize("base", BASES)
def test_resolved_tensors_are_written_before_the_next(ckpt, monkeypatch, base, way, through):
    with monkeypatch.context() as patch:
        planner = way(DefaultSavePlanner, "transform_object", in_one_buffer(through), patch)
        dcp.save(
            state(),
            storage_writer=dcp.FileSystemWriter(ckpt / "stock"),
            planner=planner,
            no_dist=True,
        )
    with monkeypatch.context() as patch:
        planner = way(base, "transform_object", in_one_buffer(through), patch)
        dcp.save(state(), storage_writer=RsWriter(ckpt / "ours"), planner=planner, no_dist=True)
    want = load_stock(blank(state()), ckpt / "stock")
    assert_state_equal(want, state())
    assert_state_equal(load_rs(blank(state()), ckpt / "ours", verify=True), want)


@pytest.mark.parametrize("base", BASES)
def test_lookup_may_reuse_memory(ckpt, base):
    buffer = torch.empty(4)

    def look_up(before, planner, index):
        return buffer.copy_(before(index))

    values = {f"w{i}": torch.full((4,), float(i)) for i in range(5)}
    planner = in_a_subclass(base, "lookup_object", look_up, None)
    dcp.save(dict(values), storage_writer=RsWriter(ckpt), planner=planner, no_dist=True)
    assert_state_equal(load_rs(blank(values), ckpt), values)


def test_sparse_tensors_may_reuse_memory(ckpt):
    """Stock cannot save it."""
    made = torch.zeros(3, 3).to_sparse()

    def transform(before, planner, item, value):
        return made.copy_(value) if isinstance(value, torch.Tensor) else before(item, value)

    values = {f"w{i}": (torch.eye(3) * i).to_sparse() for i in range(1, 4)}
    planner = in_a_subclass(RsSavePlanner, "transform_object", transform, None)
    dcp.save(dict(values), storage_writer=RsWriter(ckpt), planner=planner, no_dist=True)
    with dcp_rs.open(ckpt) as checkpoint:
        for name, value in values.items():
            assert torch.equal(checkpoint[name].to_dense(), value.to_dense())


def save_shards(path):
    for number, base in enumerate(BASES):
        planner = in_a_subclass(base, "transform_object", in_one_buffer(cast), None)
        dcp.save(sharded_state(3), storage_writer=RsWriter(path / str(number)), planner=planner)
        dist.barrier()
        got = sharded_state(9)
        dcp_rs.load(got, path / str(number), verify=True)
        assert_state_equal(got, sharded_state(3))


def test_shards_too(ckpt):
    run_ranks(2, save_shards, ckpt)


class Copies(TorchDispatchMode):
    """How many copies torch makes of tensors of this many elements."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.count = elements, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        copies = {
            torch.ops.aten.clone.default,
            torch.ops.aten._to_copy.default,
            torch.ops.aten.copy_.default,
        }
        self.count += func in copies and made.numel() == self.elements
        return made


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", BASES)
def test_tensors_of_the_state_dict_are_not_copied(ckpt, monkeypatch, way, base):
    values = {
        "w": torch.ones(77),
        "row": torch.ones(2, 77)[1],
        "parameter": torch.nn.Parameter(torch.ones(7, 11)),
        "nested": [torch.ones(11, 7)],
    }
    planner = way(
        base,
        "transform_object",
        lambda before, planner, item, value: before(item, value),
        monkeypatch,
    )
    with Copies(77) as copies:
        dcp.save(dict(values), storage_writer=RsWriter(ckpt), planner=planner, no_dist=True)
    assert copies.count == 0
    assert_state_equal(load_rs(blank(values), ckpt), values)
    with Copies(77) as copies:
        save_rs(values, ckpt)
    assert copies.count == 0


def test_parameters_stay_known(ckpt):
    """The copy of one that needs a gradient is one that does."""

    def anew(before, planner, item, value):
        return before(item, value).detach().clone().requires_grad_(value.requires_grad)

    values = {"trained": torch.nn.Parameter(torch.ones(3)), "frozen": torch.ones(3)}
    planner = in_a_subclass(RsSavePlanner, "transform_object", anew, None)
    dcp.save(values, storage_writer=RsWriter(ckpt), planner=planner, no_dist=True)
    metadata = dcp_rs.RsReader(ckpt).read_metadata().state_dict_metadata
    assert metadata["trained"].properties.requires_grad
    assert not metadata["frozen"].properties.requires_grad


class Forwards(SavePlanner):
    """A planner around another one."""

    def __init__(self, inner):
        self.inner = inner

    def state_dict(self):
        return {}

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self.inner.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self):
        return self.inner.create_local_plan()

    def create_global_plan(self, all_plans):
        return self.inner.create_global_plan(all_plans)

    def finish_plan(self, new_plan):
        return self.inner.finish_plan(new_plan)

    def resolve_data(self, write_item):
        return self.inner.resolve_data(write_item)


@pytest.mark.parametrize("base", BASES)
def test_the_state_dict_of_a_planner_in_two_others_is_not_copied(ckpt, base):
    planner = Forwards(Forwards(base()))
    values = {"w": torch.ones(77), "step": 3}
    with Copies(77) as copies:
        dcp.save(dict(values), storage_writer=RsWriter(ckpt), planner=planner, no_dist=True)
    assert copies.count == 0
    assert_state_equal(load_rs(blank(values), ckpt), values)
