"""What an integration says where its framework is not there, and that the package imports none."""

import sys

import pytest

import programs

SAYS = """
import sys
sys.modules[{name!r}] = None  # as if it were not installed
from dcp_rs.integrations.{name} import {what}
{call}
"""


@pytest.mark.parametrize(
    ("name", "what", "call"),
    [
        ("transformers", "from_pretrained", "from_pretrained(None, 'ckpt')"),
        ("lightning", "DcpRsCheckpointIO", ""),
        ("torchtitan", "DcpRsCheckpointManager", ""),
        ("vllm", "register", ""),
    ],
)
def test_missing_framework_is_named(name, what, call):
    script = SAYS.format(name=name, what=what, call=call)
    done = programs.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (
        f"ModuleNotFoundError: this part of dcp_rs works with {name}, which is not installed: pip install {name}"
        in done.stderr
    )


def test_the_package_imports_no_framework():
    script = (
        "import sys, dcp_rs; [getattr(dcp_rs, name) for name in dir(dcp_rs)]; print(*sys.modules)"
    )
    done = programs.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert not {"transformers", "accelerate", "lightning", "torchtitan", "vllm"} & set(
        done.stdout.split()
    )
