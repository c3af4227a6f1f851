"""Files that each rank saved with torch.save, as one checkpoint: its tensors are the full tensors of what the ranks held."""

import copy
import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dcp_rs
from dcp_rs.errors import CorruptDataError, DcpRsError, UnsupportedError
from support import run_ranks
from support.both import HAS_RANK_LOCAL


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
    # full_tensor() of torch 2.8 mixes rows up that strided shards divide unevenly.
    hidden, out = (10, 7) if HAS_RANK_LOCAL else (12, 8)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, out)
    )
    model.register_buffer("steps", torch.tensor([3.0, 4.0]))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def save_each(states, folder):
    """Save each state of this rank in a file of its series."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for series, state in states.items():
        torch.save(state, folder / f"{series}_world_size_{world}_rank_{rank}.pt")


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
    model, optimizer = model_and_optimizer()
    states = {"model": state, "fsdp": model.state_dict(), "optim": optimizer.state_dict()}
    save_each(states, folder)
    partial = {"p": DTensor.from_local(torch.ones(2), one, [Partial()])}
    save_each({"extra": {"rng": torch.full((3,), rank)}, "partial": partial}, folder)
    wanted = {name: full(state) for name, state in states.items()}
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


def gathered(state):
    """The state with whole tensors in place of ShardedTensors; only rank 0 has their elements."""
    found = {}
    for name, value in state.items():
        whole = value
        if isinstance(value, ShardedTensor):
            whole = torch.empty(value.size(), dtype=value.dtype)
            value.gather(0, whole if dist.get_rank() == 0 else None, enforce_dtype=True)
        found[name] = whole
    return found


def save_fsdp1(folder):
    """FSDP1's model by parameter and by flat parameter, and its optimizer."""
    warnings.simplefilter("ignore")  # torch calls FSDP1 deprecated
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 10), torch.nn.Linear(10, 7), torch.nn.Linear(7, 2)
    )
    model.register_buffer("steps", torch.tensor([3.0, 4.0]))
    model = FullyShardedDataParallel(model.double(), device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6).double()).sum().backward()
    optimizer.step()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        sharded = model.state_dict()
        optim = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        local = model.state_dict()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        wanted = {
            "sharded": model.state_dict(),
            "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer),
        }
    wanted["local"] = gathered(local)
    lacking = copy.copy(sharded)
    if rank == 2:
        lacking["0.bias"] = copy.copy(sharded["0.bias"])
        lacking["0.bias"]._local_shards = []
    states = {"sharded": sharded, "optim": optim, "local": local, "lacking": lacking}
    save_each(states, folder)
    if rank == 0:
        torch.save(wanted, folder / "wanted.pt")


@pytest.fixture(scope="module")
def saved_by_fsdp1(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp1")
    run_ranks(4, save_fsdp1, folder)
    return folder


@pytest.mark.parametrize("series", ["sharded", "local", "optim"])
def test_sharded_tensors_of_fsdp1_are_whole(saved_by_fsdp1, tmp_path, series):
    """They were values of their rank, and the file of rank 1 was called corrupt."""
    wanted = flat(torch.load(saved_by_fsdp1 / "wanted.pt", weights_only=False)[series])
    assert any(value.ndim for value in wanted.values() if isinstance(value, torch.Tensor))
    opened = dcp_rs.open(saved_by_fsdp1 / f"{series}_world_size_4_rank_*.pt")
    assert_same(dict(opened), wanted)
    folder = only(saved_by_fsdp1, tmp_path / "own", series)
    dcp_rs.convert(folder, tmp_path / "native")
    assert_same(dict(dcp_rs.open(tmp_path / "native", verify=True)), wanted)


def test_a_sharded_tensor_that_lacks_a_shard_is_refused(saved_by_fsdp1):
    with pytest.raises(CorruptDataError, match=r"0\.bias.*do not make up \[10\]"):
        dcp_rs.open(saved_by_fsdp1 / "lacking_*")


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


def twice(folder):
    a, b = (folder / f"model_world_size_4_rank_{rank}.pt" for rank in (1, 2))
    shutil.copy(a, b)
    return "model_world_size_4_rank_2.pt"


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
        missing, swapped, twice, of_another_world, two_worlds, renamed_entry, one_entry_less,
        another_shape, another_placement, other_replica, other_value,
    ],
)  # fmt: skip
def test_files_that_are_no_whole_are_refused_by_name(saved, tmp_path, damage):
    if damage in (swapped, twice) and not HAS_RANK_LOCAL:
        pytest.skip("torch 2.8 saves the place in the mesh, and that counts, not the name")
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
