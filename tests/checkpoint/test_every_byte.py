"""Every byte of a checkpoint may be wrong: a typed error, or exactly the right tensors."""

import contextlib
import struct

import pytest
import torch

import dcp_rs
from dcp_rs import _core
from dcp_rs.errors import CorruptDataError, CorruptIndexError, DcpRsError, UnsupportedError
from support import same_bits
from support.both import save_rs
from support.failures import outcome, read_whole
from support.files import flip
from support.forged import INDEX, sealed


def test_every_flipped_byte_of_an_index_is_found(saved):
    good = (saved / INDEX).read_bytes()
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        (saved / INDEX).write_bytes(bad)
        with pytest.raises((CorruptIndexError, UnsupportedError)) as raised:
            dcp_rs.open(saved)
        assert str(saved / INDEX) in str(raised.value), at


def test_every_truncation_of_an_index_is_found(saved):
    good = (saved / INDEX).read_bytes()
    for length in range(len(good)):
        for data in (good[:length], sealed(good[:length])):
            (saved / INDEX).write_bytes(data)
            with pytest.raises(CorruptIndexError):
                dcp_rs.open(saved)
    (saved / INDEX).write_bytes(good + b"\0")
    with pytest.raises(CorruptIndexError):
        dcp_rs.open(saved)


@pytest.mark.slow
def test_every_forged_byte_of_an_index_is_refused_or_harmless(saved):
    """With the digest computed anew nothing says what is right: any tensors may come out, but nothing else."""
    good = (saved / INDEX).read_bytes()
    seen = {}
    for at in range(8, len(good)):
        for value in {good[at] ^ 1, good[at] ^ 0x80, 0, 0xFF} - {good[at]}:
            bad = bytearray(good)
            bad[at] = value
            (saved / INDEX).write_bytes(sealed(bad))
            said = outcome(saved, want=None)
            seen[said] = seen.get(said, 0) + 1
    assert seen["CorruptIndexError"] > 1000
    assert seen.keys() <= {
        "right",
        "CorruptIndexError",
        "CorruptDataError",
        "UnsupportedError",
        "UnsafePickleError",
        "PlanError",
    }


@pytest.mark.slow
def test_every_flipped_bit_of_a_data_file_is_found(saved):
    """Header, payload and what lies between; by `verify`, which says where, and by a load, before anything is handed over."""
    (file,) = saved.glob("g*.safetensors")
    good = file.read_bytes()
    checkpoint = dcp_rs.open(saved)
    places = {}
    for name in checkpoint:
        (chunk,) = checkpoint.chunks(name)
        places[name] = range(chunk.offset, chunk.offset + chunk.nbytes)
    payload = range(min(p.start for p in places.values()), max(p.stop for p in places.values()))
    assert payload.stop == len(good)
    every = [*range(0, payload.start, 61), *(at for place in places.values() for at in place)]
    for at in every:
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        file.write_bytes(bad)
        report = dcp_rs.verify(saved)
        (problem,) = report.problems
        assert not report
        assert problem.file == str(file)
        inside = [name for name, place in places.items() if at in place]
        if not inside:
            assert (problem.tensor, problem.offset) == ("", 0)
            assert outcome(saved) == "right"  # a load reads no headers
            continue
        (name,) = inside
        assert (problem.tensor, problem.block, problem.offset) == (name, 0, places[name].start)
        assert problem.expected != problem.got
        with pytest.raises(CorruptDataError, match="digest") as raised:
            dcp_rs.open(saved, verify=True)[name]
        assert (raised.value.path, raised.value.tensor, raised.value.offset) == (
            str(file),
            name,
            places[name].start,
        )


def test_a_damaged_block_is_found_by_parts_that_touch_it(ckpt):
    """Three blocks, the second one damaged, in each way of reading."""
    block = 1 << 20
    save_rs({"w": torch.ones(3 * block, dtype=torch.uint8)}, ckpt)
    (file,) = ckpt.glob("g*.safetensors")
    (chunk,) = dcp_rs.open(ckpt).chunks("w")
    flip(file, chunk.offset + block + 77)
    (problem,) = dcp_rs.verify(ckpt).problems
    assert (problem.block, problem.offset) == (1, chunk.offset + block)
    for io in ("mmap", "buffered", "direct"):
        index = dcp_rs._core.Index.open(str(ckpt), None, False)
        for begin, damaged in (
            (0, False),
            (block - 1, True),
            (block + 5, True),
            (2 * block, False),
        ):
            target = torch.zeros(2, dtype=torch.uint8)
            fill = _core.Fill(0, (begin,), (2,), target.data_ptr(), (1,))
            options = {"io": io, "threads": 1, "verify": True, "max_inflight_bytes": 1 << 22}
            with pytest.raises(CorruptDataError) if damaged else contextlib.nullcontext():
                index.read_regions([fill], **options)
            assert damaged or target.tolist() == [1, 1]


def test_every_truncation_of_a_data_file_is_found(saved):
    (file,) = saved.glob("g*.safetensors")
    good = file.read_bytes()
    for length in [*range(0, len(good), 97), len(good) - 1]:
        file.write_bytes(good[:length])
        assert outcome(saved) == "CorruptDataError"
        (problem,) = dcp_rs.verify(saved).problems
        assert problem.tensor == ""
        assert str(length) in problem.got
    file.write_bytes(good + b"\0")
    assert outcome(saved) == "CorruptDataError"


def test_every_byte_of_the_header_of_a_foreign_file(tmp_path):
    """No index: the header itself is what is trusted."""
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.int8)}, path)
    good = path.read_bytes()
    header = 8 + struct.unpack("<Q", good[:8])[0]
    want = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.int8)}
    for at in range(header):
        for value in {good[at] ^ 1, good[at] ^ 0x80, 0, 0xFF, ord("9")} - {good[at]}:
            bad = bytearray(good)
            bad[at] = value
            path.write_bytes(bad)
            compare_with_safetensors(path)
    for length in range(header):
        path.write_bytes(good[:length])
        with pytest.raises(DcpRsError):
            dcp_rs.open(path)
    path.write_bytes(good)
    assert outcome(path, want) == "right"


def compare_with_safetensors(path):
    """We take what the reference reader takes, and the same of it."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as reference:
            want = {name: reference.get_tensor(name) for name in reference.keys()}  # noqa: SIM118
    except Exception:  # noqa: BLE001 - each of its releases has other classes
        with pytest.raises(DcpRsError):
            read_whole(path, verify=True)
        return
    got = read_whole(path, verify=True)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert same_bits(got[name], value), name
