"""What any kind of parallelism saves on N ranks, any other loads on M."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import dcp_rs
from dcp_rs import RsReader, RsWriter
from dcp_rs.optim import load_training_state, save_training_state
from support import assert_state_equal, run_ranks
from support.training import KINDS, parallelize, quiet, train_step, whole, whole_parameters

SIZES = [1, 2, 4]


def start(kind, seed, **options):
    model = parallelize(kind, seed, **options)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2)


def save_all(path):
    """Each kind through this package's functions, through DCP's with its own planners, and tied weights."""
    with quiet():
        for kind in KINDS:
            model, optimizer = start(kind, seed=3)
            train_step(model, [optimizer], 0)
            save_training_state(f"{path}/{kind}", model, optimizer, fsync=False)
            dcp.save(
                {"model": get_model_state_dict(model)},
                storage_writer=RsWriter(f"{path}/{kind}-dcp", fsync=False),
            )
        for kind in ("plain", "fsdp2", "ddp"):
            model, optimizer = start(kind, seed=3, tied=True)
            train_step(model, [optimizer], 0)
            save_training_state(f"{path}/{kind}-tied", model, optimizer, fsync=False)


def scramble(model, optimizer):
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.fill_(-7)
    optimizer.state.clear()


def stored(path, prefix):
    with dcp_rs.open(path) as checkpoint:
        return {
            name[len(prefix) :]: checkpoint[name].clone()
            for name in checkpoint
            if name.startswith(prefix)
        }


def optimizer_state(model, optimizer):
    """The whole state of every parameter, by FQN."""
    flat = {}
    with quiet():
        state = get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(full_state_dict=True)
        )["state"]
    for fqn, values in state.items():
        flat |= {f"{fqn}.{name}": whole(value).cpu() for name, value in values.items()}
    return flat


def load_some(path, shift, kinds):
    """Each kind from its own checkpoint, and from that of another; with DCP's planner and with this package's."""
    loads = [lambda sd, p: dcp.load(sd, storage_reader=RsReader(p)), dcp_rs.load]
    with quiet():
        for kind in kinds:
            at = KINDS.index(kind)
            model, optimizer = start(kind, seed=4)
            for load, other in zip(
                loads, (kind, KINDS[(at + 1 + 2 * shift) % len(KINDS)]), strict=True
            ):
                source = f"{path}/{other}"
                scramble(model, optimizer)
                report = load_training_state(source, model, optimizer)
                assert report.missing == [], (kind, other)
                assert_state_equal(whole_parameters(model), stored(source, "model."))
                assert_state_equal(
                    optimizer_state(model, optimizer), stored(source, "optim.state.")
                )
                scramble(model, optimizer)
                state = {"model": get_model_state_dict(model)}
                load(state, f"{source}-dcp")
                set_model_state_dict(model, state["model"])
                assert_state_equal(whole_parameters(model), stored(source, "model."))
        for kind, other in (
            ("fsdp2", "plain"),
            ("plain", "fsdp2"),
            ("ddp", "fsdp2"),
            ("fsdp2", "ddp"),
        ):
            model, optimizer = start(kind, seed=4, tied=True)
            load_training_state(f"{path}/{other}-tied", model, optimizer)
            parameters = whole_parameters(model)
            assert_state_equal(parameters, stored(f"{path}/{other}-tied", "model."))
            assert_state_equal(parameters["head.weight"], parameters["embed.weight"])
            assert_state_equal(
                optimizer_state(model, optimizer), stored(f"{path}/{other}-tied", "optim.state.")
            )


def test_any_parallelism_loads_what_another_saved(tmp_path):
    run_ranks(2, save_all, tmp_path)
    run_ranks(4, load_some, tmp_path, 0, KINDS[::2])


@pytest.mark.slow
@pytest.mark.parametrize("saved", SIZES)
def test_every_parallelism_loads_what_another_saved(tmp_path, saved):
    run_ranks(saved, save_all, tmp_path)
    for shift, loaded in enumerate(SIZES):
        run_ranks(loaded, load_some, tmp_path, shift, KINDS)


def fsdp1_types(path):
    """The three types of FSDP1's own state dicts, by its own functions."""
    rank = dist.get_rank()
    with quiet():
        model = parallelize("fsdp1_flat", seed=5)
        want = whole_parameters(model)
        full = FullStateDictConfig(rank0_only=True)
        types = [
            ("sharded", StateDictType.SHARDED_STATE_DICT, None),
            ("full", StateDictType.FULL_STATE_DICT, None),
            ("full_rank0", StateDictType.FULL_STATE_DICT, full),
            ("local", StateDictType.LOCAL_STATE_DICT, None),
        ]
        for name, kind, config in types:
            with FullyShardedDataParallel.state_dict_type(model, kind, config):
                state = model.state_dict()
                assert bool(state) or (name == "full_rank0" and rank > 0)
                dcp.save(state, storage_writer=RsWriter(f"{path}/{name}", fsync=False))
        for name, kind, _ in types:
            for load in (lambda sd, p: dcp.load(sd, storage_reader=RsReader(p)), dcp_rs.load):
                other = parallelize("fsdp1_flat", seed=6)
                with FullyShardedDataParallel.state_dict_type(other, kind):
                    state = other.state_dict()
                    load(state, f"{path}/{name}")
                    other.load_state_dict(state)
                assert_state_equal(whole_parameters(other), want)
        # Sharded from full and the reverse.
        for name, kind in (
            ("full_rank0", StateDictType.SHARDED_STATE_DICT),
            ("sharded", StateDictType.FULL_STATE_DICT),
        ):
            other = parallelize("fsdp1", seed=6)
            with FullyShardedDataParallel.state_dict_type(other, kind):
                state = other.state_dict()
                dcp_rs.load(state, f"{path}/{name}")
                other.load_state_dict(state)
            assert_state_equal(whole_parameters(other), want)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_types_of_fsdp1_state_dicts(tmp_path, ranks):
    run_ranks(ranks, fsdp1_types, tmp_path)


def stock_functions(path):
    """Torch's own get_state_dict and set_state_dict on both sides of save_training_state."""
    with quiet():
        for kind in ("ddp", "fsdp1", "fsdp2", "fsdp2_tp"):
            model, optimizer = start(kind, seed=3)
            train_step(model, [optimizer], 0)
            ours, theirs = f"{path}/{kind}", f"{path}/{kind}-stock"
            save_training_state(ours, model, optimizer, fsync=False)
            for flat in (False, True):
                options = StateDictOptions(flatten_optimizer_state_dict=flat)
                model_state, optim_state = get_state_dict(model, optimizer, options=options)
                dcp.save(
                    {"model": model_state, "optim": optim_state},
                    storage_writer=RsWriter(f"{theirs}{flat}", fsync=False),
                )
            want = whole_parameters(model), optimizer_state(model, optimizer)
            for flat in (False, True):
                model, optimizer = start(kind, seed=4)
                load_training_state(f"{theirs}{flat}", model, optimizer)
                assert_state_equal(
                    (whole_parameters(model), optimizer_state(model, optimizer)), want
                )
                assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
            model, optimizer = start(kind, seed=4)
            model_state, optim_state = get_state_dict(model, optimizer)
            dcp.load({"model": model_state, "optim": optim_state}, storage_reader=RsReader(ours))
            set_state_dict(
                model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state
            )
            assert_state_equal((whole_parameters(model), optimizer_state(model, optimizer)), want)


@pytest.mark.slow
def test_torchs_own_functions_read_and_write_the_same_checkpoints(tmp_path):
    run_ranks(2, stock_functions, tmp_path)


def numbered(shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def layouts(empty):
    """Shardings that models seldom have."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    line = init_device_mesh("cpu", (4,))
    odd = DeviceMesh("cpu", [1, 3])  # a submesh: the other ranks have no part
    column = DeviceMesh("cpu", [[1], [3]])
    made = {}

    def add(name, shape, mesh, placements):
        value = torch.full(shape, -1.0) if empty else numbered(shape)
        if mesh.get_coordinate() is None:
            # Such a rank has the DTensor all the same, with nothing in it.
            made[name] = DTensor.from_local(
                torch.empty(0),
                mesh,
                placements,
                run_check=False,
                shape=torch.Size(shape),
                stride=value.stride(),
            )
        else:
            made[name] = distribute_tensor(value, mesh, placements, src_data_rank=None)

    add("submesh_rows", (5, 3), odd, [Shard(0)])
    add("submesh_replicated", (4, 3), odd, [Replicate()])
    add("submesh_square", (5, 3), column, [Shard(1), Shard(0)])
    add("slice_rows", (6, 3), square["a"], [Shard(0)])
    add("slice_columns", (6, 3), square["b"], [Shard(1)])
    add("uneven", (3, 5), line, [Shard(0)])
    add("one_row", (1, 5), line, [Shard(0)])
    add("nothing", (0, 5), line, [Shard(0)])
    return made


def interleaved():
    """Two strided placements whose shards are rows that do not lie together."""
    square = init_device_mesh("cpu", (2, 2))
    line = init_device_mesh("cpu", (4,))
    return [
        (8, square, [Shard(0), _StridedShard(0, split_factor=2)]),
        (16, line, [_StridedShard(0, split_factor=2)]),
        (
            8,
            square,
            [_StridedShard(0, split_factor=2), Shard(0)],
        ),  # FSDP2 over TP: these do lie together
    ]


def odd_layouts(path):
    # DCP has no word for a rank outside of a mesh that holds nothing: such ranks leave the entry
    # out.
    mine = {
        k: v for k, v in layouts(empty=False).items() if v.device_mesh.get_coordinate() is not None
    }
    dcp_rs.save(mine, path, fsync=False)
    for load in (lambda sd, p: dcp.load(sd, storage_reader=RsReader(p)), dcp_rs.load):
        got = {
            k: v
            for k, v in layouts(empty=True).items()
            if v.device_mesh.get_coordinate() is not None
        }
        load(got, path)
        assert_state_equal(got, mine)
    # Ranks outside of the mesh may have the entry too.
    got = layouts(empty=True)
    dcp_rs.load(got, path)
    for name, tensor in mine.items():
        assert_state_equal(got[name], tensor)
    plain = {name: torch.full(tensor.shape, -1.0) for name, tensor in layouts(empty=True).items()}
    dcp_rs.load(plain, path)
    assert_state_equal(plain, {name: numbered(value.shape) for name, value in plain.items()})

    cases = interleaved()
    dcp_rs.save(
        {f"w{i}": numbered((rows, 3)) for i, (rows, *_) in enumerate(cases)},
        f"{path}-i",
        fsync=False,
    )
    for i, (rows, mesh, placements) in enumerate(cases):
        want = distribute_tensor(numbered((rows, 3)), mesh, placements, src_data_rank=None)
        target = distribute_tensor(
            torch.full((rows, 3), -1.0), mesh, placements, src_data_rank=None
        )
        dcp_rs.load({f"w{i}": target}, f"{path}-i")
        assert_state_equal(target, want)
        # Stock planning takes such a shard for one box, and reads other rows: with DCP's planner
        # the reader cannot know.


def test_odd_layouts(ckpt):
    run_ranks(4, odd_layouts, ckpt)
