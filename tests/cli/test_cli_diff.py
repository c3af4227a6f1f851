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
    assert dcp_rs_cli("diff", tmp_path / "a", tmp_path / "b")[1].startswith(f"the same: {count} entries, ")
    assert json.loads(dcp_rs_cli("diff", tmp_path / "a", tmp_path / "b", "--json")[1])["entries"] == count


def test_containers_that_differ_are_counted_by_themselves(dcp_rs_cli, tmp_path: Path) -> None:
    dcp_rs.save({"w": torch.ones(2), "empty": {}, "state": {"x": torch.ones(1)}}, tmp_path / "a", no_dist=True)
    dcp_rs.save({"w": torch.ones(2), "state": OrderedDict(x=torch.ones(1))}, tmp_path / "b", no_dist=True)
    status, out, _ = dcp_rs_cli("diff", tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert out.splitlines()[-1].startswith("0 of 2 entries differ, and 2 containers (")
    found = json.loads(dcp_rs_cli("diff", tmp_path / "a", tmp_path / "b", "--json")[1])
    assert (found["same"], found["entries"]) == (False, 2)
    assert {one["name"]: one["container"] for one in found["differences"]} == {"empty": True, "state": True}
    dcp_rs.save({"w": torch.zeros(2), "empty": {}, "state": {"x": torch.ones(1)}}, tmp_path / "c", no_dist=True)
    out = dcp_rs_cli("diff", tmp_path / "a", tmp_path / "c")[1]
    assert out.splitlines()[-1].startswith("1 of 2 entries differ (")
    out = dcp_rs_cli("diff", tmp_path / "c", tmp_path / "b")[1]
    assert out.splitlines()[-1].startswith("1 of 2 entries differ, and 2 containers (")
