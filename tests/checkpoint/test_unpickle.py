"""`.metadata` pickles, by every way that opens a stock folder: the real ones read, and hostile ones do nothing."""

from __future__ import annotations

import contextlib
import copyreg
import io
import json
import os
import pickle
import pickletools
import re
import shutil
import struct
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

import dcp_rs
from dcp_rs import RsReader, _core
from dcp_rs.errors import CorruptIndexError, DcpRsError, UnsafePickleError, UnsupportedError
from support import state_differences
from support.pickle_opcodes import GETATTR, PROTO, SWAPPED, Reduce, global_of, short
from support.places import STOCK
from support.torch_files import renumbered

CASES = sorted(
    path
    for path in STOCK.glob("*/*/.metadata")
    if path.parent.name not in ("quantized", "extension")
)

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


def touch() -> Reduce:
    return Reduce(os.system, ("touch owned",))


def test_members_of_enums_by_name(monkeypatch):
    """Python 3.11.0 to 3.11.3, which is that of Debian 12, pickled them so. Others write the value."""
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda own, _: (getattr, (type(own), own.name))
    )
    saved = {"w": torch.arange(6.0).reshape(2, 3), "n": 7}
    dcp.save(saved, checkpoint_id="stock", no_dist=True)
    assert b"TORCH_CONTIGUOUS_FORMAT" in Path("stock/.metadata").read_bytes()
    loaded = {"w": torch.zeros(2, 3), "n": 0}
    dcp_rs.load(loaded, "stock", no_dist=True)
    assert not state_differences(saved, loaded)
    dcp_rs.convert("stock", "back", to="dcp")
    dcp.load(loaded, checkpoint_id="back", no_dist=True)
    assert not state_differences(saved, loaded)


def folder_with(data: bytes) -> str:
    """A folder that is a stock checkpoint by this `.metadata` alone."""
    folder = Path("stock")
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_bytes(data)
    return str(folder)


def opened(data: bytes) -> _core.Index:
    return _core.Index.open(folder_with(data), None, allow_external=False)


def refused_at(
    folder: str | Path,
    error: type[DcpRsError] = UnsafePickleError,
    match: str | None = None,
    named: str = ".metadata",
) -> None:
    """By everything that opens a folder; the message names the file."""
    for read in (
        lambda: _core.Index.open(str(folder), None, allow_external=False),
        lambda: _core.Index.from_data(str(folder)),
        lambda: dcp_rs.open(folder),
        lambda: RsReader(folder).read_metadata(),
        lambda: dcp_rs.index(folder),
        lambda: dcp_rs.load({"float32": torch.zeros(3)}, folder, no_dist=True),
        lambda: dcp_rs.convert(folder, "converted"),
    ):
        with pytest.raises(error, match=match) as caught:
            read()
        assert named in str(caught.value)
    try:
        report = dcp_rs.verify(folder)
    except DcpRsError:
        return
    assert not report
    assert report.entries is None


def refused(
    data: bytes, error: type[DcpRsError] = UnsafePickleError, match: str | None = None
) -> None:
    refused_at(folder_with(data), error, match)


@pytest.mark.parametrize("path", CASES, ids=lambda path: "-".join(path.parts[-3:-1]))
def test_reads_what_stock_torch_wrote(path: Path) -> None:
    expected = json.loads((path.parent.parent / f"{path.parent.name}.json").read_text())
    if expected["error"] is not None:
        refused_at(path.parent, UnsupportedError, re.escape(expected["error"]), named=".distcp")
        return
    index = _core.Index.open(str(path.parent), None, allow_external=False)
    assert set(index.names()) == set(expected["tensors"]) | set(expected["values"])
    for fqn in expected["values"]:
        at = index.find(fqn)
        assert index.tensor(at).is_bytes
        assert len(index.chunks(at)) == 1
    for fqn, tensor in expected["tensors"].items():
        at = index.find(fqn)
        entry = index.tensor(at)
        assert (entry.name, entry.is_bytes) == (fqn, False)
        assert (entry.dtype, entry.shape) == (tensor["dtype"], tuple(tensor["shape"]))
        assert entry.flags & ~1 == 0  # contiguous, not pinned
        assert entry.chunk_count
        if tensor["path"] is not None:
            assert list(index.planner_path(at)) == tensor["path"]
    assert {file.name for file in index.files()} == {
        file.name for file in path.parent.glob("*.distcp")
    }
    for at in range(index.tensor_count):
        assert len(index.chunks(at)) == index.tensor(at).chunk_count


def test_an_extension_is_named() -> None:
    refused_at(STOCK / "torch-2.15.0" / "extension", UnsupportedError, r"stream\.invert/1")


def test_a_quantized_tensor_is_named() -> None:
    refused_at(
        STOCK / "torch-2.15.0" / "quantized", UnsupportedError, r"\"w\.q\" has dtype torch\.quint8"
    )


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
    ids=lambda exploit: type(exploit).__name__,
)
def test_reduce(exploit: object, protocol: int) -> None:
    refused(pickle.dumps(exploit, protocol), DcpRsError)


METADATA = "torch.distributed.checkpoint.metadata"


@pytest.mark.parametrize(
    ("data", "asks_for"),
    [
        (b"cos\nsystem\n(S'touch owned'\ntR.", "opcode 0x53"),
        (PROTO + b"cos\nsystem\n" + short("touch owned") + b"\x85R.", r"os\.system"),
        (PROTO + global_of("os", "system") + short("touch owned") + b"\x85R.", r"os\.system"),
        # INST and OBJ
        (b"(S'touch owned'\nios\nsystem\n.", "opcode 0x53"),
        (PROTO + b"(" + short("touch owned") + b"ios\nsystem\n.", r"os\.system"),
        (PROTO + b"(cos\nsystem\n" + short("touch owned") + b"o.", "opcode 0x6f"),
        # the extension registry
        (PROTO + b"\x82\x01.", "extension registry"),
        (PROTO + b"\x83\x01\x00.", "extension registry"),
        (PROTO + b"\x84\x01\x00\x00\x00.", "extension registry"),
        # names with dots, which pickle resolves attribute by attribute, through modules and classes
        # that are allowed
        (
            PROTO + global_of("torch", "os.system") + short("touch owned") + b"\x85R.",
            r"torch\.os\.system",
        ),
        (
            PROTO + global_of(METADATA, "os.system") + short("touch owned") + b"\x85R.",
            r"os\.system",
        ),
        (PROTO + global_of(METADATA, "Metadata.__init__.__globals__") + b".", "__globals__"),
        (PROTO + global_of("torch", "Size.__class__") + b".", "__class__"),
        (PROTO + b"ctorch\nserialization.os.system\n.", "serialization.os.system"),
        (PROTO + global_of("torch.serialization", "os") + b".", r"serialization\.os"),
        (PROTO + global_of("torch.serialization", "load") + b".", r"serialization\.load"),
        (PROTO + global_of("torch", "load") + b".", r"torch\.load"),
        (PROTO + global_of("collections", "namedtuple") + b".", "namedtuple"),
        (PROTO + global_of("pathlib", "Path.touch") + b".", "Path.touch"),
        (PROTO + global_of("builtins", "eval") + b".", "builtins.eval"),
        (PROTO + global_of("__builtin__", "eval") + b".", "__builtin__.eval"),
        (PROTO + global_of("antigravity", "x") + b".", "antigravity"),
        (PROTO + global_of("", "") + b".", "asks for"),
        (PROTO + GETATTR + short("touch owned") + b"\x85R.", r"builtins\.getattr"),
        (
            PROTO + global_of("subprocess", "Popen") + short("touch owned") + b"\x85\x81.",
            r"subprocess\.Popen",
        ),
        (
            PROTO + global_of("subprocess", "Popen") + short("touch owned") + b"\x85}\x92.",
            r"subprocess\.Popen",
        ),
        (PROTO + SWAPPED + short("touch owned") + b"\x85R.", r"os\.system"),
        # the name comes out of the memo
        (PROTO + short("os") + b"\x940h\x00" + short("system") + b"\x93.", r"os\.system"),
    ],
)
def test_globals(data: bytes, asks_for: str) -> None:
    error = CorruptIndexError if "opcode" in asks_for else UnsafePickleError
    refused(data, error, asks_for)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        # a state for a global itself, for a class, a list
        (PROTO + global_of(METADATA, "Metadata") + b"}b.", "a state for"),
        (
            PROTO
            + global_of(METADATA, "Metadata")
            + b"N}"
            + short("__setstate__")
            + short("x")
            + b"s\x86b.",
            "a state for",
        ),
        (PROTO + b"]}b.", "a state for"),
        # calling what is no global
        (PROTO + b"K\x01)R.", "a call of what"),
        (PROTO + short("os.system") + b")R.", "a call of what"),
        (PROTO + global_of("torch", "Size") + b"]R.", "a call of what"),
        # persistent ids, buffers
        (PROTO + short("x") + b"Q.", "opcode 0x51"),
        (b"Px\n.", "opcode 0x50"),
        (b"\x80\x05\x97.", "opcode 0x97"),
        (PROTO + b"\x8f.", "not an instance"),
        # names that are no text
        (PROTO + b"K\x01K\x02\x93.", "not text"),
        (PROTO + b"])\x93.", "not text"),
        # memo
        (PROTO + b"Nr\xff\xff\xff\xff.", "memo index"),
        (PROTO + b"Nq\x08.", "memo index"),
        (PROTO + b"h\x00.", "never set"),
        (PROTO + b"j\xff\xff\xff\xff.", "never set"),
        (PROTO + b"\x94.", "too few values"),
        (PROTO + b"(\x94.", "too few values"),
        # lengths that lie
        (PROTO + b"\x8d" + struct.pack("<Q", 1 << 60) + b"x.", "too early"),
        (PROTO + b"\x8e" + struct.pack("<Q", (1 << 64) - 1) + b"x.", "too early"),
        (PROTO + b"\x95" + struct.pack("<Q", 1 << 62) + b"N.", "frame"),
        (PROTO + b"X\xff\xff\xff\x7fx.", "too early"),
        (PROTO + b"\x8a\xff" + b"\x7f" * 255 + b".", "not an instance"),
        # marks and the stack
        (PROTO + b".", "too few values"),
        (PROTO + b"(.", "too few values"),
        (PROTO + b"NN.", "left on the stack"),
        (PROTO + b"N.N", "after the end"),
        (PROTO + b"t.", "mark"),
        (PROTO + b"](NNa.", "not a container|not a list"),
        (PROTO + b"}(NNNu.", "not a dict"),
        (PROTO + b"]NNs.", "not a dict"),
        (b"", "too early"),
        (b"\x80", "too early"),
        (b"N", "too early"),
    ],
)
def test_tricks(data: bytes, match: str) -> None:
    refused(data, CorruptIndexError, match)


def test_protocols_of_text_are_refused() -> None:
    for protocol in (0, 1):
        refused(pickle.dumps({"a": [1, touch()]}, protocol), DcpRsError)
    refused(b"\x80\x06N.", UnsupportedError, "protocol 6")


def test_an_exploit_within_a_real_file() -> None:
    """Each text of a real `.metadata` replaced by a call, in turn: refused, or not used."""
    folder = shutil.copytree(STOCK / "torch-2.15.0" / "plain", Path("plain"))
    good = (folder / ".metadata").read_bytes()
    assert _core.Index.from_data(str(folder)).tensor_count
    call = global_of("os", "system") + short("touch owned") + b"\x85R"
    places = [
        (at, arg)
        for op, arg, at in pickletools.genops(good)
        if op.name == "SHORT_BINUNICODE" and arg != ""
    ]
    named: list[str] = []
    for at, arg in places:
        end = at + 2 + len(arg.encode())
        bad = good[:at] + call + good[end:]
        # A frame's length may not fit any more: an honest attacker corrects it.
        bad = bad[:2] + b"\x95" + struct.pack("<Q", len(bad) - 11) + bad[11:]
        (folder / ".metadata").write_bytes(bad)
        try:
            assert dcp_rs.open(folder).source == "dcp"
        except UnsafePickleError as error:
            named.append(str(error))
        except CorruptIndexError:
            pass
    # One is refused for the entry whose state has no text where a field's name stood.
    assert sum("os.system" in error for error in named) in (len(named), len(named) - 1)
    assert len(named) > len(places) // 4


def metadata_with(planner_data: bytes, more: bytes = b"") -> bytes:
    fields = (
        short("state_dict_metadata")
        + b"}"
        + short("storage_data")
        + b"}"
        + short("planner_data")
        + planner_data
    )
    return PROTO + global_of(METADATA, "Metadata") + b")\x81}(" + fields + more + b"ub."


def test_deep_nesting_does_not_end_the_process() -> None:
    deep = b")" + b"\x85" * 100_000
    refused(PROTO + deep + b".", CorruptIndexError, "not an instance of Metadata")
    refused(PROTO + b"}" + deep + b"Ns.", CorruptIndexError, "not an instance of Metadata")
    assert opened(metadata_with(deep)).planner_root() == {"dcp_rs.left_out": ["all of it"]}
    keys = {"dcp_rs.left_out": ["a key of another type"]}
    assert opened(metadata_with(b"}" + deep + b"Ns")).planner_root() == keys
    # What nobody asks for is read, too, and let be.
    assert opened(metadata_with(b"N", short("storage_meta") + deep)).tensor_count == 0


@pytest.mark.parametrize(
    "planner_data",
    [
        b")" + b"\x85" * 100,
        b"]\x94h\x00a",  # a list in itself
        global_of("torch", "float32"),
        global_of("pathlib", "PosixPath") + b")R",
        global_of("os", "system") + short("touch owned") + b"\x85R",
        b"\x8f(K\x01\x90",
        b"\x8a\x09" + b"\x01" * 9,
    ],
)
def test_planner_data_other_than_plain_values_is_skipped(planner_data: bytes) -> None:
    left_out = {"dcp_rs.left_out": ["all of it"]}
    assert opened(metadata_with(planner_data)).planner_root() == left_out
    beside = b"}(" + short("odd") + planner_data + short("plain") + b"K\x01u"
    if b"\x94" not in planner_data:
        left_out = {"dcp_rs.left_out": ["odd"]}
        assert opened(metadata_with(beside)).planner_root() == {"plain": 1, **left_out}


def test_one_value_too_many_is_refused() -> None:
    many = b"]\x94" + b"(" + b"h\x00" * 100 + b"t"
    refused(metadata_with(many), CorruptIndexError, "not a dict")


@pytest.mark.slow
def test_planner_data_cannot_multiply() -> None:
    """Ten of ten of ten …, thirty deep, in under a kilobyte."""
    laughs = short("ha") + b"\x94"
    for level in range(30):
        laughs += b"(" + bytes([ord("h"), level]) * 10 + b"t\x94"
    # The others are in the memo, and stay on the stack until the outermost tuple takes them.
    pieces = b"(" + laughs + b"t"
    refused(metadata_with(pieces), UnsupportedError, "without bound")


def test_a_list_of_chunks_cannot_multiply() -> None:
    """One chunk 50,000 times in a list, and that in 1,000 tensors: 150 kB took gigabytes."""
    new = b")\x81}("
    chunk = (
        global_of(METADATA, "ChunkStorageMetadata")
        + new
        + short("offsets")
        + b"K\x00\x85"
        + short("sizes")
        + b"K\x01\x85ub"
    )
    layout = global_of("torch.serialization", "_get_layout") + short("torch.strided") + b"\x85R"
    order = global_of(METADATA, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R"
    properties = (
        global_of(METADATA, "TensorProperties")
        + b")\x81("
        + global_of("torch", "float32")
        + layout
        + b"\x89"
        + order
        + b"\x89tb"
    )
    kept = b"(" + chunk + b"\x94" + b"](" + b"h\x00" * 50_000 + b"e\x94" + properties + b"\x94t"
    tensor = global_of(METADATA, "TensorStorageMetadata") + new
    tensor += (
        short("properties") + b"h\x02" + short("size") + b"K\x01\x85" + short("chunks") + b"h\x01ub"
    )
    tensors = b"".join(short(str(number)) + tensor for number in range(1000))
    fields = short("storage_meta") + kept + short("state_dict_metadata") + b"}(" + tensors + b"u"
    fields += short("storage_data") + b"}" + short("planner_data") + b"}"
    with pytest.raises(UnsupportedError, match="without bound"):
        opened(PROTO + global_of(METADATA, "Metadata") + b")\x81}(" + fields + b"ub.")


def test_a_pickle_cannot_make_much_of_little() -> None:
    """Each byte made a list of its own: a file of 4 MB took 3.9 GB."""
    lists = b"(" + b"]" * 2_500_000 + b"t"
    with pytest.raises(UnsupportedError, match="makes more than 8000"):
        opened(metadata_with(lists))
    many = b"\x80\x02}" + b"X\x01\x00\x00\x00a" + lists + b"s."
    with zipfile.ZipFile("x.pt", "w") as file:
        file.writestr("archive/data.pkl", many)
    with pytest.raises(UnsupportedError, match="makes more than 8000"):
        dcp_rs.open("x.pt")


def test_entries_of_a_file_of_torch_save_cannot_multiply() -> None:
    """A dict of 1,000 entries 1,000 times, and that 1,000 times, in 20 kB."""
    state: dict[str, object] = {str(number): number for number in range(1000)}
    for _ in range(2):
        state = {str(number): state for number in range(1000)}
    torch.save(state, "x.pt")
    with pytest.raises(UnsupportedError, match="without bound"):
        dcp_rs.open("x.pt")


def planner_data_of(value: object, protocol: int) -> object:
    """What is left of a value that a pickler wrote into a `.metadata`."""
    body = pickle.dumps(value, protocol)
    start = 11 if body[2] == 0x95 else 2
    return opened(metadata_with(body[start:-1])).planner_root()


def test_planner_data_is_kept() -> None:
    kept = {"a": ("m", 0, "w"), "other": [1, 2.5, None, True, b"x", ("t",)]}
    assert planner_data_of(kept, 4) == kept
    paths: dict[str, tuple[object, ...]] = {"a": ("m", 0, "w"), "b": ("m", "b")}
    assert planner_data_of(paths, 4) == paths
    for no_path in ((), (b"m",), (None, "m")):
        assert planner_data_of(paths | {"c": no_path}, 4) == paths | {"c": no_path}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_what_pickle_reads(protocol: int) -> None:
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
    if protocol == 2:
        value = [item for item in value if not isinstance(item, bytes)]
    read = planner_data_of(value, protocol)
    assert read == value
    assert list(map(type, read)) == list(map(type, value))
    assert planner_data_of({"a": 1, 2: "b"}, protocol) == {"a": 1, 2: "b"}


def test_calls_and_names_stay_data() -> None:
    """What a `.metadata` calls is taken note of and not made."""
    made = global_of("pathlib", "PosixPath") + short("/") + short("tmp") + b"\x86R"
    assert opened(metadata_with(b"N", short("storage_meta") + made)).tensor_count == 0
    # A call whose arguments the class would not take.
    assert (
        opened(
            metadata_with(b"N", short("storage_meta") + global_of("torch", "Size") + b"K\x01\x85R")
        ).tensor_count
        == 0
    )
    refused(PROTO + made + b".", UnsafePickleError, "pathlib.PosixPath")


@settings(max_examples=300, deadline=None)
@given(at=st.integers(min_value=0), byte=st.integers(0, 255), cut=st.booleans())
def test_damage_is_an_error_or_data(at: int, byte: int, cut: bool) -> None:
    nested = STOCK / "torch-2.15.0" / "nested"
    good = (nested / ".metadata").read_bytes()
    at %= len(good)
    bad = good[:at] if cut else good[:at] + bytes([byte]) + good[at + 1 :]
    folder = Path("nested")
    if not folder.exists():
        shutil.copytree(nested, folder)
    (folder / ".metadata").write_bytes(bad)
    with contextlib.suppress(DcpRsError):
        assert _core.Index.from_data(str(folder)).names() is not None
    assert not fired


class Plan:
    """A class of a trainer, as `all_local_plans` of Megatron-LM holds them."""

    def __init__(self, *items: object) -> None:
        self.items = items


class Properties(torch.distributed.checkpoint.metadata.TensorProperties):
    """A class of a trainer's own with the fields of torch's."""


class Place:
    """The location of stored data, with the fields of torch's class, as OLMo-core has it."""

    transform_descriptors = None

    def __init__(self, info: object) -> None:
        self.__dict__.update(vars(info))


class Trainer(torch.distributed.checkpoint.metadata.Metadata):
    """As `MCoreMetadata` of Megatron-LM."""


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_classes_are_known_by_their_fields(protocol: int, tmp_path: Path) -> None:
    state = {"m": {"w": torch.arange(6.0).reshape(2, 3)}, "n": torch.ones(3), "value": {"k": 1}}
    dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    old = dcp.FileSystemReader(tmp_path / "ckpt").read_metadata()
    new = Trainer(
        old.state_dict_metadata,
        {**old.planner_data, "ranks": {1, 2}, "seed": 2**90},
        {index: Place(info) for index, info in old.storage_data.items()},
        storage_meta=old.storage_meta,
    )
    for entry in new.state_dict_metadata.values():
        if hasattr(entry, "properties"):
            entry.properties.__class__ = Properties
    new.all_local_plans = [Plan(*old.storage_data, fire), {Plan: {1, 2, frozenset({3})}}]
    new.mcore_data = {"sharded": (1 << 80, None)}
    (tmp_path / "ckpt" / ".metadata").write_bytes(pickle.dumps(new, protocol))
    got = dcp_rs.open(tmp_path / "ckpt").state_dict()
    want = {"m": {"w": torch.zeros(2, 3)}, "n": torch.zeros(3), "value": {"k": None}}
    dcp.load(want, checkpoint_id=tmp_path / "ckpt", no_dist=True)  # it unpickles everything
    assert not state_differences(got, want)
    assert RsReader(tmp_path / "ckpt").read_metadata().state_dict_metadata.keys() == (
        new.state_dict_metadata.keys()
    )


def test_memo_may_begin_at_any_number(tmp_path: Path) -> None:
    """The pickler of Python 2 begins at 1."""
    plain = STOCK / "torch-2.8.0" / "plain"  # every torch can unpickle it
    want = _core.Index.from_data(str(plain)).names()
    value = pickle.dumps(pickle.loads((plain / ".metadata").read_bytes()), 2)
    shutil.copytree(plain, tmp_path / "ckpt")
    for first in (1, 2, 100):
        (tmp_path / "ckpt" / ".metadata").write_bytes(renumbered(value, first))
        assert _core.Index.from_data(str(tmp_path / "ckpt")).names() == want
    (tmp_path / "ckpt" / ".metadata").write_bytes(renumbered(value, 1 << 31))
    with pytest.raises(CorruptIndexError, match="memo index"):
        _core.Index.from_data(str(tmp_path / "ckpt"))
