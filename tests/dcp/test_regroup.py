"""One process in several process groups: one after the other as different ranks, and in groups that overlap."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import dcp_rs
from support import assert_state_equal, run_ranks

WHOLE = {
    "even": torch.arange(8.0),
    "uneven": torch.arange(15.0).reshape(5, 3),
    "strided": torch.arange(16.0),
}


def shards(mesh, whole, placements):
    """Each tensor cut by hand, without what torch remembers of a mesh: the rows are those of this process's place in it."""
    (at,) = mesh.get_coordinate()
    cut = {}
    for name, tensor in whole.items():
        if (
            name == "strided"
        ):  # every second block of rows: split in 4, of which a rank holds one of each half
            local = tensor.view(2, 2, -1)[:, at].reshape(-1, *tensor.shape[1:])
        else:
            local = tensor.chunk(2)[at]
        cut[name] = DTensor.from_local(
            local.clone(),
            mesh,
            placements[name],
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return cut


PLACEMENTS = {
    "even": [Shard(0)],
    "uneven": [Shard(0)],
    "strided": [_StridedShard(0, split_factor=2)],
}


def save_and_load_as_two_ranks(path):
    first = dist.get_rank()
    meshes, states = [], []
    for turn, rank in enumerate((first, 1 - first)):
        if turn:
            # As after an elastic restart within the process.
            dist.destroy_process_group()
            dist.init_process_group(
                "gloo", store=dist.FileStore(f"{path}/store", 2), rank=rank, world_size=2
            )
        meshes.append(init_device_mesh("cpu", (2,)))
        assert tuple(meshes[-1].get_coordinate()) == (rank,)
        states.append(shards(meshes[-1], WHOLE, PLACEMENTS))
        dcp_rs.save(states[-1], f"{path}/{turn}")
        for source in range(turn + 1):
            got = shards(
                meshes[-1],
                {name: torch.full_like(whole, -1) for name, whole in WHOLE.items()},
                PLACEMENTS,
            )
            dcp_rs.load(got, f"{path}/{source}")
            assert_state_equal(got, states[-1])
    assert meshes[0] == meshes[1]
    assert hash(meshes[0]) == hash(meshes[1])
    # Tensors of both meshes at once: each has its own rows.
    both = {"then": states[0]["even"], "now": states[1]["even"]}
    dcp_rs.save(both, f"{path}/both")
    got = {
        name: DTensor.from_local(torch.zeros(4), t.device_mesh, [Shard(0)], run_check=False)
        for name, t in both.items()
    }
    dcp_rs.load(got, f"{path}/both")
    assert_state_equal(got, both)


def test_a_process_that_comes_back_as_another_rank_has_that_ranks_rows(tmp_path):
    run_ranks(2, save_and_load_as_two_ranks, tmp_path, fresh=True)
    for folder in ("0", "1"):
        with dcp_rs.open(tmp_path / folder) as checkpoint:
            assert_state_equal(dict(checkpoint), WHOLE)
    with dcp_rs.open(tmp_path / "both") as checkpoint:
        assert_state_equal(dict(checkpoint), {"then": WHOLE["even"], "now": WHOLE["even"]})
