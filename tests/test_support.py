"""The test infrastructure, held against stock DCP: what it reports as equal or failed is so."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from support import (
    ALL_DTYPES,
    RankDiedError,
    RanksFailedError,
    RankTimeoutError,
    UnpicklableError,
    assert_state_equal,
    blank,
    dtypes_state,
    nested_state,
    rank_outcomes,
    run_ranks,
    shapes_state,
    state_differences,
    strange_names_state,
)
from support.oldest import oldest


def sharded(shape, mesh_shape, placements, fill=None):
    """A DTensor over the first dimensions of a mesh: row numbers and columns, or `fill`."""
    mesh = init_device_mesh("cpu", mesh_shape)
    rows, columns = shape
    whole = torch.arange(rows * columns, dtype=torch.float32).reshape(shape)
    if fill is not None:
        whole = torch.full(shape, fill)
    return distribute_tensor(whole, mesh, placements)


def rank_and_size():
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total), os.environ["LOCAL_WORLD_SIZE"]


def save_stock(path, mesh_shape, placements):
    state = {"w": sharded((7, 5), mesh_shape, placements), "step": 3}
    dcp.save(state, checkpoint_id=path)


def load_stock(path, mesh_shape, placements):
    state = {"w": sharded((7, 5), mesh_shape, placements, fill=-1.0), "step": 0}
    dcp.load(state, checkpoint_id=path)
    want = {"w": sharded((7, 5), mesh_shape, placements), "step": 3}
    assert_state_equal(state, want)
    return state["w"].to_local().tolist()


@pytest.mark.parametrize("size", [1, 2, 4, 3])
def test_ranks_form_a_process_group_of_the_size_asked_for(size):
    total = sum(range(size))
    assert run_ranks(size, rank_and_size) == [(r, size, total, str(size)) for r in range(size)]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, (2,), [Shard(0)]), (4, (4,), [Shard(1)])),
        ((4, (2, 2), [Shard(0), Shard(1)]), (2, (2,), [Replicate()])),
        ((1, (1,), [Replicate()]), (4, (2, 2), [Replicate(), Shard(0)])),
        # Again, as the processes live on and torch keeps meshes in caches.
        ((4, (4,), [Shard(0)]), (2, (2,), [Shard(1)])),
    ],
)
def test_stock_dcp_reshards_between_pools_of_ranks(ckpt, saved, loaded):
    run_ranks(saved[0], save_stock, ckpt, *saved[1:])
    locals_ = run_ranks(loaded[0], load_stock, ckpt, *loaded[1:])
    assert len(locals_) == loaded[0]


def is_copyable(value):
    if isinstance(value, torch.Tensor):
        try:
            torch.empty_like(value).copy_(value)
        except NotImplementedError:
            return False
    return True


@pytest.mark.parametrize(
    "make",
    [dtypes_state, shapes_state, nested_state, strange_names_state],
    ids=lambda f: f.__name__,
)
def test_stock_dcp_round_trips_the_states(ckpt, make):
    # Older torch cannot copy its youngest dtypes, and stock DCP copies.
    want = {name: value for name, value in make().items() if is_copyable(value)}
    dcp.save(dict(want), checkpoint_id=ckpt, no_dist=True)
    got = blank(want)
    assert state_differences(got, want)
    dcp.load(got, checkpoint_id=ckpt, no_dist=True)
    assert_state_equal(got, want)


def test_states_differ_with_their_seed():
    for make in (dtypes_state, nested_state, strange_names_state):
        assert state_differences(make(seed=1), make(seed=2))


def test_all_dtypes_of_the_format_are_there():
    assert len(ALL_DTYPES) >= 22


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (
            torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32),
            torch.tensor([0x7FC00002], dtype=torch.int32).view(torch.float32),
        ),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (0.0, -0.0),
        (1, True),
        ([1], (1,)),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1, "b": 2}, {"a": 1}),
        ([1, 2], [1]),
    ],
)
def test_comparison_sees_every_difference(got, want):
    with pytest.raises(AssertionError, match="1 differences"):
        assert_state_equal({"x": got}, {"x": want})


def test_comparison_takes_equal_nans():
    nan = {"x": torch.tensor([float("nan")]), "y": float("nan"), "z": [(1, "a")]}
    assert_state_equal(nan, {"x": nan["x"].clone(), "y": float("nan"), "z": [(1, "a")]})


class PickyError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def fail_in_own_way():
    rank = dist.get_rank()
    if rank == 0:
        return torch.tensor([1.5])
    if rank == 1:
        raise KeyError("missing on one")
    if rank == 2:
        raise PickyError(1, 2)
    return lambda: None


def test_the_error_of_every_rank_comes_back_with_its_traceback():
    zero, one, two, three = rank_outcomes(4, fail_in_own_way)
    assert_state_equal(zero.value, torch.tensor([1.5]))
    assert isinstance(one.error, KeyError)
    assert "fail_in_own_way" in one.traceback
    assert isinstance(two.error, UnpicklableError)
    assert "PickyError: 1 and 2" in str(two.error)
    assert isinstance(three.error, UnpicklableError)
    assert [o.rank for o in (zero, one, two, three)] == [0, 1, 2, 3]
    with pytest.raises(RanksFailedError, match=r"(?s)1 of 2 ranks failed.*rank 1.*missing on one"):
        run_ranks(2, fail_in_own_way)


def die_on_rank_one():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def test_a_rank_that_dies_is_reported_and_replaced():
    zero, one = rank_outcomes(2, die_on_rank_one, timeout=20)
    assert isinstance(one.error, RankDiedError)
    assert "exit code 7" in str(one.error)
    assert zero.error is not None  # its barrier lost a peer
    assert len(run_ranks(2, rank_and_size)) == 2


def hang_on_rank_one():
    if dist.get_rank() == 1:
        time.sleep(1000)


@pytest.mark.slow  # it waits
def test_a_rank_that_hangs_is_killed_and_shows_where():
    zero, one = rank_outcomes(2, hang_on_rank_one, timeout=10)
    assert zero.error is None
    assert isinstance(one.error, RankTimeoutError)
    assert "hang_on_rank_one" in str(one.error)
    assert len(run_ranks(2, rank_and_size)) == 2


def leave_a_trace():
    first = not hasattr(torch, "left_by_a_test")
    torch.left_by_a_test = True
    os.environ["LEFT_BY_A_TEST"] = "1"
    return first


def find_traces():
    return hasattr(torch, "left_by_a_test"), "LEFT_BY_A_TEST" in os.environ


def test_processes_live_on_but_their_environment_is_restored():
    run_ranks(1, leave_a_trace)
    assert run_ranks(1, find_traces) == [(True, False)]


def test_fresh_processes_know_nothing_of_earlier_calls():
    run_ranks(1, leave_a_trace)
    assert run_ranks(1, leave_a_trace, fresh=True) == [True]


def begin_a_second_group():
    if dist.get_rank() == 0:
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method="tcp://127.0.0.1:1", timeout=timedelta(seconds=1)
        )


def test_a_rank_whose_group_failed_to_form_is_replaced():
    zero, one = rank_outcomes(2, begin_a_second_group)
    assert zero.error is not None
    assert not zero.reusable
    assert one.error is None
    assert len(run_ranks(2, rank_and_size)) == 2


def test_the_oldest_torch_is_read_from_pyproject():
    assert oldest("torch") == "2.8.0"
    assert tuple(map(int, torch.__version__.split("+")[0].split("."))) >= (2, 8, 0)


def test_a_dtensor_is_compared_by_its_placement_too():
    assert run_ranks(2, differences_of_placements) == [1, 1]


def differences_of_placements():
    rows, columns = sharded((4, 4), (2,), [Shard(0)]), sharded((4, 4), (2,), [Shard(1)])
    assert isinstance(rows, DTensor)
    return len(state_differences({"w": rows}, {"w": columns}))
