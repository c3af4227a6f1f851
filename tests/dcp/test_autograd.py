"""What autograd learns of a load: a tensor that was filled in place has changed, and gradients that need the old values are refused."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dcp_rs
from dcp_rs import RsReader
from support import run_ranks

W = torch.arange(24.0).reshape(4, 6)


def stock(state, path):
    dcp.load(
        state,
        storage_reader=dcp.FileSystemReader(path / "stock"),
        no_dist=not dist.is_initialized(),
    )


def ours(state, path):
    dcp_rs.load(state, path / "ours", dtype_policy="cast")


def torchs_planner(state, path):
    dcp.load(
        state,
        storage_reader=RsReader(path / "ours"),
        planner=DefaultLoadPlanner(),
        no_dist=not dist.is_initialized(),
    )


def partly(state, path):
    state["missing"] = torch.zeros(2)
    dcp_rs.load(state, path / "ours", allow_partial_load=True, dtype_policy="cast")


def shared(state, path):
    dcp_rs.load(state, path / "ours", dtype_policy="cast", replicas="all")


@pytest.fixture
def saved(tmp_path):
    dcp_rs.save({"w": W}, tmp_path / "ours", fsync=False)
    dcp.save({"w": W}, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    return tmp_path


def refuses_gradients(load, path, tensor, local=None):
    """Whether a backward that began before the load is refused after it."""
    factor = torch.ones((), requires_grad=True)
    used = tensor.detach() if local is None else local
    with torch.enable_grad():
        loss = (used * factor).sum()  # the gradient of the factor is the sum of what was there
    load({"w": tensor}, path)
    assert used.sum() != 0
    try:
        loss.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


DESTINATIONS = {
    "plain": lambda: torch.zeros(4, 6),
    "parameter": lambda: nn.Parameter(torch.zeros(4, 6)),
    "columns": lambda: torch.zeros(4, 12)[:, ::2],
    "cast": lambda: torch.zeros(4, 6, dtype=torch.float64),
}


@pytest.mark.parametrize(
    "load", [stock, ours, torchs_planner, partly], ids=lambda load: load.__name__
)
@pytest.mark.parametrize("make", DESTINATIONS.values(), ids=DESTINATIONS)
def test_gradients_of_what_was_there_are_refused(saved, load, make):
    assert refuses_gradients(load, saved, make())


def test_a_load_that_fails_half_way_counts_as_a_change(tmp_path):
    dcp_rs.save({"a": W, "b": W}, tmp_path, fsync=False)
    (data,) = tmp_path.glob("*.safetensors")
    with data.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")  # of what was written last
    state = {"a": torch.zeros(4, 6), "b": torch.zeros(4, 6)}
    factor = torch.ones((), requires_grad=True)
    losses = [(tensor * factor).sum() for tensor in state.values()]
    with pytest.raises(dcp_rs.errors.CorruptDataError):
        dcp_rs.load(state, tmp_path, verify=True)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("inside", [True, False])
def test_tensors_of_inference_mode_have_no_version_to_count(saved, dtype, inside):
    """Outside of the mode a load that casts raised, half way through: `copy_` refuses such a tensor there."""
    with torch.inference_mode():
        tensor = torch.zeros(4, 6, dtype=dtype)
    with torch.inference_mode(inside):
        ours({"w": tensor}, saved)
        assert torch.equal(tensor, W.to(dtype))


def of_ranks(path):
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for load in (stock, ours, torchs_planner, shared):
        for placement, shape in ((Shard(0), (2, 6)), (Replicate(), (4, 6))):
            local = torch.zeros(shape)
            tensor = DTensor.from_local(local, mesh, [placement], run_check=False)
            found[load.__name__, str(placement)] = refuses_gradients(load, path, tensor, local)
        found[load.__name__, "plain"] = refuses_gradients(load, path, torch.zeros(4, 6))
    return found


def test_the_shards_of_ranks(saved):
    for found in run_ranks(2, of_ranks, saved):
        assert all(found.values()), found
