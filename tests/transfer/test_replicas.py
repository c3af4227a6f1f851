"""Ranks that need the same bytes read them once, and send each other what they read."""

import os
import signal
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader, _torch
from dcp_rs.engine import load as engine_load
from dcp_rs.engine.broadcast_read import _Exchange
from dcp_rs.errors import CorruptDataError, DcpRsError, PlanError, UnsafePickleError
from dcp_rs.optim import load_training_state, save_training_state
from support import assert_state_equal, rank_outcomes, run_ranks
from support.files import flip

MIB = 1 << 20


def numbered(shape, dtype=torch.float32):
    return (torch.arange(torch.Size(shape).numel()) % 251).reshape(shape).to(dtype)


# Large ones (pieces of one tensor), many small ones (pieces of several), odd sizes, a scalar, an
# empty one, another dtype.
SHAPES = {"big": (700, 1000), "deep": (2, 3, 50, 41), "scalar": (), "empty": (0, 3)} | {
    f"small{i}": (i + 1, 3) for i in range(40)
}


def save_whole(path):
    state = {name: numbered(shape) for name, shape in SHAPES.items()}
    dcp_rs.save(
        state | {"half": numbered((300, 7), torch.bfloat16), "step": 5},
        path,
        no_dist=True,
        fsync=False,
    )


def rchar():
    """Bytes that this process has asked the system to read, whichever way it counts them."""
    return int(Path("/proc/self/io").read_text().split()[1])


def load_replicas(path, make, options, local_size):
    os.environ["LOCAL_WORLD_SIZE"] = str(local_size)
    got, want = make(empty=True), make(empty=False)
    reader = RsReader(path, io="buffered", **options)
    before = rchar()
    dcp_rs.load_state_dict(got, reader, planner=RsLoadPlanner(dtype_policy="cast"))
    read = rchar() - before
    assert_state_equal(got, want)
    filled = sum(stored_bytes(value) for value in got.values() if isinstance(value, torch.Tensor))
    values = reader.report.bytes_wanted - filled
    assert 0 <= values < 2000, values  # of the one that is no tensor
    return read, reader.report.bytes_read


def stored_bytes(tensor):
    """Of what this rank has of a tensor: floats, of 4 bytes, but for those of 2."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * (2 if tensor.dtype == torch.bfloat16 else 4)


def blank_or(value, empty):
    return torch.full_like(value, -1) if empty else value


def ddp(empty):
    state = {name: blank_or(numbered(shape), empty) for name, shape in SHAPES.items()}
    state["half"] = blank_or(numbered((300, 7), torch.bfloat16), empty)
    # Not contiguous; another dtype than what is stored; a part of one that others have whole.
    state["deep"] = (
        blank_or(numbered(SHAPES["deep"]), empty)
        .permute(3, 2, 1, 0)
        .contiguous()
        .permute(3, 2, 1, 0)
    )
    state["small7"] = state["small7"].double()
    return state | {"step": 0 if empty else 5}


def sharded(placements):
    mesh = init_device_mesh("cpu", (2, 2))
    return {
        name: lambda shape=shape, empty=False: distribute_tensor(
            blank_or(numbered(shape), empty),
            mesh,
            placements if len(shape) > 1 else [Replicate()] * 2,
            src_data_rank=None,
        )
        for name, shape in SHAPES.items()
    }


def hsdp(empty):
    return {name: make(empty=empty) for name, make in sharded([Replicate(), Shard(0)]).items()}


def columns(empty):
    """What two ranks share is not one run of bytes."""
    return {name: make(empty=empty) for name, make in sharded([Shard(1), Replicate()]).items()}


def fsdp(empty):
    """Nobody shares anything but the scalar."""
    return {name: make(empty=empty) for name, make in sharded([Shard(0), Shard(0)]).items()}


def total_bytes():
    return sum(torch.Size(shape).numel() for shape in SHAPES.values()) * 4


# make, options, ranks a node: how often each byte of the model is read from storage by 4 ranks.
CASES = [
    (ddp, {"replicas": "each"}, 4, 4),
    (ddp, {"replicas": "all"}, 4, 1),
    (ddp, {"replicas": "all", "max_inflight_bytes": 1 << 20}, 1, 1),
    (ddp, {"replicas": "node"}, 4, 1),
    (ddp, {"replicas": "node"}, 2, 2),
    (ddp, {"replicas": "node"}, 1, 4),
    (ddp, {"replicas": "all", "verify": True}, 4, 1),
    (hsdp, {"replicas": "each"}, 4, 2),
    (hsdp, {"replicas": "all"}, 4, 1),
    (columns, {"replicas": "all"}, 4, 1),
    (fsdp, {"replicas": "all"}, 4, 1),
]


def load_cases(path):
    return [load_replicas(path, make, options, local) for make, options, local, _ in CASES]


def test_every_byte_is_read_as_often_as_asked(ckpt):
    save_whole(ckpt)
    by_rank = run_ranks(4, load_cases, ckpt)
    for at, (make, options, local, times) in enumerate(CASES):
        ratio, reported = (
            sum(read[at][kind] for read in by_rank) / total_bytes() for kind in (0, 1)
        )
        # Around it: index, values, Python's own files; columns are read with the gaps between them.
        slack = 1.2 if make is columns else 0.15
        assert times <= reported <= ratio <= times + slack, (
            make.__name__,
            options,
            local,
            reported,
            ratio,
        )


def load_in_a_group(path):
    """Ranks 1 to 3 of 4 load."""
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return
    got = ddp(empty=True)
    reader = RsReader(path, replicas="all")
    dcp_rs.load_state_dict(
        got, reader, planner=RsLoadPlanner(dtype_policy="cast"), process_group=group
    )
    assert_state_equal(got, ddp(empty=False))


def load_an_element(path):
    """One of a column: contiguous to torch, whatever its stride."""
    got = {"one": torch.full((3, 5), -1.0)[:1, 1]}
    dcp_rs.load(got, path, replicas="all")
    assert got["one"].tolist() == [3.0]
    return True


def test_a_tensor_of_one_element_may_have_any_stride(ckpt):
    """By itself in a piece it was taken for a run of bytes by a view that torch refuses."""
    dcp_rs.save({"one": torch.tensor([3.0])}, ckpt)
    assert run_ranks(2, load_an_element, ckpt) == [True, True]


def load_outside_of_inference_mode(path):
    with torch.inference_mode():
        got = {"big": torch.zeros(1000, 700).t(), "half": torch.zeros(300, 7)}
    dcp_rs.load(got, path, replicas="all", dtype_policy="cast")
    return all(torch.equal(got[name], numbered(got[name].shape)) for name in got)


def test_tensors_of_inference_mode(ckpt):
    """`copy_` refuses to write to one outside of the mode."""
    save_whole(ckpt)
    assert run_ranks(2, load_outside_of_inference_mode, ckpt) == [True, True]


def test_some_ranks_share(ckpt):
    save_whole(ckpt)
    run_ranks(4, load_in_a_group, ckpt)


def load_damaged(path):
    dcp_rs.load(
        {"big": torch.zeros(700, 1000)},
        path,
        replicas="all",
        verify=True,
        max_inflight_bytes=1 << 20,
    )


def test_damage_that_one_rank_finds_is_raised_on_all(ckpt):
    save_whole(ckpt)
    (data,) = ckpt.glob("*.safetensors")
    flip(data)
    for outcome in rank_outcomes(4, load_damaged, ckpt, timeout=60):
        assert isinstance(outcome.error, CorruptDataError), outcome
        assert "big" in str(outcome.error)


def load_shards_of_which_some_are_shared(path):
    """Both ranks hold all rows, in shards of which only the first is the same."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    rank = dist.get_rank()
    local = torch.full((6, 3), -1.0)
    bounds = ([0, 4, 6], [0, 4, 5, 6])[rank]
    shards = [
        LocalShard.from_tensor_and_offsets(local[begin:end], [begin, 0], rank)
        for begin, end in pairwise(bounds)
    ]
    tensor = ShardedTensor._init_from_local_shards(shards, 6, 3, process_group=groups[rank])
    dcp_rs.load({"rows": tensor}, path, replicas="all")
    assert local.equal(numbered((6, 3)))


def load_its_own_file(path):
    state = {"w": torch.full((1000,), -1.0)}
    dcp_rs.load(state, path / f"{dist.get_rank()}.pt", replicas="all")
    return state["w"].unique().tolist()


def test_ranks_that_load_files_of_their_own_share_nothing(tmp_path):
    for rank in range(2):
        torch.save({"w": torch.full((1000,), float(rank))}, tmp_path / f"{rank}.pt")
    assert run_ranks(2, load_its_own_file, tmp_path, timeout=60) == [[0.0], [1.0]]


def load_transposed_on_one_rank(path):
    turned = dist.get_rank() == 1
    state = {"w": torch.zeros(8, 8)}
    views = dcp_rs.Transpose("w", (1, 0)) if turned else None
    dcp_rs.load(state, path, views=views, replicas="all")
    return state["w"].equal(numbered((8, 8)).T if turned else numbered((8, 8)))


def test_ranks_with_other_views_share_nothing(ckpt):
    dcp_rs.save({"w": numbered((8, 8))}, ckpt, no_dist=True, fsync=False)
    assert run_ranks(2, load_transposed_on_one_rank, ckpt, timeout=60) == [True, True]


def load_with_other_bounds(path):
    state = {"big": torch.zeros(700, 1000)}
    bound = (1 << 18, 1 << 20)[dist.get_rank()]
    dcp_rs.load(state, path, replicas="all", max_inflight_bytes=bound)
    return state["big"].equal(numbered((700, 1000)))


def test_ranks_with_other_bounds_on_memory_share_nothing(ckpt):
    save_whole(ckpt)
    assert run_ranks(2, load_with_other_bounds, ckpt, timeout=60) == [True, True]


def test_a_tensor_of_which_a_part_is_shared_is_read_whole(ckpt):
    dcp_rs.save({"rows": numbered((6, 3))}, ckpt, no_dist=True, fsync=False)
    run_ranks(2, load_shards_of_which_some_are_shared, ckpt, timeout=60)


# --- who takes part, and who fails


def load_in_a_group_by_path(path):
    """Ranks 1 and 2 of 3 load: rank 0 is not waited for, and its place in the group is another than among all."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    got = ddp(empty=True)
    planner = RsLoadPlanner(dtype_policy="cast")
    dcp_rs.load_state_dict(
        got, RsReader(path / "whole", replicas="all"), planner=planner, process_group=group
    )
    assert_state_equal(got, ddp(empty=False))
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    options = {"replicas": "all", "process_group": group}
    load_training_state(path / "training", model, optimizer, {"seen": torch.zeros(10)}, **options)
    assert model.weight.eq(2).all()


def test_some_ranks_share_who_were_told_by_the_load_alone(tmp_path):
    """H1: the reader took all ranks for those of the load."""
    save_whole(tmp_path / "whole")
    model = torch.nn.Linear(30, 20)
    torch.nn.init.constant_(model.weight, 2)
    extra = {"seen": torch.ones(10)}
    save_training_state(
        tmp_path / "training",
        model,
        torch.optim.SGD(model.parameters(), momentum=0.5),
        extra,
        fsync=False,
    )
    run_ranks(3, load_in_a_group_by_path, tmp_path, timeout=80)


def load_alone(path):
    if dist.get_rank() == 0:
        for load in ("ours", "torch's"):
            got = {"big": torch.zeros(700, 1000)}
            if load == "ours":
                dcp_rs.load(got, path, no_dist=True, replicas="all")
            else:
                dcp.load(
                    got,
                    storage_reader=RsReader(path, replicas="all"),
                    planner=RsLoadPlanner(),
                    no_dist=True,
                )
            assert torch.equal(got["big"], numbered((700, 1000)))
    dist.barrier()


def test_a_rank_that_loads_alone_waits_for_nobody(ckpt):
    """H2: `no_dist=True` with `replicas` waited for ranks that were not there."""
    save_whole(ckpt)
    run_ranks(2, load_alone, ckpt, timeout=60)


def load_bad_value(path):
    state = {"big": torch.zeros(700, 1000)} | ({"bad": None} if dist.get_rank() == 1 else {})
    dcp_rs.load(state, path, replicas="all")


@pytest.mark.filterwarnings("ignore:value 'bad'")
def test_a_value_that_one_rank_cannot_load(ckpt):
    """H3: it raised before the exchange, and the others waited in it."""
    dcp_rs.save({"big": numbered((700, 1000)), "bad": Path("x")}, ckpt)
    for outcome in rank_outcomes(3, load_bad_value, ckpt, timeout=60):
        assert type(outcome.error) is UnsafePickleError, outcome
        assert outcome.error.tensor == "bad"
        assert "raised on rank 1" in outcome.error.__notes__


def fail_to_prepare(*_):
    raise PlanError("not this one")


def load_and_fail_before(path):
    state = {"big": torch.zeros(700, 1000)}
    prepare = fail_to_prepare if dist.get_rank() == 1 else engine_load._prepare
    try:
        with mock.patch.object(engine_load, "_prepare", prepare):
            dcp_rs.load(state, path, replicas="all")
    finally:
        dist.barrier()  # all of them are through
        dcp_rs.load(state, path, replicas="all")
        assert torch.equal(state["big"], numbered((700, 1000)))


def test_a_rank_that_fails_before_it_reads(ckpt):
    save_whole(ckpt)
    for outcome in rank_outcomes(3, load_and_fail_before, ckpt, timeout=60):
        assert type(outcome.error) is PlanError, outcome
        assert outcome.error.__notes__ == ["raised on rank 1"]


def load_each_in_its_way(path, other):
    """Rank ``other`` loads in another way than the others do."""
    state = {"big": torch.zeros(700, 1000)}
    try:
        dcp_rs.load(state, path, replicas="each" if dist.get_rank() == other else "all")
    finally:
        dist.barrier()
        assert not state["big"].any()


@pytest.mark.parametrize("other", [0, 2])
def test_a_rank_that_loads_in_another_way_keeps_nobody_waiting(ckpt, other):
    dcp_rs.save({"big": numbered((700, 1000))}, ckpt)
    for outcome in rank_outcomes(3, load_each_in_its_way, ckpt, other, timeout=60):
        assert type(outcome.error) is PlanError, outcome
        assert "replicas= different values: ['all', 'each']" in str(outcome.error)


class StopError(BaseException):
    """What the handler of a signal raises, as Ctrl-C's does."""


def be_stopped_in_the_exchange(path, after):
    """On rank 1, when it has read as many pieces of its own as ``after``."""

    def stop(*_):
        raise StopError("stop")

    signal.signal(signal.SIGUSR2, stop)
    fill, filled = _Exchange._fill, []

    def fill_and_stop(self, *arguments):
        fill(self, *arguments)
        filled.append(1)
        if dist.get_rank() == 1 and len(filled) == after:
            os.kill(os.getpid(), signal.SIGUSR2)

    _Exchange._fill = fill_and_stop
    try:
        dcp_rs.load(
            {"big": torch.zeros(700, 1000)}, path, replicas="all", max_inflight_bytes=1 << 18
        )
    finally:
        _Exchange._fill = fill
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        dist.barrier()  # the connections hold
        state = {"big": torch.zeros(700, 1000)}
        dcp_rs.load(state, path, replicas="all")
        assert torch.equal(state["big"], numbered((700, 1000)))


@pytest.mark.parametrize("after", [1, 3])
def test_a_signal_on_one_rank_ends_the_exchange_of_all(ckpt, after):
    save_whole(ckpt)
    zero, one = rank_outcomes(2, be_stopped_in_the_exchange, ckpt, after, timeout=60)
    assert type(one.error) is StopError, one
    assert type(zero.error) is DcpRsError, zero  # what is no Exception stays with its process
    assert "StopError: stop" in str(zero.error)


#: Of different dimensions: what ranks share is all that is cut alike.
PAIRED = {"a": (500_000,), "b": (500, 1000), "c": (50, 100, 100)}


def load_in_pairs(path):
    """Ranks 0 and 1 share "a", ranks 1 and 2 share "b", ranks 2 and 0 share "c"."""
    state = {name: torch.zeros(PAIRED[name]) for name in ("ac", "ab", "bc")[dist.get_rank()]}
    reader = RsReader(path, replicas="all", verify=True, max_inflight_bytes=1 << 18)
    dcp_rs.load_state_dict(state, reader, planner=RsLoadPlanner())


def test_an_error_in_one_group_of_ranks_keeps_nobody_waiting_in_another(ckpt):
    """H4: a rank that failed with some ranks went on to raise, and those of its next group waited for it."""
    dcp_rs.save(
        {name: torch.arange(500_000.0).reshape(shape) for name, shape in PAIRED.items()}, ckpt
    )
    (data,) = ckpt.glob("*.safetensors")
    index = dcp_rs.open(ckpt)
    assert index["a"][0] == 0
    whole = data.read_bytes()
    at = whole.index(torch.arange(100.0, 200.0).numpy().tobytes())  # in the first of the three
    data.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
    for outcome in rank_outcomes(3, load_in_pairs, ckpt, timeout=60):
        assert isinstance(outcome.error, CorruptDataError), outcome
        assert "raised on rank" in outcome.error.__notes__[-1]


def sendable():
    group = dist.distributed_c10d._get_default_group()
    return [device.type for device in group._device_types], _torch.sendable_types(None)


def test_gloo_sends_host_memory_though_it_lists_cuda():
    """G2: targets on CUDA would have gone to gloo as they are."""
    for listed, found in run_ranks(2, sendable):
        assert "cpu" in listed
        assert found == ["cpu"]


def test_the_option_is_checked():
    with pytest.raises(ValueError, match="replicas='twice'"):
        RsReader("x", replicas="twice")
