"""A failed save leaves nothing behind."""

import gc
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_rs
from dcp_rs import RsSavePlanner, RsWriter
from dcp_rs.engine import save as engine_save
from dcp_rs.engine.save import write_files
from dcp_rs.errors import PlanError
from support import rank_outcomes, run_ranks
from support.places import data_files


class Failing(RsSavePlanner):
    """Fails on rank 1, when the others have written."""

    def finish_plan(self, new_plan):
        if dist.get_rank() == 1:
            time.sleep(0.3)
            raise PlanError("no")
        return super().finish_plan(new_plan)


def write_or_fail(*arguments, **options):
    if dist.get_rank() == 1:
        time.sleep(0.3)
        raise PlanError("no")
    return write_files(*arguments, **options)


def fail_on_one_rank(path, how):
    state = {
        "w": torch.full((1000,), float(dist.get_rank())),
        f"own.{dist.get_rank()}": torch.ones(3),
    }
    dcp_rs.save(state, path)
    before = data_files(path)
    dist.barrier()
    assert len(before) == 2
    if how == "ours":
        with (
            mock.patch.object(engine_save, "write_files", write_or_fail),
            pytest.raises(PlanError, match="no"),
        ):
            dcp_rs.save(state, path)
    else:
        writer = RsWriter(path)
        with pytest.raises(CheckpointException):
            dcp.save(state, storage_writer=writer, planner=Failing())
        if how == "writer goes":
            del writer
            gc.collect()
        else:
            dcp.save(state, storage_writer=writer)
    dist.barrier()
    after = data_files(path)
    dcp_rs.load({"w": torch.zeros(1000)}, path, verify=True)
    return before == after if how != "next save" else len(after) == 2


@pytest.mark.parametrize("how", ["ours", "writer goes", "next save"])
def test_a_failed_save_leaves_no_files_on_any_rank(ckpt, how):
    assert run_ranks(2, fail_on_one_rank, ckpt, how) == [True, True]


def keep_files_of_a_good_save(path):
    writer = RsWriter(path)
    dcp.save({f"own.{dist.get_rank()}": torch.ones(3)}, storage_writer=writer)
    del writer
    gc.collect()
    dist.barrier()
    return len(data_files(path))


def test_the_files_of_a_good_save_stay_when_the_writer_goes(ckpt):
    assert run_ranks(2, keep_files_of_a_good_save, ckpt) == [2, 2]


def disagree(path):
    dcp_rs.save({"w": torch.ones(2 + dist.get_rank())}, path)


def test_a_plan_that_does_not_fit_leaves_no_files(ckpt):
    assert all(isinstance(o.error, PlanError) for o in rank_outcomes(2, disagree, ckpt))
    assert data_files(ckpt) == []
