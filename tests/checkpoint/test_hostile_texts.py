"""Names, configurations and values that others wrote, in messages and listings."""

import json
import os
import pickle
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch

import dcp_rs
from dcp_rs.errors import CorruptDataError, DcpRsError, UnsafePickleError, UnsupportedError
from support.commands import in_a_process
from support.torch_files import archive, text

CONTROLS = "\x1b]0;owned\x07\x9b2J\x7f\r\b"


def shows_no_controls(error):
    shown = str(error)
    assert not set(shown) & {chr(code) for code in (*range(32), *range(127, 160))}, ascii(shown)
    assert "owned" in shown
    return True


def test_no_control_character_reaches_a_terminal(tmp_path):
    folder = tmp_path / CONTROLS
    with pytest.raises(DcpRsError) as raised:
        dcp_rs.open(folder)
    assert shows_no_controls(raised.value)
    with pytest.raises(DcpRsError) as raised:
        dcp_rs.open(tmp_path, storage_options={"owned": CONTROLS})
    folder.mkdir()
    (folder / "m.pt").write_bytes(b"nothing")
    with pytest.raises(CorruptDataError) as raised:
        dcp_rs.open(folder / "m.pt")
    assert shows_no_controls(raised.value)
    report = dcp_rs.verify(folder / "m.pt")
    assert shows_no_controls(report.problems[0])
    # the class of a value, and its error after a journey between ranks
    value = b"\x80\x02}" + text("w") + b"cm\nowned" + CONTROLS.encode() + b"\n)Rs."
    (tmp_path / "m.pt").write_bytes(archive(value))
    with pytest.raises(UnsafePickleError) as raised:
        dcp_rs.open(tmp_path / "m.pt")["w"]
    assert shows_no_controls(raised.value)
    assert shows_no_controls(pickle.loads(pickle.dumps(raised.value)))


def test_one_odd_value_ends_no_listing(tmp_path):
    # The attribute replaces a method, which `repr` and the listing call.
    odd = b"ccollections\nOrderedDict\n)R}" + text("keys") + b"K\x01sb"
    both = b"\x80\x02}(" + text("odd") + b"]" + odd + b"a" + text("plain") + b"K\x07u."
    (tmp_path / "m.pt").write_bytes(archive(both))
    torch.save({"odd": (OrderedDict(a=1),), "plain": 7}, tmp_path / "fine.pt")
    for options in ([], ["--json"]):
        done = in_a_process("ls", "--values", *options, tmp_path / "m.pt")
        assert done.returncode == 0, done.stderr
        assert "plain" in done.stdout
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("depth", "loads"), [(150, True), (250, False)])
def test_values_may_nest_200_deep(depth, loads, tmp_path):
    value = 1
    for _ in range(depth):
        value = (value,)
    torch.save({"deep": value}, tmp_path / "m.pt")
    checkpoint = dcp_rs.open(tmp_path / "m.pt")
    if loads:
        assert repr(checkpoint["deep"]) == repr(value)
    else:
        with pytest.raises(UnsafePickleError, match="200 deep"):
            checkpoint["deep"]


@pytest.mark.parametrize(
    "config",
    [
        b"",
        b"[1]",
        b"7",
        b"{",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"a":' * 200_000,
    ],
)
def test_odd_configuration_is_refused(config, tmp_path):
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(UnsupportedError, match="is not the configuration of a model"):
        dcp_rs.views_for(tmp_path)


def test_configuration_of_odd_types_has_no_views(tmp_path):
    for config in ({}, {"model_type": ["x"]}, {"model_type": {}, "text_config": 3}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert dcp_rs.views_for(tmp_path) == []
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"model_type": "llama", "x": Infinity}')
    assert dcp_rs.views_for(tmp_path) == []


def test_configuration_that_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    program = "import sys, dcp_rs; dcp_rs.views_for(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "is not a file of at most" in done.stderr
    (tmp_path / "config.json").unlink()
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnsupportedError, match="is not a file of at most"):
        dcp_rs.views_for(tmp_path)
