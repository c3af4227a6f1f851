"""Values of any kind beside tensors: what torch.load makes of them is what comes back, and none keeps the rest from being read."""

import collections
import dataclasses
import enum
import io
import pickle
import struct
import types
import zipfile
from typing import ClassVar

import pytest
import torch

import dcp_rs
from dcp_rs.errors import UnsafePickleError
from support.torch_files import archive, flat, same


class Outer:
    class Kind(enum.Enum):
        A = 1

    @dataclasses.dataclass
    class Config:
        depth: int = 3


class Named:
    def __new__(cls, *, size):
        made = object.__new__(cls)
        made.size = size
        return made

    def __getnewargs_ex__(self):
        return (), {"size": self.size}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(3.0))


VALUES = {
    "a member of a nested enum": Outer.Kind.A,
    "an object of a nested class": Outer.Config(),
    "arguments by name": Named(size=2),
    "a set": {1, "a", (2, 3)},
    "a frozen set": frozenset({1, 2}),
    "a set of objects": {Outer.Kind.A},
    "a bytearray": bytearray(b"\x00\xff"),
    "bytes": [b"ab"] * 3,
    "a memory format": torch.channels_last,
}


def opened(path, name):
    """The value, as opening gives it without refusing anything."""
    with dcp_rs.open(path, weights_only=False) as checkpoint:
        assert torch.equal(checkpoint["w"], torch.arange(3.0))
        return checkpoint.state_dict(copy=True)[name]


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", VALUES)
def test_values_come_back_as_torch_loads_them(tmp_path, kind, protocol, zipped):
    path = tmp_path / "x.pth"
    state = {"w": torch.arange(3.0), "value": VALUES[kind], "step": 3}
    try:
        torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    except TypeError:
        pytest.skip("torch does not save it with this protocol")
    want = torch.load(path, weights_only=False)["value"]
    got = opened(path, "value")
    assert type(got) is type(want)
    assert got == want or vars(got) == vars(want)
    with dcp_rs.open(path) as checkpoint:  # what need not be allowed is read all the same
        assert checkpoint["step"] == 3
        assert torch.equal(checkpoint["w"], torch.arange(3.0))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_value_of_a_nested_class_is_refused_alone(tmp_path, protocol):
    torch.save(
        {"w": torch.arange(3.0), "kind": Outer.Kind.A}, tmp_path / "x.pth", pickle_protocol=protocol
    )
    with dcp_rs.open(tmp_path / "x.pth") as checkpoint:
        assert torch.equal(checkpoint["w"], torch.arange(3.0))
        with pytest.raises(UnsafePickleError, match="'kind'"):
            checkpoint["kind"]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("count", [1, 5])
def test_a_tuple_in_itself(tmp_path, protocol, count):
    inner = [torch.ones(2)]
    outer = (inner, *range(1, count))
    inner.append(outer)
    torch.save(
        {"w": torch.arange(3.0), "value": outer}, tmp_path / "x.pth", pickle_protocol=protocol
    )
    got = opened(tmp_path / "x.pth", "value")
    assert got[0][1] is got
    assert got[1:] == outer[1:]
    assert torch.equal(got[0][0], torch.ones(2))


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_module_and_quantized_tensors_beside_tensors(tmp_path, protocol, zipped):
    path = tmp_path / "x.pth"
    channels = torch.quantize_per_channel(
        torch.ones(3, 2), torch.ones(3), torch.zeros(3, dtype=torch.long), 0, torch.qint32
    )
    state = {
        "q": torch.quantize_per_tensor(torch.ones(5), 0.1, 2, torch.qint8),
        "per_channel": channels,
        "w": torch.arange(3.0),
        "model": Model(),
    }
    torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    with dcp_rs.open(path, weights_only=False) as checkpoint:
        assert torch.equal(checkpoint["w"], state["w"])
        for name in ("q", "per_channel"):
            assert same(checkpoint[name], state[name])
        model = checkpoint["model"]
    assert type(model) is Model
    assert torch.equal(model.weight, state["model"].weight)


def test_a_sparse_tensor_with_an_attribute_of_its_own(tmp_path):
    """The whole file was refused as corrupt."""
    sparse = torch.eye(3).to_sparse()
    sparse.tag = "x"
    torch.save({"m": sparse, "w": torch.arange(3.0)}, tmp_path / "x.pth")
    with dcp_rs.open(tmp_path / "x.pth") as checkpoint:
        assert torch.equal(checkpoint["w"], torch.arange(3.0))
        assert torch.equal(checkpoint["m"].to_dense(), torch.eye(3))


class Python2(pickle._Pickler):
    """Writes dicts with an order, texts and large integers as Python 2 does."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def _ordered(self, value):
        self.save_reduce(
            collections.OrderedDict, ([[key, item] for key, item in value.items()],), obj=value
        )

    def _text(self, value):
        data = value.encode()
        self.write(
            b"U" + bytes([len(data)]) if len(data) < 256 else b"T" + struct.pack("<i", len(data))
        )
        self.write(data)
        self.memoize(value)

    def _int(self, value):
        if abs(value) < 2**31 or abs(value) > 2**63:
            self.save_long(value)
        else:
            self.write(b"I%d\n" % value)

    dispatch |= {collections.OrderedDict: _ordered, str: _text, int: _int}


PYTHON_2 = types.SimpleNamespace(
    __name__="python2",
    Pickler=Python2,
    dump=lambda value, file, protocol=2: Python2(file, protocol).dump(value),
)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_long_texts_and_integers_of_python_2(tmp_path, zipped):
    path = tmp_path / "x.pth"
    state = {"w": torch.arange(3.0), "text": "x" * 300, "large": 2**40, "x" * 400: 1}
    torch.save(state, path, pickle_module=PYTHON_2, _use_new_zipfile_serialization=zipped)
    assert torch.load(path, weights_only=False)["text"] == "x" * 300
    with dcp_rs.open(path) as checkpoint:
        assert same(checkpoint.state_dict(copy=True), state)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("nested", [False, True])
def test_ordered_dicts_of_python_2(tmp_path, nested, zipped):
    path = tmp_path / "x.pth"
    state = collections.OrderedDict(
        a=torch.ones(2), b=torch.zeros(1), c=collections.OrderedDict(step=2, t=torch.ones(1))
    )
    state = {"model": state, "epoch": 1} if nested else state
    torch.save(state, path, pickle_module=PYTHON_2, _use_new_zipfile_serialization=zipped)
    want = torch.load(path)
    with dcp_rs.open(path) as checkpoint:
        assert list(checkpoint) == sorted(flat(want))
        assert same(checkpoint.state_dict(copy=True), want)


@pytest.mark.parametrize("flag", [b"conj", b"neg"])
def test_a_flag_that_is_off_is_torchs_to_read(tmp_path, flag):
    """A flag that is there is set for torch, whatever its value: dcp-rs took one that is off as not set."""
    path = tmp_path / "m.pt"
    state = {"w": torch.tensor([1 + 2j, 3 - 4j])}
    state["w"] = state["w"].conj() if flag == b"conj" else torch._neg_view(state["w"])
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with zipfile.ZipFile(buffer) as file:
        inside = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    at = inside["data.pkl"].index(b"\x88", inside["data.pkl"].index(flag))
    off = inside["data.pkl"][:at] + b"\x89" + inside["data.pkl"][at + 1 :]
    path.write_bytes(archive(off, [("data/0", inside["data/0"])]))
    want = torch.load(path, weights_only=True)["w"].resolve_conj().resolve_neg()
    assert torch.equal(dcp_rs.open(path)["w"].resolve_conj().resolve_neg(), want)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_empty_tensors_as_torch_cuts_them(tmp_path, zipped):
    """A part of an empty tensor may begin behind its end, and its memory may have several types. Both were called corrupt."""
    empty = torch.empty(0, 4)
    state = {
        "right half": empty[:, 2:],
        "imaginary": torch.empty(0, dtype=torch.complex64).imag,
        "bits": empty.view(torch.int32),
        "whole": empty,
        "w": torch.arange(3.0),
    }
    path = tmp_path / "x.pth"
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    want = torch.load(path, weights_only=True)
    with dcp_rs.open(path) as checkpoint:
        for name, tensor in want.items():
            assert same(checkpoint[name], tensor), name
    assert not dcp_rs.verify(path).problems
