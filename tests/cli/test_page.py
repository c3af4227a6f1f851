"""``dcp-rs inspect --html``: one page, opened in a browser where there is one."""

import json
import re
import resource
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from dcp_rs.checkpoint.entries import TensorInfo
from dcp_rs.cli import page
from dcp_rs.cli.contents import Contents
from support import nested_state
from support.both import save_rs

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)


class Chunk(NamedTuple):
    """A chunk as an index gives it."""

    file: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def in_a_browser(file: Path, query: str = "", flags: Sequence[str] = ()) -> str:
    """The document after its script ran."""
    if BROWSER is None:
        pytest.skip("no Chromium")
    quiet = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--virtual-time-budget=10000",
    ]
    profile = f"--user-data-dir={file.parent / 'profile'}"
    command = [BROWSER, *quiet, *flags, profile, "--dump-dom", f"file://{file}{query}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return done.stdout


def rows(document: str) -> list[str]:
    return re.findall(r'<tr class="row"><td class="n">(.*?)</td>', document)


def test_page_needs_no_other_file(tmp_path: Path) -> None:
    save_rs(nested_state(), tmp_path / "ckpt")
    text = page.render(Contents(tmp_path / "ckpt"))
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)""", text)


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large"):
            page.write("a new page", tmp_path / "page.html", as_json=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text() == "old"


def test_names_are_only_names(tmp_path: Path) -> None:
    names = [
        "</script><script>document.title='owned'</script>",
        "<img src=x onerror=alert(1)>",
        "a\u2028b",
        "]]>",
        "${1}",
    ]
    save_rs({name: torch.ones(2) for name in names}, tmp_path / "ckpt")
    text = page.render(Contents(tmp_path / "ckpt"))
    assert text.count("</script>") == 1
    assert "<img" not in text
    (tmp_path / "page.html").write_text(page.render(Contents(tmp_path / "ckpt")))
    document = in_a_browser(tmp_path / "page.html")
    assert 'data-ready="yes"' in document
    assert "<title>owned</title>" not in document
    assert len(rows(document)) == 5


def test_a_browser_shows_it(tmp_path: Path) -> None:
    save_rs(nested_state(), tmp_path / "ckpt")
    (tmp_path / "page.html").write_text(page.render(Contents(tmp_path / "ckpt")))
    document = in_a_browser(tmp_path / "page.html")
    assert 'data-ready="yes"' in document
    assert len(rows(document)) == 15
    assert "rank 0" in document
    assert "15 entries, 10.5 kB" in document
    document = in_a_browser(tmp_path / "page.html", "#q=Embedding%20exp_avg_sq")
    assert rows(document) == ["optimizer.state.embedding.weight.exp_avg_sq"]
    assert "<svg" in document  # the only entry found is shown open


def test_a_browser_shows_which_nodes_have_each_file(tmp_path: Path) -> None:
    save_rs(nested_state(), tmp_path / "step-1")
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        (node / "step-1").mkdir(parents=True)
    (data,) = (tmp_path / "step-1").glob("*.safetensors")
    shutil.copy(data, nodes[1] / "step-1")
    for expected in (str(nodes[1]), "no node"):
        text = page.render(Contents(tmp_path / "step-1", local=nodes))
        (tmp_path / "page.html").write_text(text)
        document = in_a_browser(tmp_path / "page.html")
        assert 'data-ready="yes"' in document
        assert f"chunks · on {expected}" in document
        assert '<option value="node">' in document
        (nodes[1] / "step-1" / data.name).write_bytes(b"short")


@pytest.mark.slow
def test_values_are_shown_with_their_entry(tmp_path: Path) -> None:
    save_rs({"m.2.w": torch.ones(3), "m.10.w": torch.ones(2), "lr": 0.125}, tmp_path / "ckpt")
    (tmp_path / "page.html").write_text(page.render(Contents(tmp_path / "ckpt")))
    document = in_a_browser(tmp_path / "page.html")
    assert rows(document) == ["lr", "m.2.w", "m.10.w"]  # as a person counts
    assert '<div class="mono">0.125</div>' in in_a_browser(tmp_path / "page.html", "#q=lr")


@pytest.mark.slow
def test_colours_are_the_same_on_every_page(tmp_path: Path) -> None:
    """A module, and a type, keep theirs where there are others beside them."""
    save_rs({"model.w": torch.ones(2), "optim.m": torch.ones(3)}, tmp_path / "one")
    save_rs(
        {"model.w": torch.ones(2), "optim.m": torch.ones(3, dtype=torch.int8), "a": torch.ones(2)},
        tmp_path / "two",
    )
    colours = []
    for name in ("one", "two"):
        (tmp_path / f"{name}.html").write_text(page.render(Contents(tmp_path / name)))
        document = in_a_browser(tmp_path / f"{name}.html")
        colours.append(
            {
                label: colour
                for colour, label in re.findall(
                    r'background: ([^;"]+);?"></span>([\w.]+)<', document
                )
            }
        )
    assert {"model", "optim"} <= set(colours[0])
    assert colours[0].items() <= colours[1].items()
    assert re.findall(r'<option value="(\w+)"', document) == ["module", "type", "rank", "file"]


@pytest.mark.slow
def test_a_hundred_thousand_tensors(tmp_path: Path) -> None:
    names = [f"model.layers.{i // 100}.experts.{i % 100}.weight" for i in range(100_000)]
    entries = [TensorInfo(name, "bfloat16", (64, 64), 2, 8192) for name in sorted(names)]
    cut = [Chunk(0, 4096, (0, 0), (32, 64)), Chunk(1, 4096, (32, 0), (32, 64))]
    contents: Any = SimpleNamespace(
        path=Path("big"),
        format="dcp-rs",
        facts={"version": 1},
        files=[("a.safetensors", 1), ("b.safetensors", 1)],
        nodes=None,
        entries=entries,
        stored_chunks=lambda entry: cut,
    )
    size = (tmp_path / "page.html").write_text(page.render(contents))
    assert size < 30e6
    document = in_a_browser(tmp_path / "page.html", "#q=layers.777.%20experts.42.")
    assert rows(document) == ["model.layers.777.experts.42.weight"]
    assert "100,000" in document


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 900, 1500])
@pytest.mark.slow
def test_page_fits_the_window(tmp_path: Path, width: int, *, dark: bool) -> None:
    """At three sizes, light and dark: nothing is wider than the window, also with an entry open, and the map has colours."""
    state = {f"model.layers.{i}.w": torch.full((8, 8), float(i)) for i in range(12)}
    save_rs({**state, "step": 3, "lr": 0.5}, tmp_path / "ckpt")
    file = tmp_path / "page.html"
    file.write_text(page.render(Contents(tmp_path / "ckpt")))
    probe = """<script>
    addEventListener("load", () => {
      drawMap();
      const map = document.querySelector("canvas");
      const inks = new Set(new Uint32Array(map.getContext("2d").getImageData(0, 0, map.width, map.height).data.buffer)).size;
      const back = getComputedStyle(document.body).backgroundColor;
      document.body.append("PROBE " + JSON.stringify({ wide: document.documentElement.scrollWidth - innerWidth, inks, back }));
    });
    </script>"""
    file.write_text(file.read_text().replace("</html>", probe + "</html>"))
    flags = [
        f"--window-size={width},900",
        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
    ]
    found = re.search(r"PROBE (\{.*?\})", in_a_browser(file, "#q=layers.10.w", flags))
    assert found is not None
    seen = json.loads(found[1])
    assert seen["wide"] <= 0
    assert seen["inks"] > 5
    assert seen["back"] == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
