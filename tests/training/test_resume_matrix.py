"""A resumed job goes on as the uninterrupted one, bit for bit, from every source.

Judge: a plain module in one process that was never interrupted.
"""

import re
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from dcp_rs.errors import PlanError
from dcp_rs.optim import load_training_state, save_training_state
from support import assert_state_equal, run_ranks
from support.training import parallelize, quiet, train_step, whole

pytestmark = pytest.mark.slow

STEPS, MORE = 2, 2
WRAPPERS = ["plain", "ddp", "fsdp2", "compiled", "checkpointed", "mixed"]
PREFIX = re.compile(r"\b(module|_orig_mod|_checkpoint_wrapped_module)\.")


def wrap(kind, seed):
    """The model of a seed. Compiled modules have their names, and run as they are."""
    torch.compiler.set_stance("force_eager")
    if kind in ("plain", "ddp", "fsdp1", "fsdp2"):
        return parallelize(kind, seed)
    model = parallelize("plain", seed)
    for number, block in enumerate(model.blocks):
        inner = torch.compile(block) if kind == "mixed" else block
        if kind != "compiled":
            model.blocks[number] = checkpoint_wrapper(inner)
    if kind == "mixed":
        return torch.compile(torch.nn.parallel.DistributedDataParallel(model))
    return torch.compile(model) if kind == "compiled" else model


def job(kind="plain", seed=0, make=torch.optim.AdamW, steps=0):
    model = wrap(kind, seed)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = make(params, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for at in range(steps):
        train(model, optimizer, scheduler, at)
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, at):
    train_step(model, [optimizer], at)
    scheduler.step()


def state(model, optimizer, scheduler):
    """All of a job, by names without wrappers."""
    kinds = {
        PREFIX.sub("", name): {key: whole(value) for key, value in optimizer.state[param].items()}
        for name, param in model.named_parameters()
        if param in optimizer.state
    }
    return {
        "model": {PREFIX.sub("", name): whole(t) for name, t in model.state_dict().items()},
        "state": kinds,
        "settings": [group["lr"] for group in optimizer.param_groups],
        "scheduler": scheduler.state_dict(),
    }


@cache
def uninterrupted(steps):
    return state(*job(steps=steps))


# --- sources


def native(path, model, optimizer, scheduler):
    save_training_state(path, model, optimizer, {"scheduler": scheduler}, fsync=False)


def stock_named(path, model, optimizer, scheduler):
    parts = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save({**parts, "scheduler": scheduler}, checkpoint_id=path)


def stock_raw(path, model, optimizer, scheduler):
    """Names have the prefixes of wrappers, and parameters of the optimizer are numbers."""
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    dcp.save(parts, checkpoint_id=path)


def accelerate(path, model, optimizer, scheduler):
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path / "pytorch_model_fsdp_0")
    optim = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": optim}, checkpoint_id=path / "optimizer_0")
    if dist.get_rank() == 0:
        torch.save(scheduler.state_dict(), path / "scheduler.bin")


def full(model, optimizer):
    options = StateDictOptions(full_state_dict=True)
    return (
        get_model_state_dict(model, options=options),
        get_optimizer_state_dict(model, optimizer, options=options),
    )


def torch_named(path, model, optimizer, scheduler):
    parts = full(model, optimizer)
    if dist.get_rank() == 0:
        whole_state = {"model": parts[0], "optimizer": parts[1]}
        torch.save({**whole_state, "scheduler": scheduler.state_dict()}, path)


def torch_raw(path, model, optimizer, scheduler):
    if dist.get_rank() == 0:
        parts = {"model_state_dict": model, "optimizer_state_dict": optimizer}
        parts["scheduler"] = scheduler
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)


def hugging_face(path, model, optimizer, scheduler):
    parts = full(model, optimizer)
    if dist.get_rank() == 0:
        path.mkdir()
        save_file({k: v.contiguous() for k, v in parts[0].items()}, path / "model.safetensors")


SHARDED = [native, stock_named, accelerate, torch_named]
SOURCES = [native, stock_named, stock_raw, accelerate, torch_named, torch_raw, hugging_face]


def fits(source, kind):
    """Shards go into no file of torch.save of one rank."""
    return source is not torch_raw or kind != "fsdp2"


def load(path, model, optimizer, scheduler, **options):
    if path.name.startswith("hugging_face"):
        return load_training_state(path, model, None, **options)
    return load_training_state(path, model, optimizer, {"scheduler": scheduler}, **options)


def cases(kinds):
    return [(source, kind) for kind in kinds for source in SOURCES if fits(source, kind)]


def save_all(root, kinds):
    with quiet():
        for source, kind in cases(kinds):
            path = root / f"{source.__name__}-{kind}"
            source(path, *job(kind, steps=STEPS))
            dist.barrier()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of one rank and of two."""
    roots = {world: tmp_path_factory.mktemp(f"of-{world}") for world in (1, 2)}
    for world, root in roots.items():
        run_ranks(world, save_all, root, WRAPPERS, timeout=600)
    return roots


def resume_all(root, kind, saved_kinds):
    """Resume as ``kind`` from everything, and return what went wrong."""
    wrong = {}
    for source, saved_kind in cases(saved_kinds):
        path = root / f"{source.__name__}-{saved_kind}"
        resumed = job(kind, seed=1)
        try:
            with quiet():
                load(path, *resumed)
            if source is hugging_face:
                assert_state_equal(state(*resumed)["model"], uninterrupted(STEPS)["model"])
                continue
            assert_state_equal(state(*resumed), uninterrupted(STEPS))
            for at in range(STEPS, STEPS + MORE):
                train(*resumed, at)
            assert_state_equal(state(*resumed), uninterrupted(STEPS + MORE))
        except Exception as error:  # noqa: BLE001  # all are told together
            wrong[path.name] = f"{type(error).__name__}: {error}"
    return wrong


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize(("before", "now"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_resumed_job_goes_on(saved, before, now, kind):
    saved_kinds = WRAPPERS if before == now == 2 else ["plain", "fsdp2", "mixed"]
    found = run_ranks(now, resume_all, saved[before], kind, saved_kinds, timeout=600)
    assert found == [{}] * now


# --- four ranks that become two

KINDS = ["plain", "ddp", "fsdp1", "fsdp2"]


def save_four(root):
    with quiet():
        for kind in KINDS:
            for source in SHARDED:
                source(root / f"{source.__name__}-{kind}", *job(kind, steps=STEPS))
                dist.barrier()


def go_on(model, optimizer, scheduler):
    """Return the losses of the steps that follow, and the weights after them."""
    losses = []
    for at in range(STEPS, STEPS + MORE):
        losses.append(train_step(model, [optimizer], at))
        scheduler.step()
    return losses, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def resume_on_two(root, kind):
    wrong = {}
    losses, weights = go_on(*job(steps=STEPS))
    for saved_kind in KINDS:
        for source in SHARDED:
            path = root / f"{source.__name__}-{saved_kind}"
            try:
                with quiet():
                    resumed = job(kind, seed=1)
                    load(path, *resumed)
                    found = go_on(*resumed)
                assert found[0] == losses
                assert_state_equal(dict(found[1]), dict(weights))
            except Exception as error:  # noqa: BLE001  # all are told together
                wrong[path.name] = f"{type(error).__name__}: {error}"
    return wrong


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory):
    root = tmp_path_factory.mktemp("of-4")
    run_ranks(4, save_four, root, timeout=600)
    return root


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks_become_two(saved_by_four, kind):
    """Losses and weights are those of one process in stock torch that was not interrupted."""
    assert run_ranks(2, resume_on_two, saved_by_four, kind, timeout=600) == [{}, {}]


# --- what changed


def two_groups(**other):
    def make(params, lr):
        params = list(params)
        return torch.optim.AdamW([{"params": params[:3]}, {"params": params[3:], **other}], lr=lr)

    return make


def amsgrad(params, lr):
    return torch.optim.AdamW(params, lr=lr, amsgrad=True)


CHANGES = {
    "SGD": (torch.optim.SGD, "exp_avg"),
    "momentum": (lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9), "exp_avg"),
    "amsgrad": (amsgrad, "max_exp_avg_sq"),
    "Adagrad": (torch.optim.Adagrad, "exp_avg"),
    "other groups": (two_groups(weight_decay=0.5), "group"),
    "groups": (two_groups(), None),
    "Adam": (torch.optim.Adam, None),
    "fused": (lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True), None),
}


def resume_changed(root, name):
    make, refused = CHANGES[name]
    wrong = {}
    for source in SOURCES[:-1]:
        path = root / f"{source.__name__}-plain"
        resumed = job(seed=1, make=make)
        before = state(*resumed)
        by_number = source in (stock_raw, torch_raw) and name == "groups"
        try:
            with quiet():
                if refused or by_number:
                    with pytest.raises(PlanError, match="group" if by_number else refused):
                        load(path, *resumed)
                    assert_state_equal(state(*resumed), before)
                    continue
                load(path, *resumed)
            judge = job(seed=2, make=make)
            saved = job(steps=STEPS)
            judge[0].load_state_dict(saved[0].state_dict())
            judge[2].load_state_dict(saved[2].state_dict())
            if name == "groups":
                judge = saved
            else:
                judge[1].load_state_dict(saved[1].state_dict())
            for at in range(STEPS, STEPS + MORE):
                train(*resumed, at)
                train(*judge, at)
            found, wanted = state(*resumed), state(*judge)
            for key in ("model", "state"):
                assert_state_equal(found[key], wanted[key])
        except BaseException as error:  # noqa: BLE001  # pytest's own, too
            wrong[source.__name__] = f"{type(error).__name__}: {error}"
    return wrong


@pytest.fixture(scope="module")
def saved_plain(tmp_path_factory):
    root = tmp_path_factory.mktemp("plain")
    run_ranks(1, save_all, root, ["plain"])
    return root


@pytest.mark.parametrize("name", CHANGES)
def test_changed_optimizer(saved_plain, name):
    assert run_ranks(1, resume_changed, saved_plain, name) == [{}]
