"""benches/gpu.py runs, small, on the CPU, so that it works on the day it is needed."""

import json
import sys

import pytest

from support.places import ROOT

BENCHES = ROOT / "benches"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    before = set(sys.modules)
    import gpu

    contenders = list(gpu.CONTENDERS)
    yield gpu
    gpu.CONTENDERS[:] = contenders
    for name in set(sys.modules) - before:
        if name == "gpu" or name.split(".")[0] == "harness":
            del sys.modules[name]


@pytest.mark.slow
def test_bench_measures_and_checks(bench, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = f"--device cpu --sizes 0.002 --layouts large --rounds 1 --folder {tmp_path / 'data'} --out {out}"
    assert bench.main(arguments.split()) == 0
    (written,) = out.glob("*.json")
    results = json.loads(written.read_text())
    rows = {(row["case"].split(", ")[-1], row["name"]): row for row in results["rows"]}
    for cache in ("warm", "cold"):
        for name in (bench.OURS, bench.STOCK, "dcp_rs.open(...).stream()", bench.H2D_LIMIT):
            assert rows[cache, name]["error"] is None
            assert rows[cache, name]["gb_s"] > 0
    assert rows["cold", bench.DISK_LIMIT]["gb_s"] > 0
    assert rows["saved", "dcp_rs.save"]["gb_s"] > 0
    assert rows["warm", "safe_open.prefetch"]["error"]
    table = written.with_suffix(".md").read_text()
    assert "times stock" in table
    assert table in capsys.readouterr().out
    assert list((tmp_path / "data").iterdir()) == []


def test_bench_notices_a_wrong_load(bench, tmp_path, monkeypatch):
    def wrong(path, state, device):
        bench.load_stock(path, state, device)
        next(iter(state.values())).view(-1)[-1] += 1

    for contender in bench.CONTENDERS:
        if contender.name == bench.STOCK:
            monkeypatch.setattr(contender, "load", wrong)
    pattern = bench.Pattern(bench.small_shapes(40_000), bench.torch.bfloat16)
    data = bench.Data(tmp_path, pattern)
    rows = {
        r.name: r for r in bench.measure("case", data, bench.torch.device("cpu"), 1, cold=False)
    }
    assert "not loaded as it was saved" in rows[bench.STOCK].error
    assert rows[bench.OURS].error is None
