"""Ranks with a simulated device each: DTensors, stock DCP on either side, optimizer state, and replicas by every kind of group."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader, RsSavePlanner, RsWriter
from dcp_rs.optim import load_training_state, save_training_state
from support import assert_state_equal, run_ranks
from support.simulated import install
from support.simulated.collectives import register, sent

#: Of this process too: what has the simulated device comes last, as ranks keep it.
pytestmark = pytest.mark.usefixtures("sim")
WHOLE = {
    "rows": torch.arange(70_000.0).reshape(700, 100),
    "columns": torch.arange(9000, dtype=torch.int32).reshape(30, 300),
    "uneven": torch.arange(21.0).reshape(7, 3).bfloat16(),
    "all": torch.arange(5000.0),
    "conj": torch.complex(torch.arange(600.0), -torch.arange(600.0)).reshape(20, 30),
}
PLACEMENTS = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "uneven": [Shard(0)],
    "all": [Replicate()],
    "conj": [Shard(0)],
}


def begin():
    """This rank's device, and all of them as a mesh."""
    sim = install()
    sim.reset()
    register()
    torch.accelerator.set_device_index(dist.get_rank() % 2)
    mesh = DeviceMesh("sim", list(range(dist.get_world_size())), _init_backend=False)
    mesh._dim_group_names = [dist.group.WORLD.group_name]  # nothing is sent
    return sim, torch.device("sim", dist.get_rank() % 2), mesh


def sharded(whole, placement, mesh, *, empty=False):
    rank, size = dist.get_rank(), dist.get_world_size()
    local = whole
    if isinstance(placement, Shard):
        parts = whole.chunk(size, placement.dim)
        local = parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)
    local = (
        torch.empty(local.shape, dtype=local.dtype, device=f"sim:{rank % 2}")
        if empty
        else local.to(f"sim:{rank % 2}")
    )
    return DTensor.from_local(
        local, mesh, [placement], shape=whole.shape, stride=whole.stride(), run_check=False
    )


def state(mesh, *, empty=False, turned=False):
    made = {}
    for name, whole in WHOLE.items():
        (placement,) = PLACEMENTS[name]
        if turned and isinstance(placement, Shard):
            placement = Shard(1 - placement.dim)
        made[name] = sharded(whole, placement, mesh, empty=empty)
    return made


def check(got):
    for name, tensor in got.items():
        whole, (placement,) = WHOLE[name], tensor.placements
        want = whole
        if isinstance(placement, Shard):
            parts = whole.chunk(dist.get_world_size(), placement.dim)
            want = (
                parts[dist.get_rank()]
                if dist.get_rank() < len(parts)
                else whole.narrow(placement.dim, 0, 0)
            )
        assert torch.equal(tensor.to_local().cpu(), want), name


def save_and_load(folder):
    sim, _, mesh = begin()
    reader_of = {"ours": RsReader, "stock": dcp.FileSystemReader}
    for writer in ("ours", "stock"):
        for planner in (None, RsSavePlanner):
            path = folder / f"{writer}.{planner is None}"
            state_dict = state(mesh)
            sim.delay = 500
            if writer == "ours":
                dcp.save(
                    state_dict,
                    storage_writer=RsWriter(path, fsync=False),
                    planner=planner and planner(),
                )
            else:
                dcp.save(state_dict, storage_writer=dcp.FileSystemWriter(path))
            for reader, make in reader_of.items():
                if (writer, reader) == ("ours", "stock"):
                    continue
                for turned in (False, True):
                    for load_planner in (None, RsLoadPlanner):
                        got = state(mesh, empty=True, turned=turned)
                        dcp.load(
                            got, storage_reader=make(path), planner=load_planner and load_planner()
                        )
                        sim.delay = 0
                        check(got)
                        sim.delay = 500
            dist.barrier()
    # As long as a save in the background takes, training goes on.
    state_dict = state(mesh)
    state_dict["conj"] = state_dict["conj"].conj()
    future = dcp_rs.async_save(state_dict, folder / "async")
    for tensor in state_dict.values():
        tensor.to_local().zero_()
    future.result(60)
    dist.barrier()
    got = state(mesh, empty=True)
    dcp_rs.load(got, folder / "async", verify=True)
    sim.delay = 0
    got["conj"] = got["conj"].conj()
    check(got)


def test_sharded_tensors_of_several_devices(tmp_path):
    run_ranks(2, save_and_load, tmp_path, timeout=200)


def train(device, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 7)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 40, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def tensors_of(model, optimizer):
    values = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, entry in get_optimizer_state_dict(model, optimizer)["state"].items():
        values |= {f"optim.{name}.{key}": value for key, value in entry.items()}
    return {name: value.cpu() for name, value in values.items()}


def resume(folder):
    sim, device, _ = begin()
    model, optimizer = train(device, seed=1)
    want = tensors_of(model, optimizer)
    sim.delay = 300
    save_training_state(folder / "ours", model, optimizer)
    dcp.save(
        {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)},
        storage_writer=RsWriter(folder / "dcp", fsync=False),
    )
    sim.delay = 0
    other, its_optimizer = train(device, seed=2)
    sim.delay = 300
    load_training_state(folder / "ours", other, its_optimizer)
    sim.delay = 0
    assert_state_equal(tensors_of(other, its_optimizer), want)
    third, its_optimizer = train(device, seed=3)
    got = {"model": third.state_dict(), "optim": get_optimizer_state_dict(third, its_optimizer)}
    sim.delay = 300
    dcp.load(got, storage_reader=RsReader(folder / "dcp"))
    sim.delay = 0
    third.load_state_dict(got["model"])
    set_optimizer_state_dict(third, its_optimizer, got["optim"])
    assert_state_equal(tensors_of(third, its_optimizer), want)


def test_training_resumes_on_devices(tmp_path):
    # Ranks of their own: autograd counts the devices at a process's first backward pass, and never
    # again.
    run_ranks(2, resume, tmp_path, timeout=200, fresh=True)


def offloaded(whole, mesh, device="cpu"):
    """A DTensor as FSDP's CPUOffloadPolicy makes them: its mesh is of devices, and its memory elsewhere."""
    spec = sharded(whole, Shard(0), mesh)._spec
    return DTensor(
        whole.chunk(dist.get_world_size())[dist.get_rank()].to(device), spec, requires_grad=False
    )


def offload(folder):
    _, _, mesh = begin()
    whole = WHOLE["rows"]
    dcp_rs.save({"w": offloaded(whole, mesh)}, folder / "w")
    for began, options, kind, dtype in (
        ("cpu", {}, "cpu", torch.float32),
        ("cpu", {"assign": True, "dtype": torch.bfloat16}, "cpu", torch.bfloat16),
        ("meta", {}, "sim", torch.float32),
        ("meta", {"device": "cpu"}, "cpu", torch.float32),
    ):
        got = {"w": offloaded(torch.zeros_like(whole), mesh, began)}
        with warnings.catch_warnings(action="error"):
            warnings.filterwarnings("ignore", "the load (fills no|casts|replaces)")
            dcp_rs.load(got, folder / "w", **options)
        local = got["w"].to_local()
        assert (local.device.type, local.dtype) == (kind, dtype), (began, options)
        assert torch.equal(got["w"].to_local().cpu(), offloaded(whole, mesh).to_local().to(dtype))

    def part(seed):
        torch.manual_seed(seed)
        model = nn.Linear(40, 60, bias=False)
        model.weight = nn.Parameter(offloaded(torch.randn(60, 40), mesh))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = part(1)
    model.weight.grad = offloaded(torch.randn(60, 40), mesh)
    optimizer.step()
    save_training_state(folder / "training", model, optimizer)
    other, its_optimizer = part(2)
    load_training_state(folder / "training", other, its_optimizer)
    (want,), (got) = optimizer.state.values(), its_optimizer.state[other.weight]
    for name in ("exp_avg", "exp_avg_sq"):
        assert got[name].to_local().device.type == "cpu"
        assert torch.equal(got[name].to_local(), want[name].to_local())
    other.weight.grad = offloaded(torch.randn(60, 40), mesh)
    its_optimizer.step()


def test_shards_that_fsdp_offloads_stay_on_the_host(tmp_path):
    """Those that a load made anew, for another dtype or for a new optimizer, went to the device of the mesh. Their optimizer could not step, or the device had no room."""
    run_ranks(2, offload, tmp_path, timeout=200)


KINDS = ["gloo", "cpu:gloo,sim:simccl", "simccl"]


def load_replicas(path):
    sim, device, _ = begin()
    waits = {}
    for kind in KINDS:
        group = dist.new_group(backend=kind)
        for dtype in (None, torch.float64):
            got = {
                name: torch.empty(
                    tensor.shape,
                    dtype=tensor.dtype if dtype is None or tensor.is_complex() else dtype,
                )
                for name, tensor in WHOLE.items()
            }
            got = {name: tensor.to(device) for name, tensor in got.items()}
            got["columns"] = got["columns"].t().contiguous().t()
            sim.delay = 500
            before, sent_before = sim.copies, sent[0]
            reader = RsReader(path, replicas="all", max_inflight_bytes=1 << 20)
            dcp_rs.load_state_dict(
                got, reader, process_group=group, planner=RsLoadPlanner(dtype_policy="cast")
            )
            sim.delay = 0
            for name, tensor in got.items():
                assert torch.equal(tensor.cpu(), WHOLE[name].to(tensor.dtype)), (kind, name)
            waits[kind] = sim.copies - before
            # G4: what lies on devices goes by their own backend, where the group has one.
            assert (sent[0] > sent_before) == ("simccl" in kind), kind
        dist.barrier()
    return waits


def test_replicas_on_devices(ckpt):
    dcp_rs.save(WHOLE, ckpt)
    run_ranks(2, load_replicas, ckpt, timeout=200)


ROWS = {"all": torch.arange(5000.0), "more": torch.arange(21.0)}


def load_what_some_share(path):
    _, device, _ = begin()
    group = dist.new_group(backend="cpu:gloo,sim:simccl")
    backend, calls = type(group._get_backend(device)), []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("allreduce", "send", "recv"):
            call = getattr(backend, name)

            def noted(self, *args, _call=call, _name=name):
                calls.append(_name)
                return _call(self, *args)

            patch.setattr(backend, name, noted)
        # The first rank wants more, so the others share without it.
        got = {name: torch.empty(ROWS[name].shape, device=device) for name in ROWS}
        if dist.get_rank():
            del got["more"]
        dcp_rs.load_state_dict(got, RsReader(path, replicas="all"), process_group=group)
    for name, tensor in got.items():
        assert torch.equal(tensor.cpu(), ROWS[name]), name
    assert calls[0] == "allreduce"
    assert ("send" in calls or "recv" in calls) == (dist.get_rank() > 0)


def test_the_first_call_over_devices_is_one_of_all_ranks(ckpt):
    """NCCL connects all ranks of the group then: those that share waited for the others."""
    dcp_rs.save(ROWS, ckpt)
    run_ranks(3, load_what_some_share, ckpt, timeout=200)


def load_what_another_node_has(folder):
    sim, device, _ = begin()
    rank = dist.get_rank()
    want = {f"of{i}": torch.arange(70_000.0) + i for i in range(2)}
    options = {"local": folder / f"node{rank}", "node": f"node{rank}", "upload_every": 9}
    with dcp_rs.CheckpointManager(folder / "root", **options) as manager:
        for step in (1, 2):
            manager.save(step, {f"of{rank}": want[f"of{rank}"].to(device)})
        manager.wait()
        mine = torch.Stream(device=device)
        other = f"of{1 - rank}"
        with mine:
            got = {other: torch.zeros(70_000, device=device)}
            sim.delay = 500
            with sim.held_up(mine, 1.0):
                got[other].fill_(7)
                assert manager.load(got, 2) == 2
            copied = got[other].clone()
        mine.synchronize()
        sim.delay = 0
        assert torch.equal(copied.cpu(), want[other])


def test_what_another_node_sends_comes_after_the_callers_work(tmp_path):
    """A thread receives it. It copied on the stream that is current in a thread, and the work that the caller had queued on another one came after."""
    run_ranks(2, load_what_another_node_has, tmp_path, timeout=200)
