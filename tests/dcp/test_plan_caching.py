"""Plans of saves that are remembered, so that they need not be sent again."""

import gc
import pickle
import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

import dcp_rs
from dcp_rs import RsSavePlanner, RsWriter
from dcp_rs.engine.destination import Destination
from dcp_rs.errors import PlanError
from support import assert_state_equal, run_ranks
from support.layouts import layouts


@contextmanager
def gathered():
    """The bytes of what this rank tells the coordinator: of its plan, and then of what it wrote."""
    sizes, gather = [], dist.gather_object

    def recording(told, *args, **kwargs):
        sizes.append(len(pickle.dumps(told)))
        return gather(told, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "gather_object", recording)
        yield sizes


def save_with_cached_plans(path):
    sent = []
    for step in range(4):
        state = layouts(seed=step) | ({"late": torch.ones(3)} if step == 3 and dist.get_rank() == 1 else {})
        with gathered() as sizes:
            dcp_rs.save(state, path, planner=RsSavePlanner(enable_plan_caching=True))
        got = layouts(seed=9)
        dcp_rs.load(got, path)
        assert_state_equal(got, layouts(seed=step))
        dist.barrier()
        sent.append(sizes[0])
    return sent


def test_a_plan_that_did_not_change_is_not_sent_again(ckpt):
    first, second = run_ranks(2, save_with_cached_plans, ckpt)
    assert first[0] > 250
    assert max(first[1:]) < 200
    assert max(second[1:3]) < 200
    assert second[3] > 250
    assert "late" in dcp_rs.open(ckpt)


def save_and_compare(path, group, seed, **options):
    """A save of the ranks of a group; what each of them sent of its plan."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    planner = RsSavePlanner(enable_plan_caching=True)
    state = {"all": torch.full((4,), float(seed)), f"of{rank}": torch.full((3,), float(10 * seed + rank))}
    with gathered() as sizes:
        dcp_rs.save(state, path, planner=planner, process_group=group, **options)
    with dcp_rs.open(path) as checkpoint:
        assert checkpoint["all"].tolist() == [seed] * 4
        for other in range(size):
            assert checkpoint[f"of{other}"].tolist() == [10 * seed + other] * 3
    dist.barrier(group)
    return sizes[0]


def save_in_many_groups(path):
    """Rank 1 is in both groups, and is the coordinator of the second."""
    rank = dist.get_rank()
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
    sent = {"first": [], "second": []}
    save_alone = {"alone": torch.ones(2)}
    dcp_rs.save(save_alone, path / f"alone{rank}", planner=RsSavePlanner(enable_plan_caching=True), no_dist=True)
    for seed in range(3):
        if rank in (0, 1):
            sent["first"].append(save_and_compare(path / "first", first, seed))
        if rank in (1, 2):
            sent["second"].append(save_and_compare(path / "second", second, seed))
        dcp_rs.save(save_alone, path / f"alone{rank}", planner=RsSavePlanner(enable_plan_caching=True), no_dist=True)
        # torch's own function does not tell through which group.
        state = {"all": torch.ones(4), f"of{rank}": torch.ones(3)}
        for group in (first, second) if rank == 1 else (first,) if rank == 0 else (second,):
            planner = RsSavePlanner(enable_plan_caching=True)
            name = path / ("a" if group is first else "b")
            dcp.save(state, storage_writer=RsWriter(name), planner=planner, process_group=group)
    third = dist.new_group([2, 0])
    if rank in (0, 2):
        sent["third"] = [save_and_compare(path / "third", third, seed) for seed in range(2)]
    # Another group of the same ranks, and one that is made anew, begin with nothing.
    again = dist.new_group([0, 1])
    if rank == 2:
        return sent, True
    sent["again"] = [save_and_compare(path / "again", again, seed) for seed in range(2)]
    gone = weakref.ref(again)
    dist.destroy_process_group(again)
    del again
    gc.collect()
    return sent, gone() is None


def test_plans_are_remembered_for_each_group(tmp_path):
    for sent, gone in run_ranks(3, save_in_many_groups, tmp_path):
        for name, sizes in sent.items():
            assert all(size < sizes[0] for size in sizes[1:]), name
        assert gone


def fail(*_, **__):
    raise PlanError("after planning")


def save_after_a_failure(path):
    rank = dist.get_rank()

    def planner():
        return RsSavePlanner(enable_plan_caching=True)

    one, two = {"w": torch.ones(2)}, {"w": torch.ones(2), f"more{rank}": torch.ones(3)}
    dcp_rs.save(one, path, planner=planner())
    with pytest.MonkeyPatch.context() as patch:  # the coordinator plans, and the save fails after that
        patch.setattr(Destination, "begin", fail)
        with pytest.raises(PlanError, match="after planning"):
            dcp_rs.save(two, path, planner=planner())
    for state in (one, two, one, one):
        dcp_rs.save(state, path, planner=planner())
        dist.barrier()
        with dcp_rs.open(path) as checkpoint:
            assert sorted(checkpoint) == sorted(["w", "more0", "more1"] if state is two else ["w"])
        dist.barrier()


def test_a_save_that_failed_is_not_remembered(ckpt):
    run_ranks(2, save_after_a_failure, ckpt)


def forget_plans_of_torch():
    """The caches are attributes of torch's classes, and processes live on."""
    for name, value in vars(SavePlanner).items():
        if name.startswith("_cached") and isinstance(value, dict):
            value.clear()


def save_by_torch(writer, state, **options):
    dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True), **options)


def test_plans_that_torch_remembers_of_a_writer_of_its_own(tmp_path):
    """The answer to the second save came with no items, and the remembered plan with a place of another writer's."""
    forget_plans_of_torch()
    for number, kind in enumerate((dcp.FileSystemWriter, RsWriter, RsWriter, RsWriter)):
        state = {"w": torch.full((3,), float(number)), "deep": {"step": number}}
        save_by_torch(kind(tmp_path / str(number)), state, no_dist=True)
        if kind is RsWriter:
            with dcp_rs.open(tmp_path / str(number), verify=True) as checkpoint:
                assert_state_equal(dict(checkpoint), {"w": state["w"], "deep.step": number})


def fail_to_write(*_):
    raise OSError(28, "disk full")


def test_plans_that_torch_remembers_outlive_a_save_that_failed(tmp_path):
    forget_plans_of_torch()
    save_by_torch(RsWriter(tmp_path / "0"), {"w": torch.zeros(3)}, no_dist=True)
    for method in ("write_data", "prepare_local_plan"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RsWriter, method, fail_to_write)
            with pytest.raises(CheckpointException, match="disk full"):
                save_by_torch(RsWriter(tmp_path / "failed"), {"w": torch.ones(3)}, no_dist=True)
        # After a writer that never wrote what it was told to, what torch remembers has no items: an error, and no empty checkpoint.
        if method == "write_data":
            with pytest.raises(CheckpointException, match="was not told"):
                save_by_torch(RsWriter(tmp_path / "1"), {"w": torch.ones(3)}, no_dist=True)
            assert not (tmp_path / "1" / "index.dcprs").exists()
            forget_plans_of_torch()
            save_by_torch(RsWriter(tmp_path / "1"), {"w": torch.ones(3)}, no_dist=True)
    save_by_torch(RsWriter(tmp_path / "2"), {"w": torch.full((3,), 2.0)}, no_dist=True)
    assert dcp_rs.open(tmp_path / "2")["w"].eq(2).all()


def save_what_one_rank_writes(path):
    """All of it is on both ranks, so that the plan of one is empty."""
    forget_plans_of_torch()
    for number in range(3):
        save_by_torch(RsWriter(path), {"w": torch.full((3,), float(number))})
        dist.barrier()
        assert dcp_rs.open(path)["w"].eq(number).all()
        dist.barrier()


def test_an_empty_plan_is_remembered_as_such(ckpt):
    run_ranks(2, save_what_one_rank_writes, ckpt)


class Own(RsSavePlanner):
    def resolve_data(self, write_item):
        return super().resolve_data(write_item)


def save_with_planners_of_two_kinds(path):
    told = []
    for own in (0, 1):
        planner = Own() if dist.get_rank() == own else None
        with pytest.raises(PlanError) as caught:
            dcp_rs.save({"w": torch.ones(2)}, path, planner=planner)
        told.append(str(caught.value))
    return told


def test_ranks_that_plan_in_two_ways_are_told(ckpt):
    for told in run_ranks(2, save_with_planners_of_two_kinds, ckpt):
        assert all("give all ranks the same kind" in message for message in told)
    assert not list(ckpt.glob("*.dcprs"))
