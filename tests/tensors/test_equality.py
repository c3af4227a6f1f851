"""Whether two values are the same, to the bit."""

import io
import math
import struct
from collections import Counter, OrderedDict, defaultdict

import pytest
import torch

from dcp_rs.checkpoint.compare import compare
from dcp_rs.tensors.equality import raw_bytes, same
from support import same_bits

MINUS_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8 << 48))[0]


def quantized(value, scale=0.1, zero=2):
    return torch.quantize_per_tensor(torch.full((3,), value), scale, zero, torch.qint8)


def by_channel(scale, axis=0):
    return torch.quantize_per_channel(
        torch.ones(2, 2), torch.tensor([0.1, scale]), torch.tensor([1, 2]), axis, torch.qint8
    )


def uncoalesced(*values):
    return torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor(values), (3,))


def on(tensor, key="x"):
    made = OrderedDict(a=tensor)
    made._metadata = {key: 1}
    return made


EYE = torch.eye(4)
NUMBERS = torch.tensor([1 + 2j, 3 - 4j])
DIFFERENT = [
    # They ended the process: the bytes of quantized tensors were asked for.
    (quantized(1.0), quantized(2.0)),
    (quantized(1.0), torch._make_per_tensor_quantized_tensor(quantized(1.0).int_repr(), 0.5, 2)),
    (quantized(1.0), torch._make_per_tensor_quantized_tensor(quantized(1.0).int_repr(), 0.1, 3)),
    (by_channel(0.2), by_channel(0.3)),
    (by_channel(0.1), by_channel(0.1, 1)),
    (EYE.to_sparse(), 2 * EYE.to_sparse()),
    (uncoalesced(1.0, 2.0), uncoalesced(2.0, 1.0)),
    *(
        (EYE.to_sparse(layout=layout), EYE.flip(0).to_sparse(layout=layout))
        for layout in (torch.sparse_csr, torch.sparse_csc)
    ),
    (EYE.to_sparse_bsr((2, 2)), (2 * EYE).to_sparse_bsr((2, 2))),
    (EYE, EYE.to_sparse()),
    # Python takes them for equal.
    (0.0, -0.0),
    (complex(0, 0.0), complex(0, -0.0)),
    ({1}, {True}),
    ({0.0}, {-0.0}),
    ({(1, 0.0)}, {(1, -0.0)}),
    (frozenset([1]), frozenset([1.0])),
    ({1: 2}, {True: 2}),
    ({"a": 0.0}, {"a": -0.0}),
    (math.nan, MINUS_NAN),
    (1, True),
    (1, 1.0),
    (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
    (on(EYE, "x"), on(EYE, "y")),
    (torch.ones(2), torch.ones(2, requires_grad=True)),
    (torch.tensor([0.0]), torch.tensor([-0.0])),
    (torch.empty(0, 2), torch.empty(0, 3)),
    (NUMBERS.conj(), NUMBERS),
    (NUMBERS.conj().imag, NUMBERS.imag),
    (torch.ones(2).untyped_storage(), torch.zeros(2).untyped_storage()),
    (io.BytesIO(b"a"), io.BytesIO(b"b")),
    (torch.Size([1]), (1,)),
    (torch.empty(2, device="meta"), torch.empty(3, device="meta")),
]
SAME = [
    (math.nan, struct.unpack("<d", struct.pack("<d", math.nan))[0]),
    ({math.nan: 1}, {struct.unpack("<d", struct.pack("<d", math.nan))[0]: 1}),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    (Counter("aab"), Counter("baa")),
    (quantized(1.0), quantized(1.0)),
    (by_channel(0.2), by_channel(0.2)),
    (uncoalesced(1.0, 2.0), uncoalesced(1.0, 2.0)),
    *(
        (EYE.to_sparse(layout=layout), EYE.to_sparse(layout=layout))
        for layout in (torch.sparse_coo, torch.sparse_csr)
    ),
    (torch.tensor([math.nan]), torch.tensor([math.nan])),
    (torch.arange(4.0)[::2], torch.tensor([0.0, 2.0])),
    (torch.tensor(1.0), torch.tensor([1.0, 2.0])[0]),
    (NUMBERS.conj(), NUMBERS.conj().resolve_conj()),
    (torch.ones(2).to(torch.float8_e5m2), torch.ones(2).to(torch.float8_e5m2)),
    (torch.ones(2).untyped_storage(), torch.ones(2).untyped_storage()),
    (bytearray(b"a"), bytearray(b"a")),
    (torch.bfloat16, torch.bfloat16),
    (torch.empty(2, device="meta"), torch.empty(2, device="meta")),
]


def label(pair):
    shown = repr(pair[0]).split("\n", 1)[0][:40]
    return type(pair[0]).__name__ if " at 0x" in shown else shown


def passes_the_oracle(one, other):
    """Return whether the oracle ignores the difference: parameters' types, attributes of containers."""
    return getattr(one, "requires_grad", None) != getattr(other, "requires_grad", None) or hasattr(
        one, "_metadata"
    )


@pytest.mark.parametrize("pair", DIFFERENT, ids=label)
def test_every_bit_and_every_type_makes_a_difference(pair):
    one, other = pair
    assert not same(one, other)
    assert not same([{"k": (one,)}], [{"k": (other,)}])
    assert same(one, one)
    assert same_bits(one, one)
    if not passes_the_oracle(one, other):
        assert not same_bits([one], [other])


@pytest.mark.parametrize("pair", SAME, ids=label)
def test_equal_values(pair):
    one, other = pair
    assert same(one, other)
    assert same([{"k": (one,)}], [{"k": (other,)}])
    assert same_bits([one], [other])


def test_factories_of_defaultdicts_count():
    assert not same(defaultdict(list, a=1), defaultdict(int, a=1))
    assert same(defaultdict(list, a=1), defaultdict(list, a=1))


class Odd:
    """Of whose comparison nothing is known."""

    def __eq__(self, other):
        raise KeyError("no")

    __hash__ = object.__hash__

    def __reduce__(self):
        raise KeyError("nor this")


def test_incomparable_values_raise_and_count_as_different(tmp_path):
    with pytest.raises(Exception, match="nor this"):
        same(Odd(), Odd())
    torch.save({"q": quantized(1.0), "mixed": [{0.0}, 1], "w": torch.ones(1)}, tmp_path / "a.pt")
    torch.save({"q": quantized(2.0), "mixed": [{-0.0}, 1], "w": torch.ones(1)}, tmp_path / "b.pt")
    found = compare(tmp_path / "a.pt", tmp_path / "b.pt")
    assert [(one.name, one.kind) for one in found.differences] == [
        ("mixed", "value"),
        ("q", "value"),
    ]


def test_bytes_of_a_strided_tensor_of_bits():
    """Torch copies none of these dtypes."""
    row = torch.arange(32, dtype=torch.uint8)
    strided = row.view(torch.uint4).view(4, 8).t()
    assert torch.equal(raw_bytes(strided), row.view(4, 8).t().reshape(-1))
