"""The tables of the README and of docs/performance.md are those of the runs that they name.

They were written by hand once, and contradicted the later runs in both directions.
"""

import json
import sys

import pytest

from support.places import ROOT

sys.path.insert(0, str(ROOT / "benches"))

from harness import tables

RUN = "2026-11-23-amd-epyc-2cores"


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_a_page_has_the_figures_of_its_run(page):
    text = page.read_text()
    assert "<!-- table: headline " in text
    assert text.count("<!-- table: ") == text.count("<!-- end of table -->")
    assert tables.render(text) == text, (
        "make bench ARGS='--tables benches/results/RUN.json' writes them"
    )


def test_both_pages_and_the_chart_are_of_one_run():
    of = {
        page.read_text().partition("<!-- table: headline ")[2].partition(" ")[0]
        for page in tables.PAGES
    }
    assert of == {tables.charted_run()}
    assert tables.CHART.read_text() == tables.chart(tables.load(tables.charted_run()))


def test_a_run_without_a_row_of_the_other_door_says_so():
    results = tables.load(RUN)
    line = tables.TABLES["headline"].lines[0]
    for family in results["families"]:
        family["rows"] = [
            row for row in family["rows"] if (row["case"], row["ours"]) != (line.case, line.plugged)
        ]
    assert "| 1.25 s | not measured | 0.091 s" in tables.table("headline", results)
    assert "not measured" in tables.chart(results)


def test_whole_runs_stand_beside_each_other():
    """One run said 23.8 and two others 13.5, and the README named the first alone."""
    lines = tables.runs().splitlines()
    commits = [tables.commit(results) for results in tables.whole_runs()]
    assert len(commits) >= 3
    assert all(f"`{commit}`" in lines[0] for commit in commits)
    assert lines[2].startswith("| Load 2.28 GB | warm | ")
    assert lines[2].count(" / ") == len(commits)


def test_another_figure_makes_another_table(tmp_path, monkeypatch):
    results = tables.load(RUN)
    (warm,) = [
        row
        for row in results["families"][0]["rows"]
        if tables.TABLES["headline"].lines[0].case == row["case"]
    ][:1]
    before = tables.table("headline", results), tables.chart(results)
    warm |= {"value": 9.94, "ours_s": 0.1234}
    assert "| warm | 1.25 s | 0.096 s, **12.9** x | 0.12 s, **9.9** x |" in tables.table(
        "headline", results
    )
    assert (tables.table("headline", results), tables.chart(results)) != before
    # A run that lacks a row does not take over a table.
    del results["families"][0]["rows"]
    results["families"][0]["rows"] = []
    (tmp_path / f"{RUN}.json").write_text((tables.RESULTS / f"{RUN}.json").read_text())
    (tmp_path / "part.json").write_text(json.dumps(results))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = f"<!-- table: headline {RUN} -->\n<!-- end of table -->"
    assert tables.render(page, "part") == tables.render(page) != page
    with pytest.raises(tables.MissingRowError, match="no row of"):
        tables.table("headline", results)
