"""RsSavePlanner of several ranks: they save what torch's planner would, or hear why not."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import dcp_rs
from dcp_rs import RsSavePlanner, RsWriter
from dcp_rs.errors import PlanError
from support import assert_state_equal, rank_outcomes, run_ranks
from support.layouts import layouts


def save_both_ways(path):
    state = layouts()
    metadata = dcp_rs.save(state, path / "ours")
    dcp.save(layouts(), storage_writer=dcp.FileSystemWriter(path / "stock"))
    ours, stock = layouts(seed=1), layouts(seed=2)
    dcp_rs.load(ours, path / "ours", verify=True)
    dcp.load(stock, storage_reader=dcp.FileSystemReader(path / "stock"))
    assert_state_equal(ours, stock)
    return len(metadata.state_dict_metadata), metadata.storage_meta.checkpoint_id


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_restore_what_torchs_planner_would(tmp_path, size):
    counts = run_ranks(size, save_both_ways, tmp_path)
    assert counts == [(15 + size, tmp_path / "ours")] * size


def save_replicas(path, lowest):
    state = {f"w{i}": torch.full((1000 * (i + 1),), float(i)) for i in range(16)}
    dcp.save(
        state,
        storage_writer=RsWriter(path),
        planner=RsSavePlanner(dedup_save_to_lowest_rank=lowest),
    )


def test_replicas_are_saved_once_and_balanced_by_bytes(tmp_path):
    run_ranks(4, save_replicas, tmp_path / "even", False)
    sizes = [file.stat().st_size for file in (tmp_path / "even").glob("g*")]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) <= 16_000 * 4
    run_ranks(2, save_replicas, tmp_path / "lowest", True)
    small, large = sorted(file.stat().st_size for file in (tmp_path / "lowest").glob("g*"))
    assert small < 8192
    assert large > 500_000


def save_wrongly(path, how):
    rank = dist.get_rank()
    if how == "shape":
        state = {"fine": torch.ones(1), "w": torch.ones(2 + rank)}
    else:
        state = {"w": torch.ones(2) if rank == 0 else 3}
    dcp_rs.save(state, path)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "shape",
            r'"w": it is a tensor of float32 \[2\] on rank 0, and a tensor of float32 \[3\] on rank 1',
        ),
        ("kind", '"w": it is a tensor of float32'),
    ],
)
def test_every_rank_hears_of_a_plan_that_does_not_fit(ckpt, how, message):
    for outcome in rank_outcomes(2, save_wrongly, ckpt, how):
        assert isinstance(outcome.error, PlanError)
        assert outcome.error.tensor == "w"
        with pytest.raises(PlanError, match=message):
            raise outcome.error
    assert list(ckpt.glob("g*")) == []


def save_pending_sums(path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dcp_rs.save({"sums": DTensor.from_local(torch.ones(3), mesh, [Partial()])}, path)


def test_pending_reductions_are_refused(ckpt):
    for outcome in rank_outcomes(2, save_pending_sums, ckpt):
        assert isinstance(outcome.error, PlanError), outcome.traceback
        assert "'sums' has pending reductions" in str(outcome.error)
    assert not ckpt.exists() or not list(ckpt.iterdir())
