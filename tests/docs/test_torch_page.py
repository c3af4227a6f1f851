"""docs/torch-files.md: its code runs, in its order."""

import re

from support.places import ROOT

PAGE = ROOT / "docs" / "torch-files.md"


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 7
    names = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # the page is ours
    assert torch_files(tmp_path) == ["checkpoint.pth"]


def torch_files(folder):
    return sorted(path.name for path in folder.iterdir())
