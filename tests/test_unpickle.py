"""`.metadata` pickles: the real ones read, and hostile ones do nothing."""

from __future__ import annotations

import contextlib
import copyreg
import io
import json
import os
import pickle
import pickletools
import struct
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_rs._unpickle import Dict, Global, Object, unpickle, unpickle_metadata
from dcp_rs.errors import CorruptIndexError, DcpRsError, UnsafePickleError, UnsupportedError

STOCK = Path(__file__).parent / "fixtures" / "stock"
CASES = sorted(path for path in STOCK.glob("*/*/.metadata") if path.parent.name not in ("quantized", "extension"))

fired: list[str] = []


def fire(*_: object) -> str:
    """What a hostile pickle would call."""
    fired.append("fired")
    return "fired"


@pytest.fixture(autouse=True)
def nothing_executed(tmp_path, monkeypatch):
    """Each test proves that nothing ran: no call of ours, no new file, no new module."""
    monkeypatch.chdir(tmp_path)
    fired.clear()
    modules = set(sys.modules)
    yield
    assert not fired
    assert not (tmp_path / "owned").exists()
    assert not {"antigravity", "this", "test.support"} & (set(sys.modules) - modules)


class Reduce:
    def __init__(self, function, args=(), *more) -> None:
        self.made = (function, args, *more)

    def __reduce__(self):
        return self.made


def touch() -> Reduce:
    return Reduce(os.system, ("touch owned",))


def refused(data: bytes, error: type[DcpRsError] = UnsafePickleError, match: str | None = None) -> None:
    for read in (unpickle, unpickle_metadata):
        with pytest.raises(error, match=match):
            read(data)


@pytest.mark.parametrize("path", CASES, ids=lambda path: "-".join(path.parts[-3:-1]))
def test_reads_what_stock_torch_wrote(path: Path) -> None:
    said = unpickle_metadata(path.read_bytes())
    expected = json.loads((path.parent.parent / f"{path.parent.name}.json").read_text())
    if expected["error"] is None:
        assert set(said["tensors"]) == set(expected["tensors"])
        assert set(said["values"]) == set(expected["values"])
    for fqn, tensor in expected["tensors"].items():
        dtype, shape, _, memory_format, pinned, chunks = said["tensors"][fqn]
        assert (dtype, list(shape), memory_format, pinned) == (
            tensor["dtype"],
            tensor["shape"],
            0,
            False,
        )
        assert chunks
        if tensor["path"] is not None:
            assert list(said["planner_data"][fqn]) == tensor["path"]
    assert set(said["files"]) == {file.name for file in path.parent.glob("*.distcp")}
    assert all(len(item) == 5 for item in said["items"])


def test_an_extension_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"stream\.invert/1"):
        unpickle_metadata((STOCK / "torch-2.15.0" / "extension" / ".metadata").read_bytes())


def test_a_quantized_tensor_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"'w\.q' has dtype torch\.quint8"):
        unpickle_metadata((STOCK / "torch-2.15.0" / "quantized" / ".metadata").read_bytes())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_exploits_work_on_pickle_itself(protocol: int) -> None:
    """So that the tests below test something."""
    assert pickle.loads(pickle.dumps(Reduce(fire), protocol)) == "fired"
    assert fired == ["fired"]
    fired.clear()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "exploit",
    [
        touch(),
        Reduce(fire),
        Reduce(eval, ("fire()",)),
        Reduce(exec, ("open('owned', 'w')",)),
        Reduce(__import__, ("antigravity",)),
        [1, {"deep": (2, [touch()])}],
        {"state_dict_metadata": {"w": touch()}},
        Reduce(list, (), None, iter([touch()])),
        Reduce(dict, (), None, None, iter([("k", touch())])),
        OrderedDict(w=touch()),
        Reduce(io.open, ("owned", "w")),
        Reduce(copyreg._reconstructor, (Path, object, None)),
        Reduce(bytearray, (1 << 40,)),
        Reduce(type, ("Name", (), {})),
    ],
    ids=lambda exploit: type(exploit).__name__ + str(id(exploit) % 97),
)
def test_reduce(exploit: object, protocol: int) -> None:
    refused(pickle.dumps(exploit, protocol))


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def name(module: str, attribute: str) -> bytes:
    return short(module) + short(attribute) + b"\x93"


METADATA = "torch.distributed.checkpoint.metadata"
PROTO = b"\x80\x04"


@pytest.mark.parametrize(
    ("data", "asks_for"),
    [
        (b"cos\nsystem\n(S'touch owned'\ntR.", r"os\.system"),
        (PROTO + b"cos\nsystem\n" + short("touch owned") + b"\x85R.", r"os\.system"),
        (PROTO + name("os", "system") + short("touch owned") + b"\x85R.", r"os\.system"),
        # INST and OBJ
        (b"(S'touch owned'\nios\nsystem\n.", "opcode 0x53|os.system"),
        (PROTO + b"(" + short("touch owned") + b"ios\nsystem\n.", r"os\.system"),
        (PROTO + b"(cos\nsystem\n" + short("touch owned") + b"o.", r"os\.system"),
        # the extension registry
        (PROTO + b"\x82\x01.", "extension registry"),
        (PROTO + b"\x83\x01\x00.", "extension registry"),
        (PROTO + b"\x84\x01\x00\x00\x00.", "extension registry"),
        # names with dots, which pickle resolves attribute by attribute, through modules and classes that are allowed
        (
            PROTO + name("torch", "os.system") + short("touch owned") + b"\x85R.",
            r"torch\.os\.system",
        ),
        (PROTO + name(METADATA, "os.system") + short("touch owned") + b"\x85R.", r"os\.system"),
        (PROTO + name(METADATA, "Metadata.__init__.__globals__") + b".", "__globals__"),
        (PROTO + name("torch", "Size.__class__") + b".", "__class__"),
        (PROTO + b"ctorch\nserialization.os.system\n.", "serialization.os.system"),
        (PROTO + name("torch.serialization", "os") + b".", r"serialization\.os"),
        (PROTO + name("torch.serialization", "load") + b".", r"serialization\.load"),
        (PROTO + name("torch", "load") + b".", r"torch\.load"),
        (PROTO + name("collections", "namedtuple") + b".", "namedtuple"),
        (PROTO + name("pathlib", "Path.touch") + b".", "Path.touch"),
        (PROTO + name("builtins", "eval") + b".", "builtins.eval"),
        (PROTO + name("__builtin__", "eval") + b".", "__builtin__.eval"),
        (PROTO + name("antigravity", "x") + b".", "antigravity"),
        (PROTO + name("", "") + b".", "asks for"),
        # the name comes out of the memo
        (PROTO + short("os") + b"\x94h\x00" + short("system") + b"\x93.", r"os\.system"),
    ],
)
def test_globals(data: bytes, asks_for: str) -> None:
    error = CorruptIndexError if b"S'" in data and not data.startswith(b"c") else UnsafePickleError
    refused(data, error, asks_for)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        # a state for a global itself, for an allowed class, a list, a tuple; a second state
        (PROTO + name(METADATA, "Metadata") + b"}b.", "a state for"),
        (
            PROTO + name(METADATA, "Metadata") + b"N}" + short("__setstate__") + short("x") + b"s\x86b.",
            "a state for",
        ),
        (PROTO + b"]}b.", "a state for"),
        (
            PROTO + name(METADATA, "Metadata") + b")\x81}" + short("__setstate__") + name("torch", "Size") + b"sb}b.",
            "a state for",
        ),
        # calling what is no global
        (PROTO + b"K\x01)R.", "a call of what"),
        (PROTO + short("os.system") + b")R.", "a call of what"),
        (PROTO + name(METADATA, "Metadata") + b")\x81)R.", "a call of what"),
        (PROTO + name("torch", "Size") + b"]R.", "a call of what"),
        # NEWOBJ_EX, persistent ids, buffers, sets
        (PROTO + name(METADATA, "Metadata") + b")}\x92.", "opcode 0x92"),
        (PROTO + short("x") + b"Q.", "opcode 0x51"),
        (b"Px\n.", "opcode 0x50"),
        (b"\x80\x05\x97.", "opcode 0x97"),
        (PROTO + b"\x8f.", "opcode 0x8f"),
        # names that are no text
        (PROTO + b"K\x01K\x02\x93.", "not text"),
        (PROTO + b"])\x93.", "not text"),
        # memo
        (PROTO + b"Nr\xff\xff\xff\xff.", "memo index"),
        (PROTO + b"Nq\x05.", "memo index"),
        (PROTO + b"h\x00.", "."),
        (PROTO + b"j\xff\xff\xff\xff.", "."),
        (PROTO + b"\x94.", "."),
        (PROTO + b"(\x94.", "memo"),
        # lengths that lie
        (PROTO + b"\x8d" + struct.pack("<Q", 1 << 60) + b"x.", "too early"),
        (PROTO + b"\x8e" + struct.pack("<Q", (1 << 64) - 1) + b"x.", "too early"),
        (PROTO + b"\x95" + struct.pack("<Q", 1 << 62) + b"N.", "frame"),
        (PROTO + b"X\xff\xff\xff\x7fx.", "too early"),
        (PROTO + b"\x8a\xff" + b"\x7f" * 255 + b".", "64 bits"),
        # marks and the stack
        (PROTO + b".", "."),
        (PROTO + b"(.", "."),
        (PROTO + b"NN.", "left on its stack"),
        (PROTO + b"N.N", "after the end"),
        (PROTO + b"t.", "mark"),
        (PROTO + b"](NNa.", "not a list|too few"),
        (PROTO + b"}(NNNu.", "not a dict"),
        (PROTO + b"]NNs.", "not a dict"),
        (b"", "."),
        (b"\x80", "too early"),
        (b"N", "."),
    ],
)
def test_tricks(data: bytes, match: str) -> None:
    refused(data, CorruptIndexError, match)


def test_protocols_of_text_are_refused() -> None:
    for protocol in (0, 1):
        with pytest.raises(DcpRsError):
            unpickle_metadata(pickle.dumps({"a": [1, touch()]}, protocol))
    with pytest.raises(UnsupportedError, match="protocol 6"):
        unpickle(b"\x80\x06N.")


def test_an_exploit_within_a_real_file() -> None:
    """Each FQN of a real `.metadata` replaced by a call, in turn."""
    good = (STOCK / "torch-2.15.0" / "plain" / ".metadata").read_bytes()
    call = name("os", "system") + short("touch owned") + b"\x85R"
    places = [(at, arg) for op, arg, at in pickletools.genops(good) if op.name == "SHORT_BINUNICODE" and arg != ""]
    for at, arg in places[:: max(1, len(places) // 60)]:
        end = at + 2 + len(arg.encode())
        bad = good[:at] + call + good[end:]
        # A frame's length may not fit any more: an honest attacker corrects it.
        bad = bad[:2] + b"\x95" + struct.pack("<Q", len(bad) - 11) + bad[11:]
        with pytest.raises(UnsafePickleError, match=r"os\.system"):
            unpickle_metadata(bad)


def test_deep_nesting_does_not_end_the_process() -> None:
    deep = PROTO + b")" + b"\x85" * 100_000 + b"."
    value = unpickle(deep)
    assert isinstance(value, tuple)
    while value:
        (value,) = value
    as_key = PROTO + b"}" + b")" + b"\x85" * 100_000 + b"Ns."
    assert isinstance(unpickle(as_key), Dict)


def metadata_with(planner_data: bytes) -> bytes:
    fields = short("state_dict_metadata") + b"}" + short("storage_data") + b"}" + short("planner_data") + planner_data
    return PROTO + name(METADATA, "Metadata") + b")\x81}(" + fields + b"ub."


@pytest.mark.parametrize(
    "planner_data",
    [
        b")" + b"\x85" * 100,
        b"]\x94h\x00a",  # a list in itself
        b"]\x94" + b"(" + b"h\x00" * 100 + b"t" * 1,
        name("torch", "float32"),
        name("pathlib", "PosixPath") + b")R",
    ],
)
def test_planner_data_is_plain_and_bounded(planner_data: bytes) -> None:
    with pytest.raises(DcpRsError):
        unpickle_metadata(metadata_with(planner_data))


def test_planner_data_cannot_multiply() -> None:
    """Ten of ten of ten …, thirty deep, in under a kilobyte."""
    laughs = short("ha") + b"\x94"
    for level in range(30):
        laughs += b"(" + bytes([ord("h"), level]) * 10 + b"t\x94"
    # The others are in the memo, and stay on the stack until the outermost tuple takes them.
    pieces = b"(" + laughs + b"t"
    with pytest.raises(UnsupportedError, match="without measure"):
        unpickle_metadata(metadata_with(pieces))


def test_planner_data_is_kept() -> None:
    kept = {"a": ("m", 0, "w"), "other": [1, 2.5, None, True, b"x", ("t",)]}
    body = pickle.dumps(kept, 4)
    start = 11 if body[2] == 0x95 else 2
    body = body[start:-1]
    assert unpickle_metadata(metadata_with(body))["planner_data"] == kept


def test_plain_values_are_what_pickle_reads() -> None:
    value = [
        1,
        -1,
        2**40,
        -(2**63),
        255,
        65535,
        1.5,
        "é" * 300,
        b"x" * 300,
        (),
        (1,),
        (1, 2, 3, 4),
        [[]],
        None,
        True,
    ]
    for protocol in (2, 3, 4, 5):
        if protocol == 2:
            value = [item for item in value if not isinstance(item, bytes)]
        assert unpickle(pickle.dumps(value, protocol)) == value
    assert unpickle(pickle.dumps({"a": 1, 2: "b"}, 4)) == [("a", 1), (2, "b")]


def test_calls_and_names_stay_data() -> None:
    made = unpickle(PROTO + name("pathlib", "PosixPath") + short("/") + short("tmp") + b"\x86R.")
    assert isinstance(made, Object)
    assert (made.made_by, made.args) == (Global("pathlib", "PosixPath"), ("/", "tmp"))


@settings(max_examples=300, deadline=None)
@given(at=st.integers(min_value=0), byte=st.integers(0, 255), cut=st.booleans())
def test_damage_is_an_error_or_data(at: int, byte: int, cut: bool) -> None:
    good = (STOCK / "torch-2.15.0" / "nested" / ".metadata").read_bytes()
    at %= len(good)
    bad = good[:at] if cut else good[:at] + bytes([byte]) + good[at + 1 :]
    with contextlib.suppress(DcpRsError):
        unpickle_metadata(bad)
    assert not fired
