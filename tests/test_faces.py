"""What objects show of themselves, what completes, and what a type checker says of a typo."""

import re
import subprocess
import sys

import pytest
import torch

import dcp_rs
from support.both import save_rs
from support.places import ROOT

#: Each line with a comment is a mistake that a checker should find.
TYPOS = """
from typing import assert_type

import torch

import dcp_rs
from dcp_rs import RsReader

dcp_rs.opne("x")  # attr-defined
dcp_rs.load({}, "x", verfy=True)  # call-arg
dcp_rs.load({}, "x", io="mmaped")  # typeddict-item arg-type
dcp_rs.save({}, "x", fsnyc=False)  # call-arg
dcp_rs.async_save({}, "x", overwite=False)  # call-arg
dcp_rs.open("x", devcie="cpu")  # call-arg
dcp_rs.open("x", framework="np")  # arg-type
RsReader("x", theads=2)  # call-arg
dcp_rs.verify("x", thread=2)  # call-arg
dcp_rs.convert("x", "y", too="dcp")  # call-arg
dcp_rs.CheckpointManager("x", keep_lst=2)  # call-arg
dcp_rs.CheckpointManager("x").load({}, verfy=True)  # call-arg
dcp_rs.CheckpointManager("x").load_training_state(torch.nn.Linear(1, 1), partal=True)  # call-arg
dcp_rs.CheckpointManager("x").restore(1)  # attr-defined
dcp_rs.optim.save_training_state("x", torch.nn.Linear(1, 1), thread=3)  # call-arg
dcp_rs.optim.load_training_state("x", torch.nn.Linear(1, 1), verfy=True)  # call-arg
dcp_rs.optim.load_training_state("x", torch.nn.Linear(1, 1), verify=True, threads=2, dtype="bf16")
dcp_rs.CheckpointManager("x").load({}, rename={"model": ""}, io="mmap")
assert_type(dcp_rs.open("x").get_tensor("w"), torch.Tensor)
assert_type(dcp_rs.open("x").get_slice("w")[:2], torch.Tensor)
assert_type(dcp_rs.async_save({}, "x").result(), dcp_rs.SavedMetadata)
dcp_rs.CheckpointManager("x", keep_last=2, fsync=False)
report: dcp_rs.LoadReport = dcp_rs.load({}, "x", io="mmap", verify=True, replicas="node")
error: type[Exception] = dcp_rs.errors.PlanError
state: dcp_rs.optim.RngState = dcp_rs.optim.RngState()
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_type_checker_finds_every_typo(tmp_path):
    pytest.importorskip("mypy")
    file = tmp_path / "typos.py"
    file.write_text(TYPOS)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--cache-dir",
        str(ROOT / ".mypy_cache"),
        str(file),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=850, check=False
    )
    found = {
        int(number): code
        for number, code in re.findall(r"typos\.py:(\d+): error: .*\[([\w-]+)\]", done.stdout)
    }
    expected = {
        number: line.partition("#")[2].split()
        for number, line in enumerate(TYPOS.splitlines(), 1)
        if "#" in line
    }
    assert set(found) == set(expected), done.stdout
    assert all(found[number] in codes for number, codes in expected.items()), done.stdout


def test_dir_shows_what_is_public_and_star_hides_no_builtin():
    assert set(dir(dcp_rs)) == {*dcp_rs.__all__, "open", "errors", "optim"}
    names: dict = {}
    exec("from dcp_rs import *", names)
    assert "open" not in names
    assert {"load", "save", "RsReader"} <= set(names)
    assert (dcp_rs.open.__name__, dcp_rs.open.__qualname__) == ("open", "open")


def test_reprs_say_something_in_a_line(ckpt):
    save_rs({"layer.weight": torch.ones(4, 2), "<b>": 1}, ckpt)
    opened = dcp_rs.open(ckpt)
    with dcp_rs.open(ckpt, device="meta") as closed:
        part = closed.get_slice("layer.weight")
    converted = dcp_rs.convert(ckpt, ckpt.parent / "copy")
    shown = {
        repr(opened): f"Checkpoint('{ckpt}', 2 entries, device='cpu')",
        repr(closed): f"Checkpoint('{ckpt}', 2 entries, closed, device='meta')",
        repr(
            opened.get_slice("layer.weight")
        ): "TensorSlice('layer.weight', float32, shape=[4, 2])",
        repr(part): "TensorSlice('layer.weight', float32, shape=[4, 2])",
        repr(
            dcp_rs.LoadReport(missing=["a", "b", "c"])
        ): "LoadReport(missing=<3: 'a', 'b' and 1 more>)",
        repr(dcp_rs.CleanReport()): "CleanReport()",
        repr(dcp_rs.RsReader("ckpt")): "RsReader('ckpt')",
        repr(dcp_rs.RsReader("ckpt", io="mmap", replicas="all", dequantize=True)): (
            "RsReader('ckpt', io='mmap', replicas='all', dequantize='bfloat16')"
        ),
        repr(dcp_rs.RsLoadPlanner()): "RsLoadPlanner()",
        repr(dcp_rs.RsLoadPlanner(include="model.*", rename=str.lower, assign=True)): (
            "RsLoadPlanner(rename=str.lower, include='model.*', assign=True)"
        ),
    }
    assert list(shown) == list(shown.values())
    assert re.fullmatch(
        r"ConvertReport\(written=<2: .*>, bytes=.*, files=1, seconds=.*\)", repr(converted)
    )
    assert re.fullmatch(
        r"VerifyReport\(bytes_verified=.* k?B, entries=2, seconds=.*\)", repr(dcp_rs.verify(ckpt))
    )


def test_reprs_are_short_and_hide_secrets():
    options = {"aws_region": "eu-1", "aws_secret_access_key": "hidden", "x": "y" * 300}
    reader = repr(dcp_rs.RsReader("s3://bucket/run", storage_options=options))
    assert reader.startswith("RsReader('s3://bucket/run', storage_options=StorageOptions(")
    assert "hidden" not in reader
    planner = dcp_rs.RsLoadPlanner(include=[f"layer.{number}" for number in range(100)])
    report = dcp_rs.LoadReport(path="long/" * 100, missing=["a" * 300])
    for one in (reader, repr(planner), repr(report)):
        assert len(one) <= 200
        assert one.endswith(")")


def test_notebooks_show_a_table(ckpt):
    save_rs(
        {"<b>": torch.ones(4, 2), "step": 1} | {f"w{i:03}": torch.ones(1) for i in range(60)}, ckpt
    )
    shown = dcp_rs.open(ckpt)._repr_html_()
    assert "<td>&lt;b&gt;</td><td>float32</td><td>[4, 2]</td><td>1</td>" in shown
    assert "<td>step</td><td>value</td><td></td>" in shown
    assert shown.count("<tr>") == 51
    assert "12 entries more" in shown
    assert "<th>dtype</th>" in shown


def test_notebooks_get_completions(ckpt):
    save_rs({"w": torch.ones(2), "step": 1}, ckpt)
    opened = dcp_rs.open(ckpt)
    assert opened._ipython_key_completions_() == list(opened)
