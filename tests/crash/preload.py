"""Runs a module of this package in a process whose calls of the C library go through one of its sources."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def preloaded(
    module: str, source: str, arguments: Sequence[str], timeout: float
) -> list[dict[str, Any]]:
    """What ``python -m crash.<module> <library> <arguments>`` prints, as JSON.

    Raises:
        FileNotFoundError: there is no C compiler.
        AssertionError: it failed.
    """
    with tempfile.TemporaryDirectory(prefix=f"dcp-rs-{module}-") as scratch:
        library = f"{scratch}/{module}.so"
        subprocess.run(
            ["cc", "-O1", "-shared", "-fPIC", "-o", library, HERE / source, "-ldl"], check=True
        )
        done = subprocess.run(
            [sys.executable, "-m", f"crash.{module}", library, *arguments],
            env=os.environ | {"LD_PRELOAD": library, "PYTHONPATH": str(HERE.parent)},
            stdout=subprocess.PIPE,
            check=False,
            timeout=timeout,
        )
    if done.returncode:
        msg = f"exit code {done.returncode}"
        raise AssertionError(msg)
    tallies: list[dict[str, Any]] = json.loads(
        done.stdout.splitlines()[-1]
    )  # before that, torch 2.8 tells whom Gloo found
    return tallies
