"""Tensors that are wrappers of others, as quantization makes them: filled by their own ``copy_``, as under stock DCP."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader
from dcp_rs.errors import PlanError, UnsupportedError
from support import assert_state_equal, run_ranks
from support.both import load_rs, load_stock, save_stock
from support.places import data_files

W = torch.arange(60.0).reshape(6, 10) / 7


class Closed(torch.Tensor):
    """Bytes and a scale, computed when it is copied to, and only as a whole. It does not tell what it wraps."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data, scale):
        self.data8, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(cls, function, _types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return type(args[0])(args[0].data8, args[0].scale)
        if function is torch.ops.aten.copy_.default:
            into, values = args[:2]
            into.scale.copy_(values.abs().max() / 127)
            into.data8.copy_((values / into.scale).round())
            return into
        raise NotImplementedError(function)


class Quantized(Closed):
    """The same, and tells."""

    def __tensor_flatten__(self):
        return ["data8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, _meta, _size, _stride):
        return Quantized(inner["data8"], inner["scale"])


def quantized(cls=Quantized):
    return cls(torch.zeros(6, 10, dtype=torch.int8), torch.zeros(()))


def loads(path):
    """Ways to load through this package."""
    for planner in (RsLoadPlanner(dtype_policy="cast"), dcp.DefaultLoadPlanner()):
        yield lambda state, planner=planner: dcp.load(
            state, storage_reader=RsReader(path), planner=planner, no_dist=True
        )


def test_wrappers_are_filled_as_by_stock(tmp_path):
    save_stock(
        {"half": W.half(), "large": torch.ones(300, 300), "q": W, "two": W, "w": W}, tmp_path
    )

    def fresh():
        return {
            "half": torch.nn.Parameter(TwoTensor(torch.zeros(6, 10), torch.zeros(6, 10))),
            "large": TwoTensor(torch.zeros(300, 300), torch.zeros(300, 300)),
            "q": quantized(),
            "two": TwoTensor(torch.zeros(10, 6).t(), torch.zeros(10, 6).t()),
            "w": torch.zeros(6, 10),
        }

    def inner(state):
        pairs = {
            name: (state[name].a.detach(), state[name].b.detach())
            for name in ("half", "large", "two")
        }
        return pairs | {"q": (state["q"].data8, state["q"].scale), "w": state["w"]}

    with torch.no_grad():
        want = inner(load_stock(fresh(), tmp_path))
    for load in loads(tmp_path):
        state = fresh()
        load(state)
        assert_state_equal(inner(state), want)
    state = fresh()
    dcp_rs.load(state, tmp_path, dtype_policy="cast", max_inflight_bytes=1)
    assert_state_equal(inner(state), want)


def test_a_wrapper_and_the_tensors_in_it(tmp_path):
    save_stock({"m": {"a": W, "two": W + 1, "b": W + 2}}, tmp_path)
    for order in (("a", "two", "b"), ("two", "b", "a"), ("b", "a", "two")):

        def fresh(order=order):
            two = TwoTensor(torch.zeros(6, 10), torch.zeros(6, 10))
            state = {"a": two.a, "two": two, "b": two.b[1:5]}
            return two, {"m": {name: state[name] for name in order}}

        two, state = fresh()
        state["m"]["b"] = two.b
        load_stock(state, tmp_path)
        for load in loads(tmp_path):
            got, state = fresh()
            state["m"]["b"] = got.b
            load(state)
            assert_state_equal((got.a, got.b), (two.a, two.b))


def test_a_wrapper_that_tells_nothing_is_filled_too(tmp_path):
    save_stock({"q": W}, tmp_path)
    want, got = quantized(Closed), quantized(Closed)
    load_stock({"q": want}, tmp_path)
    load_rs({"q": got}, tmp_path)
    assert_state_equal((got.data8, got.scale), (want.data8, want.scale))


def test_a_wrapper_that_does_not_take_what_is_stored_is_named(tmp_path):
    class Frozen(Quantized):
        @classmethod
        def __torch_dispatch__(cls, function, _types, args=(), kwargs=None):
            if function is torch.ops.aten.copy_.default:
                raise RuntimeError("it is frozen")
            return super().__torch_dispatch__(function, _types, args, kwargs)

    save_stock({"q": W}, tmp_path)
    with pytest.raises(CheckpointException):
        load_stock({"q": quantized(Frozen)}, tmp_path)
    with pytest.raises(PlanError, match=r"'q'.*Frozen.*it is frozen") as raised:
        dcp_rs.load({"q": quantized(Frozen)}, tmp_path)
    assert pickle.loads(pickle.dumps(raised.value)).tensor == "q"


def save_shards_of_wrappers(path):
    mesh = init_device_mesh("cpu", (2,))
    state = {
        "q": DTensor.from_local(TwoTensor(W.clone(), W.clone()), mesh, [Shard(0)], run_check=False)
    }
    with pytest.raises(
        UnsupportedError, match="'q': a shard of it cannot be saved: it is a TwoTensor"
    ):
        dcp_rs.save(state, path)
    with pytest.raises(
        UnsupportedError, match="'q': a shard of it cannot be saved: it is a TwoTensor"
    ):
        dcp_rs.async_save(state, path).result(60)
    return data_files(path)


def test_shards_that_are_wrappers_are_refused(tmp_path):
    assert run_ranks(2, save_shards_of_wrappers, tmp_path / "ckpt") == [[], []]


def test_a_tensor_whose_storage_was_freed_is_refused(tmp_path):
    save_stock({"w": W}, tmp_path)
    freed = torch.zeros(6, 10)
    freed.untyped_storage().resize_(0)
    for tensor in (freed, freed.view(torch.int32)):
        with pytest.raises(PlanError, match=r"w.*its storage (was|has been) freed"):
            dcp_rs.load({"w": tensor}, tmp_path, dtype_policy="cast")


def test_a_folder_of_torch_that_holds_a_wrapper_is_saved_anew(tmp_path):
    def fresh():
        return {"two": TwoTensor(torch.zeros(6, 10), torch.zeros(6, 10)), "w": torch.zeros(6, 10)}

    save_stock({"two": TwoTensor(W, W + 1), "w": W}, tmp_path / "stock")
    with pytest.raises(
        UnsupportedError,
        match=r'"two".*\.distcp: stored with .*TwoTensor.*FileSystemReader.*save it again',
    ):
        dcp_rs.load(fresh(), tmp_path / "stock")
    state, got = fresh(), fresh()
    with torch.serialization.safe_globals([TwoTensor]), torch.no_grad():
        load_stock(state, tmp_path / "stock")
        dcp_rs.save(state, tmp_path / "anew")
        dcp_rs.load(got, tmp_path / "anew")
    assert_state_equal((got["two"].a, got["two"].b, got["w"]), (W, W + 1, W))
