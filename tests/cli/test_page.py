"""``dcp-rs inspect --html``: one page, opened in a browser where there is one."""

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcp_rs.checkpoint.locate import open_index
from dcp_rs.checkpoint.stats import stats
from dcp_rs.cli import page
from dcp_rs.cli.contents import Entry, Piece, open_contents
from support import nested_state
from support.both import save_rs

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def in_a_browser(file: Path, query: str = "") -> str:
    """The document after its script ran."""
    if BROWSER is None:
        pytest.skip("no Chromium")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=10000"]
    profile = f"--user-data-dir={file.parent / 'profile'}"
    command = [BROWSER, *flags, profile, "--dump-dom", f"file://{file}{query}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return done.stdout


def rows(document: str) -> list[str]:
    return re.findall(r'<tr class="row"><td class="n">(.*?)</td>', document)


def test_it_needs_nothing_else(tmp_path: Path) -> None:
    save_rs(nested_state(), tmp_path / "ckpt")
    text = page.render(open_contents(tmp_path / "ckpt"))
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)""", text)


def test_names_are_only_names(tmp_path: Path) -> None:
    names = [
        "</script><script>document.title='owned'</script>",
        "<img src=x onerror=alert(1)>",
        "a\u2028b",
        "]]>",
        "${1}",
    ]
    save_rs({name: torch.ones(2) for name in names}, tmp_path / "ckpt")
    text = page.render(open_contents(tmp_path / "ckpt"))
    assert text.count("</script>") == 1
    assert "<img" not in text
    page.write(open_contents(tmp_path / "ckpt"), tmp_path / "page.html")
    document = in_a_browser(tmp_path / "page.html")
    assert 'data-ready="yes"' in document
    assert "<title>owned</title>" not in document
    assert len(rows(document)) == 5


def test_a_browser_shows_it(tmp_path: Path) -> None:
    save_rs(nested_state(), tmp_path / "ckpt")
    page.write(open_contents(tmp_path / "ckpt"), tmp_path / "page.html")
    document = in_a_browser(tmp_path / "page.html")
    assert 'data-ready="yes"' in document
    assert len(rows(document)) == 15
    assert "rank 0" in document
    assert "15 entries, 10.5 kB" in document
    document = in_a_browser(tmp_path / "page.html", "#q=Embedding%20exp_avg_sq")
    assert rows(document) == ["optimizer.state.embedding.weight.exp_avg_sq"]
    assert "<svg" in document  # the only entry found is shown open


def test_statistics_and_values_are_shown_with_their_entry(tmp_path: Path) -> None:
    save_rs({"m.2.w": torch.tensor([1.0, 3.0, float("nan")]), "m.10.w": torch.ones(2), "lr": 0.125}, tmp_path / "ckpt")
    index = open_index(tmp_path / "ckpt", rank=None, allow_external=False)
    tensors = [number for number in range(index.tensor_count) if not index.tensor(number)[1]]
    found = {one.name: one for one in stats(index, tensors)}
    page.write(open_contents(tmp_path / "ckpt"), tmp_path / "page.html", found)
    document = in_a_browser(tmp_path / "page.html")
    assert rows(document) == ["lr", "m.2.w", "m.10.w"]  # as a person counts
    document = in_a_browser(tmp_path / "page.html", "#q=m.2.w")
    assert "<b>2</b>mean" in document
    assert '<div class="bad"><b>1</b>NaN' in document
    assert '<div class="mono">0.125</div>' in in_a_browser(tmp_path / "page.html", "#q=lr")


def test_colours_are_the_same_on_every_page(tmp_path: Path) -> None:
    """A module, and a type, keep theirs where there are others beside them."""
    save_rs({"model.w": torch.ones(2), "optim.m": torch.ones(3)}, tmp_path / "one")
    save_rs(
        {"model.w": torch.ones(2), "optim.m": torch.ones(3, dtype=torch.int8), "a": torch.ones(2)}, tmp_path / "two"
    )
    colours = []
    for name in ("one", "two"):
        page.write(open_contents(tmp_path / name), tmp_path / f"{name}.html")
        document = in_a_browser(tmp_path / f"{name}.html")
        colours.append(
            {label: colour for colour, label in re.findall(r'background: ([^;"]+);?"></span>([\w.]+)<', document)}
        )
    assert {"model", "optim"} <= set(colours[0])
    assert colours[0].items() <= colours[1].items()
    assert re.findall(r'<option value="(\w+)"', document) == ["module", "type", "rank", "file"]


def test_a_hundred_thousand_tensors(tmp_path: Path) -> None:
    names = [f"model.layers.{i // 100}.experts.{i % 100}.weight" for i in range(100_000)]
    entries = [Entry(name, i, "bfloat16", (64, 64), 2, 8192) for i, name in enumerate(sorted(names))]
    cut = [Piece(0, 0, 4096, (0, 0), (32, 64)), Piece(1, 0, 4096, (32, 0), (32, 64))]
    contents: Any = SimpleNamespace(
        path=Path("big"),
        format="dcp-rs",
        facts={"version": 1},
        files=[("a.safetensors", 1), ("b.safetensors", 1)],
        entries=entries,
        pieces=lambda entry: cut,
    )
    size = page.write(contents, tmp_path / "page.html")
    assert size < 30e6
    document = in_a_browser(tmp_path / "page.html", "#q=layers.777.%20experts.42.")
    assert rows(document) == ["model.layers.777.experts.42.weight"]
    assert "100,000" in document
