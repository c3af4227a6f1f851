"""What is installed with the package alone, and what each extra adds."""

import subprocess
import sys

import pytest

from support import programs

#: Makes a module look as if it were not installed, then does what its second argument says.
WITHOUT = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
exec(sys.argv[2])
"""


def run_without(modules: str, code: str) -> subprocess.CompletedProcess[str]:
    return programs.run(
        [sys.executable, "-c", WITHOUT, modules, code], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize("missing", ["click"])
def test_the_command_line_says_what_to_install(missing: str) -> None:
    done = run_without(missing, "from dcp_rs.__main__ import main; main()")
    assert done.returncode == 2
    assert done.stderr == f"dcp-rs: the command line needs {missing}: pip install 'dcp-rs[cli]'\n"


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
    done = run_without("click,rich", code)
    assert done.returncode == 0, done.stderr
