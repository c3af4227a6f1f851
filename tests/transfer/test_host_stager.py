"""The staged copy of a state dict in the host's memory."""

import threading

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from dcp_rs.transfer.stage import HostStager
from support import assert_state_equal, dtypes_state, nested_state, shapes_state


def test_a_staged_copy_is_a_copy():
    state = {**nested_state(), "dtypes": dtypes_state(), "shapes": shapes_state(), "pair": (torch.ones(2), [1])}
    staged = HostStager().stage(state)
    assert_state_equal(contiguous(staged), contiguous(state))
    state["buffers"][0].zero_()
    state["pair"][0].zero_()
    state["pair"][1].append(2)
    assert staged["pair"][0].tolist() == [1, 1]
    assert staged["pair"][1] == [1]
    assert staged["buffers"][0].any()


def contiguous(value):
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().resolve_neg().contiguous()
    if isinstance(value, dict):
        return {key: contiguous(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [contiguous(entry) for entry in value]
    return value


def test_a_stager_keeps_its_memory_and_tied_weights_share_theirs():
    stager = HostStager(cache=True)
    weight = torch.nn.Parameter(torch.randn(10, 10))
    first = stager.stage({"a": weight, "b": weight})
    assert first["a"].data_ptr() == first["b"].data_ptr()
    assert first["a"].requires_grad
    place = first["a"].data_ptr()
    second = stager.stage({"a": torch.ones(5, 10), "b": torch.ones(3)})
    assert second["a"].data_ptr() != place  # the first copy is still somebody's
    del first
    third = stager.stage({"a": torch.ones(9, 10), "b": torch.ones(3)})
    assert third["a"].data_ptr() == place
    assert second["a"].all()


def test_tied_weights_are_staged_once_and_stay_tied():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(300, 40), "head": torch.nn.Linear(40, 300, bias=False)})
    model["head"].weight = model["embed"].weight
    weight = model["embed"].weight
    state = model.state_dict()  # other tensors over the same memory
    state |= {"parameter": weight, "t": weight.t(), "half": weight[:150], "empty": weight[:0], "none": weight[:0]}
    with torch.no_grad():
        state["conj"] = torch.view_as_complex(weight.view(-1, 2)).conj()
        state["unconj"] = torch.view_as_complex(weight.view(-1, 2))
    for pickled in (False, True):
        staged = HostStager().stage(state)
        if pickled:  # as torch's checkpoint process gets it
            function, arguments = staged.__reduce__()
            assert sum(block.nbytes for block in arguments[0]) < 6 * weight.nbytes
            staged = function(*arguments)
        assert_state_equal(dict(staged), {name: value.detach().resolve_conj() for name, value in state.items()})
        places = {name: value.data_ptr() for name, value in staged.items() if value.numel()}
        assert places["embed.weight"] == places["head.weight"] == places["parameter"]
        assert len(set(places.values())) == len(places) - 2
        assert staged["parameter"].requires_grad
        assert not staged["embed.weight"].requires_grad


def test_a_stager_waits_for_nobody_who_keeps_a_staged_tensor():
    stager = HostStager(cache=True)
    over = threading.Event()
    kept = stager.stage({"w": torch.ones(100)}, under_way=lambda: not over.is_set())
    over.set()  # the save is over, and somebody has the tensors
    again = stager.stage({"w": torch.zeros(100)})
    assert kept["w"].all()
    assert not again["w"].any()


@pytest.mark.parametrize("inference", [False, True])
def test_tensors_that_are_copied_by_their_class(inference):
    """In inference mode torch refuses to detach a wrapper; and the copy of one that requires grad did not."""
    two = torch.nn.Parameter(TwoTensor(torch.ones(3), torch.zeros(3)))
    with torch.inference_mode(inference):
        staged = HostStager().stage({"two": two, "sparse": torch.eye(3).to_sparse()})
    with torch.no_grad():
        two.a.fill_(2)
    copied = staged["two"]
    assert isinstance(copied, TwoTensor)
    assert copied.requires_grad
    assert not copied.is_inference()
    assert (copied.a.tolist(), copied.b.tolist()) == ([1.0] * 3, [0.0] * 3)
    assert torch.equal(staged["sparse"].to_dense(), torch.eye(3))
