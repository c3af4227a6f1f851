"""The demonstration, small: it finds what is the same, what differs, and a disk without room."""

import importlib
import io
import re
import shutil
import tempfile

import pytest
import torch
from rich.console import Console

from support.places import ROOT

SIZE_MB = 2
DEMOS = "dcp-rs-demo-*"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def demo(folder, monkeypatch):
    """The script, as `python examples/demo.py` finds it."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("demo")


def run(demo, **options):
    out = io.StringIO()
    well = demo.run_demo(SIZE_MB, console=Console(file=out, width=80), **options)
    return well, out.getvalue()


def test_demo_restores_bit_for_bit_and_cleans_up(demo, folder):
    well, text = run(demo)
    assert well
    assert "DIFFERENT" not in text
    assert len(re.findall(r" same *$", text, re.MULTILINE)) == 4
    assert list(folder.glob(DEMOS)) == []
    # Beside what the README says, and why that may differ.
    said = demo._ratios_of_readme()
    assert said.keys() == demo._IN_README.keys()
    assert all(re.search(rf"{re.escape(how)} .*{said[action, how]}", text) for action, how in said)
    assert "with 2.28 GB" in " ".join(text.split())


@pytest.mark.slow
def test_demo_keeps_the_checkpoints_on_request(demo, folder):
    well, text = run(demo, keep=True)
    assert well
    (kept,) = folder.glob(DEMOS)
    assert str(kept) in text
    assert {path.name for path in kept.iterdir()} == {"stock", "dcp-rs"}


@pytest.mark.slow
def test_a_difference_fails_it(demo, folder, monkeypatch):
    def spoiled(*paths):
        how, path, restore = restores(*paths)[-1]

        def restore_and_flip(state):
            restore(state)
            state["model"]["output.weight"].view(torch.uint8)[0, 0] ^= 1

        return [(how, path, restore_and_flip)]

    restores = demo._restores
    monkeypatch.setattr(demo, "_restores", spoiled)
    well, text = run(demo)
    assert not well
    assert "DIFFERENT" in text
    assert demo.main(["--size-mb", str(SIZE_MB)]) == 1
    assert list(folder.glob(DEMOS)) == []


def test_a_value_of_another_type_fails_it(demo):
    assert demo._same({"a": [1, torch.zeros(2)]}, {"a": [1, torch.zeros(2)]})
    assert not demo._same({"a": [True]}, {"a": [1]})
    assert not demo._same({"a": 1, "b": 2}, {"a": 1})
    assert not demo._same([1, 2], [1])
    assert not demo._same(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not demo._same(None, torch.zeros(2))


def test_a_full_disk_is_refused_before_anything_is_written(demo, folder, monkeypatch, capsys):
    usage = shutil.disk_usage(folder)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(demo.DemoError, match="TMPDIR"):
        demo.run_demo(SIZE_MB)
    assert demo.main([]) == 2
    assert "0.0 GB free" in capsys.readouterr().out
    assert list(folder.glob(DEMOS)) == []


@pytest.mark.parametrize("size_mb", [2, 20, 300])
def test_the_model_is_about_as_large_as_asked_for(demo, size_mb):
    demo_model = importlib.import_module("demo_model")
    with torch.device("meta"):
        model = demo_model.Transformer.of_size(size_mb)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    assert nbytes == pytest.approx(size_mb * 1e6, rel=0.25)
