"""Every benchmark, tiny: it runs, and what it loads and saves is right. The figures mean nothing."""

import importlib
import json
import sys

import pytest
from torch.distributed.checkpoint import staging

import programs
from support.places import ROOT

pytestmark = pytest.mark.slow
BENCHES = ROOT / "benches"
sys.path.insert(0, str(BENCHES))

from cases import FAMILIES, QUANTITIES, SCALING  # noqa: E402
from harness import page_cache, plot, report  # noqa: E402
from harness.context import Context  # noqa: E402
from harness.pairs import Contender, Spread, Times, measure, ratio  # noqa: E402
from harness.rows import Row, figure, versus  # noqa: E402


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    built = [ROOT / "target" / profile / "examples" / "limit" for profile in ("release", "debug")]
    limit = next((path for path in built if path.exists()), None)
    return Context(tmp_path_factory.mktemp("bench"), "tiny", limit, rounds=1)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "peers"])
def test_a_family_measures_all_its_rows(context, family):
    if family == "stall" and not hasattr(staging, "DefaultStager"):
        pytest.skip("this torch has no stager of its own")
    rows = importlib.import_module(f"cases.{family}").run(context)
    assert rows
    for row in rows:
        if row.skipped or (context.limit is None and "limit" in row.against):
            continue
        assert row.error is None
        assert row.value is not None
        assert row.rounds in (1, 3)  # more where a difference of a hundredth is looked for


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_scaling_fits_a_power_law(context, quantity):
    rows = getattr(importlib.import_module(f"cases.{SCALING}"), quantity)(context)
    assert {row.unit for row in rows} == {"s", "exponent"}


def test_the_command_writes_json_markdown_and_a_plot(tmp_path, context):
    pytest.importorskip("matplotlib")
    command = [sys.executable, BENCHES / "run.py", "--size=tiny", "--rounds=1", "--only=views"]
    if context.limit is not None:
        command.append(f"--limit={context.limit}")
    else:
        command.append("--no-limit")
    out = tmp_path / "out"
    programs.run([*command, f"--folder={tmp_path / 'data'}", f"--out={out}"], check=True)
    assert sorted(path.suffix for path in out.iterdir()) == [".json", ".md", ".svg"]
    results = json.loads(next(out.glob("*.json")).read_text())
    assert [family["family"] for family in results["families"]] == ["views"]
    assert list((tmp_path / "data").iterdir()) == []


def test_a_contender_that_fails_is_a_row_that_says_so():
    def fail():
        raise ValueError("no such thing")

    ways = [Contender("ours", lambda: 1.0), Contender("theirs", fail)]
    times = measure(ways, rounds=3, slow_rounds=1)
    row = versus("a case", times, "ours", "theirs", reach=2)
    assert row.verdict == "failed"
    assert row.error == "theirs: ValueError: no such thing"


def test_rounds_are_interleaved_and_the_slow_run_less_often():
    order = []

    def way(name, seconds):
        return Contender(name, lambda: order.append(name) or seconds, warm_up=False)

    times = measure([way("a", 1.0), way("b", 10.0)], rounds=20, slow_rounds=12)
    rounds = list(zip(order[:24:2], order[1:24:2], strict=True))
    assert set(rounds) == {("a", "b"), ("b", "a")}
    assert order[24:] == ["a"] * 8
    assert ratio(times["b"], times["a"]) == Spread(10.0, 10.0, 10.0)


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Row("", "", value=2.0, reach=1.5, stretch=3.0), "reached"),
        (Row("", "", value=3.0, reach=1.5, stretch=3.0), "stretch"),
        (Row("", "", value=1.4, reach=1.5, stretch=3.0), "short"),
        (Row("", "", value=1.4), ""),
        (figure("", "", "MB", [80.0], reach=100, stretch=64), "reached"),
        (figure("", "", "MB", [101.0], reach=100, stretch=64), "short"),
    ],
)
def test_a_verdict_compares_with_the_targets(row, verdict):
    assert row.verdict == verdict


def test_a_loss_is_in_the_report():
    times = {"ours": Times([2.0]), "theirs": Times([1.0])}
    row = versus("a case", times, "ours", "theirs", reach=1.5)
    machine = dict.fromkeys(
        (
            "cpu",
            "cores",
            "memory_gb",
            "file_system",
            "kernel",
            "accelerator",
            "torch",
            "safetensors",
        ),
        "?",
    ) | {"dcp_rs": "?", "commit": "?", "python": "?"}
    family = {"rows": [vars(row) | {"verdict": row.verdict}]}
    family["noise"] = {"before": {"busy": 0.0}, "after": {"busy": 0.5}}
    results = {"date": "today", "size": "tiny", "machine": machine, "families": [family]}
    text = report.markdown(results)
    assert "| 0.5 x | 1.5 |  | **short** |" in text
    assert "noisy" in text


def test_cold_is_checked(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    page_cache.warm(tmp_path)
    share = 1 - page_cache.TOLERANCE
    assert page_cache.resident_bytes(path) >= share * (1 << 20)
    try:
        page_cache.drop(tmp_path)
    except RuntimeError:
        pytest.skip("files here are memory")
    assert page_cache.resident_bytes(path) <= page_cache.TOLERANCE * (1 << 20)


def test_the_plot_leaves_out_what_has_no_ratio(tmp_path):
    pytest.importorskip("matplotlib")
    plot.draw({"families": []}, tmp_path / "plot.svg")
    assert list(tmp_path.iterdir()) == []


def test_planning_of_loads_is_simulated():
    command = [
        sys.executable,
        BENCHES / "load_planning.py",
        "--ranks",
        "2",
        "4",
        "--fqns",
        "3",
        "--stock-ranks",
        "4",
    ]
    done = programs.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [(row[0].strip("| "), row[1]) for row in rows] == [
        ("2", "ours"),
        ("2", "stock"),
        ("4", "ours"),
        ("4", "stock"),
    ]
    assert rows[0][5] == rows[2][5]  # a rank sends the same, whatever their number


def test_planning_of_saves_is_simulated():
    command = [
        sys.executable,
        BENCHES / "save_planning.py",
        "--ranks",
        "2",
        "16",
        "--stock-ranks",
        "2",
        "--repeat",
        "1",
    ]
    done = programs.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [(row[0], row[1]) for row in rows] == [
        (kind, ranks) for kind in ("sharded", "hybrid", "replicated") for ranks in ("2", "16")
    ]
    assert all(
        (row[-1] != "-") == (row[1] == "2") for row in rows
    )  # torch's planner, for as many ranks as it was given
