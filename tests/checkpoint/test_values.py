"""Values as they are read without torch: `torch.load` is the judge of what is in them."""

import io
import zipfile

import numpy as np
import pytest
import torch

import dcp_rs
from dcp_rs.checkpoint import elements
from dcp_rs.checkpoint.values import load_value
from dcp_rs.errors import CorruptDataError, UnsupportedError
from dcp_rs.testing.compare import raw_bytes


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def with_record(data, name, content):
    """The archive, with other bytes in one of its records; without the record, if they are None."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for info in old.infolist():
            kept = content if info.filename.endswith(f"/{name}") else old.read(info)
            if kept is not None:
                new.writestr(info, kept)
    return buffer.getvalue()


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).tolist()


def signed_views():
    """Tensors that torch keeps as the conjugates, or the negatives, of their memory."""
    numbers = torch.tensor([[1 + 2j, -0.0 - 3j], [complex(float("nan"), float("inf")), 0.0]], dtype=torch.complex128)
    for dtype in (torch.complex64, torch.complex128, torch.complex32):
        made = numbers.to(dtype)
        yield f"conj {dtype}", made.conj()
        yield f"imag of conj {dtype}", made.conj().imag
        yield f"transposed {dtype}", made.mH
        yield f"0-d {dtype}", made[0, 0].conj()
        yield f"empty {dtype}", made[:0].conj()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int16, torch.int64):
        yield f"neg {dtype}", torch._neg_view(torch.tensor([0, 1, 100]).to(dtype))
    yield "neg of conj", torch._neg_view(numbers[0].conj())  # the sign of a NaN there is left as it is by torch


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("with_ml_dtypes", [True, False])
def test_conjugates_and_negatives_in_a_value_are_what_torch_computes(with_ml_dtypes, monkeypatch):
    """Without torch they came as the bytes of their memory: 1+2j for 1-2j."""
    if not with_ml_dtypes:
        monkeypatch.setattr(elements, "has_ml_dtypes", lambda: False)
    for label, tensor in signed_views():
        assert tensor.is_conj() or tensor.is_neg(), label
        data = saved((tensor,))
        want = torch.load(io.BytesIO(data))[0]
        (array,) = load_value("v", data)
        assert array.shape == tuple(want.shape), label
        assert bits(array) == raw_bytes(want).tolist(), label


@pytest.mark.parametrize("kind", ["a file of torch.save", "native", "stock"])
def test_an_open_checkpoint_has_the_signs_of_values(tmp_path, kind):
    state = {"v": (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag), "w": torch.ones(1)}
    path = tmp_path / "state.pt"
    if kind == "a file of torch.save":
        torch.save(state, path)
    elif kind == "native":
        dcp_rs.save(state, path, no_dist=True)
    else:
        torch.distributed.checkpoint.save(state, checkpoint_id=path, no_dist=True)
    conjugate, negative = dcp_rs.open(path, framework="np")["v"]
    assert (conjugate.tolist(), negative.tolist()) == ([1 - 2j], [-2.0])


class Flagged:
    """A tensor of four elements, as `torch.save` writes it, with these flags."""

    def __init__(self, tensor, flags):
        self.made = (*tensor.__reduce_ex__(2)[1], flags)
        self.make = tensor.__reduce_ex__(2)[0]

    def __reduce__(self):
        return self.make, self.made


@pytest.mark.parametrize(
    ("tensor", "flags"),
    [
        (torch.ones(4), {"unheard": True}),
        (torch.ones(4), {"conj": True}),
        (torch.ones(4, dtype=torch.bool), {"neg": True}),
        (torch.ones(4).to(torch.float8_e5m2), {"neg": True}),
    ],
)
def test_flags_that_mean_nothing_here_are_refused(tensor, flags):
    with pytest.raises(UnsupportedError, match=r"value 'v' holds .*flags \['(unheard|conj|neg)'\]") as caught:
        load_value("v", saved([Flagged(tensor, flags)]))
    assert caught.value.tensor == "v"
    (array,) = load_value("v", saved([Flagged(tensor, dict.fromkeys(flags, False))]))
    assert bits(array) == raw_bytes(tensor).tolist()


def test_another_byte_order_is_refused():
    """The record that says so was not looked at: 1.0 of a big-endian machine came as 4.6e-41."""
    data = saved((torch.tensor([1.0, 2.0]),))
    big = with_record(with_record(data, "data/0", np.array([1.0, 2.0], ">f4").tobytes()), "byteorder", b"big")
    assert torch.load(io.BytesIO(big))[0].tolist() == [1.0, 2.0]
    with pytest.raises(UnsupportedError, match=r"value 'v' holds .* byte order 'big'"):
        load_value("v", big)
    assert load_value("v", with_record(data, "byteorder", None))[0].tolist() == [1.0, 2.0]


def test_a_buffer_is_read_without_torch(tmp_path):
    """It was said to be damaged."""
    buffer = io.BytesIO(b"abc\xff")
    buffer.seek(2)
    torch.save({"v": buffer, "in": (buffer, io.BytesIO()), "w": torch.ones(1)}, tmp_path / "state.pt")
    with dcp_rs.open(tmp_path / "state.pt", framework="np") as arrays:
        assert type(arrays["v"]) is io.BytesIO
        assert (arrays["v"].getvalue(), arrays["v"].tell()) == (b"abc\xff", 2)
        assert [one.getvalue() for one in arrays["in"]] == [b"abc\xff", b""]


@pytest.mark.parametrize("state", [b"}X\x04\x00\x00\x00readK\x01s", b"(C\x01aK\x00Nt"])
def test_a_pickle_does_not_change_the_class_of_buffers(state):
    before = dict(vars(io.BytesIO))
    data = with_record(saved(1), "data.pkl", b"\x80\x02c_io\nBytesIO\n" + state + b"b.")
    with pytest.raises(CorruptDataError):
        load_value("v", data)
    assert dict(vars(io.BytesIO)) == before
