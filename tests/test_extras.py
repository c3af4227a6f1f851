"""A training job imports nothing that only the command line or users' tests need."""

import sys

import programs

#: Makes modules look as if they were not installed.
WITHOUT = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("click", "hypothesis", "rich"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""


def test_a_training_job_needs_no_extra(tmp_path) -> None:
    code = f"""
import torch, dcp_rs
for name in dcp_rs.__all__:
    getattr(dcp_rs, name)
path = {str(tmp_path / "ckpt")!r}
dcp_rs.save({{"w": torch.arange(4.0)}}, path, no_dist=True)
into = {{"w": torch.zeros(4)}}
dcp_rs.load(into, path, no_dist=True)
assert into["w"].tolist() == [0, 1, 2, 3]
assert dcp_rs.verify(path)
"""
    done = programs.run(
        [sys.executable, "-c", WITHOUT + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
