"""Versions of modules travel with their state.

They were lost, and modules took new state for old: QAT modules of torch.ao got a wrong ``eps``.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dcp_rs import CheckpointManager
from dcp_rs.optim import load_training_state, save_training_state, training_state
from support import run_ranks
from support.training import CPU, quiet


class Versioned(nn.Linear):
    """Since version 2 the weight is half of what it was."""

    _version = 2

    def __init__(self):
        super().__init__(2, 2)
        self.seen = []

    def _load_from_state_dict(self, state, prefix, local, *rest):
        self.seen.append(local.get("version"))
        if local.get("version", 1) < self._version:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2
        super()._load_from_state_dict(state, prefix, local, *rest)


class Old(Versioned):
    _version = 1


def pair(first=Versioned, wrap=lambda model: model):
    return [wrap(nn.Sequential(nn.Linear(2, 2), kind())) for kind in (first, Versioned)]


def test_versions_come_back(ckpt):
    for first, factor in ((Versioned, 1), (Old, 0.5)):
        saved, model = pair(first)
        save_training_state(ckpt, saved, fsync=False)
        load_training_state(ckpt, model)
        assert torch.equal(model[1].weight, saved[1].weight * factor)
        assert torch.equal(model[0].weight, saved[0].weight)
        assert model[1].seen == [saved[1]._version]


def test_versions_come_back_by_the_manager(tmp_path):
    saved, model = pair(Old)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, training_state(saved))
        manager.load_training_state(model)
    assert torch.equal(model[1].weight, saved[1].weight / 2)


def test_state_without_versions_is_of_the_modules_as_they_are(ckpt):
    """As in stock DCP."""
    saved, model = pair()
    dcp.save({"model": saved.state_dict()}, checkpoint_id=ckpt, no_dist=True)
    load_training_state(ckpt, model, no_dist=True)
    assert torch.equal(model[1].weight, saved[1].weight)
    dcp.load({"model": model}, checkpoint_id=ckpt, no_dist=True)
    assert model[1].seen == [2, 2]


@pytest.mark.parametrize(
    "module",
    [nn.BatchNorm1d(3), nn.MultiheadAttention(4, 2), nn.modules.batchnorm.SyncBatchNorm(3)],
)
def test_modules_of_torch(ckpt, module):
    saved = {key: value.clone() for key, value in module.state_dict().items()}
    save_training_state(ckpt, module, fsync=False)
    load_training_state(ckpt, module)
    assert all(map(torch.equal, module.state_dict().values(), saved.values()))


def test_qat_module_keeps_its_eps(ckpt):
    import torch.ao.nn.intrinsic.qat as nniqat

    qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    saved, model = (nniqat.ConvBn2d(1, 1, 1, qconfig=qconfig) for _ in range(2))
    with torch.no_grad():
        saved.bn.running_mean.fill_(3)
    save_training_state(ckpt, saved, fsync=False)
    load_training_state(ckpt, model)
    assert model.bn.running_mean.tolist() == [3.0]
    assert model.state_dict()._metadata == saved.state_dict()._metadata


def under_wrappers(path):
    kinds = {
        "ddp": DistributedDataParallel,
        "compiled": torch.compile,
        "fsdp1": lambda model: FullyShardedDataParallel(model, device_id=CPU),
        "fsdp2": fully_shard,
    }
    for kind, wrap in kinds.items():
        with quiet():
            saved, model = pair(wrap=wrap)
            save_training_state(f"{path}/{kind}", saved, fsync=False)
            load_training_state(f"{path}/{kind}", model)
        found = next(m for m in model.modules() if isinstance(m, Versioned))
        assert found.seen == [2]


def test_versions_under_wrappers(tmp_path):
    run_ranks(2, under_wrappers, tmp_path)
