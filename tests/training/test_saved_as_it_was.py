"""State that an object makes and takes comes back as it was saved, of whatever length.

The state of ``get_extra_state`` was lost without a word if it was empty before the load, and refused if it had
another length. So was a tensor of another length within an object of ``extra``.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dcp_rs
from dcp_rs.errors import PlanError
from dcp_rs.optim import load_training_state, save_training_state
from support import assert_state_equal, run_ranks
from support.training import CPU, Holder, quiet


class Scaled(nn.Linear):
    """Keeps state of its own kind, as modules of TransformerEngine do."""

    def __init__(self, state):
        super().__init__(4, 4)
        self.extra = state

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


STATES = {
    "dict": {"a": 1, "b": {"t": torch.arange(3.0)}},
    "bytes": torch.arange(9, dtype=torch.uint8),
    "other dtype": torch.arange(2, dtype=torch.float64),
    "empty": {},
    "text": "x",
    "list": [torch.ones(2), {"n": 3}],
    "none": None,
}


@pytest.mark.parametrize("before", [{}, torch.zeros(2, dtype=torch.uint8), {"a": 3, "b": {}}, None])
@pytest.mark.parametrize("case", STATES)
def test_extra_state_of_modules(ckpt, case, before):
    saved = nn.Sequential(Scaled(STATES[case]), Scaled(STATES["dict"]))
    save_training_state(ckpt, saved, fsync=False)
    model = nn.Sequential(Scaled(before), Scaled({}))
    load_training_state(ckpt, model)
    assert_state_equal(model[0].extra, STATES[case])
    assert_state_equal(model[1].extra, STATES["dict"])
    assert_state_equal(model.state_dict(), saved.state_dict())


@pytest.mark.parametrize("case", STATES)
@pytest.mark.parametrize("before", ["dict", "bytes", "empty"])
def test_state_of_objects_in_extra(ckpt, case, before):
    extra = (
        {"holder": Holder(STATES[case])}
        if isinstance(STATES[case], dict)
        else {"holder": Holder({"s": STATES[case]})}
    )
    save_training_state(ckpt, nn.Linear(1, 1), extra=extra, fsync=False)
    got = {"holder": Holder({"s": STATES[before]})}
    load_training_state(ckpt, nn.Linear(1, 1), extra=got)
    assert_state_equal(got["holder"].state, extra["holder"].state)


def test_tensor_of_extra_is_filled_in_place(ckpt):
    save_training_state(ckpt, nn.Linear(1, 1), extra={"t": torch.ones(3)}, fsync=False)
    own = torch.zeros(3)
    load_training_state(ckpt, nn.Linear(1, 1), extra={"t": own})
    assert own.tolist() == [1, 1, 1]
    with pytest.raises(PlanError, match=r"'extra.t' has shape \(2,\) in extra, and \(3,\)"):
        load_training_state(ckpt, nn.Linear(1, 1), extra={"t": torch.zeros(2)})


def test_extra_state_that_is_not_saved(ckpt):
    model = nn.Sequential(nn.Linear(4, 4))
    save_training_state(ckpt, model, fsync=False)
    other = nn.Sequential(Scaled({"mine": 1}))
    with pytest.raises(PlanError, match=r"the checkpoint has no 'model.0._extra_state'"):
        load_training_state(ckpt, other)
    report = load_training_state(ckpt, other, partial=True)
    assert report.missing == ["model.0._extra_state"]
    assert other[0].extra == {"mine": 1}
    assert torch.equal(other[0].weight, model[0].weight)


def test_module_in_extra(ckpt):
    """An average of the weights, say: its tensors are filled in place, and cast by the module itself."""
    average = nn.Linear(2, 2)
    save_training_state(ckpt, nn.Linear(1, 1), extra={"ema": average}, fsync=False)
    for dtype in (torch.float32, torch.float64):
        other = nn.Linear(2, 2, dtype=dtype)
        memory = other.weight.data_ptr()
        load_training_state(ckpt, nn.Linear(1, 1), extra={"ema": other})
        assert other.weight.data_ptr() == memory
        assert torch.equal(other.weight, average.weight.to(dtype))


def wrapped(path):
    for kind in ("ddp", "fsdp1", "fsdp2"):
        pair = [nn.Sequential(Scaled(state), nn.Linear(4, 4)) for state in (STATES["dict"], {})]
        with quiet():
            if kind == "fsdp2":
                models = [fully_shard(model) for model in pair]
            elif kind == "fsdp1":
                models = [FullyShardedDataParallel(model, device_id=CPU) for model in pair]
            else:
                models = [DistributedDataParallel(model) for model in pair]
            save_training_state(f"{path}/{kind}", models[0], fsync=False)
            load_training_state(f"{path}/{kind}", models[1])
        assert_state_equal(pair[1][0].extra, STATES["dict"])


def test_extra_state_under_wrappers(tmp_path):
    run_ranks(2, wrapped, tmp_path)


def test_extra_state_in_a_stock_checkpoint(ckpt):
    """Stock DCP stores nothing for an empty dict."""
    import torch.distributed.checkpoint as dcp

    for case in ("dict", "empty", "bytes"):
        model = nn.Sequential(Scaled(STATES[case]))
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{ckpt}/{case}", no_dist=True)
        other = nn.Sequential(Scaled({}))
        load_training_state(f"{ckpt}/{case}", other, no_dist=True)
        assert_state_equal(other[0].extra, STATES[case])
    assert dcp_rs.open(f"{ckpt}/dict")["model.0._extra_state.a"] == 1
