"""What ``diff`` counts."""

import json
from collections import OrderedDict
from pathlib import Path

import torch

import dcp_rs


def test_entries_are_counted_as_ls_counts_them(dcp_rs_cli, tmp_path: Path) -> None:
    """Empty dicts, and dicts of other kinds, were counted too."""
    state = {
        "w": torch.ones(2),
        "empty": {},
        "within": {"empty": {}, "step": 3},
        "ordered": OrderedDict(b=torch.ones(1)),
    }
    dcp_rs.save(state, tmp_path / "a", no_dist=True)
    dcp_rs.save(state, tmp_path / "b", no_dist=True)
    listed = json.loads(dcp_rs_cli("ls", tmp_path / "a", "--json")[1])
    count = len(listed["entries"])
    assert count == 3
    assert dcp_rs_cli("diff", tmp_path / "a", tmp_path / "b")[1].startswith(
        f"the same: {count} entries, "
    )
    assert (
        json.loads(dcp_rs_cli("diff", tmp_path / "a", tmp_path / "b", "--json")[1])["entries"]
        == count
    )


def test_containers_that_differ_are_counted_by_themselves(dcp_rs_cli, tmp_path: Path) -> None:
    dcp_rs.save(
        {"w": torch.ones(2), "empty": {}, "state": {"x": torch.ones(1)}},
        tmp_path / "a",
        no_dist=True,
    )
    dcp_rs.save(
        {"w": torch.ones(2), "state": OrderedDict(x=torch.ones(1))}, tmp_path / "b", no_dist=True
    )
    status, out, _ = dcp_rs_cli("diff", tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert out.splitlines()[-1].startswith("0 of 2 entries differ, and 2 containers (")
    found = json.loads(dcp_rs_cli("diff", tmp_path / "a", tmp_path / "b", "--json")[1])
    assert (found["same"], found["entries"]) == (False, 2)
    assert {one["name"]: one["container"] for one in found["differences"]} == {
        "empty": True,
        "state": True,
    }
    dcp_rs.save(
        {"w": torch.zeros(2), "empty": {}, "state": {"x": torch.ones(1)}},
        tmp_path / "c",
        no_dist=True,
    )
    out = dcp_rs_cli("diff", tmp_path / "a", tmp_path / "c")[1]
    assert out.splitlines()[-1].startswith("1 of 2 entries differ (")
    out = dcp_rs_cli("diff", tmp_path / "c", tmp_path / "b")[1]
    assert out.splitlines()[-1].startswith("1 of 2 entries differ, and 2 containers (")


def test_each_difference_is_one_line_and_long_lists_end(dcp_rs_cli, tmp_path: Path) -> None:
    """Each took two lines, in the order of the names, and all of a million were printed."""
    a = {f"layers.{i}.weight": torch.zeros(2) for i in range(30)} | {
        "step": 1,
        "old": torch.zeros(1),
        "wide": torch.zeros(3),
    }
    b = {f"layers.{i}.weight": torch.ones(2) for i in range(30)} | {
        "step": 2,
        "new": torch.zeros(1),
        "wide": torch.zeros(4),
    }
    dcp_rs.save(a, tmp_path / "a", no_dist=True)
    dcp_rs.save(b, tmp_path / "b", no_dist=True)
    lines = dcp_rs_cli("diff", tmp_path / "a", tmp_path / "b")[1].splitlines()
    assert lines[:5] == [
        "only in a  old              float32 [1]",
        "only in b  new              float32 [1]",
        "shape      wide             [3] | [4]",
        "value      step             1 | 2",
        "elements   layers.0.weight  2 elements differ, by at most 1",
    ]
    assert [line.split()[1] for line in lines[4:14]] == [f"layers.{i}.weight" for i in range(10)]
    assert lines[14] == "           and 20 more (--all)"
    assert lines[15].startswith(
        "34 of 34 entries differ (only in a: 1, only in b: 1, shape: 1, value: 1, elements: 30; "
    )
    assert len(lines) == 16
    assert len(dcp_rs_cli("diff", tmp_path / "a", tmp_path / "b", "--all")[1].splitlines()) == 35
