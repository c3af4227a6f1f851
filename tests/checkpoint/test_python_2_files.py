"""Files of torch.save under Python 2, whose pickler numbers its memo from 1 and writes text as bytes.

Each was "corrupt: a memo index out of order". The weights of lpips and torchmetrics are such files.
"""

import io
import pickletools
import zipfile

import pytest
import torch

import dcp_rs
from dcp_rs.errors import CorruptDataError
from support import assert_state_equal
from support.torch_files import archive, renumbered

STATE = {
    "lin.weight": torch.arange(6.0).reshape(2, 3),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
    "nested": {"w": torch.ones(2, dtype=torch.float64), "step": 7, "text": "note"},
}


def of_python_2(pickle):
    """Return a pickle as Python 2 writes it."""
    out = bytearray()
    ops = [*pickletools.genops(pickle)]
    ends = [at for _, _, at in ops[1:]] + [len(pickle)]
    for (op, arg, at), end in zip(ops, ends, strict=True):
        is_text = op.name == "BINUNICODE"
        out += b"U" + bytes([len(arg)]) + arg.encode() if is_text else pickle[at:end]
    return renumbered(bytes(out), 1)


def as_archive(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with zipfile.ZipFile(buffer) as file:
        inside = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    records = [(name, data) for name, data in inside.items() if name.startswith("data/")]
    return archive(of_python_2(inside["data.pkl"]), records)


def as_legacy(state):
    buffer = io.BytesIO()
    torch.save(state, buffer, _use_new_zipfile_serialization=False)
    rest, out = io.BytesIO(buffer.getvalue()), b""
    for _ in range(5):  # magic number, version, system, value, keys of storages
        begin = rest.tell()
        for _ in pickletools.genops(rest):
            pass
        out += of_python_2(rest.getvalue()[begin : rest.tell()])
    return out + rest.read()


@pytest.mark.parametrize("write", [as_archive, as_legacy])
def test_file_of_python_2_is_read(write, tmp_path):
    data = write(STATE)
    assert_state_equal(torch.load(io.BytesIO(data), weights_only=True), STATE)
    (tmp_path / "m.pth").write_bytes(data)
    assert_state_equal(dcp_rs.open(tmp_path / "m.pth").state_dict(), STATE)
    dcp_rs.convert(tmp_path / "m.pth", tmp_path / "out")
    assert_state_equal(dcp_rs.open(tmp_path / "out").state_dict(), STATE)


def test_memo_is_bounded_by_the_pickle(tmp_path):
    buffer = io.BytesIO()
    torch.save({"w": 1}, buffer)
    with zipfile.ZipFile(buffer) as file:
        pickle = file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))
    (tmp_path / "m.pth").write_bytes(archive(renumbered(pickle, 1 << 31)))
    with pytest.raises(CorruptDataError, match="memo index that is larger than the pickle"):
        dcp_rs.open(tmp_path / "m.pth")
