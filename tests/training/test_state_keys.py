"""Optimizer state within optimizer state, under keys of any kind.

DCP's paths are text. A load gave an optimizer that has a factor for each dimension, under 0 and 1,
what was saved under "0" and "1", as if it was new to it, and left empty dicts out: silently, and in
native checkpoints, which know better, too.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh

import dcp_rs
from dcp_rs import RsWriter
from dcp_rs.optim import load_optim_state_dict, load_training_state, save_training_state
from support import assert_state_equal, run_ranks
from support.training import fsdp2, quiet


class Factored(torch.optim.Optimizer):
    """As Shampoo has it: a factor for each dimension; and state under other keys that are no text."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["factors"] = {d: torch.ones(n, 2) for d, n in enumerate(p.shape)}
                    state["blocks"] = {(0, "a"): torch.zeros(2), None: 3, True: {1.5: 7, "1": 8}}
                    state[7] = torch.zeros_like(p)
                for factor in state["factors"].values():
                    factor.mul_(1.5)
                state["blocks"][(0, "a")] += 2
                state["blocks"][None] += 1
                state[7].add_(p.grad)
                p.sub_(group["lr"] * state[7] * float(state["factors"][0].sum()))


def small(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, Factored(model.parameters())


def sharded(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fsdp2(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, Factored(model.parameters())


def step(model, optimizer):
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model, optimizer, **options):
    model_state, optim_state = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": model_state, "optim": optim_state}


def by_stock(path, model, optimizer, **options):
    dcp.save(state_of(model, optimizer, **options), checkpoint_id=path)


def native(path, model, optimizer):
    save_training_state(path, model, optimizer, fsync=False)


def native_under_torchs_planner(path, model, optimizer):
    planner = dcp.DefaultSavePlanner()
    dcp.save(
        state_of(model, optimizer), storage_writer=RsWriter(path, fsync=False), planner=planner
    )


def stock(path, model, optimizer):
    by_stock(path, model, optimizer)


def stock_converted(path, model, optimizer):
    by_stock(f"{path}.stock", model, optimizer)
    first_rank(lambda: dcp_rs.convert(f"{path}.stock", path, to="dcp-rs"))


def native_converted(path, model, optimizer):
    native(f"{path}.native", model, optimizer)
    first_rank(lambda: dcp_rs.convert(f"{path}.native", path, to="dcp-rs"))


def native_converted_to_stock(path, model, optimizer):
    native(f"{path}.native", model, optimizer)
    first_rank(lambda: dcp_rs.convert(f"{path}.native", path, to="dcp", skip_unsupported=True))


WAYS = {
    way.__name__: way
    for way in (
        native,
        native_under_torchs_planner,
        stock,
        stock_converted,
        native_converted,
        native_converted_to_stock,
    )
}


def first_rank(work):
    if not dist.is_initialized() or dist.get_rank() == 0:
        work()
    if dist.is_initialized():
        dist.barrier()


def resumes(path, make, name, *, has_state):
    model, optimizer = make(0)
    for _ in range(3):
        step(model, optimizer)
    with quiet():
        WAYS[name](path, model, optimizer)
    other, resumed = make(1)
    if has_state:
        step(other, resumed)
    load_training_state(path, other, resumed)
    assert_state_equal(resumed.state_dict(), optimizer.state_dict())
    for _ in range(2):
        step(model, optimizer)
        step(other, resumed)
    assert_state_equal(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_keys_come_back_as_they_were(ckpt, name, has_state):
    resumes(ckpt, small, name, has_state=has_state)


def on_ranks(path):
    with quiet():
        for name in ("native", "stock", "stock_converted", "native_converted"):
            for has_state in (False, True):
                resumes(f"{path}/{name}-{has_state}", sharded, name, has_state=has_state)


def test_keys_come_back_on_ranks(tmp_path):
    run_ranks(2, on_ranks, tmp_path)


class Plain(Factored):
    """Of what `flatten_optimizer_state_dict` takes."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["factors"] = {
                    d: {"left": torch.ones(n), "count": 0} for d, n in enumerate(p.shape)
                }
            for factor in state["factors"].values():
                factor["left"] *= 1.5
                factor["count"] += 1


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9),
    reason="older torch flattens no state within state",
)
@pytest.mark.parametrize("save", ["native", "stock"])
def test_nested_state_that_was_flattened(ckpt, save):
    """What lay deeper was taken for that of a parameter of another name, and not loaded at all."""
    model, _ = small()
    optimizer = Plain(model.parameters())
    step(model, optimizer)
    want = optimizer.state_dict()
    state = state_of(model, optimizer, flatten_optimizer_state_dict=True)
    if save == "stock":
        dcp.save(state, checkpoint_id=ckpt)
    else:
        dcp_rs.save(state, ckpt, fsync=False)
    other, _ = small(1)
    resumed = Plain(other.parameters())
    load_training_state(ckpt, other, resumed)
    assert_state_equal(resumed.state_dict()["state"], want["state"])


@pytest.mark.parametrize("key", ["", "optim"])
def test_numbers_of_parameters_beside_keys_that_are_numbers(ckpt, key):
    model, optimizer = small()
    step(model, optimizer)
    state = optimizer.state_dict()
    dcp_rs.save({key: state} if key else state, ckpt, fsync=False)
    other, resumed = small(1)
    load_optim_state_dict(ckpt, other, resumed, key=key)
    assert_state_equal(resumed.state_dict(), optimizer.state_dict())


def test_empty_dicts_come_back(ckpt):
    model, optimizer = small()
    step(model, optimizer)
    weight, bias, other_weight, other_bias = model.parameters()
    optimizer.state[weight]["later"] = {}
    optimizer.state[bias]["factors"] = {0: {}, 1: {"deep": {}}}
    optimizer.state[other_weight] = {}
    del optimizer.state[other_bias]
    native(ckpt, model, optimizer)
    other, resumed = small(1)
    step(other, resumed)
    load_training_state(ckpt, other, resumed)
    assert_state_equal(resumed.state_dict(), optimizer.state_dict())


def test_settings_with_tensors_under_numbers(ckpt):
    model = small()[0]
    optimizer = torch.optim.SGD(
        [{"params": model.parameters(), "scales": {0: torch.ones(2), 1: {}}}], lr=0.1
    )
    native(ckpt, model, optimizer)
    resumed = torch.optim.SGD(model.parameters(), lr=0.2)
    load_training_state(ckpt, model, resumed)
    assert_state_equal(resumed.state_dict(), optimizer.state_dict())


def test_what_rides_along_saved_as_it_is(ckpt):
    """With keys that are no text, as `dcp_rs.save` takes them."""
    model = small()[0]
    extra = {"ema": {0: torch.ones(2), "none": {}, (1, 2): [torch.zeros(1)]}, "nothing": {}}
    dcp_rs.save({"model": model.state_dict(), "extra": extra}, ckpt, fsync=False)
    loaded = {"ema": {}, "nothing": {}}
    load_training_state(ckpt, model, (), loaded)
    assert_state_equal(loaded, extra)


def test_what_rides_along_loads_over_keys_of_equal_text(ckpt):
    """They cannot be saved, but they need not be."""
    model = small()[0]
    save_training_state(ckpt, model, extra={"counts": {1: 5}}, fsync=False)
    loaded = {"counts": {1: 0, "1": 0}}
    load_training_state(ckpt, model, (), loaded)
    assert loaded == {"counts": {1: 5}}


def schedulers(optimizer, last=4):
    """Schedulers that know their steps by number."""
    lr = torch.optim.lr_scheduler
    chain = [lr.MultiStepLR(optimizer, [2, 2, last], 0.5), lr.ExponentialLR(optimizer, 0.9)]
    steps = lr.MultiStepLR(optimizer, [3, last], 0.5)
    parts = [lr.MultiStepLR(optimizer, [1, 3], 0.5), lr.MultiStepLR(optimizer, [1, last], 0.1)]
    return {
        "alone": steps,
        "chain": lr.ChainedScheduler(chain, optimizer),
        "parts": lr.SequentialLR(optimizer, parts, [2]),
    }


def state_by_stock(path, state):
    dcp.save(state, checkpoint_id=path, no_dist=True)


def state_converted_to_stock(path, state):
    dcp_rs.save(state, f"{path}.native", fsync=False)
    dcp_rs.convert(f"{path}.native", path, to="dcp", skip_unsupported=True)


@pytest.mark.parametrize("last", [4, 5])
@pytest.mark.parametrize("name", ["alone", "chain", "parts"])
@pytest.mark.parametrize("save", [state_by_stock, state_converted_to_stock])
def test_scheduler_from_a_stock_checkpoint_finds_its_steps(ckpt, save, name, last):
    """DCP stores its numbers as text, and the rate stayed what it was: no step has the number "4"."""

    def rates(optimizer, scheduler, steps):
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            yield optimizer.param_groups[0]["lr"]

    def job(last):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return model, optimizer, schedulers(optimizer, last)[name]

    with quiet():
        model, optimizer, scheduler = job(4)
        list(rates(optimizer, scheduler, 1))
        extra = {"scheduler": scheduler.state_dict()}
        save(ckpt, state_of(model, optimizer) | {"extra": extra})
        resumed, its_optimizer, its_scheduler = job(last)
        load_training_state(ckpt, resumed, its_optimizer, {"scheduler": its_scheduler})
        assert_state_equal(its_scheduler.state_dict(), scheduler.state_dict())
        assert [*rates(its_optimizer, its_scheduler, 5)] == [*rates(optimizer, scheduler, 5)]


def test_plain_entries_from_a_stock_checkpoint_keep_their_keys(ckpt):
    model = small()[0]
    extra = {"seen": {0: 1.5, 12: 2.5}, "list": [{"a": {3: 1.5}}], "named": {"1": 1}}
    dcp.save({"model": model.state_dict(), "extra": extra}, checkpoint_id=ckpt, no_dist=True)
    loaded = {"seen": {0: 0.0}, "list": [{"a": {3: 0.0}}], "named": {"1": 0}}
    load_training_state(ckpt, model, (), loaded)
    assert loaded == extra
