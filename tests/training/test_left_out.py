"""What a load leaves out is left alone. It used to take memory that nothing had been read into, and None for values."""

import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from dcp_rs.errors import PlanError
from dcp_rs.optim import (
    load_optim_state_dict,
    load_training_state,
    save_training_state,
    training_state,
)
from dcp_rs.training.optimizers import renamed
from support import assert_state_equal, run_ranks
from support.training import Holder, parallelize, quiet, train, train_step, whole


@pytest.fixture(autouse=True)
def visible():
    """New memory holds NaN, so that it can be seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def start(steps, seed=0, layers=2):
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train(model, optimizer, steps)
    return model, optimizer


def copied(optimizer):
    return {
        param: {name: value.clone() for name, value in state.items()}
        for param, state in optimizer.state.items()
    }


LEFT_OUT = {
    "optim": ({"exclude": "optim.*"}, lambda name, entry: False, False),
    "all but the model": ({"include": "model.*"}, lambda name, entry: False, False),
    "some parameters": ({"exclude": "*.bias*"}, lambda name, entry: "bias" not in name, True),
    "one entry": ({"exclude": "*.exp_avg"}, lambda name, entry: False, True),
    "groups": ({"exclude": "optim.param_groups*"}, lambda name, entry: True, False),
}


@pytest.mark.parametrize("alone", [False, True], ids=["training", "optim"])
@pytest.mark.parametrize("case", LEFT_OUT)
def test_state_that_a_planner_leaves_out_stays(ckpt, case, alone):
    options, is_loaded, groups = LEFT_OUT[case]
    model, optimizer = start(5)
    save_training_state(ckpt, model, optimizer, fsync=False)
    other, resumed = start(2, seed=1)
    resumed.param_groups[0]["lr"] = 0.5
    before = copied(resumed)
    load = load_optim_state_dict if alone else load_training_state
    report = load(ckpt, other, resumed, **options)
    for (name, param), old in zip(other.named_parameters(), model.parameters(), strict=True):
        for entry, value in resumed.state[param].items():
            want = optimizer.state[old] if is_loaded(name, entry) else before[param]
            assert torch.equal(value, want[entry]), (name, entry)
    assert resumed.param_groups[0]["lr"] == (1e-3 if groups else 0.5)
    saved = [
        f"optim.state.{n}.{e}" for n, p in model.named_parameters() for e in optimizer.state[p]
    ]
    left = {
        name for name in saved if not is_loaded(*name.removeprefix("optim.state.").rsplit(".", 1))
    }
    assert {name for name in report.excluded if name.startswith("optim.state.")} == left
    train(other, resumed, 1)


class Noted(torch.optim.SGD):
    """Keeps text, and a mapping that is no plain dict."""

    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("note", "plain")
            self.state[param].setdefault("order", OrderedDict(a=1))


@pytest.mark.parametrize(
    "options", [{"include": "optim.param_groups*"}, {"exclude": "*.bias*"}, {}]
)
def test_text_and_mappings_in_state_survive(ckpt, options):
    """``Optimizer.load_state_dict`` makes ``<generator object ...>`` of text."""
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer, resumed = Noted(model.parameters()), Noted(other.parameters())
    for one in (optimizer, resumed):
        one.step()
    save_training_state(ckpt, model, optimizer, fsync=False)
    load_optim_state_dict(ckpt, other, resumed, **options)
    for param in other.parameters():
        state = resumed.state[param]
        assert state["note"] == "plain"
        assert type(state["order"]) is OrderedDict


def test_an_optimizer_of_which_nothing_is_loaded_is_not_touched(ckpt):
    """``Optimizer.load_state_dict`` raises for an array."""
    model, other = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
    optimizer, resumed = Noted(model.parameters()), Noted(other.parameters())
    optimizer.step()
    array = resumed.state[other[0].weight]["array"] = np.ones(2)
    save_training_state(ckpt, model, optimizer, fsync=False)
    load_optim_state_dict(ckpt, other, resumed, exclude="optim.param_groups*", partial=True)
    assert resumed.state[other[0].weight]["array"] is array


def named_state(model, optimizer):
    return [(fqn, optimizer.state[param]) for fqn, param in model.named_parameters()]


def named(steps, seed, first="enc", wrap=lambda module: module):
    torch.manual_seed(seed)
    layers = {first: wrap(nn.Linear(4, 4)), "dec": wrap(nn.Linear(4, 4))}
    model = nn.Sequential(OrderedDict(layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train(model, optimizer, steps)
    return model, optimizer


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"include": "optim.state.enc.*"}, {"exclude": ["optim.state.dec.*", "model.*"]}],
    ids=["include", "exclude"],
)
@pytest.mark.parametrize("source", ["numbers", "wrapped", "renamed"])
def test_globs_are_of_the_names_that_parameters_have_now(ckpt, source, options, resumes):
    """They were compared with the stored keys: nothing was included, or nothing excluded."""
    torch.compiler.set_stance("force_eager")
    compiled = torch.compile if source == "wrapped" else lambda module: module
    model, optimizer = named(5, 0, "old" if source == "renamed" else "enc", compiled)
    state = training_state(model, optimizer)
    if source == "wrapped":
        state["model"] = model.state_dict()
        state["optim"] = renamed(state["optim"], lambda fqn: fqn.replace(".", "._orig_mod.", 1))
    if source == "numbers":
        state["optim"] = optimizer.state_dict()
    dcp.save(state, checkpoint_id=ckpt, no_dist=True)
    other, resumed = named(2 if resumes else 0, 1)
    before = copied(resumed)
    rename = {"model.old": "model.enc"} if source == "renamed" else None
    load_training_state(ckpt, other, resumed, rename=rename, **options)
    for param, (fqn, saved) in zip(other.parameters(), named_state(model, optimizer), strict=True):
        want = before.get(param, {}) if fqn.startswith("dec") else saved
        assert_state_equal(dict(resumed.state.get(param, {})), dict(want))


@pytest.mark.parametrize("case", LEFT_OUT)
def test_an_optimizer_without_state_gets_no_part_of_one(ckpt, case):
    """Adam takes a state without ``exp_avg`` for a whole one, and fails at the next step."""
    options, is_loaded, _ = LEFT_OUT[case]
    save_training_state(ckpt, *start(5), fsync=False)
    other, resumed = start(0, seed=1)
    load_training_state(ckpt, other, resumed, **options)
    whole = {
        n
        for n, p in other.named_parameters()
        if all(is_loaded(n, e) for e in ("step", "exp_avg", "exp_avg_sq"))
    }
    assert {name for name, param in other.named_parameters() if resumed.state.get(param)} == whole
    train(other, resumed, 1)
    assert all(param.isfinite().all() for param in other.parameters())


def test_extras_that_a_planner_leaves_out_stay(ckpt):
    model, optimizer = start(1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    saved = {
        "step": 5,
        "schedule": schedule,
        "numbers": {"k": 1, "j": 2},
        "holder": Holder({"t": torch.ones(3), "u": torch.ones(2), "n": 1}),
        "tree": {"list": [torch.ones(1), torch.ones(2)], 3: torch.ones(1)},
    }
    save_training_state(ckpt, model, (), saved, fsync=False)

    def load(**options):
        new = torch.optim.lr_scheduler.StepLR(torch.optim.Adam(model.parameters()), 7, gamma=0.9)
        holder = Holder({"t": torch.zeros(3), "u": torch.zeros(2), "n": 0})
        extra = {"step": 3, "schedule": new, "numbers": {"k": 0}, "holder": holder}
        extra["tree"] = {"list": [torch.zeros(1)], 3: torch.zeros(1)}
        report = load_training_state(ckpt, model, (), extra, **options)
        return extra, holder.state, (new.step_size, new.gamma), report

    for options in ({"include": "model.*"}, {"exclude": "extra.*"}):
        extra, holder, schedule, report = load(**options)
        assert (extra["step"], extra["numbers"], schedule) == (3, {"k": 0}, (7, 0.9))
        assert_state_equal(holder, {"t": torch.zeros(3), "u": torch.zeros(2), "n": 0})
        assert {"extra.step", "extra.holder.t", "extra.numbers.k"} <= set(report.excluded)
        assert report.missing == []
    # An entry of which a part is left out stays as it is.
    extra, holder, schedule, report = load(exclude=["extra.step", "*.gamma", "*.u"])
    assert (extra["step"], extra["numbers"], schedule) == (3, {"k": 1, "j": 2}, (7, 0.9))
    assert_state_equal(holder, {"t": torch.zeros(3), "u": torch.zeros(2), "n": 0})
    assert_state_equal(extra["tree"], saved["tree"])
    assert {"extra.schedule.step_size", "extra.holder.t"} <= set(report.excluded)
    assert report.unexpected == []


def test_an_object_without_what_is_left_out_gets_none_of_it(ckpt):
    model, _ = start(0)
    save_training_state(ckpt, model, (), {"holder": Holder({"t": torch.ones(3)})}, fsync=False)
    holder = Holder({})
    load_training_state(ckpt, model, (), {"holder": holder}, exclude="extra.*")
    assert holder.state == {}


def without_a_chunk(path, *names):
    """Takes a chunk of each entry out of a stock checkpoint."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for name in names:
        gone = metadata.state_dict_metadata[name].chunks.pop()
        metadata.storage_data = {
            index: where
            for index, where in metadata.storage_data.items()
            if not (index.fqn == name and index.offset == gone.offsets)
        }
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("steps", [0, 2])
def test_state_that_the_checkpoint_holds_in_part_is_not_used(tmp_path, steps):
    model, optimizer = start(5)
    state = training_state(model, optimizer, {"holder": Holder({"t": torch.ones(3)})})
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    gone = ["optim.state.0.weight.exp_avg", "extra.holder.t"]
    without_a_chunk(tmp_path, *gone)
    other, resumed = start(steps, seed=1)
    holder = Holder({"t": torch.zeros(3)})
    before = copied(resumed)
    with pytest.raises(
        PlanError,
        match=r"'optim.state.0.weight.exp_avg'.* does not hold|'extra.holder.t'.* does not",
    ):
        load_training_state(tmp_path, other, resumed, {"holder": holder})
    other, resumed = start(steps, seed=1)
    before = copied(resumed)
    report = load_training_state(tmp_path, other, resumed, {"holder": holder}, partial=True)
    param = other[0].weight
    assert_state_equal(dict(resumed.state.get(param, {})), before.get(param, {}))
    assert_state_equal(dict(resumed.state[other[0].bias]), dict(optimizer.state[model[0].bias]))
    assert_state_equal(holder.state, {"t": torch.zeros(3)})
    assert report.incomplete == gone
    assert report.unexpected == []
    assert report.missing == []
    train(other, resumed, 1)
    assert all(param.isfinite().all() for param in other.parameters())


@pytest.mark.parametrize("alone", [False, True], ids=["training", "optim"])
def test_a_partial_load_keeps_the_state_of_parameters_that_were_not_saved(ckpt, alone):
    """It used to be erased, as an optimizer's own ``load_state_dict`` replaces everything."""
    model, _ = start(0)
    optimizer = torch.optim.Adam(model[0].parameters(), lr=1e-3)
    train(model, optimizer, 3)
    save_training_state(ckpt, model, optimizer, fsync=False)
    other, resumed = start(7, seed=1)
    before = copied(resumed)
    if alone:
        load_optim_state_dict(ckpt, other, resumed, partial=True)
    else:
        second = torch.optim.SGD(other[1].parameters(), lr=0.1, momentum=0.9)
        train(other, second, 2)
        momentum = copied(second)
        report = load_training_state(ckpt, other, [resumed, second], partial=True)
        assert report.missing == ["optim.state.1.weight", "optim.state.1.bias"] * 2
        assert_state_equal(copied(second), momentum)
    for param, old in zip(other[0].parameters(), model[0].parameters(), strict=True):
        assert_state_equal(dict(resumed.state[param]), dict(optimizer.state[old]))
    for param in other[1].parameters():
        assert_state_equal(dict(resumed.state[param]), before[param])


def by_fqn(model, optimizer):
    """The state as it is now, gathered."""
    state = training_state(model, optimizer)["optim"]["state"]
    return {
        fqn: {name: gathered(value) for name, value in entries.items()}
        for fqn, entries in sorted(state.items())
    }


def gathered(value):
    if isinstance(value, ShardedTensor):
        return [shard.tensor.clone() for shard in value.local_shards()]
    return whole(value)


def sharded(path):
    with quiet():
        for kind in ("fsdp1", "fsdp1_flat", "fsdp2"):

            def trained(seed, steps, kind=kind):
                model = parallelize(kind, seed)
                optimizer = torch.optim.Adam(
                    [p for p in model.parameters() if p.requires_grad], lr=1e-2
                )
                for at in range(steps):
                    train_step(model, [optimizer], at)
                return model, optimizer

            where = f"{path}/{kind}"
            model, optimizer = trained(0, 3)
            save_training_state(where, model, optimizer, fsync=False)
            saved = by_fqn(model, optimizer)
            for options in (
                {"exclude": "*.up.*"},
                {"exclude": "*.exp_avg"},
                {"include": "model.*"},
            ):
                other, resumed = trained(1, 2)
                before = by_fqn(other, resumed)
                report = load_training_state(where, other, resumed, **options)
                left = {name for name in report.excluded if name.startswith("optim.state.")}
                assert left
                for fqn, entries in by_fqn(other, resumed).items():
                    for name, value in entries.items():
                        want = before if f"optim.state.{fqn}.{name}" in left else saved
                        assert_state_equal(value, want[fqn][name])
                train_step(other, [resumed], 9)


@pytest.mark.slow
def test_state_of_sharded_parameters(tmp_path):
    run_ranks(2, sharded, tmp_path)
