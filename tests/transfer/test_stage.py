"""The staged copy of a state dict in the host's memory."""

import mmap
import threading

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from dcp_rs.transfer import buffers
from dcp_rs.transfer.buffers import BlockPool
from dcp_rs.transfer.stage import Staging, stage
from support import assert_state_equal, dtypes_state, nested_state, shapes_state


def test_a_staged_copy_is_a_copy():
    state = {
        **nested_state(),
        "dtypes": dtypes_state(),
        "shapes": shapes_state(),
        "pair": (torch.ones(2), [1]),
    }
    staged = stage(state)
    assert_state_equal(contiguous(staged), contiguous(state))
    state["buffers"][0].zero_()
    state["pair"][0].zero_()
    state["pair"][1].append(2)
    assert staged["pair"][0].tolist() == [1, 1]
    assert staged["pair"][1] == [1]
    assert staged["buffers"][0].any()


def contiguous(tree):
    return tree_map_only(
        torch.Tensor, lambda t: t.detach().resolve_conj().resolve_neg().contiguous(), tree
    )


def test_the_memory_of_a_copy_serves_the_next_once_it_is_released():
    pool = BlockPool()
    weight = torch.nn.Parameter(torch.randn(10, 10))
    first = Staging({"a": weight, "b": weight}, pool)
    place = first.values["a"].data_ptr()
    assert first.values["b"].data_ptr() == place
    assert first.values["a"].requires_grad
    second = Staging({"a": torch.ones(5, 10), "b": torch.ones(3)}, pool)
    second.finish()
    assert second.values["a"].data_ptr() != place  # the first copy may still be read
    first.release()
    first.release()  # a second time it does nothing
    third, fourth = (Staging({"a": torch.zeros(9, 10), "b": torch.ones(3)}, pool) for _ in range(2))
    assert third.values["a"].data_ptr() == place
    assert fourth.values["a"].data_ptr() != place
    assert second.values["a"].all()


def test_tied_weights_are_staged_once_and_stay_tied():
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(300, 40), "head": torch.nn.Linear(40, 300, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    weight = model["embed"].weight
    state = model.state_dict()  # other tensors over the same memory
    state |= {
        "parameter": weight,
        "t": weight.t(),
        "half": weight[:150],
        "empty": weight[:0],
        "none": weight[:0],
    }
    with torch.no_grad():
        state["conj"] = torch.view_as_complex(weight.view(-1, 2)).conj()
        state["unconj"] = torch.view_as_complex(weight.view(-1, 2))
    staged = stage(state)
    assert_state_equal(
        dict(staged), {name: value.detach().resolve_conj() for name, value in state.items()}
    )
    places = {name: value.data_ptr() for name, value in staged.items() if value.numel()}
    assert places["embed.weight"] == places["head.weight"] == places["parameter"]
    assert len(set(places.values())) == len(places) - 2
    assert staged["parameter"].requires_grad
    assert not staged["embed.weight"].requires_grad


@pytest.mark.parametrize("inference", [False, True])
def test_tensors_that_are_copied_by_their_class(inference):
    """In inference mode torch refuses to detach a wrapper; and the copy of one that requires grad did not."""
    two = torch.nn.Parameter(TwoTensor(torch.ones(3), torch.zeros(3)))
    with torch.inference_mode(inference):
        staged = stage({"two": two, "sparse": torch.eye(3).to_sparse()})
    with torch.no_grad():
        two.a.fill_(2)
    copied = staged["two"]
    assert isinstance(copied, TwoTensor)
    assert copied.requires_grad
    assert not copied.is_inference()
    assert (copied.a.tolist(), copied.b.tolist()) == ([1.0] * 3, [0.0] * 3)
    assert torch.equal(staged["sparse"].to_dense(), torch.eye(3))


@pytest.mark.parametrize("dtype", [torch.bits8, torch.bits16])
def test_bits_are_copied(dtype):
    """The copy was the tensor itself, because torch cannot clone the dtype."""
    raw = torch.arange(8, dtype=torch.uint8)
    staged = stage({"x": raw.view(dtype)})
    raw.zero_()
    assert staged["x"].dtype == dtype
    assert staged["x"].view(torch.uint8).tolist() == list(range(8))


def test_a_copy_that_fails_gives_its_memory_back():
    pool = BlockPool()
    first = Staging({"a": torch.ones(1000)}, pool)
    memory = first.values["a"].data_ptr()
    first.release()
    with pytest.raises(TypeError):
        Staging({"a": torch.ones(1000), "bad": threading.Lock()}, pool)
    assert Staging({"a": torch.ones(1000)}, pool).values["a"].data_ptr() == memory


def test_a_pool_takes_all_blocks_or_none(monkeypatch):
    pool = BlockPool()
    pool.give(pool.take([1 << 10], pin=None))

    def fail(*_, **__):
        raise MemoryError("as meant")

    with monkeypatch.context() as patch:
        patch.setattr("dcp_rs.transfer.buffers.host_memory", fail)
        for sizes in ([1 << 10, 1 << 20], [1 << 20, 1 << 10]):
            with pytest.raises(MemoryError):
                pool.take(sizes, pin=None)
    assert len(pool.take([1 << 10], pin=None)) == 1
    assert (len(pool._idle), len(pool._taken)) == (0, 1)


def test_pages_that_a_sandbox_does_not_keep_from_forks_serve_as_well(monkeypatch):
    """A refused `madvise` ended every save in the background."""

    class Refusing(mmap.mmap):
        def madvise(self, *_):
            raise PermissionError(1, "not permitted")

    monkeypatch.setattr("dcp_rs.transfer.buffers.mmap.mmap", Refusing)
    assert len(buffers._pages(4096)) == 4096
