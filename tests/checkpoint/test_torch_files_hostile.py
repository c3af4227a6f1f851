"""Nothing in a file of torch.save is trusted."""

import io
import struct
import warnings
import zipfile

import pytest
import torch

import dcp_rs
from dcp_rs.errors import CorruptDataError, DcpRsError, UnsupportedError
from support import torch_files

TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
    b"X\x03\x00\x00\x00cpuK%ctQK%c(K%ct(K%ct\x89ccollections\nOrderedDict\n)RtR"
)


def archive(pickle, *, more=(), **options):
    """A file of torch.save with this pickle, and a storage of 16 bytes."""
    return torch_files.archive(pickle, [("data/0", bytes(16)), *more], **options)


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
        inner = (
            b"}"
            + key[0]
            + inner
            + b"s"
            + key[1]
            + b"h"
            + bytes([level])
            + b"s"
            + b"q"
            + bytes([level + 1])
        )
    return b"\x80\x02" + inner + b"."


LIES = {
    "a deflated archive": (
        archive(one(tensor()), method=zipfile.ZIP_DEFLATED),
        UnsupportedError,
        "is compressed",
    ),
    "a record that is not there": (
        archive(one(tensor().replace(b"\x000X", b"\x001X"))),
        CorruptDataError,
        "no record data/1",
    ),
    "a storage that is too short": (
        archive(one(tensor(count=5))),
        CorruptDataError,
        "16 bytes, expected 20",
    ),
    "a tensor beyond its storage": (
        archive(one(tensor(size=5))),
        CorruptDataError,
        "leads out of its storage",
    ),
    "strides beyond its storage": (
        archive(one(tensor(stride=200))),
        CorruptDataError,
        "leads out of its storage",
    ),
    "an offset beyond its storage": (
        archive(one(tensor(offset=200))),
        CorruptDataError,
        "leads out of its storage",
    ),
    "many flags of a tensor": (
        archive(one(tensor()[:-2] + b"}(" + b"N\x89" * 65 + b"utR")),
        CorruptDataError,
        "its flags",
    ),
    "a global with a long name": (
        archive(one(b"c" + b"x" * 2000 + b"\ny\n)R")),
        UnsupportedError,
        "a global whose name has more than 1024 bytes",
    ),
    "nesting": (archive(nested(100_000)), UnsupportedError, "nested more than 1000 deep"),
    "itself": (
        archive(b"\x80\x02}q\x00X\x01\x00\x00\x00wh\x00s."),
        UnsupportedError,
        "without measure|nested more",
    ),
    "many laughs": (
        archive(laughing(60)),
        UnsupportedError,
        "grows without bound as it repeats itself",
    ),
    "no pickle": (archive(b""), CorruptDataError, "ends too early"),
    "an opcode": (archive(b"\x80\x02P1\n."), CorruptDataError, "opcode 0x50 is not allowed"),
    "a record twice": (
        archive(one(b"N"), more=[("data/0", b"")]),
        CorruptDataError,
        "is there twice",
    ),
    "an empty zip archive": (
        b"PK\x05\x06" + bytes(18),
        CorruptDataError,
        "it does not begin like one",
    ),
    "another zip archive": (
        archive(b"").replace(b"data.pkl", b"blob.bin"),
        CorruptDataError,
        "without data.pkl",
    ),
    "nothing": (b"", CorruptDataError, "it is empty"),
    "text": (b"junk", CorruptDataError, "it does not begin like one"),
    "a tar archive": (bytes(257) + b"ustar" + bytes(300), UnsupportedError, "tar archive"),
    "a big-endian file": (archive(one(b"N"), order="big"), UnsupportedError, "byte order"),
}


LONG = (1 << 20).to_bytes(4, "little") + b"k" * (1 << 20)
LONG_TEXTS = {
    "keys of a dict": b"}(X" + LONG + b"q\x00N" + b"h\x00N" * 200 + b"u",
    "keys of storages": b"}(X\x01\x00\x00\x00w"
    + tensor().replace(b"X\x01\x00\x00\x000", b"X" + LONG)
    + b"q\x00"
    + b"".join(b"X\x03\x00\x00\x00%03dh\x00" % i for i in range(200))
    + b"u",
}


@pytest.mark.parametrize("what", LONG_TEXTS)
def test_a_text_that_is_used_again_is_counted_each_time(tmp_path, what):
    """A file of 1.2 MB took tens of GB."""
    path = tmp_path / "x.pth"
    path.write_bytes(archive(b"\x80\x02" + LONG_TEXTS[what] + b"."))
    with pytest.raises(UnsupportedError, match="grows without bound"):
        dcp_rs.open(path)


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
    # In the directory the second storage begins where the first does; its name is made the first's
    # too where that is compared.
    entries = [
        i
        for i in range(len(data))
        if data[i : i + 4] == b"PK\x01\x02" and b"/data/" in data[i + 46 : i + 60]
    ]
    first, second = (struct.unpack("<I", data[i + 42 : i + 46])[0] for i in entries[:2])
    forged = bytearray(data)
    forged[first + 18 : first + 26] = struct.pack("<II", second - first + 128, second - first + 128)
    at = entries[0]
    forged[at + 20 : at + 28] = struct.pack("<II", second - first + 128, second - first + 128)
    (tmp_path / "y.pth").write_bytes(forged)
    with pytest.raises(CorruptDataError, match="share bytes"):
        dcp_rs.open(tmp_path / "y.pth")


@pytest.mark.parametrize(
    "follows",
    [b"\0" * 100, b"x" * 60_000, b"PK\x05\x06"],
    ids=["zeros", "much", "the beginning of an end"],
)
def test_bytes_behind_an_archive_are_ignored(tmp_path, follows):
    path = tmp_path / "x.pth"
    torch.save({"w": torch.arange(4.0)}, path)
    with path.open("ab") as file:
        file.write(follows)
    assert torch.equal(dcp_rs.open(path)["w"], torch.load(path)["w"])
    assert dcp_rs.verify(path).ok


def test_a_comment_of_an_archive(tmp_path):
    path = tmp_path / "x.pth"
    torch.save({"w": torch.arange(4.0)}, path)
    with zipfile.ZipFile(path, "a") as file:
        file.comment = b"what this is"
    assert torch.equal(dcp_rs.open(path)["w"], torch.load(path)["w"])


@pytest.mark.parametrize(
    "follows", [b"x" * 0x10000, b"PK\x05\x06" + b"x" * 18], ids=["too much", "another end"]
)
def test_archive_whose_end_torch_cannot_find(tmp_path, follows):
    path = tmp_path / "x.pth"
    torch.save({"w": torch.arange(4.0)}, path)
    with path.open("ab") as file:
        file.write(follows)
    with pytest.raises((RuntimeError, OSError)):
        torch.load(path)
    with pytest.raises(CorruptDataError):
        dcp_rs.open(path)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_every_byte_that_is_changed_or_cut_off(tmp_path, zipped):
    """A typed error, or tensors within the file."""
    buffer = io.BytesIO()
    torch.save(
        {"w": torch.arange(4.0), "n": {"x": [1, torch.ones(2)]}},
        buffer,
        _use_new_zipfile_serialization=zipped,
    )
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
