"""Conversion of tensors that several ranks saved in shards."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch

import dcp_rs
from dcp_rs.errors import CorruptDataError
from support import random_tensor, run_ranks
from support.formats import judge


def _save_sharded(path: str) -> None:
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        "rows": distribute_tensor(random_tensor((7, 5), seed=1), mesh, [Shard(0)]),
        "columns": distribute_tensor(random_tensor((6, 9), torch.bfloat16, 2), mesh, [Shard(1)]),
        "whole": random_tensor((3,), seed=3),
        "step": 7,
    }
    save(state, storage_writer=torch.distributed.checkpoint.FileSystemWriter(path))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """What three ranks saved."""
    folder = tmp_path_factory.mktemp("sharded") / "src"
    run_ranks(3, _save_sharded, str(folder))
    return folder


def test_shards_stay_shards(sharded: Path, tmp_path: Path) -> None:
    state = {
        "rows": random_tensor((7, 5), seed=1),
        "columns": random_tensor((6, 9), torch.bfloat16, 2),
        "whole": random_tensor((3,), seed=3),
        "step": 7,
    }
    for to in ("dcp-rs", "dcp"):
        dcp_rs.convert(sharded, tmp_path / to, to=to)
        judge(to, tmp_path / to, state)
        with dcp_rs.open(sharded) as old, dcp_rs.open(tmp_path / to) as new:
            for name in ("rows", "columns"):
                chunks = [
                    [(c.offsets, c.sizes) for c in opened.chunks(name)] for opened in (old, new)
                ]
                assert chunks[0] == chunks[1]
                assert len(chunks[1]) == 3
        # A shard of a shard, cast on the way.
        dcp_rs.convert(sharded, tmp_path / f"{to}-cast", to=to, dtype="fp64", shards=2)
        wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        judge(to, tmp_path / f"{to}-cast", wide)
    # The others put them together.
    dcp_rs.convert(sharded, tmp_path / "x.pt", to="torch")
    judge("torch", tmp_path / "x.pt", state)
    dcp_rs.convert(sharded, tmp_path / "hf", to="safetensors", exclude="step")
    judge(
        "safetensors", tmp_path / "hf", {name: state[name] for name in ("rows", "columns", "whole")}
    )


def test_a_tensor_with_a_hole(sharded: Path, tmp_path: Path) -> None:
    """One rank's file is gone, with its index: what is left of the tensor is not taken for all of it."""
    shutil.copytree(sharded, tmp_path / "half")
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = FileSystemReader(tmp_path / "half").read_metadata()
    del metadata.state_dict_metadata["rows"].chunks[1]
    metadata.storage_data = {
        key: info
        for key, info in metadata.storage_data.items()
        if key.fqn != "rows" or key.offset != torch.Size([3, 0])
    }
    (tmp_path / "half" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptDataError, match="'rows' is not all there"):
        dcp_rs.convert(tmp_path / "half", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()
