"""Non-tensor values that crash torch, keep it busy for ever, or fill the memory: refused before torch gets them.

A folder of 932 bytes ended `open` and `ls --values` with SIGSEGV; 561 bytes took 4.1 GB.
"""

import io
import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict

import pytest
import torch

import dcp_rs
import programs
from dcp_rs.checkpoint.compare import compare
from dcp_rs.errors import CorruptDataError, UnsupportedError
from dcp_rs.tensors import pickles
from support import same_bits
from support.torch_files import archive, rich_state, text

PROTO = b"\x80\x02"


def number(n):
    return b"\x8a\x08" + n.to_bytes(8, "little", signed=True)


def tensor(*, sizes, strides, key="0", count=1, offset=0, name="_rebuild_tensor_v2"):
    """A call that rebuilds a tensor over a storage of `count` floats."""
    storage = (
        b"("
        + text("storage")
        + b"ctorch\nFloatStorage\n"
        + text(key)
        + text("cpu")
        + number(count)
        + b"tQ"
    )
    extents = b"(" + b"".join(map(number, sizes)) + b"t(" + b"".join(map(number, strides)) + b"t"
    return (
        b"ctorch._utils\n"
        + name.encode()
        + b"\n("
        + storage
        + number(offset)
        + extents
        + b"\x89NtR"
    )


#: The seeds of mutations.
VALUE = {
    "a": [1, 2.5, None, (True, "text", b"bytes")],
    5: torch.arange(6.0).reshape(2, 3).t(),
    "p": torch.nn.Parameter(torch.ones(2)),
    "c": Counter("aab"),
    "o": OrderedDict(x={1, 2}),
    "more": (bytearray(b"x"), 1j, torch.Size([2]), io.BytesIO(b"abc")),
}
FLOAT = [("data/0", b"\0\0\x80?")]
DEEP = 1_000_000
#: A pair of a pair twice of a pair twice ...
LAUGHS = b")" + b"".join(bytes([ord("q"), level, ord("h"), level, 0x86]) for level in range(60))
REBUILD = b"ctorch._tensor\n_rebuild_from_type_v2\n("

UNSAFE = {
    "tuples as a key, a million deep": archive(PROTO + b"})" + b"\x85" * DEEP + b"Ns."),
    "a tuple as an item of a set": archive(
        PROTO + b"c__builtin__\nset\n])" + b"\x85" * DEEP + b"a\x85R."
    ),
    "lists, 5,000 deep": archive(PROTO + b"]" * 5000 + b"a" * 4999 + b"."),
    "a key of 2**60 parts": archive(PROTO + b"}" + LAUGHS + b"Ns."),
    "a value of 2**60 parts": archive(PROTO + LAUGHS + b"."),
    "a bytearray of a terabyte": archive(
        PROTO + b"c__builtin__\nbytearray\n" + number(1 << 40) + b"\x85R."
    ),
    "bytes, renamed": archive(PROTO + b"cbuiltins\nbytes\n" + number(1 << 33) + b"\x85R."),
    "a bytearray of a number in a tensor": archive(
        PROTO + b"cbuiltins\nbytearray\n" + tensor(sizes=(), strides=()) + b"\x85R.", FLOAT
    ),
    "a set of a tensor's rows": archive(
        PROTO + b"cbuiltins\nset\n" + tensor(sizes=(1 << 20,), strides=(0,)) + b"\x85R.", FLOAT
    ),
    "strides of 0": archive(PROTO + tensor(sizes=(1 << 30,), strides=(0,)) + b".", FLOAT),
    "a quantized tensor": archive(
        PROTO + tensor(sizes=(1 << 30,), strides=(0,), name="_rebuild_qtensor") + b".", FLOAT
    ),
    "copies of strides of 0": archive(
        PROTO
        + tensor(sizes=(1 << 21,), strides=(0,))
        + b"q\x000]"
        + b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n(h\x00ctorch\nfloat64\nX\x03\x00\x00\x00cpu\x89tRa"
        * 100
        + b".",
        FLOAT,
    ),
    "a parameter that is set to a gigabyte": archive(
        PROTO
        + b"ctorch.nn.parameter\nParameter\n("
        + tensor(sizes=(1,), strides=(1,))
        + b"\x89t\x81"
        + tensor(sizes=(1 << 28,), strides=(1,)).split(b"\n", 2)[2].removesuffix(b"\x89NtR")
        + b"tb.",
        FLOAT,
    ),
    "a tensor that is set to a gigabyte": archive(
        PROTO
        + tensor(sizes=(1,), strides=(1,))
        + b"q\x00("
        + tensor(sizes=(1,), strides=(1,))
        + number(0)
        + b"("
        + number(1 << 28)
        + b"ttb.",
        FLOAT,
    ),
    "a storage of its own": archive(
        PROTO + b"ctorch.storage\nUntypedStorage\n" + number(1 << 40) + b"\x85R."
    ),
    "a tensor of its own": archive(PROTO + b"ctorch\nTensor\n" + number(1 << 40) + b"\x85R."),
    "a tensor of its own, by another": archive(
        PROTO + REBUILD + b"ctorch\nFloatTensor\nctorch\nTensor\n" + number(1 << 40) + b"\x85NtR."
    ),
    "a name cut elsewhere": archive(
        PROTO + b"ctorch\nstorage.UntypedStorage\n" + number(1 << 40) + b"\x85R."
    ),
    "a call of a call": archive(PROTO + REBUILD + REBUILD[:-1] + b"ctorch\nTensor\n)NtR."),
    "one text, copied again and again": archive(
        PROTO
        + text("x" * 100_000)
        + b"q\x000"
        + b"c_codecs\nencode\nq\x010]"
        + b"h\x01h\x00"
        + text("latin1")
        + b"\x86Ra" * 1
        + (b"h\x01h\x00" + text("latin1") + b"\x86Ra") * 20_000
        + b"."
    ),
    "empty texts, passed again and again": archive(
        PROTO
        + b"cx\ny\nq\x00"
        + text("")
        + b"q\x01("
        + b"h\x01" * 200_000
        + b"tq\x02000"
        + b"h\x00h\x02R0" * 200_000
        + b"N."
    ),
    "another codec": archive(PROTO + b"c_codecs\nencode\n" + text("x") + text("idna") + b"\x86R."),
    "a compressed record": archive(
        PROTO + b"N.", [("data/0", bytes(1 << 26))], zipfile.ZIP_DEFLATED
    ),
    "many empty sets": archive(b"\x80\x04]" + b"(" + b"\x8f" * 1_000_000 + b"e."),
    "a class by number": archive(PROTO + b"\x82\x01."),
}
DAMAGED = {
    "no archive": b"\x80\x02N.",
    "nothing": b"",
    "no data.pkl": archive(b"")[:-9],
    "a memo with a gap": archive(PROTO + b"Nr\xff\xff\xff\x7f."),
    "a memo that was never set": archive(PROTO + b"h\x05."),
    "an empty stack": archive(PROTO + b"."),
    "no mark": archive(PROTO + b"t."),
    "a text of 4 GB": archive(PROTO + b"X\xff\xff\xff\xffabc."),
    "bytes of 2**62": archive(b"\x80\x04\x8e" + (1 << 62).to_bytes(8, "little") + b"."),
    "an unhashable key": archive(PROTO + b"}]Ns."),
    "a list as a class": archive(PROTO + b"]\x81."),
    "no such layout": archive(
        PROTO + b"ctorch.serialization\n_get_layout\n" + text("x") + b"\x85R."
    ),
    "wrong arguments": archive(PROTO + b"ctorch\nSize\nK\x01\x85R."),
    "a storage longer than its record": archive(
        PROTO + tensor(sizes=(4,), strides=(1,), count=4) + b".", FLOAT
    ),
    "a storage without a record": archive(PROTO + tensor(sizes=(1,), strides=(1,)) + b"."),
    "a tensor before its storage": archive(PROTO + tensor(sizes=(2,), strides=(-1,)) + b".", FLOAT),
    "a storage of two lengths": archive(
        PROTO + tensor(sizes=(), strides=()) + tensor(sizes=(), strides=(), count=0) + b"\x86.",
        FLOAT,
    ),
    "names that differ in case": archive(PROTO + b"N.", [("DATA.PKL", b"\x80\x02K\x01.")]),
}


def mutations():
    """A good value with a bit of the file flipped, and with bytes of its pickle changed by somebody who mends the checksum."""
    data = pickles.dump("v", VALUE)
    for at in range(0, len(data), 5):
        yield data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        folder = file.namelist()[0].split("/")[0]
        good = file.read(f"{folder}/data.pkl")
        records = [(name, file.read(f"{folder}/{name}")) for name in ("data/0", "data/1")]
    chosen = random.Random(0)
    for _ in range(500):
        bad = bytearray(good)
        for _ in range(chosen.randint(1, 3)):
            bad[chosen.randrange(len(bad))] = chosen.choice(
                (chosen.randrange(256), *b"()]}0Rb.tue\x85\x86\x81Qqh")
            )
        yield archive(bytes(bad), records)


#: In a process of its own, for all of this once ended it, or the machine's memory.
SCRIPT = """
import resource, signal, sys, time
from dcp_rs.errors import CorruptDataError, UnsafePickleError
from dcp_rs.tensors import pickles
sys.path.insert(0, {tests!r})
from checkpoint.test_hostile_values import DAMAGED, UNSAFE, mutations
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
wrong = []
signal.alarm(100)
for inputs, expected in ((UNSAFE, UnsafePickleError), (DAMAGED, CorruptDataError)):
    for name, data in inputs.items():
        before, began = peak(), time.monotonic()
        try:
            loaded = pickles.load("the name", data, weights_only=True)
        except BaseException as error:
            if type(error) is not expected or "'the name'" not in str(error) or error.tensor != "the name":
                wrong.append((name, type(error), str(error)[:300]))
        else:
            wrong.append((name, "loaded", type(loaded)))
        if peak() - before > 300_000 or time.monotonic() - began > 10:
            wrong.append((name, "kB and seconds", peak() - before, time.monotonic() - began))
for data in mutations():
    try:
        pickles.load("the name", data, weights_only=True)
    except (CorruptDataError, UnsafePickleError):
        pass
    except BaseException as error:
        wrong.append(("a mutation", type(error), str(error)[:300]))
for one in wrong:
    print(*one)
assert not wrong
"""


def test_values_that_would_crash_or_fill_the_memory_are_refused():
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT.format(tests=tests)]
    done = programs.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_values_of_torch_are_let_through():
    values = [
        *rich_state().values(),
        VALUE,
        [{"lr": 0.1}] * 1000,
        {(i, (i, str(i))): [] for i in range(1000)},
    ]
    values += [
        bytes(1 << 20),
        "ü" * 100_000,
        [[] for _ in range(10_000)],
        [set() for _ in range(10_000)],
    ]
    values += [[torch.zeros(0), torch.zeros(0, dtype=torch.int8)], torch.ones(1).expand(1000, 1000)]
    nested = []
    for _ in range(190):
        nested = [nested]
    within = [1]
    within.append(within)
    for value in [*values, nested]:
        got = pickles.load("v", pickles.dump("v", value), weights_only=True)
        if isinstance(value, torch.Tensor):
            assert same_bits(got, value)
        elif not isinstance(value, dict | tuple | list):
            assert got == value
    got = pickles.load("v", pickles.dump("v", within), weights_only=True)
    assert got[1] is got


def test_open_names_the_entry(tmp_path):
    torch.save({"w": torch.ones(2), "v": (7,)}, tmp_path / "x.pt")
    torch.distributed.checkpoint.save(
        {"v": {"a": [1, 2]}}, checkpoint_id=tmp_path / "stock", no_dist=True
    )
    (file,) = (tmp_path / "stock").glob("*.distcp")
    content = file.read_bytes()
    at = content.index(b"\x80\x02]")
    file.write_bytes(content[: at + 2] + b"}" + content[at + 3 :])
    with dcp_rs.open(tmp_path / "stock") as checkpoint:
        with pytest.raises(CorruptDataError, match=r"'v\.a'.*CRC-32") as caught:
            checkpoint["v.a"]
        assert caught.value.tensor == "v.a"
    with pytest.raises(CorruptDataError, match=r"'v\.a'"):
        dcp_rs.load({"v": {"a": None}}, tmp_path / "stock", no_dist=True)


def test_a_value_that_is_too_deep_can_be_left_out(tmp_path):
    """It was read for its length, so that nothing of the file could be converted or compared."""
    path, deep = tmp_path / "x.pt", b"N" + b"\x85" * 1100
    path.write_bytes(archive(PROTO + b"}(" + text("deep") + deep + text("n") + b"K\x01u."))
    dcp_rs.convert(path, tmp_path / "converted", exclude="deep")
    dcp_rs.merge([path, path], tmp_path / "merged", exclude="deep")
    for made in (path, tmp_path / "converted", tmp_path / "merged"):
        assert compare(path, made, exclude="deep").differences == []
        assert dcp_rs.open(made)["n"] == 1
    assert list(dcp_rs.open(tmp_path / "converted")) == ["n"]
    with pytest.raises(UnsupportedError, match=r'"deep".*nested more than 1000 deep'):
        dcp_rs.convert(path, tmp_path / "all")


class Gone:
    pass


def test_without_the_check_errors_have_types_too(monkeypatch):
    data = pickles.dump("v", Gone())
    assert isinstance(pickles.load("v", data, weights_only=False), Gone)
    monkeypatch.delattr(sys.modules[__name__], "Gone")
    with pytest.raises(UnsupportedError, match=r"'v' cannot be unpickled here: .*Gone"):
        pickles.load("v", data, weights_only=False)
    for bad in (b"", data[:-100], archive(pickle.dumps([])[:-3])):
        with pytest.raises(CorruptDataError, match="'v'"):
            pickles.load("v", bad, weights_only=False)
