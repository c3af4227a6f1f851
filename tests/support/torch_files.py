"""What files of torch.save may hold, and its comparison with what torch.load gives."""

import collections
import io
import pickletools
import struct
import zipfile

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from support import same_bits
from support.states import dtypes_state, shapes_state

#: Of the largest tensor of `whole`.
ROWS = 100_000


def archive(data, records=(), method=zipfile.ZIP_STORED, order="little"):
    """A file of torch.save with this pickle, and records by name."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        file.writestr("archive/data.pkl", data)
        for name, record in records:
            file.writestr(f"archive/{name}", record)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", order)
    return buffer.getvalue()


def text(word):
    """The opcode for a text."""
    return b"X" + len(word).to_bytes(4, "little") + word.encode()


def renumbered(data, first):
    """Return a pickle of protocol 2 whose memo begins at `first`: the one of Python 2 begins at 1."""
    puts = {"BINPUT": b"r", "LONG_BINPUT": b"r", "BINGET": b"j", "LONG_BINGET": b"j"}
    ops = [*pickletools.genops(data)]
    ends = [at for _, _, at in ops[1:]] + [len(data)]
    return b"".join(
        puts[op.name] + struct.pack("<I", arg + first) if op.name in puts else data[at:end]
        for (op, arg, at), end in zip(ops, ends, strict=True)
    )


def rich_state():
    """Everything that weights_only=True allows."""
    shapes = shapes_state()
    del shapes["negative"], shapes["two_blocks"]  # torch does not save one memory as two types
    base = torch.arange(100.0)
    weight = torch.nn.Parameter(torch.randn(3, 4))
    return {
        "model": collections.OrderedDict(w=weight, rows=base[10:20], turned=base.view(10, 10).t()),
        "expanded": torch.ones(1, 2).expand(5, 2),
        "tied": weight,
        "optimizer": {
            "state": {
                0: {"step": torch.tensor(1.0), "m": torch.zeros(3)},
                7: {"step": torch.tensor(2.0)},
            },
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 7]}],
        },
        "lists": [1, [torch.ones(2)], {"a": -1}],
        "tuple": (torch.ones(2), 3),
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "values": [
            None,
            True,
            2**70,
            -(2**40),
            1.5,
            "text \U0001f600 \ud800",
            b"\x00\xff",
            {1, 2},
            1 + 2j,
            bytearray(b"x"),
        ],
        "counter": collections.Counter("aab"),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "empty": [],
        "none": None,
        5: "five",
    } | {"shapes": shapes, "dtypes": dtypes_state()}


def whole():
    """What lies in the file: rows in order, views of one memory, types that need not be aligned."""
    base = torch.arange(600.0).reshape(30, 20)
    return {
        "rows": torch.arange(ROWS * 3.0).reshape(ROWS, 3),
        "nested": {
            "turned": base.t(),
            "part": base[5:16, 3:],
            "repeated": torch.arange(8.0).expand(7, 8),
        },
        "conj": torch.complex(torch.arange(33.0), -torch.arange(33.0)).reshape(11, 3).conj(),
        "half": torch.arange(21.0).reshape(7, 3).bfloat16(),
        "bytes": torch.arange(13, dtype=torch.uint8).reshape(13, 1),
        "step": 7,
    }


def tensors(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from tensors(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}{key}", value


def same(got, want):
    """Equal to the last bit and type."""
    if (
        isinstance(want, torch.Tensor)
        and not isinstance(want, torch.nn.Parameter)
        and type(got) is not type(want)
    ):
        return False
    if isinstance(want, torch.Tensor):
        return same_bits(got, want)
    if type(got) is not type(want):
        return False
    if isinstance(want, dict):
        return list(got) == list(want) and all(same(got[key], want[key]) for key in want)
    if isinstance(want, list | tuple):
        return len(got) == len(want) and all(map(same, got, want))
    return got == want or repr(got) == repr(want) == "nan"


def flat(state):
    """What DCP makes of it."""
    return flatten_state_dict(state)[0]
