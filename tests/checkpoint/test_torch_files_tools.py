"""What else takes files of torch.save: verify, index, convert, the command line."""

import os
import subprocess
import sys
import zipfile

import pytest
import torch

import dcp_rs
from dcp_rs.cli import main
from dcp_rs.errors import CorruptDataError
from support.states import nested_state
from support.torch_files import flat, rich_state, same


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


def damage(path, part):
    """Changes one bit of what holds these bytes."""
    data = bytearray(path.read_bytes())
    data[data.index(part)] ^= 1
    path.write_bytes(data)


def bits(*numbers):
    return torch.tensor(numbers, dtype=torch.float32).numpy().tobytes()


@pytest.mark.parametrize("where", [1000.0, 1005.0])
def test_all_that_lies_over_damage_is_lost(tmp_path, where):
    path = tmp_path / "x.pth"
    base = torch.arange(6.0) + 1000
    shared = {
        "a": base,
        "b": base,
        "part": base[3:],
        "turned": base.view(2, 3).t(),
        "in": {"value": (base, 3)},
    }
    torch.save(shared | {"other": torch.ones(2), "empty": base[:0], "step": 1}, path)
    damage(path, bits(where))
    report = dcp_rs.verify(path)
    assert report.lost == ["a", "b", "in.value", "part", "turned"]
    assert [problem.tensor for problem in report.problems] == report.lost
    assert len({problem.offset for problem in report.problems}) == 1


def test_a_value_over_damage_is_lost_alone(tmp_path):
    path = tmp_path / "x.pth"
    sparse = torch.eye(3).to_sparse() * 99
    torch.save(
        {
            "a": torch.ones(4),
            "v": (1, [{"k": torch.tensor([77.0, 78.0])}]),
            "sparse": sparse,
            "z": torch.zeros(3),
        },
        path,
    )
    damage(path, bits(77.0, 78.0))
    assert dcp_rs.verify(path).lost == ["v"]
    damage(path, bits(99.0, 99.0, 99.0))
    report = dcp_rs.verify(path)
    assert report.lost == ["sparse", "v"]
    assert report.entries == 4


def test_damage_in_what_belongs_to_no_entry_loses_none(tmp_path):
    path = tmp_path / "x.pth"
    torch.save({"a": torch.ones(4)}, path)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("x/data/7", b"unused by any")
    damage(path, b"unused")
    report = dcp_rs.verify(path)
    assert not report.ok
    assert report.lost == []


def test_a_file_whose_pickle_was_damaged_after_it_was_indexed(tmp_path):
    path = tmp_path / "x.pth"
    torch.save({"a": torch.ones(4), "value": (3,)}, path)
    dcp_rs.index(path)
    times = path.stat()
    damage(path, b"value")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    report = dcp_rs.verify(tmp_path)
    assert report.lost == ["a", "value"]
    assert any("its pickle has CRC-32" in problem.got for problem in report.problems)


def test_a_byte_order_that_is_damaged_is_damage(tmp_path):
    path = tmp_path / "x.pth"
    torch.save({"a": torch.ones(4)}, path)
    damage(path, b"little")
    (problem,) = dcp_rs.verify(path).problems
    assert "its byte order has CRC-32" in problem.got
    with pytest.raises(CorruptDataError, match="its byte order has CRC-32"):
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
        assert report.ok is None
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
def test_torch_file_converts(tmp_path, to):
    path, out = tmp_path / "x.pth", tmp_path / "out"
    torch.save(rich_state(), path)
    want = flat(torch.load(path, weights_only=True))
    dcp_rs.convert(
        path, out, to=to, skip_unsupported=to == "dcp"
    )  # keys that are no text, say, become text there
    with dcp_rs.open(out) as opened:
        assert set(opened) == set(want)
        for fqn, value in want.items():
            assert same(opened[fqn], value), fqn
    assert dcp_rs.verify(out).ok is not False  # torch's own formats may have no digests


def test_the_command_line_needs_no_torch(tmp_path):
    path = tmp_path / "x.pth"
    torch.save(nested_state(), path)
    script = (
        "import sys\nfrom dcp_rs.cli import main\n"
        "for command in (['ls'], ['inspect'], ['inspect', 'model.embedding.weight'], ['verify', '--allow-unverified'], ['index']):\n"
        "    try: main([command[0], sys.argv[1], *command[1:]])\n"
        "    except SystemExit as ended: assert ended.code == 0, command\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "model.embedding.weight" in done.stdout
    assert "a file of torch.save" in done.stdout


def test_tied_tensors_are_said_to_be(tmp_path, capfd):
    weight = torch.ones(4, 4)
    torch.save(
        {"head": weight, "embed": weight, "part": weight[:2], "other": torch.ones(2)},
        tmp_path / "x.pth",
    )
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path / "x.pth"), "head"])
    assert "shares its bytes with  embed, part" in " ".join(
        capfd.readouterr().out.split(" ")
    ).replace("\n", " ")
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path / "x.pth"), "other"])
    assert "shares" not in capfd.readouterr().out
