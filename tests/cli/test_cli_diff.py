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


def test_empty_dicts_and_kinds_of_dicts_make_no_difference(dcp_rs_cli, tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "state": {"x": torch.ones(1)}}
    ordered = {"w": torch.ones(2), "state": OrderedDict(x=torch.ones(1))}
    dcp_rs.save(state | {"empty": {}}, tmp_path / "a", no_dist=True)
    dcp_rs.save(ordered, tmp_path / "b", no_dist=True)
    assert dcp_rs_cli("diff", tmp_path / "a", tmp_path / "b")[0] == 0


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


def test_names_with_another_prefix_are_renamed(dcp_rs_cli, tmp_path: Path) -> None:
    """Of 79 entries "79 differ", though all agreed below the prefix."""
    model = {f"layers.{i}.weight": torch.full((2,), float(i)) for i in range(3)}
    dcp_rs.save({"model": model, "step": 3}, tmp_path / "train", no_dist=True)
    torch.save(model, tmp_path / "model.bin")
    status, out, _ = dcp_rs_cli("diff", tmp_path / "train", tmp_path / "model.bin")
    assert status == 1
    assert out.splitlines()[-1].endswith("its names begin with 'model.': pass --rename model=")
    renamed = "diff", tmp_path / "train", tmp_path / "model.bin", "--rename", "model="
    assert dcp_rs_cli(*renamed)[1].splitlines() == [
        "only in a  step  value",
        "1 of 4 entries differ (only in a: 1; 24 B compared)",
    ]
    status, out, _ = dcp_rs_cli(*renamed, "--include", "layers.*")
    assert (status, out) == (0, "the same: 3 entries, 24 B\n")
    other = "diff", tmp_path / "model.bin", tmp_path / "train"
    assert "pass --rename =model, which finds 3 of 4 names" in dcp_rs_cli(*other)[1]
    assert dcp_rs_cli(*other, "--rename", "=model", "--exclude", "step")[0] == 0
    status, _, err = dcp_rs_cli(*renamed, "--rename", "step=layers.0.weight")
    assert status == 2
    assert "--rename gives two entries" in err
