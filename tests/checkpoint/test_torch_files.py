"""Files of torch.save as checkpoints: what they hold comes back as torch.load gives it."""

import collections
import io
import os
import pathlib
import pickle
import warnings
import zipfile
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader
from dcp_rs.errors import DcpRsError, PlanError, UnsafePickleError, UnsupportedError
from support import assert_state_equal, same_bits
from support.states import ALL_DTYPES, blank, nested_state, shapes_state
from support.torch_files import flat, rich_state, same


def state_for(*, zipped):
    """The same, without what torch cannot read from its old format: sparse tensors, and its younger dtypes."""
    state = rich_state()
    if not zipped:
        del state["sparse"], state["quantized"]
        state["dtypes"] = {
            name: state["dtypes"][name]
            for name in ("float32", "bfloat16", "bool", "complex64", "int16")
        }
    return state


@pytest.mark.parametrize(
    "name", ["x.pth", "x.pt", "x.bin", "x.ckpt", "checkpoint", "odd.safetensors"]
)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_torch_file_comes_back(tmp_path, name, zipped):
    path = tmp_path / name
    torch.save(state_for(zipped=zipped), tmp_path / "saved", _use_new_zipfile_serialization=zipped)
    want = flat(torch.load(tmp_path / "saved", weights_only=True))
    (tmp_path / "saved").rename(path)
    with dcp_rs.open(path) as opened:
        assert opened.source == "torch"
        assert set(opened) == set(want)
        for fqn, value in want.items():
            assert same(opened[fqn], value), fqn
        assert opened["model.w"].requires_grad is False
        if zipped:  # the old format does not align what it holds
            assert opened["tied"].data_ptr() == opened["model.w"].data_ptr()
        assert opened["expanded"].stride() == (0, 1)
        for fqn, value in want.items():
            if (
                isinstance(value, torch.Tensor)
                and value.layout == torch.strided
                and not value.is_quantized
                and value.dim()
            ):
                rows = opened.get_slice(fqn)[: value.shape[0] // 2]
                assert same_bits(rows, value[: value.shape[0] // 2]), fqn


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_torch_file_loads_in_place(tmp_path, zipped):
    path = tmp_path / "x.pth"
    state = nested_state() | {"shapes": rich_state()["shapes"]}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    for load in (
        lambda into: dcp_rs.load(into, path),
        lambda into: dcp.load(into, storage_reader=RsReader(path), no_dist=True),
        lambda into: dcp.load(
            into, storage_reader=RsReader(path), planner=RsLoadPlanner(), no_dist=True
        ),
    ):
        got = blank(state)
        load(got)
        assert_state_equal(got, state)


def test_every_dtype_is_a_view_of_the_file_or_right(tmp_path):
    path = tmp_path / "x.pth"
    state = {str(dtype): torch.empty(3, 5, dtype=dtype) for dtype in ALL_DTYPES}
    torch.save(state, path)
    with dcp_rs.open(path) as opened:
        for name, value in state.items():
            assert same_bits(opened[name], value), name
            assert opened[name].data_ptr() % 64 == 0 or value.nbytes == 0
            assert opened[name].data_ptr() == opened[name].data_ptr()


def test_changing_a_tensor_changes_no_file(tmp_path):
    path = tmp_path / "x.pth"
    torch.save({"w": torch.ones(4)}, path)
    before = path.read_bytes()
    with dcp_rs.open(path) as opened:
        opened["w"].zero_()
    assert path.read_bytes() == before


def test_parameters_are_read_as_what_is_in_them(tmp_path):
    """As state_dict() gives them, and as DCP stores them; that they want a gradient is known, and kept by a conversion."""
    path = tmp_path / "x.pth"
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    torch.save(
        {
            "w": weight,
            "frozen": frozen,
            "tensor": torch.ones(3, requires_grad=True),
            "list": [weight, 1],
        },
        path,
    )
    with dcp_rs.open(path) as opened:
        for nested in (opened.state_dict(), {**opened, "list": [opened["list.0"], 1]}):
            read = {
                "w": nested["w"],
                "frozen": nested["frozen"],
                "tensor": nested["tensor"],
                "0": nested["list"][0],
            }
            assert {type(value) for value in read.values()} == {torch.Tensor}
            assert not any(value.requires_grad for value in read.values())
        assert_state_equal(opened["w"], weight.detach())
    with dcp_rs.open(path, device="meta") as skeleton:
        assert {
            name for name in ("w", "frozen", "tensor", "list.0") if skeleton[name].requires_grad
        } == {
            "w",
            "tensor",
            "list.0",
        }
    into = {"w": torch.nn.Parameter(torch.zeros(2, 3)), "frozen": torch.zeros(2)}
    kept = into["w"]
    dcp_rs.load(into, path)
    assert into["w"] is kept
    assert kept.requires_grad
    assert_state_equal(kept.detach(), weight.detach())
    module = torch.nn.Module()
    module.w, module.frozen = (
        torch.nn.Parameter(torch.zeros_like(value)) for value in (weight, frozen)
    )
    with dcp_rs.open(path) as opened:
        module.load_state_dict(opened.state_dict(), strict=False)
    assert_state_equal(module.w.detach(), weight.detach())
    dcp_rs.convert(path, tmp_path / "y.pth", to="torch")
    again = torch.load(tmp_path / "y.pth", weights_only=True)
    assert [again[name].requires_grad for name in ("w", "frozen", "tensor")] == [True, False, True]


class Forbidden:
    """A class that nobody allowed."""

    def __init__(self):
        self.w = torch.ones(2)

    def __eq__(self, other):
        return torch.equal(self.w, other.w)

    __hash__ = None


def test_a_class_that_is_not_allowed_is_named_when_it_is_asked_for(tmp_path):
    path = tmp_path / "last.ckpt"
    state = {
        "hyper_parameters": {"model": Forbidden(), "path": pathlib.PurePosixPath("x"), "lr": 0.1},
        "w": torch.ones(3),
    }
    state["default"] = collections.defaultdict(list, a=[1])
    torch.save(state, path)
    with dcp_rs.open(path) as opened:
        assert torch.equal(opened["w"], torch.ones(3))
        assert opened["hyper_parameters.lr"] == 0.1
        with pytest.raises(
            UnsafePickleError, match=r"'hyper_parameters.model'.*test_torch_files\.Forbidden"
        ):
            opened["hyper_parameters.model"]
        with pytest.raises(UnsafePickleError, match=r"PurePosixPath"):
            opened["hyper_parameters.path"]
        with pytest.raises(UnsafePickleError, match=r"defaultdict"):
            opened["default"]
        with torch.serialization.safe_globals([Forbidden]):
            assert opened["hyper_parameters.model"] == Forbidden()
    with dcp_rs.open(path, weights_only=False) as opened:
        assert opened["hyper_parameters.model"] == Forbidden()
        assert opened["default"] == state["default"]
    into = {"w": torch.zeros(3)}
    dcp_rs.load(into, path)
    assert torch.equal(into["w"], torch.ones(3))
    with pytest.raises(UnsafePickleError, match=r"value '(default|hyper_parameters)"):
        dcp_rs.convert(path, tmp_path / "converted")
    dcp_rs.convert(path, tmp_path / "tensors", include="w")
    assert set(dcp_rs.open(tmp_path / "tensors")) == {"w"}


def test_an_error_of_a_value_names_the_file(tmp_path):
    path, state = tmp_path / "x.pt", {"at": None}
    torch.save({"at": Forbidden()}, path)
    ways = {
        "open": lambda: dcp_rs.open(path)["at"],
        "load": lambda: dcp_rs.load(state, path),
        "reader": lambda: dcp_rs.load_state_dict(state, dcp_rs.RsReader(path)),
        "convert": lambda: dcp_rs.convert(path, tmp_path / "out"),
        "convert to torch": lambda: dcp_rs.convert(path, tmp_path / "out.pt"),
    }
    for way, run in ways.items():
        with pytest.raises(UnsafePickleError, match=r"value 'at' of .*x\.pt") as raised:
            run()
        assert raised.value.path == str(path), way


@pytest.mark.parametrize(
    ("content", "error", "why"),
    [
        (torch.ones(2), UnsupportedError, "it holds a tensor, not a state dict"),
        ([torch.ones(2)], UnsupportedError, "it holds a list, not a state dict"),
        (3, UnsupportedError, "it holds a number, not a state dict"),
        (torch.nn.Linear(2, 2), UnsafePickleError, r"torch\.nn\.modules\.linear\.Linear"),
        ({"a": {"b": 1}, "a.b": 2}, PlanError, "two entries flatten to this name"),
        ({1: 1, "1": 2}, PlanError, "two entries flatten to this name"),
    ],
)
def test_file_without_a_state_dict(tmp_path, content, error, why):
    path = tmp_path / "x.pt"
    torch.save(content, path)
    with pytest.raises(error, match=why) as raised:
        dcp_rs.open(path)
    assert "x.pt" in str(raised.value) or raised.value.path == str(path)


def test_a_script_module_says_what_it_is(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "x.pt")
    with pytest.raises(UnsupportedError, match=r"TorchScript archive.*torch\.jit\.load"):
        dcp_rs.open(tmp_path / "x.pt")


_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.complex_numbers(allow_nan=False),
    st.sets(st.integers(0, 5), max_size=3),
    st.sampled_from(
        [torch.Size([1, 2]), torch.float16, torch.device("cpu"), collections.Counter("aab")]
    ),
    st.sampled_from(list(shapes_state().values())[:-1]),
    st.sampled_from([pathlib.PurePosixPath("x"), print, int]),
)

_KEYS = st.one_of(st.text(max_size=3), st.integers(-3, 300), st.booleans(), st.none())


def _containers(inner):
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(_KEYS, inner, max_size=4),
        st.dictionaries(_KEYS, inner, max_size=4).map(collections.OrderedDict),
        inner.map(lambda value: [value, value, {"again": value}]),
    )


_STATES = st.dictionaries(_KEYS, st.recursive(_LEAVES, _containers, max_leaves=12), max_size=5)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(_STATES, st.booleans())
def test_the_same_as_torch_or_both_refuse(tmp_path, state, zipped):
    path = tmp_path / "x.pth"
    try:
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
    except RuntimeError as error:
        assert "view the same data as different types" in str(error)  # noqa: PT017
        reject()
    try:
        want = flat(torch.load(path, weights_only=True))
    except (pickle.UnpicklingError, ValueError):  # or two entries of one name
        want = None
    if want is not None:
        with dcp_rs.open(path) as opened:
            assert set(opened) == set(want)
            for name, value in want.items():
                assert same(opened[name], value), name
        return
    with pytest.raises(DcpRsError), dcp_rs.open(path) as opened:  # noqa: PT012
        for name in opened:
            opened[name]


def test_checksums_are_those_of_zip(tmp_path):
    """The archive that a value is handed over as is one that others read."""
    torch.save({"t": (torch.arange(3.0), "x")}, tmp_path / "x.pth")
    index = dcp_rs._core.Index.open(os.fspath(tmp_path / "x.pth"), None, False)
    (data,) = index.read_bytes(
        [0], io="buffered", threads=1, verify=False, max_inflight_bytes=1 << 20
    )
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        assert file.testzip() is None
        assert zlib.crc32(torch.arange(3.0).numpy().tobytes()) == file.getinfo("archive/data/0").CRC
