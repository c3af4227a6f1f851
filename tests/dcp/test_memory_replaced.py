"""Loads wrote to the memory that tensors had when the load was planned.

A planner's ``finish_plan`` that gave them other memory (``t.data = ...``, a storage that is freed
and allocated again) ended in a segmentation fault, or left the tensors unfilled. Stock DCP fills
the memory that they have when it reads.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader
from support import assert_state_equal, run_ranks
from support.both import save_rs, save_stock

SAVED = {f"w{i}": torch.arange(4096.0).reshape(64, 64) + i for i in range(4)}


def other_memory(tensor):
    tensor.data = torch.full_like(tensor, -1)


def other_strides(tensor):
    tensor.data = torch.full_like(tensor, -1).t()


def freed_and_allocated(tensor):
    """As FSDP does: the storage object stays, its memory does not."""
    nbytes = tensor.untyped_storage().nbytes()
    tensor.untyped_storage().resize_(0)
    keep.append(
        torch.full((nbytes,), 7, dtype=torch.uint8)
    )  # where the old memory was, most likely
    tensor.untyped_storage().resize_(nbytes)


def other_storage(tensor):
    tensor.set_(
        torch.full((2 * tensor.numel(),), -1, dtype=tensor.dtype).untyped_storage(),
        64,
        (64, 64),
        (64, 1),
    )


keep = []


def with_finish_plan(base, change, **options):
    class Planner(base):
        def finish_plan(self, plan):
            plan = super().finish_plan(plan)
            with torch.no_grad():
                change(self.original_state_dict)
            return plan

    return Planner(**options)


def fresh(dtype=torch.float32, *, grad=False):
    return {name: torch.full((64, 64), -2, dtype=dtype, requires_grad=grad) for name in SAVED}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_rs(SAVED, folder / "rs")
    save_stock(SAVED, folder / "stock")
    return folder


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["plain", "cast"])
@pytest.mark.parametrize(
    "change", [other_memory, other_strides, freed_and_allocated, other_storage]
)
def test_load_fills_the_memory_at_the_read(folder, change, dtype, grad):
    def change_some(state):
        for name in ("w1", "w3"):
            change(state[name])

    want = fresh(dtype, grad=grad)
    planner = with_finish_plan(DefaultLoadPlanner, change_some)
    dcp.load(
        want, storage_reader=dcp.FileSystemReader(folder / "stock"), planner=planner, no_dist=True
    )
    for load in (
        lambda state, planner: dcp_rs.load_state_dict(
            state, RsReader(folder / "rs"), planner=planner
        ),
        lambda state, planner: dcp.load(
            state, storage_reader=RsReader(folder / "rs"), planner=planner, no_dist=True
        ),
    ):
        for base in (RsLoadPlanner, DefaultLoadPlanner):
            got = fresh(dtype, grad=grad)
            load(got, with_finish_plan(base, change_some))
            assert_state_equal(got, want)
            assert got["w1"].float().eq(SAVED["w1"].to(dtype).float()).all()


def test_a_module_that_is_emptied_anew(folder):
    model = torch.nn.Linear(64, 64, bias=False)
    state = model.state_dict()
    load = with_finish_plan(
        RsLoadPlanner, lambda _: model.to_empty(device="cpu"), rename={"w2": "weight"}
    )
    dcp_rs.load_state_dict(state, RsReader(folder / "rs"), planner=load)
    assert torch.equal(state["weight"], SAVED["w2"])


def test_memory_that_is_gone_is_an_error(folder):
    def free(state):
        state["w1"].untyped_storage().resize_(0)

    with pytest.raises(CheckpointException, match=r"w1.*storage has been freed"):
        dcp_rs.load_state_dict(
            fresh(), RsReader(folder / "rs"), planner=with_finish_plan(RsLoadPlanner, free)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["plain", "cast"])
def test_another_shape_is_an_error(folder, dtype):
    def shrink(state):
        state["w1"].data = torch.zeros(2, 64, dtype=dtype)

    with pytest.raises(CheckpointException, match="'w1': the planner resolved"):
        dcp_rs.load_state_dict(
            fresh(dtype), RsReader(folder / "rs"), planner=with_finish_plan(RsLoadPlanner, shrink)
        )


def load_shards(folder):
    """The local tensor is replaced as FSDP2 does it, and what it holds as ``to_empty`` does it."""
    mesh = init_device_mesh("cpu", (2,))

    def other_local(shard: DTensor):
        shard._local_tensor = torch.full_like(shard._local_tensor, -1)

    for change in (other_local, lambda shard: other_memory(shard._local_tensor)):
        for dtype in (torch.float32, torch.bfloat16):
            state = {
                name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in fresh(dtype).items()
            }
            planner = with_finish_plan(
                RsLoadPlanner, lambda state, change=change: change(state["w1"])
            )
            dcp_rs.load_state_dict(state, RsReader(folder / "rs"), planner=planner)
            for name, shard in state.items():
                assert torch.equal(shard.full_tensor(), SAVED[name].to(dtype))


def test_shards(folder):
    run_ranks(2, load_shards, folder)


def test_memory_that_a_commit_replaces(tmp_path):
    """``commit_tensor`` of one item may give those after it other memory, where they are filled in turns of their own."""
    save_rs(SAVED, tmp_path / "rs")
    save_stock(SAVED, tmp_path / "stock")

    class Planner(DefaultLoadPlanner):
        def resolve_tensor(self, read_item):
            return self.buffer.view(64, 64)

        def set_up_planner(self, *args, **kwargs):
            super().set_up_planner(*args, **kwargs)
            self.buffer = torch.zeros(4096)
            self.got = {}

        def commit_tensor(self, read_item, tensor):
            self.got[read_item.dest_index.fqn] = tensor.clone()
            freed_and_allocated(self.buffer)

    got, want = Planner(), Planner()
    dcp.load(
        fresh(), storage_reader=dcp.FileSystemReader(tmp_path / "stock"), planner=want, no_dist=True
    )
    dcp.load(fresh(), storage_reader=RsReader(tmp_path / "rs"), planner=got, no_dist=True)
    assert_state_equal(got.got, want.got)
    assert_state_equal(got.got, SAVED)
