"""A read that fails on one rank is an error of the training load on all ranks."""

import pytest
import torch
import torch.distributed as dist

from dcp_rs.errors import CorruptDataError
from dcp_rs.optim import load_training_state, save_training_state
from support import run_ranks
from support.training import parallelize, quiet, train_step


class Refuses:
    """An object whose state does not load on rank 1."""

    def state_dict(self):
        return {"x": 1}

    def load_state_dict(self, state):
        if dist.get_rank() == 1:
            raise ValueError("this is not mine")


def job(seed):
    with quiet():
        model = parallelize("fsdp2", seed)
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        train_step(model, [optimizer], seed)
    return model, optimizer


def load_damaged(path):
    model, optimizer = job(0)
    save_training_state(path, model, optimizer, fsync=False)
    if dist.get_rank() == 0:  # the shards that rank 1 alone reads
        (file,) = path.glob("*-r00001-*.safetensors")
        data = bytearray(file.read_bytes())
        data[-1000:] = bytes(byte ^ 1 for byte in data[-1000:])
        file.write_bytes(data)
    dist.barrier()
    with pytest.raises(CorruptDataError) as caught:
        load_training_state(path, *job(1), verify=True)
    return str(caught.value)


def load_refused(path):
    saved = job(0)
    save_training_state(path, *saved, extra={"odd": Refuses()}, fsync=False)
    with pytest.raises(ValueError, match="not mine"):
        load_training_state(path, *job(1), {"odd": Refuses()})
    # The next load goes on as if nothing had happened.
    model, optimizer = job(1)
    load_training_state(path, model, optimizer)
    return train_step(model, [optimizer], 5) == train_step(saved[0], [saved[1]], 5)


def test_damaged_shard_of_one_rank(ckpt):
    told = run_ranks(2, load_damaged, ckpt)
    assert all("r00001" in message for message in told)


def test_object_that_refuses_on_one_rank(ckpt):
    assert run_ranks(2, load_refused, ckpt) == [True, True]
