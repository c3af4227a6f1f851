"""Files that each rank saved with torch.save, as one checkpoint: its tensors are the full tensors of what the ranks held."""

import copy
import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dcp_rs
from dcp_rs.errors import CorruptDataError, DcpRsError, UnsupportedError
from support import run_ranks


def numbers(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def full(state):
    """The state with full tensors."""
    if isinstance(state, dict):
        return {key: full(value) for key, value in state.items()}
    return state.full_tensor() if isinstance(state, DTensor) else state


def model_and_optimizer():
    """A small model under FSDP2 over tensor parallelism, which cuts strided shards, and its optimizer."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 7))
    model.register_buffer("steps", torch.tensor([3.0, 4.0]))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def save_all(folder):
    rank, world = dist.get_rank(), dist.get_world_size()
    one = init_device_mesh("cpu", (world,))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    state = {
        "even": distribute_tensor(numbers(8, 3), one, [Shard(0)]),
        "uneven": distribute_tensor(numbers(5, 3, dtype=torch.bfloat16), one, [Shard(0)]),
        "columns": distribute_tensor(numbers(3, 10), one, [Shard(1)]),
        "few": distribute_tensor(numbers(2, 2), one, [Shard(0)]),
        "same": distribute_tensor(numbers(4), one, [Replicate()]),
        "hybrid": distribute_tensor(numbers(7, 2), two, [Replicate(), Shard(0)]),
        "both": distribute_tensor(numbers(7, 9), two, [Shard(0), Shard(1)]),
        "twice": distribute_tensor(numbers(11, 2), two, [Shard(0), Shard(0)]),
        "parameter": torch.nn.Parameter(distribute_tensor(numbers(6, 2), one, [Shard(0)])),
        "scalar": distribute_tensor(torch.tensor(2.0), one, [Replicate()]),
        "buffer": torch.ones(3, dtype=torch.int64),
        "epoch": 7,
    }
    torch.save(state, folder / f"model_world_size_{world}_rank_{rank}.pt")
    model, optimizer = model_and_optimizer()
    states = {"fsdp": model.state_dict(), "optim": optimizer.state_dict()}
    for name, state_dict in states.items():
        torch.save(state_dict, folder / f"{name}_world_size_{world}_rank_{rank}.pt")
    torch.save({"rng": torch.full((3,), rank)}, folder / f"extra_world_size_{world}_rank_{rank}.pt")
    partial = {"p": DTensor.from_local(torch.ones(2), one, [Partial()])}
    torch.save(partial, folder / f"partial_world_size_{world}_rank_{rank}.pt")
    wanted = {"model": full(state), **{name: full(state) for name, state in states.items()}}
    if rank == 0:
        torch.save(wanted, folder / "wanted.pt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(4, save_all, folder)
    return folder


def only(folder, into, series):
    """A folder with the files of one series."""
    into.mkdir()
    for path in folder.glob(f"{series}_world_size_*"):
        shutil.copy(path, into)
    return into


def flat(state, prefix=""):
    found = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            value = dict(enumerate(value))  # noqa: PLW2901  # of dicts, it is flattened too
        found |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


def assert_same(got, wanted):
    assert sorted(got) == sorted(wanted)
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert got[name].dtype == value.dtype, name
            assert torch.equal(got[name], value), name
        else:
            assert got[name] == value, name


@pytest.mark.parametrize("series", ["model", "fsdp", "optim"])
def test_tensors_are_those_of_all_ranks(saved, tmp_path, series):
    wanted = flat(torch.load(saved / "wanted.pt", weights_only=False)[series])
    opened = dcp_rs.open(saved / f"{series}_world_size_4_rank_*.pt")
    assert_same(dict(opened), wanted)
    folder = only(saved, tmp_path / "own", series)
    assert_same(dict(dcp_rs.open(folder)), wanted)
    dcp_rs.convert(folder, tmp_path / "native")
    assert_same(dict(dcp_rs.open(tmp_path / "native", verify=True)), wanted)


def test_a_folder_with_several_series_is_its_model(saved):
    wanted = torch.load(saved / "wanted.pt", weights_only=False)["model"]
    opened = dcp_rs.open(saved)
    assert_same(dict(opened), wanted)
    assert torch.equal(opened.get_slice("twice")[2:9, 1], wanted["twice"][2:9, 1])


def load_sharded(folder, wanted):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    names = ("uneven", "columns", "twice", "both")
    state = {
        name: zeros(*wanted[name].shape, dtype=wanted[name].dtype, device_mesh=mesh,
                    placements=[Shard(1)])
        for name in names
    }  # fmt: skip
    dcp_rs.load(state, folder)
    for name in names:
        assert torch.equal(state[name].full_tensor(), wanted[name]), name


def test_loads_on_another_number_of_ranks(saved):
    wanted = torch.load(saved / "wanted.pt", weights_only=False)["model"]
    run_ranks(3, load_sharded, saved, wanted)


def test_state_dicts_are_nested_as_they_were(saved):
    wanted = torch.load(saved / "wanted.pt", weights_only=False)["optim"]
    state = dcp_rs.open(saved / "optim*").state_dict(copy=True)
    assert_same(flat(state), flat(wanted))


def test_the_command_line_takes_folders_and_patterns(dcp_rs_cli, saved, tmp_path):
    status, out, _ = dcp_rs_cli("ls", saved)
    assert status == 0
    assert "uneven" in out
    assert "[5, 3]" in out
    assert dcp_rs_cli("inspect", saved / "optim_world_size_4_rank_*.pt")[0] == 0
    assert dcp_rs_cli("verify", saved)[0] == 0
    options = ("--to", "safetensors", "--exclude", "epoch")
    assert dcp_rs_cli("convert", saved, tmp_path / "hf", *options)[0] == 0
    wanted = torch.load(saved / "wanted.pt", weights_only=False)["model"]
    del wanted["epoch"]
    assert_same(dict(dcp_rs.open(tmp_path / "hf")), wanted)


def test_an_index_beside_the_files_is_refused(saved, tmp_path):
    """It could not describe shards in several files."""
    folder = only(saved, tmp_path / "own", "model")
    with pytest.raises(UnsupportedError, match=r"dcp_rs\.convert"):
        dcp_rs.index(folder)


def missing(folder):
    (folder / "model_world_size_4_rank_2.pt").unlink()
    return "model_world_size_4_rank_2.pt"


def swapped(folder):
    a, b = (folder / f"model_world_size_4_rank_{rank}.pt" for rank in (1, 2))
    a.rename(folder / "x")
    b.rename(a)
    (folder / "x").rename(b)
    return "model_world_size_4_rank_1.pt"


def of_another_world(folder):
    for rank in range(2):
        path = folder / f"model_world_size_4_rank_{rank}.pt"
        path.rename(folder / f"model_world_size_2_rank_{rank}.pt")
    for rank in (2, 3):
        (folder / f"model_world_size_4_rank_{rank}.pt").unlink()
    return "model_world_size_2_rank_0.pt"


def two_worlds(folder):
    shutil.copy(folder / "model_world_size_4_rank_0.pt", folder / "model_world_size_8_rank_0.pt")
    return "model_world_size_8_rank_*.pt"


def renamed_entry(folder):
    change(folder / "model_world_size_4_rank_3.pt", lambda state: state.update(x=state.pop("few")))
    return "model_world_size_4_rank_3.pt"


def one_entry_less(folder):
    change(folder / "model_world_size_4_rank_3.pt", lambda state: state.pop("few"))
    return "model_world_size_4_rank_3.pt"


def another_shape(folder):
    def wider(state):
        state["even"]._spec.tensor_meta = state["uneven"]._spec.tensor_meta

    change(folder / "model_world_size_4_rank_3.pt", wider)
    return "model_world_size_4_rank_3.pt"


def another_placement(folder):
    def turned(state):
        state["even"] = copy.copy(state["columns"])

    change(folder / "model_world_size_4_rank_3.pt", turned)
    return "model_world_size_4_rank_3.pt"


def other_replica(folder):
    change(folder / "model_world_size_4_rank_3.pt", lambda state: state["buffer"].zero_())
    return "model_world_size_4_rank_3.pt"


def other_value(folder):
    change(folder / "model_world_size_4_rank_3.pt", lambda state: state.update(epoch=8))
    return "model_world_size_4_rank_3.pt"


def change(path, function):
    state = torch.load(path, weights_only=False)
    function(state)
    torch.save(state, path)


@pytest.mark.parametrize(
    "damage",
    [
        missing, swapped, of_another_world, two_worlds, renamed_entry, one_entry_less,
        another_shape, another_placement, other_replica, other_value,
    ],
)  # fmt: skip
def test_files_that_are_no_whole_are_refused_by_name(saved, tmp_path, damage):
    folder = only(saved, tmp_path / "own", "model")
    named = damage(folder)
    with pytest.raises(DcpRsError) as error:
        dcp_rs.open(folder)
    assert named in str(error.value)


def test_rank_files_that_do_not_fit_are_refused(saved):
    with pytest.raises(UnsupportedError, match=r"partial_world_size_4_rank_0.*Partial"):
        dcp_rs.open(saved / "partial_*")
    with pytest.raises(CorruptDataError, match=r"extra_world_size_4_rank_1.*differs"):
        dcp_rs.open(saved / "extra_*")
    with pytest.raises(dcp_rs.errors.CheckpointNotFoundError, match="ranks"):
        dcp_rs.open(saved / "nothing_*")
    with pytest.raises(UnsupportedError, match=r"optim_world_size_4_rank_\*\.pt"):
        dcp_rs.open(saved / "*p*t*_rank_*")
