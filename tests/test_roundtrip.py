"""What is saved comes back bit for bit, for every kind of value that a state dict holds.

The destinations differ from what was saved in every byte, and stock DCP says what it makes of the
same state.
"""

import collections

import pytest
import torch
from torch import nn

from dcp_rs import RsReader
from dcp_rs.errors import UnsafePickleError, UnsupportedError
from support import (
    ALL_DTYPES,
    assert_state_equal,
    blank,
    dtypes_state,
    nested_state,
    random_tensor,
    shapes_state,
    strange_names_state,
)
from support.both import load_rs, load_stock, save_rs, save_stock, through_rs, through_stock

IO_MODES = ["auto", "mmap", "direct", "buffered"]


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(ckpt, dtype):
    want = {
        "matrix": random_tensor((5, 3), dtype, seed=1),
        "scalar": random_tensor((), dtype, seed=2),
        "empty": random_tensor((0,), dtype, seed=3),
        "deep": random_tensor((2, 1, 3, 2, 2), dtype, seed=4),
        "columns": random_tensor((6, 8), dtype, seed=5)[:, 2:7],
    }
    assert_state_equal(through_rs(want, ckpt), want)


def test_payloads_of_nans_and_signs_of_zeros_survive(ckpt):
    want = {
        "f32": torch.tensor([0x7FC00001, 0x7F800001, -1, 1 << 31], dtype=torch.int64)
        .to(torch.int32)
        .view(torch.float32),
        "f64": torch.tensor([0x7FF0000000000001, -1, -(1 << 63)]).view(torch.float64),
        "bf16": torch.tensor([0x7FC1, -1, -(1 << 15)], dtype=torch.int16).view(torch.bfloat16),
    }
    assert_state_equal(through_rs(want, ckpt), want)


@pytest.mark.parametrize("mode", IO_MODES)
def test_states_come_back_through_every_way_of_reading(tmp_path, mode):
    for make in (dtypes_state, shapes_state, nested_state, strange_names_state):
        want = make()
        assert_state_equal(through_rs(want, tmp_path / make.__name__, io=mode, verify=True), want)


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_both_ways_of_writing_store_the_same(tmp_path, mode):
    want = dtypes_state() | shapes_state()
    save_rs(want, tmp_path, io=mode, fsync=False)
    assert_state_equal(load_rs(blank(want), tmp_path), want)


@pytest.mark.parametrize("make", [shapes_state, nested_state, strange_names_state])
def test_stock_dcp_makes_the_same_of_it(tmp_path, make):
    state = make()
    assert_state_equal(
        through_rs(state, tmp_path / "ours"), through_stock(state, tmp_path / "stock")
    )


def test_sizes_around_the_block_of_a_digest(ckpt):
    block = 1 << 20
    want = {
        str(size): random_tensor((size,), torch.uint8, seed=size)
        for size in (1, 4095, 4096, 4097, block - 1, block, block + 1, 2 * block, 2 * block + 3)
    }
    want["columns"] = random_tensor((1500, 1000), torch.float32)[:, 3:-3]
    assert_state_equal(through_rs(want, ckpt, verify=True), want)


def test_only_the_elements_of_a_view_are_stored(ckpt):
    base = random_tensor((1000, 1000))
    want = {"corner": base[:2, :2], "row": base[7], "expanded": base[:1, :4].expand(3, 4)}
    assert_state_equal(through_rs(want, ckpt), want)
    assert sum(file.stat().st_size for file in ckpt.glob("*.safetensors")) < 10_000


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_lazy_conjugation_and_negation_are_carried_out(ckpt, dtype):
    numbers = torch.complex(torch.arange(6.0), -torch.arange(6.0)).reshape(2, 3).to(dtype)
    state = {"conj": numbers.conj(), "t": numbers.conj().t(), "both": numbers.conj().t()[1:]}
    assert all(value.is_conj() for value in state.values())
    state["neg"] = numbers.conj().imag
    assert state["neg"].is_neg()
    got = through_rs(state, ckpt)
    for name, value in got.items():
        assert torch.equal(
            torch.view_as_real(value) if value.is_complex() else value,
            torch.view_as_real(state[name].resolve_conj())
            if value.is_complex()
            else state[name].resolve_neg(),
        ), name


@pytest.mark.parametrize("limit", [1, None])
def test_tensors_of_one_element_with_odd_strides(ckpt, limit):
    """They count as contiguous, whatever their stride, but cannot be viewed as bytes."""
    numbers = torch.complex(torch.arange(9.0), -torch.arange(9.0))
    state = {
        "conj": numbers[3::4][:1].conj(),
        "neg": numbers[5:6].conj().imag,
        "step": torch.arange(9.0)[2::5][:1],
        "rows": torch.arange(30.0).reshape(5, 6)[1:4, ::6],
        "float": torch.arange(9.0).expand(2, 9).t()[4:5, :1],
    }
    save_rs(state, ckpt, max_inflight_bytes=limit)
    got = load_rs(blank(state), ckpt, max_inflight_bytes=limit)
    assert_state_equal(
        got, {name: value.resolve_conj().resolve_neg() for name, value in state.items()}
    )


def test_a_destination_may_be_conjugated_or_negated(ckpt):
    numbers = torch.complex(torch.arange(6.0), -torch.arange(6.0))
    save_rs({"c": numbers, "f": torch.arange(6.0)}, ckpt)
    template = {"c": torch.zeros(6, dtype=torch.complex64).conj()}
    template["f"] = torch.zeros(6, dtype=torch.complex64).conj().imag
    load_rs(template, ckpt)
    assert torch.equal(template["c"].resolve_conj(), numbers)
    assert torch.equal(template["f"].resolve_neg(), torch.arange(6.0))


def test_a_module_and_its_tied_weights(tmp_path):
    def model():
        net = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7))
        net[1].weight = net[0].weight
        return net

    source, ours, stock = model(), model(), model()
    source(torch.arange(7))  # moves the statistics of the batch norm
    save_rs(source.state_dict(), tmp_path / "ours")
    save_stock(source.state_dict(), tmp_path / "stock")
    ours.load_state_dict(load_rs(ours.state_dict(), tmp_path / "ours"))
    stock.load_state_dict(load_stock(stock.state_dict(), tmp_path / "stock"))
    assert_state_equal(ours.state_dict(), source.state_dict())
    assert_state_equal(ours.state_dict(), stock.state_dict())
    assert ours[1].weight is ours[0].weight


def test_parameters_that_require_grad(ckpt):
    want = {"w": nn.Parameter(random_tensor((3, 4))), "b": random_tensor((4,)).requires_grad_()}
    save_rs(want, ckpt)
    parameter = nn.Parameter(torch.zeros(3, 4))
    got = load_rs({"w": parameter, "b": torch.zeros(4, requires_grad=True)}, ckpt)
    assert got["w"] is parameter
    assert parameter.requires_grad
    assert parameter.grad_fn is None
    assert_state_equal(got, want)
    properties = RsReader(ckpt).read_metadata().state_dict_metadata["b"].properties
    assert properties.requires_grad


def test_an_optimizer_resumes_where_it_was(tmp_path):
    def trained(steps):
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, betas=(0.8, 0.9))
        for _ in range(steps):
            net(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        return net, optimizer

    net, optimizer = trained(3)
    want = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
    save_rs(want, tmp_path)
    other_net, other = trained(1)
    got = load_rs({"net": other_net.state_dict(), "optimizer": other.state_dict()}, tmp_path)
    save_stock(want, tmp_path / "stock")
    other_net, other = trained(1)
    stock = load_stock(
        {"net": other_net.state_dict(), "optimizer": other.state_dict()}, tmp_path / "stock"
    )
    assert_state_equal(got, stock)


VALUES = {
    "int": 3,
    "big": 1 << 80,
    "float": float("nan"),
    "negative zero": -0.0,
    "bool": True,
    "str": "größe\n\x00",
    "bytes": bytes(range(256)),
    "empty bytes": b"",
    "none": None,
    "list": [1, "two", None, [3.0]],
    "tuple": (1, (2, "three")),
    "ordered": collections.OrderedDict(a=1),
    "deep": {"a": {"b": {"c": [1, {"d": (2,)}]}}},
    "dtype": torch.float8_e5m2,
    "size": torch.Size([1, 2]),
    "tensors in a tuple": (torch.arange(3), {"x": torch.ones(2)}),
    "large": "x" * 3_000_000,
}


def test_values_that_are_not_tensors(tmp_path):
    got = through_rs(VALUES, tmp_path / "ours")
    assert_state_equal(got, through_stock(VALUES, tmp_path / "stock"))
    plain = {name: value for name, value in VALUES.items() if name != "ordered"}
    assert_state_equal({name: got[name] for name in plain}, plain)
    assert dict(got["ordered"]) == {"a": 1}


def test_keys_that_are_not_strings_and_nesting(tmp_path):
    state = {
        "layers": {0: {"w": random_tensor((2,), seed=0)}, 1: {"w": random_tensor((2,), seed=1)}},
        "list": [random_tensor((3,), seed=2), {"x": random_tensor((1,), seed=3), "y": 4}, [5]],
        "empty": {},
        "a.b": {"c": torch.ones(1)},
    }
    ours = through_rs(state, tmp_path / "ours")
    assert_state_equal(ours, through_stock(state, tmp_path / "stock"))
    assert_state_equal(ours["list"], state["list"])


def test_values_that_torch_will_not_load_safely_need_leave(ckpt):
    save_rs({"ok": 1, "counter": collections.Counter("abba"), "path": _Custom(3)}, ckpt)
    with pytest.raises(BaseException, match=r"path") as raised:
        load_rs({"ok": 0, "path": None}, ckpt)
    error = next(iter(raised.value.failures.values()))[0]
    assert isinstance(error, UnsafePickleError)
    assert error.tensor == "path"
    got = load_rs({"path": None}, ckpt, weights_only=False)
    assert got["path"].value == 3


class _Custom:
    def __init__(self, value):
        self.value = value


def test_a_quantized_tensor_is_kept_as_an_object(ckpt):
    want = torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, torch.qint8)
    save_rs({"q": want, "w": torch.ones(2)}, ckpt)
    got = load_rs({"q": torch.quantize_per_tensor(torch.zeros(3, 4), 0.1, 3, torch.qint8)}, ckpt)[
        "q"
    ]
    assert torch.equal(got.int_repr(), want.int_repr())
    assert (got.q_scale(), got.q_zero_point()) == (want.q_scale(), want.q_zero_point())


def test_a_sparse_tensor_is_kept_as_an_object(ckpt):
    want = torch.eye(3).to_sparse()
    save_rs({"w": torch.ones(2), "odd.one": want}, ckpt)
    got = load_rs({"odd.one": torch.full((3, 3), 2.0).triu().tril().to_sparse()}, ckpt)["odd.one"]
    assert got.layout == torch.sparse_coo
    assert torch.equal(got.to_dense(), torch.eye(3))


class _Wrapped(torch.Tensor):
    """A tensor subclass whose values are in two tensors, and which no one has allow-listed."""

    @staticmethod
    def __new__(cls, parts):
        return torch.Tensor._make_wrapper_subclass(cls, parts[0].shape)

    def __init__(self, parts):
        self.parts = parts

    def __tensor_flatten__(self):
        return ["a", "b"], None

    def __repr__(self):
        return "_Wrapped"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].parts)
        if func is torch.ops.aten.is_pinned.default:
            return False
        raise NotImplementedError(func)


def test_a_tensor_that_raw_bytes_cannot_hold_is_refused_by_name(ckpt):
    with pytest.raises(BaseException, match=r"odd\.one.*_Wrapped") as raised:
        save_rs({"w": torch.ones(2), "odd.one": _Wrapped([torch.ones(2)] * 2)}, ckpt)
    error = next(iter(raised.value.failures.values()))[0]
    assert isinstance(error, UnsupportedError)
    assert error.tensor == "odd.one"
    assert list(ckpt.iterdir()) == []


def test_a_tensor_whose_memory_was_freed_is_refused_by_name(ckpt):
    """FSDP frees the storage of parameters that it gathers again later: their address is null."""
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(BaseException, match=r"'w' .*memory has been freed"):
        save_rs({"w": freed}, ckpt)
    save_rs({"w": torch.ones(4)}, ckpt)
    with pytest.raises(BaseException, match='"w": the destination has no memory'):
        load_rs({"w": freed}, ckpt)


def test_a_tensor_without_data_is_refused_by_name(ckpt):
    with pytest.raises(BaseException, match=r"'m' is on the meta device"):
        save_rs({"m": torch.empty(3, device="meta")}, ckpt)
    assert list(ckpt.iterdir()) == []


def test_an_empty_state_dict(ckpt):
    save_rs({}, ckpt)
    assert load_rs({}, ckpt) == {}
    assert len(RsReader(ckpt).read_metadata().state_dict_metadata) == 0


def test_many_small_tensors(ckpt):
    want = {f"layer.{i}.w": torch.full((i % 7,), i) for i in range(3000)}
    assert_state_equal(through_rs(want, ckpt), want)


def test_a_part_of_the_checkpoint_may_be_loaded(ckpt):
    want = dtypes_state()
    save_rs(want, ckpt)
    part = {"float32": want["float32"], "bool": want["bool"]}
    assert_state_equal(load_rs(blank(part), ckpt), part)
