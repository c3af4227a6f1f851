"""``dcp_rs.async_save(state, path)`` talked in the default group while training did: collectives of two threads do not match.

With FSDP2 on a default group of gloo a loop of them waited for ever at its first step.
"""

import pytest
import torch
import torch.distributed as dist

import dcp_rs
from dcp_rs import _torch
from support import assert_state_equal, run_ranks


def save_while_ranks_talk(path):
    rank = dist.get_rank()
    for step in range(15):
        state = {"all": torch.full((3,), float(step)), f"own.{rank}": torch.ones(2), "step": step}
        future = dcp_rs.async_save(state, f"{path}/{step}", fsync=False)
        for i in range(30):
            total = torch.tensor([float(rank + i)])
            dist.all_reduce(total)
            assert total.item() == 2 * i + 1
            objects = [None, None]
            dist.all_gather_object(objects, (rank, i))
            assert objects == [(0, i), (1, i)]
        future.result(60)
    got = {"all": torch.zeros(3), f"own.{rank}": torch.zeros(2), "step": 0}
    dcp_rs.load(got, f"{path}/14")
    assert_state_equal(got, state)


def test_training_may_talk_meanwhile(tmp_path):
    run_ranks(2, save_while_ranks_talk, tmp_path, timeout=60)


def count_groups(path):
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    own = dist.new_group(backend="gloo")
    dcp_rs.async_save({"w": torch.ones(1)}, path, process_group=own).result(60)
    assert len(groups) == before + 1
    for _ in range(3):
        dcp_rs.async_save({"w": torch.ones(1)}, path).result(60)
    assert len(groups) == before + 2
    # Torch forgets it with the default group: a new one gets its own.
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{path}.store", 2), rank=rank, world_size=2
    )
    dcp_rs.async_save({"w": torch.ones(1)}, path).result(60)
    assert len(dist.distributed_c10d._world.pg_map) == 2


def test_the_group_is_made_once(ckpt):
    run_ranks(2, count_groups, ckpt, timeout=60)


@pytest.mark.parametrize("no_dist", [False, True])
def test_one_rank_needs_none(ckpt, no_dist):
    dcp_rs.async_save({"w": torch.ones(1)}, ckpt, no_dist=no_dist).result(60)


def save_in_a_group_for_devices_alone(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_torch, "group_devices", lambda _: [torch.device("cuda")])
        for number, group in enumerate((None, dist.new_group())):
            dcp_rs.async_save({"w": torch.ones(1)}, f"{path}/{number}", process_group=group).result(
                60
            )
            manager = dcp_rs.CheckpointManager(f"{path}/run-{number}", process_group=group)
            manager.async_save(1, {"w": torch.ones(1)}).result(60)
            manager.close()


def test_one_rank_of_nccl_alone_saves_in_the_background(tmp_path):
    """A `ValueError` asked for a CPU backend, though one rank sends nothing."""
    run_ranks(1, save_in_a_group_for_devices_alone, tmp_path)
