"""The proof: a job that was saved and started anew goes on as if nothing had happened.

Every rank trains on the same batches, so that the number of ranks changes nothing but the order of
sums.
"""

import functools
import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel

import dcp_rs
from dcp_rs.optim import PerRank, RngState, load_training_state, save_training_state
from dcp_rs.tensors.pickles import plain_numbers
from support import assert_state_equal, run_ranks
from support.training import CPU, KINDS, parallelize, quiet, train_step, whole_parameters

BEFORE, AFTER = 3, 3


class Position:
    """A data loader's place, another on each rank."""

    def __init__(self, at=0):
        self.at = at

    def state_dict(self):
        return {"at": self.at, "buffer": torch.full((2,), self.at)}

    def load_state_dict(self, state):
        assert state["buffer"].tolist() == [state["at"]] * 2
        self.at = state["at"]


def start(kind, seed):
    """A model, its optimizers and their schedulers: two optimizers, one with two groups."""
    model = parallelize(kind, seed)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if kind == "fsdp1_flat":
        groups = [{"params": [p for _, p in named]}]
        others = []
    else:
        decayed = [p for n, p in named if "blocks" in n and "norm" not in n]
        plain = [p for n, p in named if "blocks" in n and "norm" in n]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": plain, "weight_decay": 0.0, "lr": 3e-3},
        ]
        others = [p for n, p in named if "blocks" not in n]
    optimizers = [torch.optim.AdamW(groups, lr=1e-2)]
    if others:
        optimizers.append(torch.optim.SGD(others, lr=1e-2, momentum=0.9, weight_decay=0.01))
    schedulers = [torch.optim.lr_scheduler.MultiStepLR(o, [2, 4], gamma=0.5) for o in optimizers]
    return model, optimizers, schedulers


def extras(schedulers, position, step):
    return {
        "schedulers": {str(i): s.state_dict() for i, s in enumerate(schedulers)},
        "first_scheduler": schedulers[0],
        "position": PerRank(position, key=torch.distributed.get_rank()),
        "rng": RngState(),
        "step": step,
    }


def run_steps(model, optimizers, schedulers, begin, end):
    losses = []
    for at in range(begin, end):
        noise = float(torch.rand(()))  # of the generator that is restored
        losses.append(train_step(model, optimizers, at) + noise)
        for scheduler in schedulers:
            scheduler.step()
    return losses


def train_and_save(path, kinds):
    rank = torch.distributed.get_rank()
    results = {}
    with quiet():
        for kind in kinds:
            model, optimizers, schedulers = start(kind, seed=0)
            torch.manual_seed(99)
            run_steps(model, optimizers, schedulers, 0, BEFORE)
            save_training_state(
                f"{path}/{kind}",
                model,
                optimizers,
                extras(schedulers, Position(10 + rank), BEFORE),
                fsync=False,
            )
            losses = run_steps(model, optimizers, schedulers, BEFORE, BEFORE + AFTER)
            results[kind] = (losses, whole_parameters(model))
    return results


def resume(path, kinds, *, as_saved):
    """Every kind of checkpoint by the same kind of model: (losses, parameters) of the rest of the training."""
    rank = torch.distributed.get_rank()
    results = {}
    with quiet():
        for kind in kinds:
            model, optimizers, schedulers = start(kind, seed=1)
            torch.manual_seed(1234)
            position = Position()
            extra = extras(schedulers, position, 0)
            if not as_saved:
                del extra["position"]  # there are more ranks, or fewer, than have one
            load_training_state(f"{path}/{kind}", model, optimizers, extra)
            assert extra["step"] == BEFORE
            for i, scheduler in enumerate(schedulers):
                scheduler.load_state_dict(extra["schedulers"][str(i)])
            losses = run_steps(model, optimizers, schedulers, BEFORE, BEFORE + AFTER)
            results[kind] = (losses, whole_parameters(model), position.at, rank)
    return results


@pytest.mark.parametrize(
    ("ranks", "all_kinds"),
    [(2, KINDS[1::2]), *(pytest.param(size, KINDS, marks=pytest.mark.slow) for size in (1, 2, 4))],
)
def test_a_resumed_job_equals_one_that_never_stopped(tmp_path, ranks, all_kinds):
    want = run_ranks(ranks, train_and_save, tmp_path, all_kinds)
    for turn, other in enumerate((1, 2, 4) if all_kinds is KINDS else (2, 1)):
        kinds = all_kinds if other == ranks else all_kinds[turn % 2 :: 2]
        got = run_ranks(other, functools.partial(resume, as_saved=other == ranks), tmp_path, kinds)
        for kind in kinds:
            losses, parameters = want[0][kind]
            for rank, result in enumerate(got):
                new_losses, new_parameters, position, _ = result[kind]
                # A rank that was not there before starts with its own random numbers.
                assert position == (10 + rank if other == ranks else 0), kind
                if other == ranks:
                    assert new_losses == want[rank][kind][0], (kind, rank)
                    for name, value in parameters.items():
                        assert torch.equal(new_parameters[name], value), (kind, name)
                elif rank == 0:
                    torch.testing.assert_close(new_losses, losses, rtol=1e-4, atol=1e-5)
                    torch.testing.assert_close(new_parameters, parameters, rtol=1e-3, atol=1e-4)
    # The checkpoints are as plain as any other.
    with dcp_rs.open(tmp_path / "fsdp1") as checkpoint:
        assert "optim.state.blocks.0.up.weight.exp_avg" in checkpoint
        assert checkpoint["model.blocks.0.up.weight"].shape == (12, 8)


def trained_with_numpys_numbers(steps):
    """Learning rates as NumPy computes them: torch keeps their type."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(
        [{"params": model.parameters(), "lr": np.float64(0.1), "betas": (np.float32(0.5), 0.9)}]
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: np.cos(epoch / 10))
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer, scheduler


@pytest.mark.filterwarnings("error")
def test_numbers_of_numpy_come_back(ckpt):
    model, optimizer, scheduler = trained_with_numpys_numbers(3)
    assert type(optimizer.param_groups[0]["lr"]) is np.float64
    counts = {"seen": np.int64(7), "losses": [np.float32(0.5)], "who": "a"}
    save_training_state(ckpt, model, optimizer, {"scheduler": scheduler, "counts": counts})
    assert type(counts["seen"]) is np.int64  # the caller's own
    got, into, after = trained_with_numpys_numbers(0)
    extra = {"scheduler": after, "counts": {"seen": 0, "losses": [], "who": ""}}
    load_training_state(ckpt, got, into, extra)
    assert extra["counts"] == counts
    assert into.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] != 0.1
    assert into.param_groups[0]["betas"] == (0.5, 0.9)
    assert after.get_last_lr() == scheduler.get_last_lr()
    assert_state_equal(into.state_dict()["state"], optimizer.state_dict()["state"])


def test_mappings_in_tuples_keep_their_types():
    own = defaultdict(len, a=np.float64(1))
    tree = {"a": ({"b": np.float64(2)}, own), "c": defaultdict(int, d=np.float64(3))}
    plain = plain_numbers(tree)
    assert plain["a"][1] is own
    assert type(plain["a"][0]["b"]) is type(plain["c"]["d"]) is float
    assert plain["c"].default_factory is int


def blocks(seed):
    """A model whose weights have the same shape: one in the place of another is no error."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)))


def wrapped_in_fsdp1(wrappers, seed, *, flat):
    """An FSDP1 model whose blocks have these wrappers inside of FSDP1, and its optimizer."""
    model = blocks(seed)
    for number, block in enumerate(model):
        inner = block
        for wrap in wrappers[1:]:
            inner = wrap(inner)
        model[number] = FullyShardedDataParallel(inner, device_id=CPU, use_orig_params=not flat)
    model = wrappers[0](FullyShardedDataParallel(model, device_id=CPU, use_orig_params=not flat))
    return model, stepped(model)


def stepped(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for param in model.parameters():
        param.grad = param.detach() * 0.3
    optimizer.step()
    return optimizer


def resume_with_other_wrappers(path):
    torch.compiler.set_stance("force_eager")
    plain, compiled = (lambda module: module), torch.compile
    ways = [
        (plain, compiled),
        (compiled, plain),
        (compiled, checkpoint_wrapper),
        (compiled, compiled, checkpoint_wrapper),
        (plain, checkpoint_wrapper, compiled),
    ]
    model = blocks(7)
    optimizer = stepped(model)
    save_training_state(f"{path}/names", model, optimizer, fsync=False)
    numbers = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp_rs.save(numbers, f"{path}/numbers", fsync=False)
    with quiet():
        for source, number, flat in itertools.product(
            ("names", "numbers"), range(len(ways)), (False, True)
        ):
            model, optimizer = wrapped_in_fsdp1(ways[number], 8, flat=flat)
            load_training_state(f"{path}/{source}", model, optimizer)
            save_training_state(f"{path}/{source}-{number}-{flat}", model, optimizer, fsync=False)


def test_wrappers_inside_of_fsdp1_are_no_part_of_names(tmp_path):
    """They stayed in names of the model.

    A load found none of them, raised after it had read, or mixed up the weights of a block.
    """
    run_ranks(2, resume_with_other_wrappers, tmp_path)
    with dcp_rs.open(tmp_path / "names") as first:
        for path in tmp_path.glob("*-*"):
            with dcp_rs.open(path) as other:
                assert_state_equal(dict(other), dict(first))
