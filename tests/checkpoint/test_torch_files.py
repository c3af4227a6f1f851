"""Files of torch.save as checkpoints: what they hold comes back as torch.load gives it, and nothing in them is trusted."""

import collections
import io
import json
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import warnings
import zipfile
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader
from dcp_rs.cli import main
from dcp_rs.errors import (
    CheckpointNotFoundError,
    CorruptDataError,
    DcpRsError,
    PlanError,
    UnsafePickleError,
    UnsupportedError,
)
from dcp_rs.testing.states import ALL_DTYPES, blank, dtypes_state, nested_state, shapes_state
from support import assert_state_equal, same_bits


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
            "state": {0: {"step": torch.tensor(1.0), "m": torch.zeros(3)}, 7: {"step": torch.tensor(2.0)}},
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


def state_for(*, zipped):
    """The same, without what torch cannot read from its old format: sparse tensors, and its younger dtypes."""
    state = rich_state()
    if not zipped:
        del state["sparse"], state["quantized"]
        state["dtypes"] = {
            name: state["dtypes"][name] for name in ("float32", "bfloat16", "bool", "complex64", "int16")
        }
    return state


def same(got, want):
    """Equal to the last bit and type."""
    if isinstance(want, torch.Tensor) and not isinstance(want, torch.nn.Parameter) and type(got) is not type(want):
        return False
    if isinstance(want, torch.Tensor):
        if want.is_quantized:
            return torch.equal(got.int_repr(), want.int_repr())
        if want.layout != torch.strided:
            return torch.equal(got.to_dense(), want.to_dense())
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


@pytest.mark.parametrize("name", ["x.pth", "x.pt", "x.bin", "x.ckpt", "checkpoint", "odd.safetensors"])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_what_it_holds_comes_back(tmp_path, name, zipped):
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
def test_it_loads_into_what_is_there(tmp_path, zipped):
    path = tmp_path / "x.pth"
    state = nested_state() | {"shapes": rich_state()["shapes"]}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    for load in (
        lambda into: dcp_rs.load(into, path),
        lambda into: dcp.load(into, storage_reader=RsReader(path), no_dist=True),
        lambda into: dcp.load(into, storage_reader=RsReader(path), planner=RsLoadPlanner(), no_dist=True),
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
    torch.save({"w": weight, "frozen": frozen, "tensor": torch.ones(3, requires_grad=True), "list": [weight, 1]}, path)
    with dcp_rs.open(path) as opened:
        for nested in (opened.state_dict(), {**opened, "list": [opened["list.0"], 1]}):
            read = {"w": nested["w"], "frozen": nested["frozen"], "tensor": nested["tensor"], "0": nested["list"][0]}
            assert {type(value) for value in read.values()} == {torch.Tensor}
            assert not any(value.requires_grad for value in read.values())
        assert_state_equal(opened["w"], weight.detach())
    with dcp_rs.open(path, device="meta") as skeleton:
        assert {name for name in ("w", "frozen", "tensor", "list.0") if skeleton[name].requires_grad} == {
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
    module.w, module.frozen = (torch.nn.Parameter(torch.zeros_like(value)) for value in (weight, frozen))
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
        with pytest.raises(UnsafePickleError, match=r"'hyper_parameters.model'.*test_torch_files\.Forbidden"):
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
def test_what_is_no_state_dict(tmp_path, content, error, why):
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


# --- several files -----------------------------------------------------------------------------------


def sharded(folder):
    """A model in two files, as transformers saved them."""
    folder.mkdir()
    first, second = {"a": torch.ones(3), "b": torch.zeros(2)}, {"c": torch.arange(4.0), "d": torch.ones(1)}
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    for name, state in zip(names, (first, second), strict=True):
        torch.save(state, folder / name)
    weight_map = dict.fromkeys(first, names[0]) | dict.fromkeys(second, names[1])
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    torch.save({"args": 1}, folder / "training_args.bin")
    return index, first | second


@pytest.mark.parametrize("way", ["folder", "index", "without an index"])
def test_files_with_an_index_are_one_checkpoint(tmp_path, way):
    index, want = sharded(tmp_path / "hf")
    if way == "without an index":
        index.unlink()
    path = index if way == "index" else index.parent
    with dcp_rs.open(path) as opened:
        assert opened.source == "torch"
        assert_state_equal({name: opened[name] for name in opened}, want)
    got = blank(want)
    dcp_rs.load(got, path)
    assert_state_equal(got, want)
    assert dcp_rs.verify(path)
    dcp_rs.convert(path, tmp_path / "out")
    assert_state_equal(dcp_rs.open(tmp_path / "out").state_dict(), want)


def test_files_that_do_not_make_one_checkpoint(tmp_path):
    index, _ = sharded(tmp_path / "hf")
    torch.save({"c": torch.arange(4.0)}, tmp_path / "hf" / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(CorruptDataError, match="names the tensor for this file, which does not hold it") as raised:
        dcp_rs.open(index)
    assert raised.value.tensor == "d"
    index.unlink()
    torch.save({"a": torch.ones(3)}, tmp_path / "hf" / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(PlanError, match="two entries flatten to this name"):
        dcp_rs.open(tmp_path / "hf")
    (tmp_path / "hf" / "pytorch_model-00001-of-00002.bin").unlink()
    with pytest.raises(CorruptDataError, match="it is missing: 1 of 2"):
        dcp_rs.open(tmp_path / "hf")
    (tmp_path / "pth").mkdir()
    torch.save({}, tmp_path / "pth" / "checkpoint.pth")
    with pytest.raises(CheckpointNotFoundError, match="each opens by itself"):
        dcp_rs.open(tmp_path / "pth")


# --- checked, indexed, converted ---------------------------------------------------------------------


def test_damage_is_found_by_the_file_s_own_checksums(tmp_path):
    path = tmp_path / "x.pth"
    torch.save({"a": torch.ones(1000), "b": torch.zeros(1000), "value": 3}, path)
    report = dcp_rs.verify(path)
    assert report.ok
    assert (report.bytes_verified, report.bytes_without_digest) == (8000, 0)
    data = bytearray(path.read_bytes())
    where = data.index(torch.ones(100).numpy().tobytes()) + 40
    data[where] ^= 1
    path.write_bytes(data)
    report = dcp_rs.verify(path)
    (problem,) = report.problems
    assert (problem.file, problem.tensor) == (str(path), "a")
    assert problem.expected.startswith("a record of 4000 bytes with CRC-32 ")
    # What decides all else is looked at by whoever opens the file.
    data[data.index(b"value")] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptDataError, match="its pickle has CRC-32"):
        dcp_rs.open(path)


def test_files_without_checksums_are_said_to_have_none(tmp_path):
    state = {"a": torch.ones(1000), "value": 3}
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        torch.save(state, tmp_path / "bare.pth")
    finally:
        torch.serialization.set_crc32_options(before)
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("bare.pth", "old.pth"):
        report = dcp_rs.verify(tmp_path / name)
        assert report.ok
        assert report.bytes_verified == 0
        assert report.bytes_without_digest > 4000
        assert dcp_rs.open(tmp_path / name)["value"] == 3


@pytest.mark.parametrize("digests", [False, True])
def test_an_index_beside_it(tmp_path, digests):
    path = tmp_path / "x.pth"
    state = rich_state()
    torch.save(state, path)
    made = dcp_rs.index(path, digests=digests)
    assert made == tmp_path / "index.dcprs"
    want = flat(torch.load(path, weights_only=True))
    with dcp_rs.open(tmp_path, verify=digests) as opened:
        assert opened.source == "torch"
        assert all(same(opened[fqn], value) for fqn, value in want.items())
    assert dcp_rs.verify(tmp_path)
    torch.save({"other": torch.ones(3)}, path)
    with pytest.raises(CorruptDataError, match=r"x\.pth"):
        dcp_rs.open(tmp_path)["none"]


@pytest.mark.parametrize("to", ["dcp-rs", "dcp", "torch"])
def test_it_converts(tmp_path, to):
    path, out = tmp_path / "x.pth", tmp_path / "out"
    torch.save(rich_state(), path)
    want = flat(torch.load(path, weights_only=True))
    dcp_rs.convert(path, out, to=to, skip_unsupported=to == "dcp")  # keys that are no text, say, become text there
    with dcp_rs.open(out) as opened:
        assert set(opened) == set(want)
        for fqn, value in want.items():
            assert same(opened[fqn], value), fqn
    assert dcp_rs.verify(out)


def test_the_command_line_needs_no_torch(tmp_path):
    path = tmp_path / "x.pth"
    torch.save(nested_state(), path)
    script = (
        "import sys\nfrom dcp_rs.cli import main\n"
        "for command in (['ls'], ['inspect'], ['inspect', 'step'], ['verify'], ['index']):\n"
        "    try: main([command[0], sys.argv[1], *command[1:]])\n"
        "    except SystemExit as ended: assert ended.code == 0, command\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], check=True, capture_output=True, text=True, timeout=60
    )
    assert "model.embedding.weight" in done.stdout
    assert "a file of torch.save" in done.stdout


def test_tied_tensors_are_said_to_be(tmp_path, capfd):
    weight = torch.ones(4, 4)
    torch.save({"head": weight, "embed": weight, "part": weight[:2], "other": torch.ones(2)}, tmp_path / "x.pth")
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path / "x.pth"), "head"])
    assert "shares its bytes with  embed, part" in " ".join(capfd.readouterr().out.split(" ")).replace("\n", " ")
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path / "x.pth"), "other"])
    assert "shares" not in capfd.readouterr().out


# --- nothing is trusted ------------------------------------------------------------------------------

PICKLE = b"\x80\x02}q\x00X\x01\x00\x00\x00wq\x01%s."
TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
    b"X\x03\x00\x00\x00cpuK%ctQK%c(K%ct(K%ct\x89ccollections\nOrderedDict\n)RtR"
)


def archive(pickle, *, storage=bytes(16), method=zipfile.ZIP_STORED, more=()):
    """A file of torch.save with this pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        file.writestr("x/data.pkl", pickle)
        file.writestr("x/byteorder", b"little")
        file.writestr("x/data/0", storage)
        for name, data in more:
            file.writestr(name, data)
    return buffer.getvalue()


def one(value):
    """A state dict of one entry."""
    return b"\x80\x02}X\x01\x00\x00\x00w" + value + b"s."


def tensor(count=4, offset=0, size=4, stride=1):
    return TENSOR % (bytes([count]), bytes([offset]), bytes([size]), bytes([stride]))


def nested(depth):
    return one(b"}X\x01\x00\x00\x00w" * depth + b"N" + b"s" * depth)


def laughing(levels):
    """Dicts in dicts, each used twice."""
    key = [b"X\x01\x00\x00\x00a", b"X\x01\x00\x00\x00b"]
    inner = b"}" + key[0] + b"Nsq\x00"
    for level in range(levels):
        inner = b"}" + key[0] + inner + b"s" + key[1] + b"h" + bytes([level]) + b"s" + b"q" + bytes([level + 1])
    return b"\x80\x02" + inner + b"."


LIES = {
    "a deflated archive": (archive(one(tensor()), method=zipfile.ZIP_DEFLATED), UnsupportedError, "is compressed"),
    "a record that is not there": (
        archive(one(tensor().replace(b"\x000X", b"\x001X"))),
        CorruptDataError,
        "no record data/1",
    ),
    "a storage that is too short": (archive(one(tensor(count=5))), CorruptDataError, "16 bytes, expected 20"),
    "a tensor beyond its storage": (archive(one(tensor(size=5))), CorruptDataError, "leads out of its storage"),
    "strides beyond its storage": (archive(one(tensor(stride=200))), CorruptDataError, "leads out of its storage"),
    "an offset beyond its storage": (archive(one(tensor(offset=200))), CorruptDataError, "leads out of its storage"),
    "nesting": (archive(nested(100_000)), UnsupportedError, "nested more than 1000 deep"),
    "itself": (archive(b"\x80\x02}q\x00X\x01\x00\x00\x00wh\x00s."), UnsupportedError, "without measure|nested more"),
    "many laughs": (archive(laughing(60)), UnsupportedError, "repeats itself without measure"),
    "no pickle": (archive(b""), CorruptDataError, "ends too early"),
    "an opcode": (archive(b"\x80\x02P1\n."), CorruptDataError, "opcode 0x50 is not allowed"),
    "a record twice": (archive(one(b"N"), more=[("x/data/0", b"")]), CorruptDataError, "is there twice"),
    "an empty zip archive": (b"PK\x05\x06" + bytes(18), CorruptDataError, "it begins as none does"),
    "another zip archive": (archive(b"").replace(b"data.pkl", b"blob.bin"), CorruptDataError, "without data.pkl"),
    "nothing": (b"", CorruptDataError, "it is empty"),
    "text": (b"junk", CorruptDataError, "it begins as none does"),
    "a tar archive": (bytes(257) + b"ustar" + bytes(300), UnsupportedError, "tar archive"),
    "a big-endian file": (archive(one(b"N")).replace(b"little", b"bigger"), UnsupportedError, "byte order"),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("lie", LIES)
def test_lies_are_typed_errors(tmp_path, lie):
    data, error, why = LIES[lie]
    path = tmp_path / "x.pth"
    path.write_bytes(data)
    with pytest.raises(error, match=why) as raised:
        dcp_rs.open(path)
    assert "x.pth" in str(raised.value)


def test_records_that_share_bytes(tmp_path):
    torch.save({"a": torch.ones(64), "b": torch.zeros(64)}, tmp_path / "x.pth")
    data = (tmp_path / "x.pth").read_bytes()
    # In the directory the second storage begins where the first does; its name is made the first's too where that is compared.
    entries = [i for i in range(len(data)) if data[i : i + 4] == b"PK\x01\x02" and b"/data/" in data[i + 46 : i + 60]]
    first, second = (struct.unpack("<I", data[i + 42 : i + 46])[0] for i in entries[:2])
    forged = bytearray(data)
    forged[first + 18 : first + 26] = struct.pack("<II", second - first + 128, second - first + 128)
    at = entries[0]
    forged[at + 20 : at + 28] = struct.pack("<II", second - first + 128, second - first + 128)
    (tmp_path / "y.pth").write_bytes(forged)
    with pytest.raises(CorruptDataError, match="share bytes"):
        dcp_rs.open(tmp_path / "y.pth")


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_every_byte_that_is_changed_or_cut_off(tmp_path, zipped):
    """A typed error, or tensors within the file."""
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(4.0), "n": {"x": [1, torch.ones(2)]}}, buffer, _use_new_zipfile_serialization=zipped)
    good = buffer.getvalue()
    path = tmp_path / "x.pth"
    for at in range(0, len(good), 3):
        bad = bytearray(good)
        bad[at] ^= 0x81
        for data in (bytes(bad), good[:at]):
            path.write_bytes(data)
            try:
                with dcp_rs.open(path) as opened, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    for name in opened:
                        opened[name]
            except DcpRsError:
                continue


# --- against torch -----------------------------------------------------------------------------------

_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.complex_numbers(allow_nan=False),
    st.sets(st.integers(0, 5), max_size=3),
    st.sampled_from([torch.Size([1, 2]), torch.float16, torch.device("cpu"), collections.Counter("aab")]),
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


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    (data,) = index.read_bytes([0], io="buffered", threads=1, verify=False, max_inflight_bytes=1 << 20)
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        assert file.testzip() is None
        assert zlib.crc32(torch.arange(3.0).numpy().tobytes()) == file.getinfo("archive/data/0").CRC
