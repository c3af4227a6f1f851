"""Plans of saves that torch's planner remembers, so that they need not be sent again."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

import dcp_rs
from dcp_rs import RsSavePlanner, RsWriter, _core
from dcp_rs.errors import PlanError
from support import assert_state_equal, run_ranks


def forget_plans_of_torch():
    """The caches are attributes of torch's classes, and processes live on."""
    for name, value in vars(SavePlanner).items():
        if name.startswith("_cached") and isinstance(value, dict):
            value.clear()


def save_by_torch(writer, state, **options):
    dcp.save(
        state,
        storage_writer=writer,
        planner=DefaultSavePlanner(enable_plan_caching=True),
        **options,
    )


def test_plans_that_torch_remembers_of_a_writer_of_its_own(tmp_path):
    """The answer to the second save came with no items, and the remembered plan with a place of another writer's."""
    forget_plans_of_torch()
    for number, kind in enumerate((dcp.FileSystemWriter, RsWriter, RsWriter, RsWriter)):
        state = {"w": torch.full((3,), float(number)), "deep": {"step": number}}
        save_by_torch(kind(tmp_path / str(number)), state, no_dist=True)
        if kind is RsWriter:
            with dcp_rs.open(tmp_path / str(number), verify=True) as checkpoint:
                assert_state_equal(dict(checkpoint), {"w": state["w"], "deep.step": number})


def test_plans_that_torch_remembers_of_our_writer_serve_its_own(tmp_path):
    """Its writer looked for a prefix of file names in the plan, and found our answer."""
    forget_plans_of_torch()
    for number, kind in enumerate((RsWriter, dcp.FileSystemWriter)):
        state = {"w": torch.full((3,), float(number))}
        save_by_torch(kind(tmp_path / str(number)), state, no_dist=True)
    got = {"w": torch.zeros(3)}
    dcp.load(got, checkpoint_id=tmp_path / "1", no_dist=True)
    assert got["w"].eq(1).all()


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
        # After a writer that never wrote what it was told to, what torch remembers has no items: an
        # error, and no empty checkpoint.
        if method == "write_data":
            with pytest.raises(CheckpointException, match="was not told"):
                save_by_torch(RsWriter(tmp_path / "1"), {"w": torch.ones(3)}, no_dist=True)
            assert not (tmp_path / "1" / "index.dcprs").exists()
            forget_plans_of_torch()
            save_by_torch(RsWriter(tmp_path / "1"), {"w": torch.ones(3)}, no_dist=True)
    save_by_torch(RsWriter(tmp_path / "2"), {"w": torch.full((3,), 2.0)}, no_dist=True)
    assert dcp_rs.open(tmp_path / "2")["w"].eq(2).all()


@pytest.mark.parametrize("saves_before", [0, 1])
def test_a_save_that_could_not_begin_does_not_end_those_after_it(tmp_path, saves_before):
    """It failed after torch had filled half of its cache, and no rank got its plan any more."""
    forget_plans_of_torch()
    for number in range(saves_before):
        save_by_torch(RsWriter(tmp_path), {"w": torch.full((3,), float(number))}, no_dist=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "next_generation", fail_to_write)
        with pytest.raises(CheckpointException, match="disk full"):
            save_by_torch(RsWriter(tmp_path), {"w": torch.ones(3)}, no_dist=True)
    for number in range(2):
        save_by_torch(RsWriter(tmp_path), {"w": torch.full((3,), 5.0 + number)}, no_dist=True)
        assert dcp_rs.open(tmp_path)["w"].eq(5 + number).all()


def test_a_plan_without_items_is_not_saved_by_torchs_writer(tmp_path):
    """A save that failed leaves one in torch's cache: it would be an empty checkpoint."""
    forget_plans_of_torch()
    save_by_torch(RsWriter(tmp_path / "0"), {"w": torch.zeros(3)}, no_dist=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RsWriter, "write_data", fail_to_write)
        with pytest.raises(CheckpointException, match="disk full"):
            save_by_torch(RsWriter(tmp_path / "1"), {"w": torch.ones(3)}, no_dist=True)
    with pytest.raises(CheckpointException, match="without its items"):
        save_by_torch(dcp.FileSystemWriter(tmp_path / "2"), {"w": torch.ones(3)}, no_dist=True)
    assert not (tmp_path / "2" / ".metadata").exists()
    forget_plans_of_torch()


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
