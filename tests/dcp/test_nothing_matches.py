"""A load whose ``include`` matched nothing, or a partial one with no name in common, returned, and the model stayed random.

A save or a comparison whose ``include`` matches nothing is the same mistake.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader, RsSavePlanner, RsWriter
from dcp_rs.checkpoint.compare import compare
from dcp_rs.cli import main
from dcp_rs.errors import PlanError
from support import run_ranks
from support.both import save_rs

SAVED = {f"model.layers.{i}.weight": torch.full((2,), float(i)) for i in range(7)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "ckpt"
    save_rs(SAVED, folder)
    return folder


def blank(prefix="model."):
    return {f"{prefix}layers.{i}.weight": torch.zeros(2) for i in range(7)}


@pytest.mark.parametrize(
    "names", [{"include": "layers.*"}, {"include": []}, {"exclude": "*"}], ids=str
)
def test_names_that_match_nothing(saved, names):
    given = (
        "=".join(map(str, *names.items()))
        .replace("layers.*", r"'layers\.\*'")
        .replace("=*", r"='\*'")
    )
    match = (
        rf"nothing to load.*{given.replace('[]', '..')}.*'model\.layers\.0\.weight'.* and 2 more"
    )
    with pytest.raises(PlanError, match=match):
        dcp_rs.load(blank(), saved, **names)
    with pytest.raises(dcp.api.CheckpointException, match="nothing to load"):
        dcp.load(
            blank(), storage_reader=RsReader(saved), planner=RsLoadPlanner(**names), no_dist=True
        )


def test_a_partial_load_with_nothing_in_common(saved):
    match = r"nothing to load: the checkpoint has none of.*'layers\.0\.weight'.* it has 'model\.layers\.0\.weight'.*rename=\{'model': ''\}"
    with pytest.raises(PlanError, match=match):
        dcp_rs.load(blank(""), saved, allow_partial_load=True)


def test_partial_match_is_loaded_and_counted(saved):
    state = {**blank(), "head": torch.zeros(1)}
    report = dcp_rs.load(state, saved, allow_partial_load=True, include=["model.layers.1*", "head"])
    assert (report.entries, report.entries_loaded) == (8, 1)
    assert "loaded 1 of 8 entries, 8 B from" in str(report)
    assert "entries" not in str(dcp_rs.load(blank(), saved))
    misfit = dcp_rs.load({"model.layers.0.weight": torch.zeros(3)}, saved, allow_partial_load=True)
    assert "loaded 0 of 1 entries" in str(misfit)


def test_nothing_is_asked_of_an_empty_state_dict(saved):
    dcp_rs.load({}, saved)
    dcp_rs.load({}, saved, include="head")


def load_on_ranks(saved):
    """A rank that has none of what is included is none of a mistake's: a stage of a pipeline, say."""
    first = dist.get_rank() == 0
    state = {"model.layers.0.weight" if first else "model.layers.1.weight": torch.full((2,), -1.0)}
    dcp_rs.load(state, saved, include="*.0.*")
    assert next(iter(state.values())).tolist() == ([0, 0] if first else [-1, -1])
    with pytest.raises(PlanError, match="nothing to load"):
        dcp_rs.load(state, saved, include="layers.0.*")
    with pytest.raises(PlanError, match="nothing to save"):
        dcp_rs.save(state, saved, include="layers.0.*")


def test_ranks(saved):
    run_ranks(2, load_on_ranks, saved)


def test_a_save_of_nothing(tmp_path):
    planner = RsSavePlanner(include="layers.*")
    match = r"nothing to save.*include='layers\.\*'.*'model\.layers\.0\.weight'"
    with pytest.raises(PlanError, match=match):
        dcp_rs.save(SAVED, tmp_path / "rs", include="layers.*")
    with pytest.raises(dcp.api.CheckpointException, match="nothing to save"):
        dcp.save(SAVED, storage_writer=RsWriter(tmp_path / "rs"), planner=planner, no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match="nothing to save"):
        dcp.save(
            SAVED,
            storage_writer=dcp.FileSystemWriter(tmp_path / "stock"),
            planner=planner,
            no_dist=True,
        )
    assert not list(tmp_path.glob("*/*index*"))


def test_a_comparison_of_nothing(saved, capsys):
    with pytest.raises(PlanError, match=r"nothing to compare.*'layers'"):
        compare(saved, saved, include="layers")
    with pytest.raises(SystemExit) as ended:
        main(["diff", str(saved), str(saved), "--include", "layers"])
    assert ended.value.code == 2
    assert "nothing to compare" in capsys.readouterr().err
